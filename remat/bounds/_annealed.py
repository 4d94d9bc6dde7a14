"""Compiled searches for plans with a low peak, for `remat.bounds.min_budget`; imports Numba."""

from __future__ import annotations

import time

import numpy as np

from remat.bounds._sides import FINENESS, Sides
from remat.plan import Plan
from remat.search.anneal import NOTHING, minimise_cost
from remat.search.ordering.anneal import anneal_orders
from remat.search.ordering.construct import plan_in_original, reordered

SEARCH_MOVES = 200_000  # of the annealing at each budget, about a second for 100 operations
SEARCH_BUDGETS = 12  # most budgets to try
ORDER_MOVES = 1_000_000


def reorder(sides: Sides, deadline: float) -> None:
    """Try other topological orders: first with each operation run once, then with annealed repeats."""
    now = time.monotonic()
    orders = anneal_orders(sides.graph, sides.lower.bytes, 0, now + 0.3 * (deadline - now), ORDER_MOVES)
    for order in orders:
        sides.offer(Plan.from_order(sides.graph, order.operations))
    for i, order in enumerate(orders):
        now = time.monotonic()
        anneal(sides, list(order.operations), now + (deadline - now) / (len(orders) - i))


def anneal(sides: Sides, firsts: list[int] | None = None, deadline: float = float("inf")) -> None:
    """Bisect the budget of the annealed search, each time from the best plan with these first computations.

    The search is staged, so it runs on the graph in the order `firsts`; by default the order of the best plan.
    """
    known = sides.plan.order.tolist()
    known_firsts = list(dict.fromkeys(known))
    firsts = firsts or known_firsts
    label = {k: i for i, k in enumerate(firsts)}
    graph = sides.graph if firsts == sorted(firsts) else reordered(sides.graph, firsts)
    start = np.array([label[k] for k in known] if firsts == known_firsts else range(len(firsts)), dtype=np.int32)
    deadline = min(deadline, sides.deadline)
    low = sides.lower.bytes
    for attempt in range(SEARCH_BUDGETS):
        now = time.monotonic()
        if sides.lower.bytes >= sides.bytes or now >= deadline or sides.bytes - low <= sides.bytes // FINENESS:
            return
        middle = (low + sides.bytes) // 2
        best = minimise_cost(
            graph, middle, start, seed=attempt, deadline=now + (deadline - now) / (SEARCH_BUDGETS - attempt),
            target_cost=NOTHING, work_limit=SEARCH_MOVES,
        )  # fmt: skip
        plan = best.plan(graph)
        if plan is None:
            low = middle
        else:
            start = plan.order
            sides.offer(plan_in_original(sides.graph, firsts, plan))
