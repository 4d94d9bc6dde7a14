"""Rebuild and time one Keras layer, forward or backward, from its signature (checked with keras 3.15)."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import tensorflow as tf

from remat.cost.timing import Timing
from remat.tf.timing import measure_function, random_tensor


def time(description: dict[str, Any], device: str) -> Timing:
    """Time the layer in training mode, compiled as in `fit`, without XLA.

    The time of the backward pass is (forward and backward) less forward. Alone it cannot be timed, because
    TensorFlow drops the parts of the forward pass that the gradient does not need and keeps the others.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    with tf.device("/CPU:0"):
        if description["class"] == "__loss__":
            outputs = [random_tensor(shape, "float32") for shape in description["inputs"]]
            return measure_function(tf.function(_cross_entropy), outputs)
        layer = _layer(description)
        dtype = "int32" if description["class"] == "Embedding" else layer.compute_dtype
        inputs = [random_tensor(shape, dtype) for shape in description["inputs"]]
        _call(layer, inputs)  # creates its variables, outside any function

        @tf.function
        def forward(*values: Any) -> Any:
            return _call(layer, values)

        alone = measure_function(forward, inputs)
        if not description["backward"]:
            return alone

        @tf.function
        def both(*values: Any) -> Any:
            with tf.GradientTape() as tape:
                for value in values:
                    if value.dtype.is_floating:
                        tape.watch(value)
                outputs = _call(layer, values)
            upstream = tf.nest.map_structure(tf.ones_like, outputs)
            sources = [[v for v in values if v.dtype.is_floating], [w.value for w in layer.trainable_variables]]
            return outputs, tape.gradient(outputs, sources, output_gradients=upstream)

        return measure_function(both, inputs).less(alone)


def _layer(description: dict[str, Any]) -> Any:
    kind = getattr(keras.layers, description["class"], None)
    if kind is None:
        raise LookupError(f"keras.layers has no {description['class']}")
    return kind.from_config(description["config"])


def _call(layer: Any, values: Any) -> Any:
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return layer(*values, training=True)
    inputs = values[0] if len(values) == 1 else list(values)
    takes_training = "training" in inspect.signature(layer.call).parameters
    return layer(inputs, training=True) if takes_training else layer(inputs)


def _cross_entropy(*outputs: Any) -> Any:
    return [tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=y) for y in outputs]
