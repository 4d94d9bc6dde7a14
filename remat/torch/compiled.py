"""Plans of steps that Inductor compiles: made on its fused groups, and checked against the code that it generates.

Inductor is asked for the code of a plan, without compiling kernels, and the code is followed on tensors without
contents (`remat.torch.generated`). If it holds more than the budget, the plan is made again within less.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx

from remat.cost import Noise, costs_and_noise
from remat.cost.gpu import Gpu
from remat.cost.profile import profile_workspaces
from remat.errors import CostWarning
from remat.execution import Generated
from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import simulate
from remat.solution import Solution
from remat.torch import _private, capture, mincut
from remat.torch._emit import emit
from remat.torch._private import LoweredHalf
from remat.torch.fused import FusedStep, fused
from remat.torch.generated import GeneratedStep, follow
from remat.torch.plain import calls_graph
from remat.torch.step_graph import CapturedStep, split_graph_of

AS_IT_IS = "fits as it is"  # strategy of a plan that repeats nothing
MOST_TRIES = 4
SHARES = (0.8, 0.6, 0.4, 0.2, 0.0)  # of PyTorch's knob, whose saved tensors are plans to start from

@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan as Inductor compiles it.

    Attributes:
        order: of operations of the step.
        groups: numbers of consecutive operations that may be fused, and whose order the code keeps; () if it is free.
        peak_bytes: that its code holds above what is there before the step.
        step: its code, as followed.
    """

    order: list[int]
    groups: list[int]
    peak_bytes: int
    step: GeneratedStep


@dataclass(slots=True)
class CompiledStep:
    """A captured step and what Inductor makes of it.

    Attributes:
        step: of single calls; its training graph can be lowered again.
        folder: for files of kernels, and for measurements.
        device: ``cpu`` or ``cuda``.
    """

    step: CapturedStep
    folder: Path
    device: str
    fused: FusedStep = field(init=False)
    plain: Candidate = field(init=False)
    workspaces: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        halves = self._lowered(lambda step, n_forward: _private.default_partition(step.training_graph.module, n_forward))
        self.fused = fused(self.step, halves)
        once, _ = self.fused.calls_in(range(len(self.fused.graph)))
        self.plain = self._followed(halves, once, [])

    def candidate(self, order_of_groups: Sequence[int]) -> Candidate:
        """The plan with this order of groups."""
        order, groups = self.fused.calls_in(order_of_groups)
        return self.followed(order, groups)

    def followed(self, order: list[int], groups: list[int]) -> Candidate:
        """The plan with this order of operations."""
        return self._followed(self._lowered(lambda step, _: emit(step, order, (), groups)), order, groups)

    def _lowered(self, partition: Callable[[CapturedStep, int], Any]) -> Sequence[LoweredHalf]:
        training_graph = self.step.training_graph
        lower = training_graph.lowering
        assert lower is not None, "a step for Inductor has a lowering"

        def cut(module: fx.GraphModule, n_forward: int) -> tuple[fx.GraphModule, fx.GraphModule]:
            again = capture.read_training_graph(module, n_forward, training_graph.primals, lower)
            step = split_graph_of(again, self.step.graph.name, replays_random=False)
            return partition(step, n_forward)

        with capture.settings():
            return lower(cut)

    def _followed(self, halves: Sequence[LoweredHalf], order: list[int], groups: list[int]) -> Candidate:
        training_graph = self.step.training_graph
        places = training_graph.module.graph.find_nodes(op="placeholder")
        tangents = training_graph.tangents
        end = self.step.graph.operations[self.fused.members[self.fused.end][0]]
        step = follow(
            halves, [node for node in places if node not in tangents], tangents, training_graph.n_forward_outputs,
            end.workspace_bytes, self.folder / "kernels",
        )  # fmt: skip
        new = {s for s in step.signatures if s} - self.workspaces.keys()
        if new:
            calls = calls_graph(self.step.graph.name, new)
            sizes, _ = profile_workspaces(calls, self.folder, self.device)
            named = (op.work.signature for op in calls.operations if op.work)
            self.workspaces.update(zip(named, sizes, strict=True))
        return Candidate(order, groups, step.peak_bytes(self.workspaces), step)

    def weighed(self, model: str, gpu: Gpu) -> Weighed:
        """The graph of groups with costs and workspaces."""
        fine, groups = self.step.graph, self.fused.graph
        calls = [self.fused.made[g] if is_extern else () for g, is_extern in enumerate(self.fused.is_extern)]
        library = sorted({k for made in calls for k in made})
        alone = Graph(fine.name, tuple(replace(fine.operations[k], inputs=(), outputs=()) for k in library), ())
        sizes = dict(zip(library, profile_workspaces(alone, self.folder, self.device)[0], strict=True))
        if model == "profile":
            ns, noise = self.measured([*(op.work.signature for op in alone.operations if op.work), *self.plain.step.calls])
            library_ns = {k: ns[fine.operations[k].work.signature] for k in library}  # pyright: ignore
            costs = [sum(library_ns[k] for k in made) for made in calls]
            groups = groups.with_costs([a + round(b) for a, b in zip(costs, self._kernel_ns(ns), strict=True)], "ns")
        else:
            groups, noise = costs_and_noise(groups, model, gpu)
        shift = max(self.fused.in_place)
        workspaces = [
            op.workspace_bytes + max((sizes[k] for k in made), default=0) + shift - taken
            for op, made, taken in zip(groups.operations, calls, self.fused.in_place, strict=True)
        ]
        return Weighed(groups.with_workspaces(workspaces), shift, noise)

    def measured(self, signatures: Iterable[str]) -> tuple[dict[str, int], Noise | None]:
        """({signature: ns of the call}, their noise), from measurements."""
        calls = calls_graph(self.step.graph.name, signatures)
        calls, noise = costs_and_noise(calls, "profile", None, cache_folder=self.folder, device=self.device)
        return {op.work.signature: op.cost for op in calls.operations if op.work}, noise

    def _kernel_ns(self, ns: Mapping[str, int]) -> list[float]:
        """[groups] ns in generated kernels; a kernel of several groups is divided by the bytes that each moves."""
        costs = [0.0] * len(self.fused.graph)
        seen: list[set[str]] = [set(), set()]
        maker = {(half, name): g for g, (half, names) in enumerate(self.fused.buffers) for name in names}
        for call in self.plain.step.kernels:
            new = call.buffers - seen[call.half]
            seen[call.half] |= new
            makers = {maker[call.half, name] for name in new if (call.half, name) in maker}
            works = {g: self.fused.graph.operations[g].work for g in makers}
            moved = {g: 1 + (work.bytes_moved or 0) if work else 1 for g, work in works.items()}
            for g, part in moved.items():
                costs[g] += ns[call.signature] * part / sum(moved.values())
        return costs

    def starts(self, gpu: Gpu) -> list[list[int]]:
        """Orders of groups that save what PyTorch's knob saves."""
        with warnings.catch_warnings(action="ignore", category=CostWarning):
            weighed, _ = costs_and_noise(self.step.graph, "roofline", gpu)
        costs = {
            node.name: op.cost for op, nodes in zip(weighed.operations, self.step.nodes, strict=True) for node in nodes
        }
        before_end = range(self.fused.graph.operations[self.fused.end].outputs[-1] + 1)
        ids = {self.fused.values[i]: i for i in before_end}
        orders = []
        for share in SHARES:
            saved = mincut.saved_values(self.step, costs, share)
            orders.append(mincut.order_with(self.fused.graph, {ids[v] for v in saved if v in ids}))
        return orders


@dataclass(frozen=True, slots=True)
class Weighed:
    """The graph of groups with costs and workspaces.

    Attributes:
        shift: added to every workspace, so that those of groups that write into an input's storage are not negative.
            A budget for the graph must be larger by as much.
    """

    graph: Graph
    shift: int
    noise: Noise | None




@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """What was found for a budget.

    Attributes:
        candidate: the order of operations, and its code.
        generated: what the code needs.
        strategy: that found it.
        cost_unit: of the costs in `generated`.
        noise: of measured costs.
    """

    candidate: Candidate
    generated: Generated
    strategy: str
    cost_unit: str = ""
    noise: Noise | None = None


def cheapest(
    compiled: CompiledStep, budget_bytes: int, model: str, gpu: Gpu, find: Callable[[Graph, int, list[Plan]], Solution]
) -> CompiledPlan | None:
    """A plan whose code keeps the budget, everything included; None if its search finds none.

    Args:
        model, gpu: of the costs.
        find: (graph, budget, known plans) -> solution, with a plan.
    """
    fixed, plain = compiled.step.graph.fixed_bytes, compiled.plain
    if fixed + plain.peak_bytes <= budget_bytes:
        return CompiledPlan(plain, Generated(plain.peak_bytes, 0, 0), AS_IT_IS)
    weighed = compiled.weighed(model, gpu)
    graph, limit = weighed.graph, budget_bytes + weighed.shift
    orders = [[*range(len(graph))], *compiled.starts(gpu)]
    for _ in range(MOST_TRIES):
        solution = find(graph, limit, [Plan.from_order(graph, order, limit) for order in orders])
        assert solution.plan is not None
        candidate = compiled.candidate(solution.plan.order.tolist())
        excess = fixed + candidate.peak_bytes - budget_bytes
        if excess <= 0:
            cost, plain_cost = simulate(graph, solution.plan).cost, graph.total_cost
            if model == "profile":
                ns, _ = compiled.measured([*candidate.step.calls, *plain.step.calls])
                cost, plain_cost = (sum(ns[call] for call in each.step.calls) for each in (candidate, plain))
            generated = Generated(candidate.peak_bytes, cost, plain_cost, tuple(candidate.groups))
            return CompiledPlan(candidate, generated, solution.strategy, graph.cost_unit, weighed.noise)
        limit -= excess
    return None
