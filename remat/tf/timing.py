"""Rebuild and time one TensorFlow operation from its signature (checked with tensorflow 2.21)."""

from __future__ import annotations

from typing import Any

from remat.cost.timing import Timing, measure
from remat.tf._keras import without_keras

with without_keras():  # measuring needs no Keras
    import tensorflow as tf

    from remat.tf._nodes import run_signature

COPIES = 16  # of a fast operation in one function, so that the cost of the call is spread over them
FAST_NS = 5_000_000  # an operation up to this is fast
_EMPTY_CALLS: dict[int, Timing] = {}  # number of inputs -> time


def time(description: dict[str, Any], device: str) -> Timing:
    """Time the operation with random inputs, inside a `tf.function` whose own call is subtracted."""
    # a single operation leaves nothing to optimise, but constant inputs would be folded away
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    with tf.device("/CPU:0"):
        tensors = [None if "c" in entry else random_tensor(entry["t"], entry["d"]) for entry in description["inputs"]]
        given = [t for t in tensors if t is not None]

        @tf.function
        def repeated(*values: Any, copies: int) -> Any:
            done: list[Any] = []
            for _ in range(copies):
                rest = iter(values)
                with tf.control_dependencies(done):  # run one after the other, merge none
                    done = run_signature(description, [None if t is None else next(rest) for t in tensors])
            with tf.control_dependencies(done):
                return tf.constant(0)

        once = measure_function(lambda *values: repeated(*values, copies=1), given)
        if once.median_ns > FAST_NS:
            return once
        return measure_function(lambda *values: repeated(*values, copies=COPIES), given).each(COPIES)


def random_tensor(shape: list[int], dtype: str) -> Any:
    """Uniform floats, random booleans, zero integers (valid as indices and labels)."""
    kind = tf.as_dtype(dtype)
    if kind.is_floating:
        return tf.cast(tf.random.uniform(shape, 0.1, 1.0), kind)
    if kind.is_bool:
        return tf.random.uniform(shape) > 0.5
    return tf.zeros(shape, kind)


def measure_function(function: Any, inputs: list[Any]) -> Timing:
    """Time a `tf.function`, less an empty one with as many inputs."""
    return measure(lambda: function(*inputs)).less(_empty_call(len(inputs)))


def _empty_call(n_inputs: int) -> Timing:
    """Time of an empty function; measured again if other processes disturbed it."""
    if n_inputs not in _EMPTY_CALLS or _EMPTY_CALLS[n_inputs].disturbed:

        @tf.function
        def nothing(*values: Any) -> Any:
            return tf.constant(0)

        inputs = [tf.zeros(1)] * n_inputs
        _EMPTY_CALLS[n_inputs] = measure(lambda: nothing(*inputs))
    return _EMPTY_CALLS[n_inputs]
