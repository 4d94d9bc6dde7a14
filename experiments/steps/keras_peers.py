"""TensorFlow's own method, measured as plans are: `tf.recompute_grad` over segments of a Keras model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from experiments.steps.keras_models import LOSS, Sample
from remat.tf.capture import trace


def cut_points(model: keras.Model) -> list[Any]:
    """Outputs of layers and operations through which every path of a functional model goes, in their order."""
    functional: Any = model  # `x + y` is an operation of a model, but none of its layers
    order: list[Any] = [op for op in functional.operations if not isinstance(op, keras.layers.InputLayer)]
    position = {id(layer): i for i, layer in enumerate(order)}
    last_use = [0] * len(order)
    for i, layer in enumerate(order):
        for parent in (parent for node in layer._inbound_nodes for parent in node.parent_nodes):
            if id(parent.operation) in position:
                last_use[position[id(parent.operation)]] = i  # ascending, thus the last one stays
    cuts, furthest = [], 0
    for i, layer in enumerate(order[:-1]):
        if furthest <= i and i > 0:
            cuts.append(layer.output)
        furthest = max(furthest, last_use[i])
    return cuts


def segmented(model: keras.Model, n_segments: int) -> Callable[[Any], Any]:
    """The model's forward pass in training mode, each segment but the last under `tf.recompute_grad`.

    A recomputed segment updates its batch statistics again, thus this peer's moving averages are not the plain step's.
    """
    cuts = cut_points(model)
    chosen = [cuts[len(cuts) * i // n_segments] for i in range(1, n_segments)] if cuts else []
    chosen = list({id(t): t for t in chosen}.values())
    parts = [
        keras.Model(a, b)
        for a, b in zip([model.inputs[0], *chosen], [*chosen, model.outputs[0]], strict=True)
    ]  # fmt: skip

    def forward(x: Any) -> Any:
        for part in parts[:-1]:
            x = tf.recompute_grad(lambda x, part=part: part(x, training=True))(x)
        return parts[-1](x, training=True)

    return forward


def recompute_grad_step(sample: Sample, n_segments: int) -> Any:
    """The traced step, (loss, gradients), with `tf.recompute_grad` over `n_segments` segments."""
    forward = segmented(sample.model, n_segments)
    loss: Any = keras.losses.get(LOSS)
    variables = [v.value for v in sample.model.trainable_variables]

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(y, forward(x)))
        return value, tape.gradient(value, variables)

    return trace(step, sample.specs)
