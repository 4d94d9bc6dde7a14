"""Keras, imported where it is needed: with TensorFlow it takes seconds."""

from __future__ import annotations

import importlib
import os
from typing import Any

from remat.errors import MissingPackage

INSTALL = "pip install 'remat[tensorflow]'"


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
        raise MissingPackage(f"Keras models need TensorFlow ({error}): {INSTALL}") from error
