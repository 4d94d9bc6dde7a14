"""Take out repeats that a plan does not need: what a solver leaves inside its gap tolerance."""

from __future__ import annotations

import time

from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import simulate


def drop_needless_repeats(graph: Graph, plan: Plan, budget_bytes: int, deadline: float) -> Plan:
    """A plan with as many repeats removed, latest first, as the budget allows.

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
