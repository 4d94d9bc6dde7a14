"""Loss and gradients of a Keras model; losses are one, a list or a dict, as in Keras."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from remat.errors import InvalidInput
from remat.tf._keras import compiled_loss


def differentiate(
    model: Any, inputs: Any, loss_of: Callable[[Any], Any], scale: Callable[[Any], Any] = lambda x: x
) -> tuple[Any, Any, list[Any]]:
    """(prediction, loss, gradients of the scaled loss with respect to the trainable variables)."""
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        for variable in variables:
            tape.watch(variable)
        prediction = model(inputs, training=True)
        loss = loss_of(prediction)
        scaled = scale(loss)
    return prediction, loss, tape.gradient(scaled, variables)


def total_loss(model: Any, loss: Callable[..., Any], labels: Sequence[Any], predictions: Sequence[Any]) -> Any:
    """The sum of the means of `loss` of each output, and of the model's own (regularization) losses."""
    terms = [tf.reduce_mean(loss(y, p)) for y, p in zip(labels, predictions, strict=True)] + list(model.losses)
    return terms[0] if len(terms) == 1 else tf.add_n([tf.cast(t, terms[0].dtype) for t in terms])


class Objective:
    """Loss and gradients of a Keras model, the loss as `Model.compile` reads it: masks, weights, reductions.

    `gradients` and `values` keep the tensors of the last trace.
    """

    def __init__(self, model: keras.Model, loss: Any) -> None:
        self.model = model
        self.losses: Any = loss if isinstance(loss, (Mapping, list, tuple)) else [loss]
        known = list(self.losses.values()) if isinstance(self.losses, Mapping) else self.losses
        for one in known:
            _check_loss(one)
        if all(one is None for one in known):
            raise InvalidInput("give loss=, e.g. loss='sparse_categorical_crossentropy'")
        self.gradients: list[Any] = []
        self.values: list[Any] = []

    def differentiate(
        self, inputs: Any, labels: Any, scale: Callable[[Any], Any] = lambda x: x, weights: Any = None
    ) -> tuple[Any, Any, list[Any]]:
        """(prediction, loss, gradients of the scaled loss with respect to the trainable variables)."""
        prediction, value, gradients = differentiate(
            self.model, inputs, lambda p: self._loss(labels, p, weights), scale
        )
        self.gradients[:] = [t for t in tf.nest.flatten(gradients, expand_composites=True) if t is not None]
        self.values[:] = [value]
        return prediction, value, gradients

    def step(self, inputs: Any, labels: Any, *weights: Any) -> tuple[Any, list[Any]]:
        """(loss, gradients); `weights` are sample weights, if there are any."""
        _, value, gradients = self.differentiate(inputs, labels, weights=weights[0] if weights else None)
        return value, gradients

    def _loss(self, labels: Any, prediction: Any, weights: Any) -> Any:
        """The sum that `Model.compute_loss` makes: of the outputs' losses, then of the model's own."""
        losses = self.losses
        if isinstance(prediction, Mapping) or isinstance(losses, Mapping):
            has_order = not isinstance(prediction, Mapping)
            names, prediction = self._named(prediction)
            if isinstance(labels, Mapping) or not has_order:
                labels = _by_name(labels, names, "labels")
            if isinstance(losses, Mapping) or len(losses) > 1:
                losses = _by_name(losses, names, "losses")
            if isinstance(weights, Mapping):
                weights = _by_name(weights, names, "sample weights")
        y, p, w = tf.nest.flatten(labels), tf.nest.flatten(prediction), tf.nest.flatten(weights)
        losses = list(losses) * len(p) if len(losses) == 1 else losses
        w = w * len(p) if len(w) == 1 else w
        if not len(y) == len(p) == len(losses) == len(w):
            raise InvalidInput(
                f"{len(p)} outputs, {len(y)} labels, {len(losses)} losses and {len(w)} sample weights: give one each"
            )
        terms = [compiled_loss(f, *rest) for f, *rest in zip(losses, y, p, w, strict=True) if f is not None]
        total = sum(terms[1:], terms[0])
        own = [keras.ops.sum(term) for term in self.model.losses]
        return keras.ops.sum([total, *own]) if own else total

    def _named(self, prediction: Any) -> tuple[list[str], list[Any]]:
        """(names of the outputs, the outputs), in the same order."""
        if isinstance(prediction, Mapping):
            return list(prediction), list(prediction.values())
        outputs, names = tf.nest.flatten(prediction), getattr(self.model, "output_names", None) or []
        if len(names) != len(outputs):
            raise InvalidInput("the model's outputs have no names: give losses as a list in the order of the outputs")
        return list(names), outputs


def _check_loss(loss: Any) -> None:
    """Refuse what `Model.compile` takes for no loss; None is for an output without one."""
    if str(loss).lower() in ("crossentropy", "ce"):  # Keras chooses by the shapes of the labels
        return
    try:
        keras.losses.get(loss)
    except (ValueError, TypeError):
        raise InvalidInput(
            f"loss {loss!r} is no Keras loss, the name of one, or a function of labels and prediction"
        ) from None


def _by_name(given: Any, names: Sequence[str], what: str) -> list[Any]:
    """Values of a dict in the order of `names`. A list has no names, so it may hold one value only."""
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise InvalidInput(f"{what} for {sorted(given)}, outputs {sorted(names)}: give one for each output")
        return [given[name] for name in names]
    if len(names) == 1:
        return [given[0] if isinstance(given, list) else given]
    raise InvalidInput(f"outputs have names: give {what} as a dict with the keys {sorted(names)}")
