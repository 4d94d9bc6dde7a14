"""Imports Keras at its first use, because that takes seconds with TensorFlow; and what is private in it.

Checked with Keras 3.15.1: `keras.src.trainers.compile_utils` has the loss and the metrics of `Model.compile`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from remat.errors import InvalidInput, MissingPackage


def import_keras() -> Any:
    """The `keras` module, with a quiet TensorFlow.

    Raises:
        MissingPackage: Keras or its backend is not installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    try:
        return importlib.import_module("keras")
    except ImportError as error:
        raise MissingPackage(f"Keras models need TensorFlow ({error}): pip install 'remat[tensorflow]'") from error


@contextmanager
def without_keras() -> Iterator[None]:
    """Keep TensorFlow from importing Keras, which doubles the time of its import."""
    if "keras" in sys.modules:
        yield
        return
    sys.modules["keras"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["keras"]


def check_backend() -> None:
    """Refuse Keras on another framework than TensorFlow."""
    backend = import_keras().backend.backend()
    if backend != "tensorflow":
        raise InvalidInput(f"Keras runs on '{backend}'; set KERAS_BACKEND=tensorflow")


def compiled_loss(loss: Any, labels: Any, prediction: Any, weights: Any) -> Any:
    """One output's loss as in a model that was compiled with `loss`: masked, weighted, reduced, in the float type."""
    keras = import_keras()
    from keras.src.trainers.compile_utils import get_loss

    compiled: Any = get_loss(loss, labels, prediction)
    return keras.ops.cast(compiled(labels, prediction, weights), keras.config.floatx())


def compiled_metrics(model: Any, metrics: Any, weighted_metrics: Any) -> Any:
    """The metrics of a model as `Model.compile` makes them: masked, the second ones weighted."""
    import_keras()
    from keras.src.trainers.compile_utils import CompileMetrics

    return CompileMetrics(metrics, weighted_metrics, output_names=getattr(model, "output_names", None))
