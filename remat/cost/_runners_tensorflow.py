"""Rebuild and time one TensorFlow operation from its signature (checked with tensorflow 2.21)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from remat.cost._timing import Timing, measure
from remat.frontends._tensorflow_nodes import run_signature


def time(description: dict[str, Any], device: str) -> Timing:
    """Time the operation with random inputs, inside a `tf.function` whose own call is subtracted."""
    # one operation leaves nothing to optimise, but constant inputs would be folded away
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    with tf.device("/CPU:0"):
        tensors = [None if "c" in entry else random_tensor(entry["t"], entry["d"]) for entry in description["inputs"]]
        given = [t for t in tensors if t is not None]

        @tf.function
        def operation(*values: Any) -> Any:
            rest = iter(values)
            return run_signature(description, [None if t is None else next(rest) for t in tensors])

        return measure_function(operation, given)


def random_tensor(shape: list[int], dtype: str) -> Any:
    """Uniform floats, random booleans, zero integers (valid as indices and labels)."""
    kind = tf.as_dtype(dtype)
    if kind.is_floating:
        return tf.cast(tf.random.uniform(shape, 0.1, 1.0), kind)
    if kind.is_bool:
        return tf.random.uniform(shape) > 0.5
    return tf.zeros(shape, kind)


def measure_function(function: Any, inputs: list[Any]) -> Timing:
    """Time a `tf.function`, less that of one that does nothing with the same inputs."""

    @tf.function
    def nothing(*values: Any) -> Any:
        return tf.constant(0)

    return measure(lambda: function(*inputs)).less(measure(lambda: nothing(*inputs)))
