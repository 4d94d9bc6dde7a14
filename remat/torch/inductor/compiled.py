"""Plans of steps that Inductor compiles: made on its fused groups, and checked against the code that it generates.

Inductor is asked for the code of a plan, without compiling kernels, and the code is followed on tensors without
contents (`remat.torch.inductor.generated`). If it holds more than the budget, the plan is made again within less.
A step is lowered twice whatever the budget, as `torch.compile` cuts it and with what it repeats for nothing, and once
for a plan that repeats more.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx

from remat.bounds.min_budget import min_budget
from remat.cost import Noise, costs_and_noise
from remat.cost.gpu import DEFAULT_GPU, Gpu, load_gpu
from remat.cost.profile import begin_to_measure, profile_workspaces
from remat.errors import BudgetTooSmall, CostWarning, InvalidInput, warn
from remat.execution import Generated
from remat.execution.kept import keep
from remat.execution.phases import MEASURING, Phases
from remat.files import read_json, unsealed
from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import simulate
from remat.solution import Solution
from remat.torch.inductor import mincut
from remat.torch.inductor.fused import FusedGroups, fused
from remat.torch.inductor.generated import FollowedCode, follow
from remat.torch.internals import aot
from remat.torch.internals.inductor import Buffer, LoweredHalf, settings_key
from remat.torch.measuring.plain import calls_graph
from remat.torch.step import capture
from remat.torch.step.emit import emit
from remat.torch.step.runners import Inductor
from remat.torch.step.training_graph import CapturedStep, end_of
from remat.units import format_size

AS_IT_IS = "fits as it is"  # strategy of a plan that repeats nothing
KNOB = "torch.compile"  # strategy of a plan whose order within each half is left to Inductor
# Code of other orders needs a little more or less than the last one's: tries for a budget, and the share of it that the
# third leaves free beside what the second exceeded; each further one leaves twice as much.
MOST_TRIES, SPARE = 5, 0.005
SMALLEST = "min_budget"  # strategy of the plan that needs the least
SMALLEST_S = 5.0  # to find it
# Shares of PyTorch's knob. From 0.9 to 0.7 it repeats what its estimate says costs nothing; such calls are fused into
# kernels that read their results. Below, its plans are slower than ours (docs/results/compiled-steps.md).
ALL, FREE = 1.0, 0.8
FORMAT = "remat-lowered/1"
ENOUGH = 0.001  # overhead that is not worth a search


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


@dataclass
class LoweredStep:
    """A captured step and what Inductor makes of it.

    Attributes:
        step: of single calls; its training graph can be lowered again.
        folder: for files of kernels, of what was lowered, and for measurements.
        device: ``cpu`` or ``cuda``.
        phases: where the seconds of measuring go.
    """

    step: CapturedStep
    folder: Path
    device: str
    phases: Phases = field(default_factory=Phases)
    workspaces: dict[str, int] = field(init=False, default_factory=dict)

    @functools.cached_property
    def plain(self) -> Candidate:
        """The step as `torch.compile` cuts it."""
        return self._followed(self._plain[1], self._plain[0], [])

    @functools.cached_property
    def fused(self) -> FusedGroups:
        """Its groups."""
        return fused(self.step, self._plain[1])

    @functools.cached_property
    def repeats_free(self) -> Candidate:
        """The step as PyTorch's knob cuts it at `FREE`."""
        order, halves = self._kept("free", lambda: self._order_of(self.free_cut), whole=False)
        return self._followed(halves, order, [])

    @functools.cached_property
    def _plain(self) -> tuple[list[int], Sequence[LoweredHalf]]:
        return self._kept("plain", lambda: self._order_of(self._cut(ALL, {})), whole=True)

    @functools.cached_property
    def free_cut(self) -> Sequence[fx.GraphModule]:
        """The halves of the knob's cut at `FREE`."""
        gpu = load_gpu("cpu" if self.device == "cpu" else DEFAULT_GPU)
        with warnings.catch_warnings(action="ignore", category=CostWarning):
            weighed, _ = costs_and_noise(self.step.graph, "roofline", gpu)
        pairs = zip(weighed.operations, self.step.nodes, strict=True)
        return self._cut(FREE, {node.name: op.cost for op, nodes in pairs for node in nodes})

    def _cut(self, share: float, costs: Mapping[str, int]) -> Sequence[fx.GraphModule]:
        training_graph = self.step.training_graph
        return aot.min_cut(training_graph.module, training_graph.n_forward_outputs, costs, share)

    @functools.cached_property
    def _key(self) -> str:
        """What determines the code of this step."""
        module = self.step.training_graph.module
        places = [(node.name, str(node.meta.get("val"))) for node in module.graph.find_nodes(op="placeholder")]
        determines = FORMAT, settings_key(), module.code, places
        return hashlib.sha256(repr(determines).encode()).hexdigest()[:32]

    def _kept(
        self, name: str, order_of: Callable[[], list[int]], *, whole: bool
    ) -> tuple[list[int], Sequence[LoweredHalf]]:
        """(an order of operations, what Inductor makes of it), from a file if an earlier call has lowered it."""
        path = self.folder / "lowered" / f"{self._key}-{name}.json"
        try:
            if path.exists():
                document = unsealed(read_json(path), path)
                return document["order"], [_half_of(half) for half in document["halves"]]
        except InvalidInput as error:
            warn(f"{error}; lowering the step again")
        begin_to_measure(self.step.graph, self.folder, self.device)  # meanwhile: the process takes seconds to start
        order = order_of()
        halves = self._lowered(order, [], whole=whole)
        keep(path, {"format": FORMAT, "order": order, "halves": [asdict(half) for half in halves]}, "code")
        return order, halves

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
        return self._followed(self._lowered(order, groups), order, groups)

    def _lowered(self, order: list[int], groups: list[int], *, whole: bool = False) -> Sequence[LoweredHalf]:
        runner = self.step.training_graph.runner
        assert isinstance(runner, Inductor), "the step was captured for Inductor"
        with capture.compiler_settings():
            return runner.shown(emit(self.step, order, (), groups), whole=whole)

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
            with self.phases.of(MEASURING):
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
        with self.phases.of(MEASURING):
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

    def freely_repeating(self) -> tuple[int, list[int]]:
        """(bytes that the cut of `repeats_free` saves, its least peak; an order of groups that saves the same)."""
        before_end = range(self.fused.graph.operations[self.fused.end].outputs[-1] + 1)
        ids = {self.fused.values[i]: i for i in before_end}
        saved = mincut.values_saved_by(self.free_cut[0], self.step)
        order = mincut.order_with(self.fused.graph, {ids[v] for v in saved if v in ids})
        return sum(self.step.graph.values[v].bytes for v in saved), order


def _half_of(document: Mapping[str, Any]) -> LoweredHalf:
    groups = tuple(tuple(Buffer(**each) for each in group) for group in document["groups"])
    others = {name: tuple(document[name]) for name in ("is_extern", "inputs", "outputs")}
    return LoweredHalf(document["source"], groups, **others)


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
    saved_bytes, start = compiled.freely_repeating()
    free = None
    # Without measurements, the cost of code that the groups do not describe is not known.
    if model == "profile" and fixed + saved_bytes <= budget_bytes:
        free = _fitting(compiled, weighed, budget_bytes)
    if free is not None and free.generated.cost <= (1 + ENOUGH) * free.generated.plain_cost:
        return free
    found = _within(compiled, weighed, budget_bytes, [start], find, free)
    if found is None:
        found = _smallest(compiled, weighed)
        if fixed + found.candidate.peak_bytes > budget_bytes:
            known_bytes = fixed + min(found.candidate.peak_bytes, plain.peak_bytes)
            raise BudgetTooSmall(
                f"no plan of '{compiled.step.graph.name}' compiled by Inductor was found within "
                f"{format_size(budget_bytes)}; the smallest budget known to suffice is "
                f"{format_size(known_bytes, up=True)}",
                known_bytes,
            )
    if model != "profile" or found is free:
        return found
    timed = [_timed(compiled, found), *([] if free is None else [free])]
    return min(timed, key=lambda each: each.generated.cost)


def _smallest(compiled: LoweredStep, weighed: Weighed) -> CompiledPlan:
    """The plan on groups that is known to need the least."""
    graph = weighed.cautious
    plan = min_budget(graph, "free", time_limit_s=SMALLEST_S).plan
    candidate = compiled.candidate(plan.order.tolist())
    needs = _needs(candidate, simulate(graph, plan).cost, graph.total_cost)
    return CompiledPlan(candidate, needs, SMALLEST, graph.cost_unit, weighed.noise)


def _fitting(compiled: LoweredStep, weighed: Weighed, budget_bytes: int) -> CompiledPlan | None:
    """What repeats calls for nothing, if its code keeps the budget."""
    candidate = compiled.repeats_free
    if compiled.step.graph.fixed_bytes + candidate.peak_bytes > budget_bytes:
        return None
    return _timed(compiled, CompiledPlan(candidate, _needs(candidate), KNOB, "ns", weighed.noise))


def _within(
    compiled: LoweredStep, weighed: Weighed, budget_bytes: int, orders: Iterable[list[int]],
    find: Callable[[Graph, int, list[Plan]], Solution], known: CompiledPlan | None,
) -> CompiledPlan | None:  # fmt: skip
    """The cheapest plan on groups whose code keeps the budget; made within less while the code needs more.

    Args:
        known: the plan to return if the groups show none that is cheaper.
    """
    limit = budget_bytes + weighed.shift
    starts = [[*range(len(weighed.graph))], *orders]
    for i in range(MOST_TRIES):
        graph = weighed.cautious if i else weighed.graph
        solution = find(graph, limit, [Plan.from_order(graph, order, limit) for order in starts])
        if solution.plan is None:
            return known
        cost = simulate(graph, solution.plan).cost
        if known is not None and cost * known.generated.plain_cost >= known.generated.cost * graph.total_cost:
            return known
        candidate = compiled.candidate(solution.plan.order.tolist())
        excess = graph.fixed_bytes + candidate.peak_bytes - budget_bytes
        if excess <= 0:
            needs = _needs(candidate, cost, graph.total_cost)
            return CompiledPlan(candidate, needs, solution.strategy, graph.cost_unit, weighed.noise)
        if i:
            limit -= excess + round(SPARE * budget_bytes) * 2 ** (i - 1)
        if limit <= weighed.shift:
            break
    return known


def _needs(candidate: Candidate, cost: int = 0, plain_cost: int = 0) -> Generated:
    return Generated(candidate.peak_bytes, cost, plain_cost, tuple(candidate.groups))


def _timed(compiled: LoweredStep, plan: CompiledPlan) -> CompiledPlan:
    """The plan with the measured times of the calls of its code, and of the plain step's."""
    steps = compiled.plain.step, plan.candidate.step
    ns, _ = compiled.measured(call for step in steps for call in step.calls)
    plain_cost, cost = (sum(ns[call] for call in step.calls) for step in steps)
    return replace(plan, generated=_needs(plan.candidate, cost, plain_cost))
