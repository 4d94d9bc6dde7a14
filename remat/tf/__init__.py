"""Training steps of TensorFlow and Keras 3 that run within a memory budget.

import remat.tf as rtf
train_iteration_fn = rtf.compile(model, loss, optimizer, input_spec, label_spec, budget="2GB")
step = rtf.rematerialize(model, (input_spec, label_spec), budget=0.6, loss=loss)
model = rtf.fit_within(model, budget=0.6); model.fit(x, y)
rtf.prepare(model, (x[:64], y[:64]), (x[-16:], y[-16:]))  # ahead of fit
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.tf._keras import import_keras

if TYPE_CHECKING:
    from remat.tf._fit import fit_within, prepare
    from remat.tf._step import PlannedStep
    from remat.tf.api import compile, rematerialize

__all__ = ["PlannedStep", "compile", "fit_within", "prepare", "rematerialize"]


def __getattr__(name: str) -> Any:
    """Load TensorFlow at first use, which takes seconds; the options of `remat.tf.networks` need none.

    Raises:
        MissingPackage: TensorFlow is not installed.
    """
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    import_keras()
    from remat.tf import _fit, _step, api

    globals().update(
        compile=api.compile, rematerialize=api.rematerialize, fit_within=_fit.fit_within, prepare=_fit.prepare,
        PlannedStep=_step.PlannedStep,
    )  # fmt: skip
    return globals()[name]
