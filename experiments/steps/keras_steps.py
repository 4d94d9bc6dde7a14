"""The harness's adapter for Keras: a model's traced step, its plans, and `tf.recompute_grad` over its blocks.

Fresh processes measure peaks and times, with the allocators of such a process. The steps of a row are timed in turns;
CPU time is of all threads.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

import remat.tf as rtf
from experiments.steps.job import Candidate, Job, Method, Subject
from experiments.steps.keras_models import LOSS, Sample, build
from remat.errors import InvalidInput
from remat.tf.adapter import executed_as_written
from remat.tf.api import Objective
from remat.tf.capture import trace
from remat.tf.emit import EmittedStep, emit, emit_plain
from remat.tf.operation_graph import nested_functions_inlined
from remat.tf.portable import measure_step, time_steps

EVERYTHING = "1000TB"  # a budget that never binds: the plan is the traced step itself


@dataclass(frozen=True, slots=True)
class Run:
    """A step in two forms: `emitted` is measured in another process, `call` runs here to compare its bits."""

    emitted: EmittedStep
    as_written: bool
    call: Callable[..., Any]


class KerasSteps(Subject):
    """A model of `keras_models`; `Method.run` is a `Run`."""

    def __init__(self, job: Job, _implementations: str):
        self.job = job
        self.sample = build(job.model)
        self.batch = self.sample.specs[0].shape[0]
        whole = self._rematerialized(EVERYTHING, cost="flops", verify=False)
        self.graph, self.fixed_bytes = whole.plan.graph, whole._step.graph.fixed_bytes
        self._plain = _traced(whole._step.function)
        with nested_functions_inlined():  # XLA, with which Keras compiles grouped convolutions, changes last bits
            eager = self._bits(Objective(self.sample.model, LOSS).step)
        self.references = {"eager": eager, "tf.function": self._bits(self._plain.run.call)}

    def _rematerialized(self, budget: int | str, **options: Any) -> Any:
        return rtf.rematerialize(self.sample.model, self.sample.specs, budget, loss=LOSS, **options)

    def plain(self) -> Method:
        return self._plain

    def peers(self) -> Iterator[Candidate]:
        """`tf.recompute_grad` over about sqrt(n) blocks."""
        segments = max(2, math.isqrt(len(cut_points(self.sample.model))))

        def make() -> Method:
            try:
                return _traced(recompute_grad_step(self.sample, segments))
            except ValueError as error:
                raise InvalidInput(str(error)) from None

        yield Candidate("tf.recompute_grad", f"{segments} blocks", make)

    def best_within(self, budget_bytes: int) -> Method:
        job = self.job
        step = self._rematerialized(budget_bytes, time_limit_s=job.time_limit_s, cost=job.cost)
        order = step.plan.order.tolist()
        run = Run(emit(step._step, order), True, step)
        return Method(run, step.predicted_peak_bytes, None, step.overhead, len(order) - len(self.graph))

    def peak_bytes(self, method: Method) -> int:
        run = method.run
        return measure_step(run.emitted, as_written=run.as_written).above(self.fixed_bytes).peak_bytes

    def same_as(self, method: Method) -> str:
        """Which steps leave the same bits: ``eager``, ``tf.function`` (the plain one, without grappler), both or ''."""
        ours = self._bits(method.run.call)
        return ", ".join(name for name, bits in self.references.items() if bits == ours)

    def measured(self, method: Method) -> dict[str, Any]:
        """Median times of the plain `tf.function`, of the same as written (without grappler), and of the method."""
        if not self.job.rounds:
            return {}
        plain, run = self._plain.run.emitted, method.run
        first, as_written, ours = time_steps(
            [(plain, False), (plain, True), (run.emitted, run.as_written)], self.job.rounds
        )
        return {
            "plain_s": first.wall_s, "plain_cpu_s": first.cpu_s, "as_written_s": as_written.wall_s,
            "as_written_cpu_s": as_written.cpu_s, "measured_s": ours.wall_s, "measured_cpu_s": ours.cpu_s,
            "measured_ratio": ours.wall_s / first.wall_s,
        }  # fmt: skip

    def _bits(self, step: Callable[..., Any]) -> list[bytes]:
        """Loss, gradients and variables after a step, as bytes; restores the variables."""
        before = self.sample.state()
        results = step(*self.sample.batch)
        bits = [t.numpy().tobytes() for t in tf.nest.flatten(results, expand_composites=True) if t is not None]
        bits += [value.tobytes() for value in self.sample.state()]
        self.sample.restore(before)
        return bits


def _traced(function: Any) -> Method:
    return Method(Run(emit_plain(function), False, partial(_as_written, function)))


def _as_written(function: Any, *batch: Any) -> Any:
    """The results of a traced function with grappler off."""
    with executed_as_written():
        return function(*batch)


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
    parts = [keras.Model(a, b) for a, b in zip([model.inputs[0], *chosen], [*chosen, model.outputs[0]], strict=True)]

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
