"""`rematerialize` and `compile`: trace a step, plan it, and return it as a callable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import keras
import tensorflow as tf

from remat.errors import InvalidInput
from remat.execution import check_options
from remat.tf._keras import check_backend, compiled_metrics
from remat.tf._objective import Objective
from remat.tf._plan import Options, SavedPlan, load_plan, make_plan, promise_of
from remat.tf._step import PlannedStep, describe
from remat.tf.adapter import is_jit_compiled
from remat.tf.capture import capture_step, trace

Budget = int | float | str


class Keywords(TypedDict, total=False):
    """Keywords of all calls that plan; `rematerialize` describes them."""

    strategy: str
    scope: str
    cost: str
    time_limit_s: float
    seed: int
    threads: int | None
    target_gap: float | None
    verify: bool
    plan: SavedPlan | None
    jit_compile: bool


NO_JIT = (
    "jit_compile=True undoes rematerialization: XLA merges a recomputation with the first computation and orders "
    "operations itself; leave it out"
)


def rematerialize(
    model_or_step: Any,
    input_signature: Sequence[Any],
    budget: Budget | None = None,
    *,
    loss: Any = None,
    **keywords: Unpack[Keywords],
) -> PlannedStep:
    """A step that computes the loss and the gradients and holds at most `budget` bytes at once.

    Args:
        model_or_step: a Keras model, or a function of tensors that returns the loss and the gradients (in any
            structure that starts with the loss). A `tf.function` is traced as it is.
        input_signature: for a model ``(inputs, labels)`` or ``(inputs, labels, sample_weights)``, for a function its
            arguments, as ``tf.TensorSpec`` (or structures of them) of static shapes.
        budget: the most bytes held at once, in all: variables, gradients, the batch with its labels, activations,
            workspace of kernels, and the executor's own bookkeeping. Bytes, a size like ``'8GB'``, or a fraction in
            (0, 1] of the peak of the step's plain `tf.function`, which a fresh process measures. The budget does not
            cover earlier allocations (the optimizer's state, if there is one; datasets).
        loss: for a model: ``loss(labels, prediction)``, a Keras loss or its name; one for all outputs, a list in
            their order or a dict by their names. It is read as `Model.compile` reads it: Keras's mask and sample
            weights count, labels and prediction come in Keras's float type. The step differentiates the sum of the
            losses and of the regularization losses (with ``reduction=None`` the sum of all elements).
        strategy, time_limit_s, seed, threads: of the solver; see `remat.solve`. The time limit does not cover
            measuring kernels (once, then read from ``$REMAT_CACHE`` or ``~/.cache/remat``) and verifying. The solver
            ends sooner where more time is not expected to save a thousandth of the cost.
        target_gap: the solver ends at this proven gap instead; 0.01 is 1 %.
        scope: ``free`` (the default: any order), ``fixed_order`` or ``staged``.
        cost: the cost of operations: ``profile`` (each distinct operation timed here once), ``roofline``, ``flops``.
        verify: run the plan once in its own process, and plan again with less if it exceeds the budget there.
        plan: a plan made before, or its file. Then nothing is solved or verified, and `budget` may be left out; a
            budget that is given replaces the promise of the plan.
        jit_compile: must be False.

    Returns:
        A callable of the same arguments. For a model it returns ``(loss, gradients)``, gradients in the order of
        ``model.trainable_variables`` (None where there is none). Results, moving averages and seeds are those of the
        eager step bit for bit. (Grappler optimises a default `tf.function`, which changes last bits.)

    Raises:
        InvalidInput: (a ValueError) no plan within the budget; a plan made for something else; unreadable options.
    """
    options = checked_options(budget, keywords)
    if isinstance(model_or_step, keras.Model):
        model = model_or_step
        if len(input_signature) not in (2, 3):
            raise InvalidInput(
                "input_signature of a model must be (inputs, labels) or (inputs, labels, sample_weights)"
            )
        check_one_device(model)
        objective = Objective(model, loss)
        _build(model, input_signature[0])
        return _planned(objective.step, input_signature, budget, options, model.name, {"parameters": model}, objective)
    if not callable(model_or_step):
        raise InvalidInput(f"a Keras model or a function is needed, not {type(model_or_step).__name__}")
    if is_jit_compiled(model_or_step):
        raise InvalidInput(NO_JIT)
    name = getattr(model_or_step, "__name__", "step")
    return _planned(model_or_step, input_signature, budget, options, name, {})


def compile(
    model: keras.Model,
    loss: Any,
    optimizer: Any,
    input_spec: Any,
    label_spec: Any,
    budget: Budget | None = None,
    *,
    weight_spec: Any = None,
    metrics: Any = None,
    weighted_metrics: Any = None,
    **keywords: Unpack[Keywords],
) -> PlannedStep:
    """One line from a model to its training iteration: ``train_iteration_fn(x, y) -> (prediction, loss)``.

    The iteration applies the optimizer. Its slot variables and the temporaries of its update count towards the budget.
    An exception in the network or the loss leaves every variable as it was.

    Args:
        optimizer: a Keras optimizer or its name. This call builds it for the model's trainable variables.
        input_spec, label_spec: ``tf.TensorSpec`` (or structures of them) of static shapes.
        weight_spec: of sample weights, which are then a third argument: ``train_iteration_fn(x, y, weights)``.
        metrics, weighted_metrics: as for `Model.compile`. ``step.metrics.result()`` and ``step.metrics.reset_state()``
            read and reset them.
        loss, budget, others: as for `rematerialize`.

    Raises:
        InvalidInput: as `rematerialize`.
    """
    options = checked_options(budget, keywords)
    check_one_device(model)
    objective = Objective(model, loss)
    optimizer = keras.optimizers.get(optimizer)
    _build(model, input_spec)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)

    measured = compiled_metrics(model, metrics, weighted_metrics)

    def train_iteration(inputs: Any, labels: Any, *weights: Any) -> tuple[Any, Any]:
        given = weights[0] if weights else None
        prediction, value, gradients = objective.differentiate(inputs, labels, optimizer.scale_loss, given)
        optimizer.apply(gradients, model.trainable_variables)
        measured.update_state(labels, prediction, given)
        return prediction, value

    holders = {"parameters": model, "optimizer": optimizer, "metrics": measured}
    specs = (input_spec, label_spec) if weight_spec is None else (input_spec, label_spec, weight_spec)
    step = _planned(train_iteration, specs, budget, options, model.name, holders, objective)
    step.metrics = measured
    return step


def check_one_device(model: Any) -> None:
    """Refuse a model that was made in the scope of a strategy with several replicas, also when used outside of it."""
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise InvalidInput("a plan is for one device; leave the distribution strategy out")


def _build(model: keras.Model, input_spec: Any) -> None:
    """Create the variables of a model that has none yet, as its first call would."""
    if not model.built:
        _check_static(input_spec)
        trace(lambda inputs: model(inputs, training=True), (input_spec,))


def _check_static(specs: Any) -> None:
    for spec in tf.nest.flatten(specs):
        shape = getattr(spec, "shape", None)
        if shape is None or tf.TensorShape(shape).num_elements() is None:
            raise InvalidInput(f"{spec} has no static shape; a plan is for one batch size")


def checked_options(budget: Budget | None, keywords: Keywords) -> Options:
    """The options of a call; refuses other backends, XLA, visible GPUs, and what cannot be used."""
    for name in keywords:
        if name in ("offload", "link"):
            raise InvalidInput(
                f"no plan of a TensorFlow step copies values to the host, as in PyTorch: leave {name}= out"
            )
        if name not in Keywords.__annotations__:
            raise TypeError(f"unexpected keyword argument '{name}'")
    check_backend()
    given = dict(keywords)
    if given.pop("jit_compile", False):
        raise InvalidInput(NO_JIT)
    if tf.config.get_visible_devices("GPU"):
        raise InvalidInput("plans of TensorFlow steps are for the CPU: tf.config.set_visible_devices([], 'GPU') first")
    options = Options(**{**given, "threads": given.get("threads") or None})  # pyright: ignore[reportArgumentType]
    check_options(budget, options.plan, options)
    return options


def _planned(
    step: Callable[..., Any], specs: Sequence[Any], budget: Budget | None, options: Options, name: str,
    holders: Mapping[str, Any], objective: Objective | None = None,
) -> PlannedStep:  # fmt: skip
    """Trace, plan and emit."""
    _check_static(list(specs))
    function = trace(step, specs)
    fixed = variable_bytes(function, holders)
    if objective is None:
        captured = capture_step(function, name, fixed)
    else:
        captured = capture_step(function, name, fixed, objective.values[0], objective.gradients)
    inputs = describe(specs)
    if options.plan is not None:
        return PlannedStep(captured, load_plan(captured, options.plan, inputs, budget))
    assert budget is not None
    return PlannedStep(captured, make_plan(captured, promise_of(captured, budget), options, inputs))


def variable_bytes(function: Any, holders: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the variables of each holder (anything with ``variables``), and of others that the trace reads."""
    groups = {name: holder.variables for name, holder in holders.items()}
    groups["other variables" if holders else "variables"] = function.graph.variables
    seen: set[int] = set()
    sizes: Counter[str] = Counter()
    for name, variables in groups.items():
        for variable in variables:
            inner = variable.value if isinstance(variable, keras.Variable) else variable
            if id(inner.handle) not in seen:
                seen.add(id(inner.handle))
                shape = inner.shape if inner.shape.is_fully_defined() else inner.read_value().shape
                sizes[name] += shape.num_elements() * inner.dtype.size
    return {name: size for name, size in sizes.items() if size}
