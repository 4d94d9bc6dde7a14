"""Imports Keras at its first use, because that takes seconds with TensorFlow."""

from __future__ import annotations

import importlib
import os
from typing import Any

from remat.errors import MissingPackage


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
