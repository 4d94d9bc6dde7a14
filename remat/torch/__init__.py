"""Train PyTorch models under a plan, within a memory budget.

import remat.torch as rt
model = rt.rematerialize(model, (x,), budget="8GB", optimizer=optimizer)
print(model.plan)
"""

import importlib
from typing import TYPE_CHECKING, Any

from remat.errors import MissingPackage

try:
    import torch as _torch  # noqa: F401 - the first of many imports: without PyTorch, only this one fails
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingPackage("PyTorch is not installed: pip install 'remat[torch]'") from None

from remat.torch import _version

_version.refuse_old()
if TYPE_CHECKING:
    from remat.torch._rematerialize import follow, rematerialize
    from remat.torch.checkpointing.checkpoints import Checkpoints, checkpoints
    from remat.torch.explaining.compare import Comparison, compare
    from remat.torch.explaining.configured import from_config
    from remat.torch.explaining.explain import Explanation, explain
    from remat.torch.following.module import Rematerialized
    from remat.torch.measuring.measure import measured_peak

_HOMES = {
    "follow": "_rematerialize",
    "rematerialize": "_rematerialize",
    "Checkpoints": "checkpointing.checkpoints",
    "checkpoints": "checkpointing.checkpoints",
    "Comparison": "explaining.compare",
    "compare": "explaining.compare",
    "from_config": "explaining.configured",
    "Explanation": "explaining.explain",
    "explain": "explaining.explain",
    "Rematerialized": "following.module",
    "measured_peak": "measuring.measure",
}

__all__ = [
    "Checkpoints", "Comparison", "Explanation", "Rematerialized", "checkpoints", "compare", "explain", "follow",
    "from_config", "measured_peak", "rematerialize",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use: a process that measures kernels needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    try:
        found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except (ImportError, AttributeError) as error:
        if not _version.is_untested():
            raise
        raise _version.newer_fails(f"it lacks something that remat needs ({error})") from error
    globals()[name] = found
    return found


if _version.is_untested():  # refuse it now if it lacks something
    for _name in __all__:
        __getattr__(_name)
