"""Plans of steps that Inductor compiles: made on its fused groups, and checked against the code that it generates.

Inductor is asked for the code of a plan, without compiling kernels, and the code is followed on tensors without
contents (`remat.torch.inductor.generated`). If it holds more than the budget, the plan is made again within less.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx

from remat.bounds.min_budget import min_budget
from remat.cost import Noise, costs_and_noise
from remat.cost.gpu import Gpu
from remat.cost.profile import profile_workspaces
from remat.errors import BudgetTooSmall, CostWarning
from remat.execution import Generated
from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import simulate
from remat.solution import Solution
from remat.torch.inductor import mincut
from remat.torch.inductor.fused import FusedGroups, fused
from remat.torch.inductor.generated import FollowedCode, follow
from remat.torch.internals import aot
from remat.torch.internals.inductor import LoweredHalf
from remat.torch.measuring.plain import calls_graph
from remat.torch.step import capture
from remat.torch.step.emit import emit
from remat.torch.step.runners import Inductor
from remat.torch.step.training_graph import CapturedStep, end_of, split_graph_of
from remat.units import format_size

AS_IT_IS = "fits as it is"  # strategy of a plan that repeats nothing
KNOB = "torch.compile"  # strategy of a plan whose order within each half is left to Inductor
LIKELY = 1.1  # a cut that costs more, by its groups, than so many times our plan is not tried
MOST_TRIES = 4
SMALLEST = "min_budget"  # strategy of the plan that needs the least
SMALLEST_S = 5.0  # to find it
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
    step: FollowedCode


@dataclass(slots=True)
class LoweredStep:
    """A captured step and what Inductor makes of it.

    Attributes:
        step: of single calls; its training graph can be lowered again.
        folder: for files of kernels, and for measurements.
        device: ``cpu`` or ``cuda``.
    """

    step: CapturedStep
    folder: Path
    device: str
    fused: FusedGroups = field(init=False)
    plain: Candidate = field(init=False)
    workspaces: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        training_graph = self.step.training_graph
        halves = aot.min_cut(training_graph.module, training_graph.n_forward_outputs, {})
        order = self._order_of(halves)
        lowered = self._lowered(order, [])
        self.fused = fused(self.step, lowered)
        self.plain = self._followed(lowered, order, [])

    def _order_of(self, halves: Sequence[fx.GraphModule]) -> list[int]:
        """The order of operations in two halves whose calls have the names of the training graph."""
        op_of = {node.name: k for k, nodes in enumerate(self.step.nodes) for node in nodes}
        end = end_of(self.step.graph)
        forward, backward = (
            [op_of[node.name] for node in half.graph.nodes if node.op == "call_function" and node.name in op_of]
            for half in halves
        )
        missing = set(range(len(self.step.graph))) - {end, *forward, *backward}
        forward = sorted({*forward, *(k for k in missing if k < end)} - {end})
        return [*forward, end, *backward, *sorted(k for k in missing if k > end)]

    def candidate(self, order_of_groups: Sequence[int]) -> Candidate:
        """The plan with this order of groups."""
        order, groups = self.fused.calls_in(order_of_groups)
        return self.followed(order, groups)

    def followed(self, order: list[int], groups: list[int]) -> Candidate:
        """The plan with this order of operations."""
        return self._followed(self._lowered(order, groups), order, groups)

    def _lowered(self, order: list[int], groups: list[int]) -> Sequence[LoweredHalf]:
        training_graph = self.step.training_graph
        runner = training_graph.runner
        assert isinstance(runner, Inductor), "the step was captured for Inductor"
        lower = runner.lower
        assert lower is not None

        def cut(module: fx.GraphModule, n_forward: int) -> tuple[fx.GraphModule, fx.GraphModule]:
            again = capture.read_training_graph(module, n_forward, training_graph.primals, runner)
            step = split_graph_of(again, self.step.graph.name)
            return emit(step, order, (), groups)

        with capture.compiler_settings():
            return lower(cut)

    def _followed(self, halves: Sequence[LoweredHalf], order: list[int], groups: list[int]) -> Candidate:
        training_graph = self.step.training_graph
        places = training_graph.module.graph.find_nodes(op="placeholder")
        tangents = training_graph.tangents
        end = self.step.graph.operations[end_of(self.step.graph)]
        held = sum(self.step.graph.values[v].bytes for v in end.outputs if self.step.graph.values[v].keep)
        step = follow(
            halves, [node for node in places if node not in tangents], tangents, training_graph.n_forward_outputs,
            end.workspace_bytes + held, held, self.folder / "kernels",
        )  # fmt: skip
        return Candidate(order, groups, step.peak_bytes(self._measured_workspaces(step.signatures)), step)

    def _measured_workspaces(self, signatures: Iterable[str]) -> Mapping[str, int]:
        """[signature] bytes."""
        new = set(signatures) - self.workspaces.keys() - {""}
        if new:
            calls = calls_graph(self.step.graph.name, new)
            sizes, _ = profile_workspaces(calls, self.folder, self.device)
            named = (op.work.signature for op in calls.operations if op.work)
            self.workspaces.update(zip(named, sizes, strict=True))
        return self.workspaces

    def _library_calls(self, operations: Iterable[int]) -> dict[int, str]:
        """[operation] signature of its call in the code of the plain step, where layouts may be others."""
        known = {_likeness(signature): signature for signature in self.plain.step.signatures if signature}
        works = {k: self.step.graph.operations[k].work for k in operations}
        captured = {k: work.signature for k, work in works.items() if work is not None and work.signature}
        return {k: known.get(_likeness(signature), signature) for k, signature in captured.items()}

    def weighed(self, model: str, gpu: Gpu) -> Weighed:
        """The graph of groups with costs and workspaces."""
        groups = self.fused.graph
        calls = [self.fused.made[g] if is_extern else () for g, is_extern in enumerate(self.fused.is_extern)]
        signature = self._library_calls({k for made in calls for k in made})
        sizes = self._measured_workspaces(signature.values())
        if model == "profile":
            ns, noise = self.measured([*signature.values(), *self.plain.step.calls])
            costs = [sum(ns[signature[k]] for k in made if k in signature) for made in calls]
            groups = groups.with_costs([a + round(b) for a, b in zip(costs, self._kernel_ns(ns), strict=True)], "ns")
        else:
            groups, noise = costs_and_noise(groups, model, gpu)
        shift = max(self.fused.in_place)
        own = [max((sizes[signature[k]] for k in made if k in signature), default=0) for made in calls]
        parts = zip(groups.operations, own, self.fused.temporary, self.fused.in_place, strict=True)
        workspaces = [op.workspace_bytes + size + copied + shift - taken for op, size, copied, taken in parts]
        both = zip(workspaces, self.fused.in_place, strict=True)
        cautious = [size + (taken if g < self.fused.end else 0) for g, (size, taken) in enumerate(both)]
        return Weighed(groups.with_workspaces(workspaces), groups.with_workspaces(cautious), shift, noise)

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

    def cuts(self, gpu: Gpu) -> list[tuple[list[int], list[int]]]:
        """(order of operations, order of groups) of each cut of the step by PyTorch's knob."""
        with warnings.catch_warnings(action="ignore", category=CostWarning):
            weighed, _ = costs_and_noise(self.step.graph, "roofline", gpu)
        pairs = zip(weighed.operations, self.step.nodes, strict=True)
        costs = {node.name: op.cost for op, nodes in pairs for node in nodes}
        before_end = range(self.fused.graph.operations[self.fused.end].outputs[-1] + 1)
        ids = {self.fused.values[i]: i for i in before_end}
        training_graph, cuts = self.step.training_graph, dict[tuple[int, ...], list[int]]()
        for share in SHARES:
            halves = aot.min_cut(training_graph.module, training_graph.n_forward_outputs, costs, share)
            saved = {ids[v] for v in mincut.values_saved_by(halves[0], self.step) if v in ids}
            cuts[tuple(self._order_of(halves))] = mincut.order_with(self.fused.graph, saved)
        return [([*order], groups) for order, groups in cuts.items()]


def _likeness(signature: str) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """What calls of one operator share that differ in layouts, or in where the result goes."""
    call = json.loads(signature)
    given = [call["args"], {name: x for name, x in call["kwargs"].items() if name != "out"}]
    return call["op"].rpartition(".")[0], tuple(sorted(_shapes(given)))


def _shapes(x: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of the tensors in the arguments of a signature."""
    if isinstance(x, dict) and "t" in x:
        yield tuple(x["t"])
    elif isinstance(x, (dict, list)):
        for each in x.values() if isinstance(x, dict) else x:
            yield from _shapes(each)


@dataclass(frozen=True, slots=True)
class Weighed:
    """The graph of groups with costs and workspaces.

    Attributes:
        graph: in which groups write into an input's storage where they do in the plain step.
        cautious: where groups of the forward pass do not, because their repetitions sometimes do not.
        shift: added to every workspace, so that those of groups that write into an input's storage are not negative.
            A budget for the graph must be larger by as much.
    """

    graph: Graph
    cautious: Graph
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
    compiled: LoweredStep, budget_bytes: int, model: str, gpu: Gpu, find: Callable[[Graph, int, list[Plan]], Solution]
) -> CompiledPlan:
    """The fastest known plan whose code keeps the budget, everything included.

    Args:
        model, gpu: of the costs.
        find: (graph, budget, known plans) -> solution, with or without a plan.

    Raises:
        BudgetTooSmall: none is known.
    """
    fixed, plain = compiled.step.graph.fixed_bytes, compiled.plain
    if fixed + plain.peak_bytes <= budget_bytes:
        return CompiledPlan(plain, _needs(plain), AS_IT_IS)
    weighed = compiled.weighed(model, gpu)
    cuts = compiled.cuts(gpu)
    ours = _within(compiled, weighed, budget_bytes, [groups for _, groups in cuts], find)
    candidates = [] if ours is None else [ours]
    if model == "profile":  # else the cost of code that the groups do not describe is not known
        limit = None if ours is None else LIKELY * ours.generated.cost
        free = _fitting(compiled, weighed, budget_bytes - fixed, cuts, limit)
        if ours is not None:
            free.append(compiled.followed(ours.candidate.order, []))  # Inductor may fuse more where it is free
        candidates += [
            CompiledPlan(each, _needs(each), KNOB, "ns", weighed.noise)
            for each in free if fixed + each.peak_bytes <= budget_bytes
        ]  # fmt: skip
        candidates = _timed(compiled, candidates)
    if not candidates:
        least = _smallest(compiled, weighed)
        if fixed + least.candidate.peak_bytes > budget_bytes:
            known_bytes = fixed + min(least.candidate.peak_bytes, plain.peak_bytes)
            raise BudgetTooSmall(
                f"no plan of '{compiled.step.graph.name}' compiled by Inductor was found within "
                f"{format_size(budget_bytes)}; the smallest budget known to suffice is "
                f"{format_size(known_bytes, up=True)}",
                known_bytes,
            )
        candidates = [least]
    return min(candidates, key=lambda each: each.generated.cost)


def _smallest(compiled: LoweredStep, weighed: Weighed) -> CompiledPlan:
    """The plan on groups that is known to need the least."""
    graph = weighed.cautious
    plan = min_budget(graph, "free", time_limit_s=SMALLEST_S).plan
    candidate = compiled.candidate(plan.order.tolist())
    needs = _needs(candidate, simulate(graph, plan).cost, graph.total_cost)
    return CompiledPlan(candidate, needs, SMALLEST, graph.cost_unit, weighed.noise)


def _fitting(
    compiled: LoweredStep, weighed: Weighed, peak_bytes: int, cuts: Iterable[tuple[list[int], list[int]]],
    limit: float | None,
) -> list[Candidate]:  # fmt: skip
    """The cheapest of the knob's cuts whose code keeps the peak, if it may cost less than `limit`; or none."""

    def cost(cut: tuple[list[int], list[int]]) -> int:
        return simulate(weighed.graph, Plan.from_order(weighed.graph, cut[1], None)).cost

    for cut in sorted(cuts, key=cost):
        if limit is not None and cost(cut) > limit:
            return []
        candidate = compiled.followed(cut[0], [])
        if candidate.peak_bytes <= peak_bytes:
            return [candidate]
    return []


def _within(
    compiled: LoweredStep, weighed: Weighed, budget_bytes: int, orders: Iterable[list[int]],
    find: Callable[[Graph, int, list[Plan]], Solution],
) -> CompiledPlan | None:  # fmt: skip
    """The cheapest plan on groups whose code keeps the budget; made within less while the code needs more."""
    limit = budget_bytes + weighed.shift
    starts = [[*range(len(weighed.graph))], *orders]
    for i in range(MOST_TRIES):
        graph = weighed.cautious if i else weighed.graph
        solution = find(graph, limit, [Plan.from_order(graph, order, limit) for order in starts])
        if solution.plan is None:
            return None
        candidate = compiled.candidate(solution.plan.order.tolist())
        excess = graph.fixed_bytes + candidate.peak_bytes - budget_bytes
        if excess <= 0:
            needs = _needs(candidate, simulate(graph, solution.plan).cost, graph.total_cost)
            return CompiledPlan(candidate, needs, solution.strategy, graph.cost_unit, weighed.noise)
        if i:
            limit -= excess
        if limit <= weighed.shift:
            return None
    return None


def _needs(candidate: Candidate, cost: int = 0, plain_cost: int = 0) -> Generated:
    return Generated(candidate.peak_bytes, cost, plain_cost, tuple(candidate.groups))


def _timed(compiled: LoweredStep, plans: Sequence[CompiledPlan]) -> list[CompiledPlan]:
    """The plans with the measured times of the calls of their code, and of the plain step's."""
    steps = [compiled.plain.step, *(each.candidate.step for each in plans)]
    ns, _ = compiled.measured(call for step in steps for call in step.calls)
    plain_cost, *costs = (sum(ns[call] for call in step.calls) for step in steps)
    return [
        replace(each, generated=_needs(each.candidate, cost, plain_cost))
        for each, cost in zip(plans, costs, strict=True)
    ]
