"""Take out repeats that a plan does not need: a solver leaves some inside its gap tolerance."""

from __future__ import annotations

import time
from collections.abc import Sequence

from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import simulate


def drop_unread_repeats(graph: Graph, calls: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """The (operation, implementation) computations, in order, without repeats whose outputs nobody reads."""
    is_needed = [value.keep for value in graph.values]
    first = {k: at for at, (k, _) in reversed(list(enumerate(calls)))}
    kept: list[tuple[int, str]] = []
    for at in range(len(calls) - 1, -1, -1):
        k, name = calls[at]
        implementation = graph.implementation(k, name)
        if at != first[k] and not any(is_needed[v] for v in implementation.outputs):
            continue
        kept.append((k, name))
        for v in implementation.outputs:
            is_needed[v] = False
        for v in implementation.inputs:
            is_needed[v] = True
    return kept[::-1]


def drop_needless_repeats(graph: Graph, plan: Plan, budget_bytes: int, deadline: float) -> Plan:
    """A plan with as many repeats removed, last one first, as the budget allows.

    Without a repeat the earlier copy is held until its later uses, so the plan stays valid (and
    staged); only its peak may grow. Costs one replay for each repeat; stops at `deadline`
    (`time.monotonic()`).
    """
    order = plan.order.tolist()
    seen: set[int] = set()
    repeats = [i for i, k in enumerate(order) if k in seen or seen.add(k)]
    for at in reversed(repeats):
        if time.monotonic() > deadline:
            break
        shorter = Plan.from_order(graph, order[:at] + order[at + 1 :], plan.budget_bytes)
        if simulate(graph, shorter).peak_bytes <= budget_bytes:
            order, plan = shorter.order.tolist(), shorter
    return plan
