"""Train PyTorch models under a plan, within a memory budget.

import remat.torch as rt
model = rt.rematerialize(model, (x,), budget="8GB", optimizer=optimizer)
print(model.plan)
"""

from remat.torch._measure import measured_peak
from remat.torch._module import Rematerialized
from remat.torch._rematerialize import rematerialize

__all__ = ["Rematerialized", "measured_peak", "rematerialize"]
