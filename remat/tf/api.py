"""`rematerialize` and `compile`: trace a step, plan it, return it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from remat.errors import InvalidInput
from remat.execution import StepPlan, check_options
from remat.tf._plan import Options, load_plan, make_plan, promise_of
from remat.tf._step import PlannedStep, describe
from remat.tf.adapter import is_jit_compiled
from remat.tf.capture import capture_step, trace

Budget = int | float | str
SavedPlan = StepPlan | str | os.PathLike[str]
NO_JIT = (
    "jit_compile=True undoes rematerialization: XLA merges what a plan computes again with the first computation "
    "and orders operations itself; leave it out"
)


def rematerialize(
    model_or_step: Any,
    input_signature: Sequence[Any],
    budget: Budget | None = None,
    *,
    loss: Any = None,
    strategy: str = "portfolio",
    scope: str = "free",
    cost: str = "profile",
    time_limit_s: float = 60.0,
    seed: int = 0,
    threads: int | None = None,
    verify: bool = True,
    plan: SavedPlan | None = None,
    jit_compile: bool = False,
) -> PlannedStep:
    """A step that gives the loss and the gradients and holds at most `budget` bytes at once.

    Args:
        model_or_step: a Keras model, or a function of tensors that returns the loss and the gradients (in any
            structure that starts with the loss); a `tf.function` is traced as it is.
        input_signature: for a model ``(inputs, labels)``, for a function its arguments, as ``tf.TensorSpec`` (or
            structures of them) of static shapes.
        budget: the most bytes held at once, in all: variables, gradients, the batch with its labels, activations,
            workspace of kernels, and the executor's own bookkeeping. Bytes, a size like ``'8GB'``, or a fraction in
            (0, 1] of what the plain `tf.function` of the step needs, which is measured in a fresh process. What is
            allocated before (the optimizer's state, if there is one; datasets) is beside it.
        loss: with a model: ``loss(labels, prediction)``, a Keras loss or its name, one for all outputs, a list in
            their order or a dict by their names; their means are added and differentiated, with regularization losses.
        strategy, time_limit_s, seed, threads: of the solver; see `remat.solve`. Measuring kernels and verifying take
            their time beside it (kernels once, then from ``$REMAT_CACHE`` or ``~/.cache/remat``).
        scope: ``free`` (the default: any order), ``fixed_order`` or ``staged``.
        cost: what recomputing costs: ``profile`` (each distinct operation timed here once), ``roofline``, ``flops``.
        verify: run the plan once in a process of its own, and plan again with less if it exceeds the budget there.
        plan: a plan made before, or its file: then nothing is solved or verified, and `budget` is not needed; if it is
            given, it is promised instead of the plan's own.
        jit_compile: must be False.

    Returns:
        A callable of the same arguments. For a model it returns ``(loss, gradients)``, gradients in the order of
        ``model.trainable_variables`` (None where there is none). Results, moving averages and seeds are those of the
        eager step bit for bit; a default `tf.function` is optimised by grappler, which changes last bits.

    Raises:
        InvalidInput: (a ValueError) no plan within the budget; a plan made for something else; unreadable options.
    """
    options = Options(strategy, scope, cost, time_limit_s, seed, threads, verify)
    check_call(budget, plan, jit_compile, options)
    if isinstance(model_or_step, keras.Model):
        model = model_or_step
        if len(input_signature) != 2:
            raise InvalidInput("input_signature of a model must be (inputs, labels)")
        if loss is None:
            raise InvalidInput("give loss=, e.g. loss='sparse_categorical_crossentropy'")
        _build(model, input_signature[0])
        objective = Objective(model, loss)
        return _planned(objective.step, input_signature, budget, options, plan, model.name, {"parameters": model},
                        objective.gradients, objective.values)  # fmt: skip
    if not callable(model_or_step):
        raise InvalidInput(f"a Keras model or a function is needed, not {type(model_or_step).__name__}")
    if is_jit_compiled(model_or_step):
        raise InvalidInput(NO_JIT)
    name = getattr(model_or_step, "__name__", "step")
    return _planned(model_or_step, input_signature, budget, options, plan, name, {}, None)


def compile(
    model: keras.Model,
    loss: Any,
    optimizer: Any,
    input_spec: Any,
    label_spec: Any,
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
) -> PlannedStep:
    """One line from a model to its training iteration: ``train_iteration_fn(x, y) -> (prediction, loss)``.

    The optimizer is applied in the iteration, and its slot variables and the temporaries of its update count to the
    budget. An exception in the network or the loss leaves every variable as it was.

    Args:
        optimizer: a Keras optimizer or its name; built here for the model's trainable variables.
        input_spec, label_spec: ``tf.TensorSpec`` (or structures of them) of static shapes.
        budget, others: as of `rematerialize`.

    Raises:
        InvalidInput: as of `rematerialize`.
    """
    options = Options(strategy, scope, cost, time_limit_s, seed, threads, verify)
    check_call(budget, plan, jit_compile, options)
    optimizer = keras.optimizers.get(optimizer)
    _build(model, input_spec)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    objective = Objective(model, loss)

    def train_iteration(inputs: Any, labels: Any) -> tuple[Any, Any]:
        prediction, value, gradients = objective.differentiate(inputs, labels, optimizer.scale_loss)
        optimizer.apply(gradients, model.trainable_variables)
        return prediction, value

    return _planned(train_iteration, (input_spec, label_spec), budget, options, plan, model.name,
                    {"parameters": model, "optimizer": optimizer}, objective.gradients, objective.values)  # fmt: skip


class Objective:
    """Loss and gradients of a Keras model; `gradients` and `values` keep the tensors of the last trace."""

    def __init__(self, model: keras.Model, loss: Any) -> None:
        self.model = model
        if isinstance(loss, Mapping):
            self.losses: Any = {name: _loss_of(one) for name, one in loss.items()}
        else:
            self.losses = [_loss_of(one) for one in (loss if isinstance(loss, (list, tuple)) else [loss])]
        self.gradients: list[Any] = []
        self.values: list[Any] = []

    def differentiate(
        self, inputs: Any, labels: Any, scale: Callable[[Any], Any] = lambda x: x
    ) -> tuple[Any, Any, list[Any]]:
        """(prediction, loss, gradients of the trainable variables of the scaled loss)."""
        variables = [v.value for v in self.model.trainable_variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for variable in variables:
                tape.watch(variable)
            prediction = self.model(inputs, training=True)
            value = self._loss(labels, prediction)
            scaled = scale(value)
        gradients = tape.gradient(scaled, variables)
        self.gradients[:] = [t for t in tf.nest.flatten(gradients, expand_composites=True) if t is not None]
        self.values[:] = [value]
        return prediction, value, gradients

    def step(self, inputs: Any, labels: Any) -> tuple[Any, list[Any]]:
        _, value, gradients = self.differentiate(inputs, labels)
        return value, gradients

    def _loss(self, labels: Any, prediction: Any) -> Any:
        losses = self.losses
        if isinstance(prediction, Mapping) or isinstance(losses, Mapping):
            ordered = not isinstance(prediction, Mapping)
            names, prediction = self._named(prediction)
            if isinstance(labels, Mapping) or not ordered:
                labels = _by_name(labels, names, "labels")
            if isinstance(losses, Mapping) or len(losses) > 1:
                losses = _by_name(losses, names, "losses")
        y, p = tf.nest.flatten(labels), tf.nest.flatten(prediction)
        losses = losses * len(p) if len(losses) == 1 else losses
        if not len(y) == len(p) == len(losses):
            raise InvalidInput(f"{len(p)} outputs, {len(y)} labels and {len(losses)} losses: give one each")
        terms = [tf.reduce_mean(f(a, b)) for f, a, b in zip(losses, y, p, strict=True)] + list(self.model.losses)
        return terms[0] if len(terms) == 1 else tf.add_n([tf.cast(t, terms[0].dtype) for t in terms])

    def _named(self, prediction: Any) -> tuple[list[str], list[Any]]:
        """Names of the outputs, and the outputs."""
        if isinstance(prediction, Mapping):
            return list(prediction), list(prediction.values())
        model: Any = self.model
        outputs, names = tf.nest.flatten(prediction), getattr(model, "output_names", None) or []
        if len(names) != len(outputs):
            raise InvalidInput("the model's outputs have no names: give losses as a list in the order of the outputs")
        return list(names), outputs


def _loss_of(one: Any) -> Any:
    try:
        found = keras.losses.get(one)
    except (ValueError, TypeError):
        found = None
    if found is None:
        raise InvalidInput(f"loss {one!r} is no Keras loss, the name of one, or a function of labels and prediction")
    return found


def _by_name(given: Any, names: Sequence[str], what: str) -> list[Any]:
    """Values of a dict in the order of `names`; a list is in that order only where it cannot be mistaken."""
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise InvalidInput(f"{what} for {sorted(given)}, outputs {sorted(names)}: give one for each output")
        return [given[name] for name in names]
    if len(names) == 1:
        return [given[0] if isinstance(given, list) else given]
    raise InvalidInput(f"outputs have names: give {what} as a dict with the keys {sorted(names)}")


def _build(model: keras.Model, input_spec: Any) -> None:
    """Make the variables of a model that has none yet, as its first call would."""
    if not model.built:
        _check_static(input_spec)
        trace(lambda inputs: model(inputs, training=True), (input_spec,))


def _check_static(specs: Any) -> None:
    for spec in tf.nest.flatten(specs):
        shape = getattr(spec, "shape", None)
        if shape is None or tf.TensorShape(shape).num_elements() is None:
            raise InvalidInput(f"{spec} has no static shape; a plan is for one batch size")


def check_call(budget: Budget | None, plan: SavedPlan | None, jit_compile: bool, options: Options) -> None:
    if jit_compile:
        raise InvalidInput(NO_JIT)
    if tf.config.get_visible_devices("GPU"):
        raise InvalidInput("plans of TensorFlow steps are for the CPU: tf.config.set_visible_devices([], 'GPU') first")
    check_options(budget, plan, options.strategy, options.scope, options.cost, options.time_limit_s)


def _planned(
    step: Callable[..., Any], specs: Sequence[Any], budget: Budget | None, options: Options, plan: SavedPlan | None,
    name: str, holders: Mapping[str, Any], gradients: Sequence[Any] | None, values: Sequence[Any] = (),
) -> PlannedStep:  # fmt: skip
    """Trace, plan and emit; `gradients` and `values` (the loss) are filled by the trace."""
    _check_static(list(specs))
    function = trace(step, specs)
    fixed = variable_bytes(function, holders)
    captured = capture_step(function, name, fixed, values[0] if values else None, gradients)
    inputs = describe(specs)
    if plan is not None:
        return PlannedStep(captured, load_plan(captured, plan, inputs, budget))
    assert budget is not None
    return PlannedStep(captured, make_plan(captured, promise_of(captured, budget), options, inputs))


def variable_bytes(function: Any, holders: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the variables of each holder (anything with ``variables``), and of others that the trace reads."""
    groups = {name: list(holder.variables) for name, holder in holders.items()}
    groups["other variables" if holders else "variables"] = list(function.graph.variables)
    seen: set[int] = set()
    sizes = {}
    for name, variables in groups.items():
        sizes[name] = 0
        for variable in variables:
            inner = variable.value if isinstance(variable, keras.Variable) else variable
            if id(inner.handle) not in seen:
                seen.add(id(inner.handle))
                shape = inner.shape if inner.shape.is_fully_defined() else inner.read_value().shape
                sizes[name] += shape.num_elements() * inner.dtype.size
    return {name: size for name, size in sizes.items() if size}
