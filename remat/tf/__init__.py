"""Training steps of TensorFlow and Keras 3 within a memory budget: plans that are executed.

import remat.tf as rtf
train_iteration_fn = rtf.compile(model, loss, optimizer, input_spec, label_spec, budget="2GB")
step = rtf.rematerialize(model, (input_spec, label_spec), budget=0.6, loss=loss)
model = rtf.fit_within(model, budget=0.6); model.fit(x, y)
rtf.prepare(model, (x[:64], y[:64]), (x[-16:], y[-16:]))  # ahead of fit
"""

from remat.tf._api import compile, rematerialize
from remat.tf._fit import fit_within, prepare
from remat.tf._step import PlannedStep

__all__ = ["PlannedStep", "compile", "fit_within", "prepare", "rematerialize"]
