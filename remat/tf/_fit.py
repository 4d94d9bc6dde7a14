"""`fit_within`: plain ``model.fit`` under a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import keras
import numpy as np
import tensorflow as tf

from remat.errors import InvalidInput
from remat.execution import Peaks, StepPlan, announce_pause, is_fraction
from remat.tf._plan import Options, Promise, fingerprint, load_plan, make_plan, promise_of
from remat.tf._step import PlannedStep, describe
from remat.tf.api import NO_JIT, Budget, Keywords, check_one_device, checked_options, variable_bytes
from remat.tf.capture import CapturedStep, capture_step, trace


def fit_within(model: keras.Model, budget: Budget | None = None, **keywords: Unpack[Keywords]) -> keras.Model:
    """Make ``model.fit`` (and ``train_on_batch``) train under a plan; returns the same model.

    The plan covers the model's whole ``train_step``, also one that a subclass defines: loss, metrics, optimizer.
    Each shape of a batch is traced and planned once, when the first batch of that shape comes, or ahead by `prepare`.
    A smaller last batch gets its own plan, without recomputation if it fits as it is. Callbacks, metrics, validation
    and ``evaluate`` are Keras's.

    Args:
        budget: the most bytes held at once while a batch is trained, in all: variables of the model, the optimizer
            and the metrics, gradients, the batch with its labels and weights, activations, workspace of kernels.
            See `rematerialize`. A fraction is of the plain step of the largest batch, and every other shape gets the
            same number of bytes. A batch larger than all before raises it: the fraction is then of its plain step.
        plan: for the first shape of a batch (in `prepare`: the largest); others get the budget, or that of the plan.
        others: as for `rematerialize`.

    As with Keras's own compiled step, an attribute of a layer that changes later (a dropout's rate) takes effect with
    the next ``compile``; freezing layers takes effect at once.

    After the first batch ``model.remat`` is the planned step of the largest batch: ``model.remat.plan``,
    ``.budget_bytes``, ``.predicted_peak_bytes``, ``.overhead``. ``model.remat_steps`` has all steps by shape.

    Raises:
        InvalidInput: here for unreadable options; from ``fit`` when there is no plan within the budget.
    """
    options = checked_options(budget, keywords)
    if not isinstance(model, keras.Model):
        raise InvalidInput(f"fit_within takes a Keras model, not {type(model).__name__}")
    trainer = _Trainer(model, budget, options)
    # Write to the instance's dictionary: Keras tracks attributes to find layers and variables, and the model file must
    # not hold these, which are no configuration of the model.
    model.__dict__.update(
        make_train_function=trainer.make_train_function, remat_steps=trainer.steps, train_function=None
    )
    return model


def prepare(model: keras.Model, *batches: Any) -> tuple[StepPlan, ...]:
    """Plan steps of a model of `fit_within` before ``fit`` needs them, so that ``fit`` does not pause.

    Args:
        model: compiled, and with layers frozen that will be.
        batches: for each step the argument of ``train_step``, e.g. ``(x, y)`` or ``(x, y, sample_weight)``: tensors,
            arrays (``fit`` makes tensors of Keras's float type from them) or ``tf.TensorSpec``. Only shapes and types
            matter.

    Returns:
        A plan for each batch.

    Raises:
        InvalidInput: no plan within the budget, a shape that is not static, or a model that `fit_within` does not know.
    """
    trainer = getattr(getattr(model, "__dict__", {}).get("make_train_function"), "__self__", None)
    if not isinstance(trainer, _Trainer):
        raise InvalidInput(
            "prepare plans steps of a model of fit_within: call remat.tf.fit_within(model, budget) first"
        )
    return trainer.prepare(batches)


class _Trainer:
    """The steps of one model.

    Attributes:
        steps: by shapes and types of a batch.
        largest_bytes: of the batches planned so far; the step of that batch is ``model.remat``.
        promise: the budget in bytes that a fraction, or a given plan, stands for.
        trained: variables that get gradients.
    """

    def __init__(self, model: keras.Model, budget: Budget | None, options: Options) -> None:
        self.model, self.budget, self.options = model, budget, options
        self.steps: dict[str, PlannedStep] = {}
        self.trained: tuple[Any, ...] = ()
        self.forget()

    def forget(self) -> None:
        self.steps.clear()
        self.largest_bytes = -1
        self.promise: Promise | None = None
        self.model.__dict__["remat"] = None

    def prepare(self, batches: Sequence[Any]) -> tuple[StepPlan, ...]:
        if not getattr(self.model, "compiled", False):
            raise InvalidInput("prepare plans the step that model.compile(...) defines: compile the model first")
        if not batches or not all(isinstance(batch, (tuple, list, dict)) for batch in batches):
            raise InvalidInput("prepare takes the argument of train_step for each step, e.g. prepare(model, (x, y))")
        self.make_train_function()
        specs = [tf.nest.map_structure(_spec, batch) for batch in batches]
        for batch in sorted(specs, key=_bytes, reverse=True):  # a fraction is of the largest batch's step
            self._step_for(batch)
        return tuple(self.steps[_key(batch)].plan for batch in specs)

    def make_train_function(self, force: bool = False) -> Callable[[Any], Any]:
        """Keras calls this at the start of ``fit``; the result takes the iterator."""
        model: Any = self.model
        if model.jit_compile is True:
            raise InvalidInput(f"{NO_JIT}: model.compile(..., jit_compile=False)")
        check_one_device(model)
        if model.run_eagerly:
            raise InvalidInput("run_eagerly=True runs no graph, so no plan; leave it out")
        # `compile` removes the step, as it does Keras's own; freezing layers changes the trained variables
        trained = tuple(model.trainable_variables)
        same = list(map(id, trained)) == list(map(id, self.trained))
        if force or not same or model.__dict__.get("train_function") is None:
            self.forget()
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
        tensors = tf.nest.map_structure(_dense, data)
        step = self._step_for(tensors, in_loop=True)
        return step(*(t for t in tf.nest.flatten(tensors) if t is not None))

    def _step_for(self, data: Any, *, in_loop: bool = False) -> PlannedStep:
        """The step of batches like `data`: a known one, or one planned now (a loop that waits prints a line)."""
        key = _key(data)
        if key not in self.steps:
            captured = self._captured(data)
            step = PlannedStep(captured, self._plan(captured, data, in_loop))
            self.steps[key] = step
            if _bytes(data) > self.largest_bytes:
                self.largest_bytes = _bytes(data)
                self.model.__dict__["remat"] = step
        return self.steps[key]

    def _captured(self, data: Any) -> CapturedStep:
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
            trace(train_step, specs)  # creates the variables, outside the trace that is planned
            self.trained = tuple(model.trainable_variables)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        seen = _Seen()
        function = trace(train_step, specs)
        fixed = variable_bytes(function, {"parameters": model, "optimizer": model.optimizer})
        if not seen.applied:
            raise InvalidInput(
                "the model's train_step applies no gradients through model.optimizer, so there is nothing to plan: "
                "use that one, or rematerialize a function that gives the loss and the gradients"
            )
        loss = seen.loss if seen.loss is not None else next(iter(seen.gradients), None)
        return capture_step(function, model.name, fixed, loss, seen.gradients)

    def _plan(self, captured: CapturedStep, data: Any, in_loop: bool) -> StepPlan:
        inputs = describe(data)
        here = fingerprint(captured, inputs)
        for step in self.steps.values():
            if step.plan.fingerprint == here:  # the same tensors in another structure, e.g. no weights
                return load_plan(captured, step.plan, inputs, None)
        if self.options.plan is not None and not self.steps:
            plan = load_plan(captured, self.options.plan, inputs, self.budget)
            if plan.budget_bytes is not None:
                self.promise = Promise(plan.budget_bytes, Peaks(plan.plain_peak_bytes))
            return plan
        if in_loop:
            announce_pause(self.model.name, inputs, self.options.time_limit_s, "remat.tf.prepare(model, batch, ...)")
        return make_plan(captured, self._promise(captured, data), self.options, inputs)

    def _promise(self, captured: CapturedStep, data: Any) -> Promise:
        """The promise for a batch like `data`; a fraction is of the plain step of the largest batch."""
        if self.budget is None:
            if self.promise is None:
                raise InvalidInput(f"the plan was made without a budget: give one for batches of {describe(data)}")
            return Promise(self.promise.budget_bytes, Peaks(None, "not measured"))
        if not is_fraction(self.budget):
            return promise_of(captured, self.budget)
        if _bytes(data) > self.largest_bytes:
            found = promise_of(captured, self.budget)
            if self.promise is None or found.budget_bytes > self.promise.budget_bytes:
                self.promise = found
                # steps that recompute within the smaller promise are planned again when needed
                for key in [key for key, step in self.steps.items() if step.plan.recomputed]:
                    del self.steps[key]
            return found
        assert self.promise is not None
        return Promise(self.promise.budget_bytes, Peaks(None, "measured for the largest batch only"))


class _Seen:
    """What `train_step` hands over while it is traced.

    Attributes:
        loss: of ``compute_loss``; if that is not called, the first gradient.
        gradients: tensors that go to the optimizer, without those that a branch of `tf.cond` computes itself.
        applied: whether anything goes to the optimizer, in a branch too.
    """

    def __init__(self) -> None:
        self.loss: Any = None
        self.gradients: tuple[Any, ...] = ()
        self.applied = False


@contextmanager
def _watched(model: Any, seen: _Seen) -> Iterator[None]:
    """Note the loss, and the gradients that go to the optimizer, while ``train_step`` is traced."""
    optimizer, graph = model.optimizer, tf.compat.v1.get_default_graph()
    compute_loss, apply = model.compute_loss, optimizer.apply

    def noting_loss(*args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(*args, **kwargs)
        if _is_in(graph, loss):
            seen.loss = loss
        return loss

    def noting_gradients(grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        seen.applied = True
        seen.gradients += tuple(t for t in tf.nest.flatten(grads, expand_composites=True) if _is_in(graph, t))
        return apply(grads, trainable_variables)

    with (
        _replaced(model.__dict__, "compute_loss", noting_loss),
        _replaced(optimizer.__dict__, "apply", noting_gradients),
    ):
        yield


def _is_in(graph: Any, tensor: Any) -> bool:
    """Whether `tensor` is one of the graph's; variables, None and tensors of a branch's own graph are not."""
    return tf.is_tensor(tensor) and not isinstance(tensor, tf.Variable) and getattr(tensor, "graph", None) is graph


@contextmanager
def _replaced(attributes: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Replace an attribute in an instance's dictionary for a while, which may have held one already."""
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)


def _key(batch: Any, outermost: bool = True) -> str:
    """Shapes and types of a batch with their structure, because it says what each tensor is for."""
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {_key(batch[name], False)}" for name in sorted(batch, key=str)) + "}"
    if isinstance(batch, (list, tuple)):
        parts = ", ".join(_key(part, False) for part in batch)
        return parts if outermost else f"[{parts}]"
    return "None" if batch is None else describe(batch)


def _bytes(batch: Any) -> int:
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    return sum(tf.TensorShape(leaf.shape).num_elements() * tf.as_dtype(leaf.dtype).size for leaf in leaves)


def _spec(leaf: Any) -> tf.TensorSpec | None:
    """Shape and type of the tensor that ``fit`` makes of `leaf`."""
    if leaf is None:
        return None
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    shape = tf.TensorShape(leaf.shape)
    if shape.num_elements() is None:
        raise InvalidInput(f"a batch of shape {shape} has no static shape; a plan is for one: give every size")
    is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"
    return tf.TensorSpec(shape, keras.config.floatx() if is_array else leaf.dtype)


def _dense(leaf: Any) -> Any:
    if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
        raise InvalidInput(
            f"a batch holds a {type(leaf).__name__}; a plan is for tensors of static shape: make it dense"
        )
    return None if leaf is None or isinstance(leaf, tf.experimental.Optional) else tf.convert_to_tensor(leaf)
