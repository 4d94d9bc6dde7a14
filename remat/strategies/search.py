"""Annealed search over staged plans: the fast way to a good one."""

from __future__ import annotations

import time

import numpy as np

from remat.arrays import GraphArrays
from remat.eviction import greedy_eviction
from remat.plan import Plan, Scope
from remat.registry import strategy
from remat.search import is_warm, minimise_cost
from remat.search.evict import evict
from remat.solve import Candidate, Outcome, Problem

COST_POWERS = (0.5, 0.25, 0.75, 0.0, 1.0)
COLD_START_S = 40.0  # compiling takes 10 to 30 s; with less time than this it is not begun


@strategy("search")
def search(problem: Problem) -> Outcome:
    """Annealing over retention intervals, from a greedy eviction: drop a value, hold it, move a repeat.

    Anytime and seeded; independent seeds on `threads` threads share the best plan between rounds.
    With `work_limit` (moves of each thread) they share nothing, and a run repeats exactly. All plans
    are staged and use exact accounting; nothing is proven. The moves are in `remat.search.kernel`.
    """
    graph = problem.graph
    if not is_warm() and problem.remaining_s() < COLD_START_S and problem.work_limit is None:
        plan = greedy_eviction(graph, problem.budget_bytes, deadline=problem.deadline)
        hint = "only the greedy was run: the search is not compiled yet; run 'python -m remat.search' once (30 s)"
        return Outcome((Candidate(plan),) if plan is not None else (), message=hint)
    began = time.monotonic()
    start, fits = first_order(problem)
    stats: dict[str, object] = {}
    if fits:
        stats["greedy_s"] = time.monotonic() - began
    best = minimise_cost(
        graph, problem.budget_bytes, start, seed=problem.seed, threads=problem.threads, deadline=problem.deadline,
        work_limit=problem.work_limit, target_cost=graph.total_cost,
    )  # fmt: skip
    stats["moves"] = best.moves
    if best.order is None or best.excess:
        message = f"no plan found after {best.moves:,} moves; nothing is proven"
        return Outcome(message=message, stats=stats)
    return Outcome((Candidate(Plan.from_order(graph, best.order, problem.budget_bytes)),), stats=stats)


def first_order(problem: Problem) -> tuple[np.ndarray | None, bool]:
    """(computations of a staged plan to start from, whether it fits the budget)."""
    warm = problem.warm_start
    if warm is not None and warm.scope is Scope.STAGED:
        return warm.order, True  # `minimise_cost` measures it; the judge does so at the end
    arrays = GraphArrays.of(problem.graph)
    for power in COST_POWERS:
        order = evict(arrays, problem.budget_bytes - problem.graph.fixed_bytes, power)
        if order is not None:
            return order, True
    return None, False
