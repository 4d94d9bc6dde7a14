"""The result of the public functions: a callable that runs a training step under a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from remat.errors import InvalidInput
from remat.execution import Planned, StepPlan
from remat.tf.capture import CapturedStep
from remat.tf.emit import EmittedStep, emit, emit_plain
from remat.tf.portable import StepMeasurement, StepTimes, measure_step, time_steps


class PlannedStep(Planned):
    """A training step under a plan; call it with arguments of the shapes that it was planned for.

    `remat.tf.rematerialize`, `remat.tf.compile` and, for each shape of a batch, `remat.tf.fit_within` make one.

    Attributes:
        plan: the order of computations; ``print`` it, ``save`` it.
        metrics: of `remat.tf.compile`, Keras's own collection.
    """

    metrics: Any = None

    def __init__(self, step: CapturedStep, plan: StepPlan) -> None:
        self.plan = plan
        self._step = step  # also holds the variables
        self._emitted = emit(step, plan.order.tolist())
        self._function = self._emitted.function()
        self._signature = step.function.structured_input_signature[0]
        self._specs = tf.nest.flatten(self._signature, expand_composites=True)
        self._result = step.function.structured_outputs

    def __call__(self, *arguments: Any) -> Any:
        """Run the step.

        Raises:
            InvalidInput: arguments of another structure, shape or type than planned for; a call inside a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise InvalidInput("inside a tf.function the graph optimizers would rewrite the plan; call it from Python")
        rest = iter(self._function(*self._flat(arguments)))
        flat = [None if t is None else next(rest) for t in tf.nest.flatten(self._result, expand_composites=True)]
        return tf.nest.pack_sequence_as(self._result, flat, expand_composites=True)

    def measure(self, runs: int = 5) -> StepMeasurement:
        """Peak of this step, measured in a fresh process, in bytes in all (like `budget_bytes`).

        Its seconds are those under the heap counter, which slows allocation down; see `measure_times`.
        """
        return self._measure(self._emitted, runs)

    def measure_plain(self, runs: int = 5) -> StepMeasurement:
        """As `measure`, for the framework's own `tf.function`."""
        return self._measure(emit_plain(self._step.function), runs)

    def _measure(self, emitted: EmittedStep, runs: int) -> StepMeasurement:
        measured = measure_step(emitted, as_written=emitted.is_plan, runs=runs)
        return measured.above(self._step.graph.fixed_bytes)

    def measure_times(self, rounds: int = 9) -> dict[str, StepTimes]:
        """Seconds of a step, for three steps that take turns in one fresh process.

        ``planned`` is this step, ``plain`` the framework's own `tf.function`, and ``plain as written`` the same without
        grappler, which the predicted overhead is relative to.
        """
        plain = emit_plain(self._step.function)
        steps = [(self._emitted, True), (plain, False), (plain, True)]
        return dict(zip(("planned", "plain", "plain as written"), time_steps(steps, rounds), strict=True))

    def _flat(self, arguments: Sequence[Any]) -> list[Any]:
        try:
            tf.nest.assert_same_structure(self._signature, tuple(arguments), check_types=False)
        except (ValueError, TypeError):
            raise InvalidInput(f"the step takes {describe(self._signature)}; it was called with "
                               f"{describe(tuple(arguments))}") from None  # fmt: skip
        flat = []
        for spec, value in zip(self._specs, tf.nest.flatten(tuple(arguments)), strict=True):
            tensor = tf.convert_to_tensor(value, dtype_hint=spec.dtype)
            if tensor.dtype != spec.dtype:
                if tensor.dtype.is_floating and not spec.dtype.is_floating:
                    raise InvalidInput(f"the step takes {spec.dtype.name}{spec.shape.as_list()} and was called with "
                                       f"{tensor.dtype.name}: round it yourself, or plan for that type")  # fmt: skip
                tensor = tf.cast(tensor, spec.dtype)
            if not spec.shape.is_compatible_with(tensor.shape):
                raise InvalidInput(
                    f"the step was planned for {spec.shape} and called with {tensor.shape}; "
                    "make batches of one size (drop_remainder=True) or plan for this one too"
                )
            flat.append(tensor)
        return flat

    def __repr__(self) -> str:
        return f"<remat.tf step of {describe(self._signature)}>\n{self.plan}"


def describe(structure: Any) -> str:
    """Shapes and types of tensors or specs, e.g. ``float32[8, 64, 64, 3], int32[8]``; None is left out."""
    parts = []
    for leaf in tf.nest.flatten(structure):
        if leaf is None:
            continue
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            parts.append(type(leaf).__name__)
        else:
            parts.append(f"{tf.as_dtype(dtype).name}{list(shape)}")
    return ", ".join(parts)
