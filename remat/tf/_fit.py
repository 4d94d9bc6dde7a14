"""`fit_within`: plain ``model.fit`` under a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from remat.errors import InvalidInput
from remat.tf._api import NO_JIT, Budget, SavedPlan, check_call, variable_bytes
from remat.tf._capture import capture_step, trace
from remat.tf._plan import Options, load_plan, make_plan
from remat.tf._step import PlannedStep, describe


def fit_within(
    model: keras.Model,
    budget: Budget | None = None,
    *,
    strategy: str = "portfolio",
    scope: str = "free",
    cost: str = "profile",
    time_limit_s: float = 60.0,
    seed: int = 0,
    threads: int | None = None,
    verify: bool = True,
    plan: SavedPlan | None = None,
    jit_compile: bool = False,
) -> keras.Model:
    """Make ``model.fit`` (and ``train_on_batch``) train under a plan; returns the same model.

    The whole of the model's own ``train_step`` is planned, also one that a subclass defines: loss, metrics, optimizer.
    It is traced and planned once for each shape of a batch, when the first batch of that shape comes: a smaller last
    batch gets a plan of its own. Callbacks, metrics, validation and ``evaluate`` are Keras's.

    Args:
        budget: the most bytes held at once while a batch is trained, in all: variables of the model, the optimizer
            and the metrics, gradients, the batch with its labels and weights, activations, workspace of kernels.
            See `rematerialize`; a fraction is of the plain step of the same shape.
        plan: for the first shape of a batch; other shapes need a budget.
        others: as of `rematerialize`.

    As with Keras's own compiled step, an attribute of a layer that changes later (a dropout's rate) takes effect with
    the next ``compile``; freezing layers takes effect at once.

    After the first batch ``model.remat`` is the planned step of the last batch's shape: ``model.remat.plan``,
    ``.budget_bytes``, ``.predicted_peak_bytes``, ``.overhead``; ``model.remat_steps`` has all of them by shape.

    Raises:
        InvalidInput: here for unreadable options; from ``fit`` when there is no plan within the budget.
    """
    options = Options(strategy, scope, cost, time_limit_s, seed, threads, verify)
    check_call(budget, plan, jit_compile, options)
    if not isinstance(model, keras.Model):
        raise InvalidInput(f"fit_within takes a Keras model, not {type(model).__name__}")
    trainer = _Trainer(model, budget, plan, options)
    # in the instance's own dictionary: Keras's attribute tracking is for layers and variables, and what is not
    # a configuration of the model is not saved with it
    model.__dict__["make_train_function"] = trainer.make_train_function
    model.__dict__["remat_steps"] = trainer.steps
    model.__dict__["remat"] = None
    model.__dict__["train_function"] = None
    return model


class _Trainer:
    def __init__(self, model: keras.Model, budget: Budget | None, plan: SavedPlan | None, options: Options) -> None:
        self.model, self.budget, self.plan, self.options = model, budget, plan, options
        self.steps: dict[str, PlannedStep] = {}
        self.trained: tuple[Any, ...] = ()  # variables of which the steps give gradients

    def make_train_function(self, force: bool = False) -> Callable[[Any], Any]:
        """What Keras calls at the start of ``fit``; the result takes the iterator."""
        model: Any = self.model
        if model.jit_compile is True:
            raise InvalidInput(f"{NO_JIT}: model.compile(..., jit_compile=False)")
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise InvalidInput("a plan is for one device; leave the distribution strategy out")
        if model.run_eagerly:
            raise InvalidInput("run_eagerly=True runs no graph, so no plan; leave it out")
        # another step: `compile` takes the old one away, as it does Keras's own; layers may have been frozen
        trained = tuple(model.trainable_variables)
        same = len(trained) == len(self.trained) and all(a is b for a, b in zip(trained, self.trained, strict=True))
        if force or not same or model.__dict__.get("train_function") is None:
            self.steps.clear()
            self.trained = trained
        model.__dict__["train_function"] = self._train
        return self._train

    def _train(self, iterator: Any) -> Any:
        logs = None
        for _ in range(self.model.steps_per_execution):
            try:
                data = next(iter(iterator))
            except StopIteration:
                if logs is None:
                    raise
                break
            logs = self._step(data)
        return logs

    def _step(self, data: Any) -> Any:
        data = tf.nest.map_structure(_without_optional, data)
        tensors = tf.nest.map_structure(_dense, data)
        key = _key(tensors)
        if key not in self.steps:
            self.steps[key] = self._planned(tensors, describe(tensors))
        model: Any = self.model
        model.__dict__["remat"] = self.steps[key]
        flat = [t for t in tf.nest.flatten(tensors) if t is not None]
        return self.steps[key](*flat)

    def _planned(self, data: Any, inputs: str) -> PlannedStep:
        model: Any = self.model
        flat = tf.nest.flatten(data)
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in flat if t is not None]
        seen = _Seen()

        def train_step(*tensors: Any) -> Any:
            rest = iter(tensors)
            given = tf.nest.pack_sequence_as(data, [None if t is None else next(rest) for t in flat])
            with _watched(model, seen):
                return model.train_step(given)

        if not model.built:
            trace(train_step, specs)  # makes the variables, outside of the trace that is planned
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        seen = _Seen()
        function = trace(train_step, specs)
        fixed = variable_bytes(function, {"parameters": model, "optimizer": model.optimizer})
        if not seen.gradients:
            raise InvalidInput(
                "the model's train_step applies no gradients through model.optimizer, so there is nothing to plan: "
                "use that one, or rematerialize a function that gives the loss and the gradients"
            )
        loss = seen.loss if seen.loss is not None else seen.gradients[0]
        captured = capture_step(function, model.name, fixed, loss, seen.gradients)
        if self.plan is not None and not self.steps:
            return PlannedStep(captured, load_plan(captured, self.plan, inputs, self.budget))
        if self.budget is None:
            raise InvalidInput(
                f"the plan is for another batch than {inputs}: give a budget too, or batches of one size"
            )
        return PlannedStep(captured, make_plan(captured, self.budget, self.options, inputs))


class _Seen:
    loss: Any = None
    gradients: tuple[Any, ...] = ()


@contextmanager
def _watched(model: Any, seen: _Seen) -> Iterator[None]:
    """Note the loss and the gradients that go to the optimizer while ``train_step`` is traced."""
    optimizer = model.optimizer
    compute_loss, apply = model.compute_loss, optimizer.apply

    def noting_loss(*args: Any, **kwargs: Any) -> Any:
        seen.loss = compute_loss(*args, **kwargs)
        return seen.loss

    def noting_gradients(grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        flat = tf.nest.flatten(grads, expand_composites=True)
        seen.gradients = (*seen.gradients, *(t for t in flat if t is not None))
        return apply(grads, trainable_variables)

    with (
        _replaced(model.__dict__, "compute_loss", noting_loss),
        _replaced(optimizer.__dict__, "apply", noting_gradients),
    ):
        yield


@contextmanager
def _replaced(attributes: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """An attribute of an instance alone, which may have had one of its own."""
    before = attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before


def _key(batch: Any, outermost: bool = True) -> str:
    """Shapes and types of a batch with the structure around them, in which the same tensors mean other things."""
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {_key(batch[name], False)}" for name in sorted(batch, key=str)) + "}"
    if isinstance(batch, (list, tuple)):
        parts = ", ".join(_key(part, False) for part in batch)
        return parts if outermost else f"[{parts}]"
    return describe(batch)


def _dense(leaf: Any) -> Any:
    if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
        raise InvalidInput(
            f"a batch holds a {type(leaf).__name__}; a plan is for tensors of static shape: make it dense"
        )
    return None if leaf is None else tf.convert_to_tensor(leaf)


def _without_optional(leaf: Any) -> Any:
    return None if isinstance(leaf, tf.experimental.Optional) else leaf
