"""Plans of the free scope: choose an order, then search its recomputations; the best of several orders."""

from __future__ import annotations

import time
from collections.abc import Callable

from remat.graph import Graph
from remat.ordering.anneal import anneal_orders
from remat.ordering.relabel import plan_in_original, reordered
from remat.plan import Plan
from remat.search import minimise_cost

ORDER_SHARE = 0.4  # of the time or moves left, for the orders; the rest for the recomputations


def free_plan(
    graph: Graph,
    budget_bytes: int,
    *,
    seed: int = 0,
    deadline: float = float("inf"),
    work_limit: int | None = None,
    on_plan: Callable[[Plan, int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Plan | None:
    """The cheapest free plan found within the budget, or None; nothing is proven.

    If an order fits as it is, its plan costs `graph.total_cost` and is optimal in every scope.

    Args:
        deadline: of `time.monotonic()`; give this or `work_limit`.
        work_limit: moves in all; runs then repeat exactly.
        on_plan: called with each better plan and its cost.
    """
    seconds = deadline - time.monotonic()
    until = time.monotonic() + ORDER_SHARE * seconds if seconds < float("inf") else deadline
    moves = None if work_limit is None else int(ORDER_SHARE * work_limit)
    orders = anneal_orders(graph, budget_bytes, seed, until, moves)
    best, best_cost = None, float("inf")

    def offer(plan: Plan, cost: int) -> None:
        nonlocal best, best_cost
        if cost < best_cost:
            best, best_cost = plan, cost
            if on_plan is not None:
                on_plan(plan, cost)

    if orders and orders[0].peak_bytes <= budget_bytes:
        offer(Plan.from_order(graph, orders[0].operations, budget_bytes), graph.total_cost)
        return best
    own = tuple(range(len(graph)))
    candidates = list(dict.fromkeys([*(order.operations for order in orders), own]))
    for i, operations in enumerate(candidates):
        if should_stop() or time.monotonic() >= deadline:
            break
        left = deadline - time.monotonic()
        share = time.monotonic() + left / (len(candidates) - i) if left < float("inf") else deadline
        part = None if work_limit is None else int((1 - ORDER_SHARE) * work_limit) // len(candidates)
        found = minimise_cost(
            reordered(graph, operations), budget_bytes, seed=seed, deadline=share, work_limit=part,
            target_cost=graph.total_cost, should_stop=should_stop,
        )  # fmt: skip
        if found.order is not None and not found.excess:
            plan = Plan.from_order(reordered(graph, operations), found.order.tolist(), budget_bytes)
            offer(plan_in_original(graph, operations, plan), found.cost)
    return best
