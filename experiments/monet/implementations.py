"""Which implementations the stored plans use, and why some are never chosen; solves nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import remat
from experiments.monet.cases import JOINT, NO_WINOGRAD, Context, graph_of, graph_run_of_case
from experiments.monet.published import Network
from remat.graph import Graph
from remat.implementation import DEFAULT, Implementation
from remat.plan import Plan
from remat.search.choices import choose
from remat.units import format_size

SLIGHT = 1e-4  # share of the cost or of the budget; smaller differences count as none
Way = tuple[str, str]  # kind of operation, name of the implementation


@dataclass(frozen=True, slots=True)
class Swap:
    """A plan after every operation of one kind was switched to an implementation that the plan did not use.

    Attributes:
        cost_share: the cost added, as a share of the plan's.
        peak_bytes: the bytes added to the plan's peak.
        fits: whether the result fits the budget.
        budget_bytes: of the plan.
    """

    cost_share: float
    peak_bytes: int
    fits: bool
    budget_bytes: int


def run(context: Context) -> dict[str, Any]:
    """Counts for each plan, and the reason for each implementation that no plan of a level uses."""
    used, never = [], []
    for network in context.networks:
        for level in (NO_WINOGRAD, JOINT):
            graph = graph_of(context, network, level)
            plans = _plans(context, network, level)
            chosen: set[Way] = set()
            for (strategy, budget), plan in plans.items():
                counts = count(graph, plan)
                chosen |= set(counts)
                used += [
                    {"network": network.name, "level": level, "strategy": strategy, "budget_bytes": budget,
                     "kind": kind, "way": name, "operations": n}
                    for (kind, name), n in sorted(counts.items())
                ]  # fmt: skip
            if not plans:
                continue
            for (kind, name), n in available(graph).items():
                if (kind, name) not in chosen:
                    own = {budget: plan for (strategy, budget), plan in plans.items() if strategy == "portfolio"}
                    never.append({"network": network.name, "level": level, "kind": kind, "way": name, "operations": n,
                                  "reason": reason(graph, own, kind, name)})  # fmt: skip
    offered = [
        {"network": network.name, "kind": kind, "way": name, "operations": n}
        for network in context.networks
        for (kind, name), n in available(graph_of(context, network, JOINT)).items()
    ]
    return {"used": used, "never": never, "available": offered}


def _plans(context: Context, network: Network, level: str) -> dict[tuple[str, int], Plan]:
    """(strategy, budget) -> its plan."""
    found = {}
    for case, row in context.rows.items():
        if (case.network, case.level, case.cost_cap) == (network.name, level, None):
            plan = graph_run_of_case(context, case).plan_of(row)
            if plan is not None:
                found[case.strategy, case.budget_bytes] = plan
    return found


def available(graph: Graph) -> dict[Way, int]:
    """How many operations have each implementation."""
    counts: dict[Way, int] = defaultdict(int)
    for op in graph.operations:
        for way in op.implementations:
            counts[op.kind, way.name] += 1
    return dict(sorted(counts.items()))


def count(graph: Graph, plan: Plan) -> dict[Way, int]:
    """How many operations the plan runs at least once in each implementation other than the default one."""
    which: dict[Way, set[int]] = defaultdict(set)
    for k, name in zip(plan.order.tolist(), plan.choices, strict=False):
        if name:
            which[graph.operations[k].kind, name].add(k)
    return {way: len(operations) for way, operations in which.items()}


def reason(graph: Graph, plans: Mapping[int, Plan], kind: str, name: str) -> str:
    """Why no plan of `plans` (by budget) uses the implementation `name` of operations of that kind.

    Either another implementation is never slower and holds no more. Or the simulator judges every plan with the
    implementation put in, for each operation of the kind that has it, together with what its readers then need.
    """
    own = [
        k
        for k, op in enumerate(graph.operations)
        if op.kind == kind and name in (w.name for w in op.all_implementations)
    ]
    better = _dominating(graph, own, name)
    if better:
        return f"dominated: {better} is never slower, and reads and holds no more"
    swaps = [swap for budget, plan in plans.items() for swap in (_swap(graph, plan, budget, own, name),) if swap]
    if not swaps:
        return "cannot be put into any plan found: what it needs is written over or not made there"
    return _words(swaps)


def _dominating(graph: Graph, operations: Sequence[int], name: str) -> str:
    """Another implementation of all these operations that is no slower and no larger; '' without one."""
    common: set[str] | None = None
    for k in operations:
        way = graph.implementation(k, name)
        names = {w.name for w in graph.operations[k].all_implementations if w.name != name and _is_no_worse(w, way)}
        common = names if common is None else common & names
    return min(common or {""}, key=lambda n: (n == DEFAULT, n))


def _is_no_worse(a: Implementation, b: Implementation) -> bool:
    return (
        a.cost <= b.cost
        and a.workspace_bytes <= b.workspace_bytes
        and set(a.inputs) <= set(b.inputs)
        and set(a.outputs) == set(b.outputs)
        and a.overwrites == b.overwrites  # else one is smaller, and the other may stand where that may not
        and not a.is_lossy
    )


def _swap(graph: Graph, plan: Plan, budget: int, operations: Sequence[int], name: str) -> Swap | None:
    """The plan with one implementation for each operation, before and after the switch; None if it is impossible."""
    wanted = [0] * len(graph)
    for k, way in zip(plan.order.tolist(), plan.choices or ("",) * plan.n_computations, strict=True):
        wanted[k] = [w.name for w in graph.operations[k].all_implementations].index(way or DEFAULT)
    before = _simulated(graph, plan, wanted)
    for k in operations:
        wanted[k] = [w.name for w in graph.operations[k].all_implementations].index(name)
    for k in operations:
        _adapt_readers(graph, k, graph.implementation(k, name), wanted)
    after = _simulated(graph, plan, wanted)
    if before is None or after is None:
        return None
    chosen = after[2]
    if not any(graph.operations[k].all_implementations[chosen[k]].name == name for k in operations):
        return None
    return Swap(after[0] / before[0] - 1, after[1] - before[1], after[1] <= max(budget, before[1]), budget)


def _adapt_readers(graph: Graph, k: int, way: Implementation, wanted: list[int]) -> None:
    """Switch the readers of operation `k` to implementations that read what `way` produces, its extra values first."""
    made = set(way.outputs)
    missing = {v for w in graph.operations[k].all_implementations for v in w.outputs} - made
    extra = made - set(graph.operations[k].outputs)
    lost = missing | (set() if way.overwrites is None else {way.overwrites})
    for r in range(k + 1, len(graph)):
        ways = graph.operations[r].all_implementations if graph.operations[r].implementations else ()
        served = [i for i, w in enumerate(ways) if not lost & set(w.inputs) and not w.is_lossy]
        best = [i for i in served if extra & set(ways[i].inputs)]
        if best and not extra & set(ways[wanted[r]].inputs):
            wanted[r] = best[0]
        elif served and lost & set(ways[wanted[r]].inputs):
            wanted[r] = served[-1]


def _simulated(graph: Graph, plan: Plan, wanted: Sequence[int]) -> tuple[int, int, tuple[int, ...]] | None:
    """(cost, peak, choice) of the plan with that choice of implementations, or with the nearest possible one."""
    chosen = choose(graph, wanted)
    if chosen is None:
        return None
    try:
        lifted = chosen.lift(Plan.from_order(chosen.graph, chosen.order_of(plan.order.tolist()).tolist()))
        trace = remat.simulate(graph, lifted)
    except remat.InvalidPlan:
        return None
    return trace.cost, trace.peak_bytes, chosen.indices


def _words(swaps: Sequence[Swap]) -> str:
    """The case that speaks most for the implementation, in words; see `SLIGHT`."""

    def words(swap: Swap) -> str:
        time = f"{100 * swap.cost_share:+.2f} % time"
        sign = "+" if swap.peak_bytes >= 0 else "-"
        memory = "the same peak" if not swap.peak_bytes else f"{sign}{format_size(abs(swap.peak_bytes))} at the peak"
        return f"put into the plan for {format_size(swap.budget_bytes)}: {time}, {memory}"

    cheaper = [swap for swap in swaps if swap.cost_share < -SLIGHT]
    missed = [swap for swap in cheaper if swap.fits]
    if missed:
        return f"missed by the search: {words(min(missed, key=lambda s: s.cost_share))}"
    smaller = [swap for swap in swaps if swap.peak_bytes < -SLIGHT * swap.budget_bytes]
    if cheaper:
        return f"faster but beyond the budget: {words(min(cheaper, key=lambda s: s.peak_bytes))}"
    if smaller:
        return (
            f"smaller but slower, and the budget is met without it: {words(min(smaller, key=lambda s: s.cost_share))}"
        )
    best = min(swaps, key=lambda s: (s.cost_share, s.peak_bytes))
    if best.peak_bytes > SLIGHT * best.budget_bytes:
        return f"neither faster nor smaller: {words(best)}"
    if abs(best.cost_share) <= SLIGHT:
        return f"makes no difference: {words(best)}"
    return f"slower, and its saving is not at the peak: {words(best)}"
