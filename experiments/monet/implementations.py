"""Which implementations the stored plans use, and why some are never chosen; solves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import remat
from experiments.monet.cases import CPU, NO_WINOGRAD, OURS, Context, graph_of, graph_run_of_case
from experiments.monet.published import Network
from remat.graph import Graph
from remat.implementation import DEFAULT, Implementation
from remat.plan import Plan
from remat.search.choices import Choices
from remat.units import format_size

SLIGHT = 1e-4  # share of the cost or of the budget; smaller differences count as none
KindAndName = tuple[str, str]  # kind of operation, name of the implementation; documents call the name "way"


@dataclass(frozen=True, slots=True)
class Swap:
    """A plan after every operation of one kind was switched to an implementation that the plan did not use.

    Attributes:
        cost_share: the added cost, as a share of the plan's.
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
    used, never, offered = [], [], []
    for network in context.networks:
        for level in (NO_WINOGRAD, CPU):
            graph = graph_of(context, network, level)
            plans = _plans(context, network, level)
            chosen: set[KindAndName] = set()
            for (strategy, budget), plan in plans.items():
                counts = count(graph, plan)
                chosen |= set(counts)
                solve = {"network": network.name, "level": level, "strategy": strategy, "budget_bytes": budget}
                used += [solve | entry for entry in _entries(dict(sorted(counts.items())))]
            own = {budget: plan for (strategy, budget), plan in plans.items() if strategy == OURS}
            unused = {one: n for one, n in available(graph).items() if one not in chosen} if plans else {}
            never += [
                {"network": network.name, "level": level} | entry
                | {"reason": reason(graph, own, entry["kind"], entry["way"])} for entry in _entries(unused)
            ]  # fmt: skip
        all_of_them = available(graph_of(context, network, NO_WINOGRAD))
        offered += [{"network": network.name} | entry for entry in _entries(all_of_them)]
    return {"used": used, "never": never, "available": offered}


def _entries(counts: Mapping[KindAndName, int]) -> list[dict[str, Any]]:
    """Numbers of operations as entries of the document."""
    return [{"kind": kind, "way": name, "operations": n} for (kind, name), n in counts.items()]


def _plans(context: Context, network: Network, level: str) -> dict[tuple[str, int], Plan]:
    """(strategy, budget) -> its plan."""
    found = {}
    for case, row in context.rows.items():
        if (case.network, case.level, case.cost_cap) == (network.name, level, None):
            plan = graph_run_of_case(context, case).plan_of(row)
            if plan is not None:
                found[case.strategy, case.budget_bytes] = plan
    return found


def available(graph: Graph) -> dict[KindAndName, int]:
    """How many operations have each implementation."""
    return dict(sorted(Counter((op.kind, one.name) for op in graph.operations for one in op.implementations).items()))


def count(graph: Graph, plan: Plan) -> dict[KindAndName, int]:
    """How many operations the plan runs at least once with each implementation other than the default one."""
    runs = {(k, name) for k, name in zip(plan.order.tolist(), plan.choices, strict=False) if name}
    return Counter((graph.operations[k].kind, name) for k, name in runs)


def reason(graph: Graph, plans: Mapping[int, Plan], kind: str, name: str) -> str:
    """Why no plan of `plans` (by budget) uses the implementation `name` of operations of that kind.

    Either another implementation is never slower and holds no more. Or the simulator judges every plan with the
    implementation put in, for each operation of the kind that has it, together with the needs of its readers.
    """
    own = [k for k, op in enumerate(graph.operations) if op.kind == kind and name in _names(graph, k)]
    better = _dominating(graph, own, name)
    if better:
        return f"dominated: {better} is never slower, and reads and holds no more"
    swaps = [swap for budget, plan in plans.items() if (swap := _swap(graph, plan, budget, own, name))]
    if not swaps:
        return "cannot be put into any plan found: it needs a value that is overwritten or not made there"
    return _words(swaps)


def _names(graph: Graph, k: int) -> list[str]:
    """Names of the implementations of operation `k`, the default one first."""
    return [one.name for one in graph.operations[k].all_implementations]


def _dominating(graph: Graph, operations: Sequence[int], name: str) -> str:
    """Another implementation of all these operations that is no slower and no larger; '' if there is none."""
    common = set.intersection(*(
        {other.name for other in graph.operations[k].all_implementations
         if other.name != name and _is_no_worse(other, graph.implementation(k, name))} for k in operations
    ))  # fmt: skip
    return min(common, key=lambda n: (n == DEFAULT, n), default="")


def _is_no_worse(a: Implementation, b: Implementation) -> bool:
    return (
        a.cost <= b.cost
        and a.workspace_bytes <= b.workspace_bytes
        and set(a.inputs) <= set(b.inputs)
        and set(a.outputs) == set(b.outputs)
        and a.overwrites == b.overwrites  # else one is smaller, and the other may run where that one may not
        and not a.is_lossy
    )


def _swap(graph: Graph, plan: Plan, budget: int, operations: Sequence[int], name: str) -> Swap | None:
    """The plan with one implementation for each operation, before and after the switch; None if it is impossible."""
    wanted = [0] * len(graph)
    for k, chosen in zip(plan.order.tolist(), plan.choices or ("",) * plan.n_computations, strict=True):
        wanted[k] = _names(graph, k).index(chosen or DEFAULT)
    before = _simulated(graph, plan, wanted)
    for k in operations:
        wanted[k] = _names(graph, k).index(name)
    for k in operations:
        _adapt_readers(graph, k, graph.implementation(k, name), wanted)
    after = _simulated(graph, plan, wanted)
    if before is None or after is None:
        return None
    (old_cost, old_peak, _), (cost, peak, indices) = before, after
    if not any(_names(graph, k)[indices[k]] == name for k in operations):
        return None
    return Swap(cost / old_cost - 1, peak - old_peak, peak <= max(budget, old_peak), budget)


def _adapt_readers(graph: Graph, k: int, chosen: Implementation, wanted: list[int]) -> None:
    """Switch the readers of operation `k` to implementations that read the outputs of `chosen`, extra ones first."""
    made = set(chosen.outputs)
    missing = {v for one in graph.operations[k].all_implementations for v in one.outputs} - made
    extra = made - set(graph.operations[k].outputs)
    lost = missing | (set() if chosen.overwrites is None else {chosen.overwrites})
    for r in range(k + 1, len(graph)):
        if not graph.operations[r].implementations:
            continue
        inputs = [set(one.inputs) for one in graph.operations[r].all_implementations]
        served = [i for i, one in enumerate(graph.operations[r].all_implementations)
                  if not lost & inputs[i] and not one.is_lossy]  # fmt: skip
        best = [i for i in served if extra & inputs[i]]
        if best and not extra & inputs[wanted[r]]:
            wanted[r] = best[0]
        elif served and lost & inputs[wanted[r]]:
            wanted[r] = served[-1]


def _simulated(graph: Graph, plan: Plan, wanted: Sequence[int]) -> tuple[int, int, tuple[int, ...]] | None:
    """(cost, peak, choice) of the plan with that choice of implementations, or with the nearest possible choice."""
    chosen = Choices(graph).choose(wanted)
    if chosen is None:
        return None
    try:
        lifted = chosen.lift(Plan.from_order(chosen.graph, chosen.order_of(plan.order.tolist()).tolist()))
        trace = remat.simulate(graph, lifted)
    except remat.InvalidPlan:
        return None
    return trace.cost, trace.peak_bytes, chosen.indices


def _words(swaps: Sequence[Swap]) -> str:
    """The strongest case for the implementation, in words; see `SLIGHT`."""

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
