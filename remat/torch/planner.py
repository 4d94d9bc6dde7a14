"""From a captured step to the plan it is executed with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from remat.cost import Noise, costs_and_noise
from remat.cost.gpu import DEFAULT_GPU, Gpu, gpus, load_gpu
from remat.cost.profile import profile_workspaces
from remat.errors import CostWarning, InvalidInput, warn
from remat.execution import (
    Fingerprint,
    Peaks,
    StepPlan,
    announce_pause,
    cheapest_fitting,
    find_plan,
    fingerprint_of,
)
from remat.graph import Graph, Operation
from remat.plan import Plan
from remat.torch import _aot
from remat.torch._private import tree_leaves
from remat.torch._random import random_state
from remat.torch._work import CUDA_BLOCK_BYTES
from remat.torch.capture import TrainingGraph
from remat.torch.step_graph import CapturedStep, is_random

START = "start of backward"  # counted as resident, but made by the step
VERSION = torch.__version__.split("+")[0]


@dataclass(slots=True)
class Planner:
    """How steps of one model are planned, and the plans made so far.

    Attributes:
        budget_bytes: for every step.
        cost: ``profile``, ``roofline`` or ``flops``.
        gpu: of the roofline.
        device: where the model is: ``cpu`` or ``cuda``.
        plain: peak of the plain step on the sample arguments.
        beside: what is resident beside parameters, buffers and arguments of a step, in bytes by name.
        state_bytes: of the optimizer; `beside` counts a part of it.
        sample: shapes and dtypes of the sample arguments, which the budget was given for.
        implementations: which implementations steps may be planned with, see `remat.torch._with_implementations`.
        plans: by the sha256 of the step's fingerprint.
    """

    name: str
    budget_bytes: int
    strategy: str
    scope: str
    cost: str
    gpu: Gpu
    device: str
    time_limit_s: float
    seed: int
    threads: int
    cache_folder: Path
    plain: Peaks
    beside: Callable[[TrainingGraph], Mapping[str, int]]
    state_bytes: Callable[[], int]
    sample: str = ""
    implementations: str = "default"
    plans: dict[str, StepPlan] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)

    def plan(self, step: CapturedStep, inputs: str, *, in_loop: bool = False) -> StepPlan:
        """The plan of a step: one made before, or a new one.

        Args:
            in_loop: a training loop waits: say so, and take the order of another shape if it fits.

        Raises:
            InvalidInput: no plan within the budget was found.
        """
        graph, fixed = self.with_everything_resident(step)
        fingerprint = fingerprint_of(graph.default(), "torch", VERSION, inputs)
        with self.lock:
            if fingerprint.sha256 not in self.plans:
                if in_loop:
                    announce_pause(self.name, inputs, self.time_limit_s, "model.prepare(...)")
                try:
                    self.plans[fingerprint.sha256] = self._new(graph, step, fixed, fingerprint, in_loop)
                except InvalidInput as error:
                    if not self.plans:
                        raise
                    raise InvalidInput(f"{error}; {self._what_the_budget_is_for(inputs)}") from None
            return self.plans[fingerprint.sha256]

    def take(
        self, path: str | PathLike[str] | StepPlan, step: CapturedStep, inputs: str, budget_bytes: int | None = None
    ) -> StepPlan:
        """The plan of a file, or of another module, for this step; nothing is solved or measured.

        Args:
            budget_bytes: promised instead of the plan's own budget; other shapes are planned with what is promised.

        Raises:
            InvalidInput: it exceeds the budget with what is resident here.
            InvalidPlan: it was made for something else.
        """
        graph, fixed = self.with_everything_resident(step)
        fingerprint = fingerprint_of(graph.default(), "torch", VERSION, inputs)
        taken = StepPlan.load(path, graph, fingerprint, fixed) if not isinstance(path, StepPlan) else (
            path.moved(graph, fingerprint, fixed))  # fmt: skip
        taken = taken.promising(budget_bytes)
        if self.plain.plain_bytes is not None:
            taken = replace(taken, plain_peak_bytes=self.plain.plain_bytes)
        self.budget_bytes = taken.budget_bytes or taken.peak_bytes
        self.plans[fingerprint.sha256] = taken
        return taken

    def with_everything_resident(self, step: CapturedStep) -> tuple[Graph, dict[str, int]]:
        """The graph with all that is resident in `fixed_bytes`, and its parts by name."""
        fixed = {"parameters, buffers and inputs": step.graph.fixed_bytes, **self.beside(step.training_graph)}
        fixed |= {START: _start_bytes(step.training_graph)}
        return replace(step.graph, fixed_bytes=sum(fixed.values())), fixed

    def weigh(self, graph: Graph, step: CapturedStep) -> Graph:
        """The graph with costs and workspaces."""
        return self._with_costs(_with_workspaces(graph, step, self._workspaces(graph)))[0]

    def _workspaces(self, graph: Graph) -> list[int]:
        """Bytes measured for every way of every operation."""
        sizes, unmeasured = profile_workspaces(graph.every_implementation(), self.cache_folder, self.device)
        if unmeasured:
            named = ", ".join(f"{kind} ({why})" for kind, why in sorted(unmeasured.items()))
            warn(f"workspace not measured, taken as 0: {named}", CostWarning)
        return sizes

    def _with_costs(self, graph: Graph) -> tuple[Graph, Noise | None]:
        return costs_and_noise(graph, self.cost, self.gpu, cache_folder=self.cache_folder, device=self.device)

    def _new(
        self, graph: Graph, step: CapturedStep, fixed: Mapping[str, int], fingerprint: Fingerprint, in_loop: bool
    ) -> StepPlan:
        workspaces = self._workspaces(graph)
        graph = _with_workspaces(graph, step, workspaces)
        is_sample = not (self.plans or in_loop)
        plan, who, costs, noise = _once(graph, self.budget_bytes), "fits as it is", "", None
        fits = cheapest_fitting(graph, [plan], self.budget_bytes) is not None
        if is_sample or not fits or graph.has_implementations:  # else there is nothing to choose, so nothing to time
            if max(graph.largest_working_set()[0], graph.final_bytes) <= self.budget_bytes:  # else there is no plan
                (graph, noise), costs = self._with_costs(graph), self.cost
            plan, who = self._cheapest(graph, in_loop)
        graph = _with_workspaces(graph, step, workspaces, plan)
        plan = Plan.from_order(graph, plan.order.tolist(), self.budget_bytes, plan.choices)
        plain = self.plain.plain_bytes if is_sample else None
        return StepPlan(
            plan,
            graph,
            fingerprint,
            who,
            self.budget_bytes,
            plain,
            fixed,
            costs,
            implementations=self.implementations,
            noise=noise,
        )

    def _what_the_budget_is_for(self, inputs: str) -> str:
        """And what to do where a step that is not of the sample arguments has no plan."""
        if inputs == self.sample:
            return "the budget was given for this step in another mode, or with other gradients: give a larger one"
        return (
            f"this step is of {inputs}, the budget was given for {self.sample}: "
            "rematerialize with the largest arguments that occur, or with a larger budget"
        )

    def _cheapest(self, graph: Graph, in_loop: bool) -> tuple[Plan, str]:
        """The cheapest known order that fits, while a loop waits; else what the solver finds. And whose it is."""
        known = [_once(graph, self.budget_bytes)]
        known += [
            Plan.from_order(graph, made.order.tolist(), self.budget_bytes, made.plan.choices)
            for made in self.plans.values() if _same_calls(made.graph, graph)
        ]  # fmt: skip
        found = cheapest_fitting(graph, known, self.budget_bytes) if in_loop else None
        if found is not None:
            return found, "from another shape"
        solution = find_plan(
            graph, self.budget_bytes, strategy=self.strategy, scope=self.scope,
            time_limit_s=self.time_limit_s, seed=self.seed, threads=self.threads, known=known,
        )  # fmt: skip
        assert solution.plan is not None
        return solution.plan, solution.strategy


def _once(graph: Graph, budget_bytes: int) -> Plan:
    """Every operation once, in the graph's order."""
    return Plan.from_order(graph, range(len(graph)), budget_bytes)


def there_before(plan: StepPlan) -> int:
    """What of a plan's fixed bytes is there before a step."""
    return plan.graph.fixed_bytes - plan.fixed.get(START, 0)


def _with_workspaces(graph: Graph, step: CapturedStep, measured: Sequence[int], plan: Plan | None = None) -> Graph:
    """The graph with workspaces: those measured, or what it takes to read a random generator's state.

    Args:
        measured: [ways of all operations] bytes.
        plan: whose repeated draws are the only ones before which the state is read; by default any may be repeated.
    """
    times = [2] * len(graph) if plan is None else np.bincount(plan.order, minlength=len(graph))
    sizes, next_measured = list[int](), iter(measured)
    for op, nodes, n in zip(graph.operations, step.nodes, times, strict=True):
        state = _state_bytes(op, nodes) if n > 1 else 0
        made = [sum(graph.values[v].bytes for v in implementation.outputs) for implementation in op.all_implementations]
        sizes += [max(next(next_measured), state - size) for size in made]
    return graph.with_workspaces(sizes)


def _state_bytes(op: Operation, nodes: Sequence[fx.Node]) -> int:
    """What PyTorch's allocator holds of the random generator's state before a call that may be repeated."""
    replayed = [node for node in nodes if is_random(node) and not op.run_once]
    devices = (device for device in map(_aot.device_of, replayed) if device.type == "cpu")
    return max((random_state(device).nbytes for device in devices), default=0)


def _start_bytes(training_graph: TrainingGraph) -> int:
    """What the caller of ``loss.backward()`` holds: a gradient of one element, and the loss where it is outside."""
    outputs = [node.meta["val"] for node in training_graph.tangents]
    cuda = any(x.device.type == "cuda" for x in outputs)
    one = CUDA_BLOCK_BYTES if cuda else max((x.element_size() for x in outputs), default=0)
    return one if len(outputs) == 1 and outputs[0].numel() == 1 else 2 * one


def _same_calls(one: Graph, other: Graph) -> bool:
    """Whether two graphs differ in sizes only, so that an order of one is an order of the other."""

    def shape(graph: Graph) -> list[Any]:
        return [
            (
                op.kind,
                op.inputs,
                op.outputs,
                op.run_once,
                [implementation.name for implementation in op.implementations],
            )
            for op in graph.operations
        ]

    return shape(one) == shape(other)


def describe_inputs(args: Any) -> str:
    """Shapes and dtypes of tensors in a structure of arguments, e.g. ``float32[32, 3, 224, 224]``."""
    return ", ".join(map(_described, tree_leaves(args))) or "no inputs"


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        place = f"@{x.device.type}" if x.device.type != "cpu" else ""
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{place}"
    plain = isinstance(x, (bool, int, float, complex, str, torch.dtype, type(None)))
    return repr(x)[:40] if plain else type(x).__name__  # which may hold an address


def device_of(model: nn.Module, args: Any) -> str:
    """``cpu`` or ``cuda``: where everything is.

    Raises:
        InvalidInput: on several devices, or on one that nothing can be measured on.
    """
    tensors = [x for x in (*model.parameters(), *model.buffers(), *tree_leaves(args)) if isinstance(x, Tensor)]
    kinds = {x.device.type for x in tensors}
    if len({x.device for x in tensors if x.device.type != "cpu"}) > 1 or kinds - {"cpu", "cuda"}:
        places = ", ".join(sorted({str(x.device) for x in tensors}))
        raise InvalidInput(f"model and sample_args are on {places}; move both to the CPU or to one CUDA device")
    return "cuda" if "cuda" in kinds else "cpu"


def default_gpu(device: str) -> Gpu:
    """The device of the roofline: this machine's GPU if it is known, else a V100; the CPU for models there."""
    if device == "cpu":
        return load_gpu("cpu")
    name = torch.cuda.get_device_name().lower().replace(" ", "")
    alike = [load_gpu(known) for known in gpus() if known.split("_")[0] in name]  # may differ in memory
    there = torch.cuda.get_device_properties(0).total_memory
    return min(alike, key=lambda gpu: abs(gpu.memory_bytes - there), default=load_gpu(DEFAULT_GPU))
