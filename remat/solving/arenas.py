"""Plans whose bytes have places within the budget, not only a sum of live bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from remat.arena import Arena
from remat.graph import Graph
from remat.incumbent import is_proven, relative_gap
from remat.plan import Plan
from remat.solution import Solution, Status
from remat.units import format_size

ROUNDS = 8  # solves at most; each plans for a budget smaller by the gaps of the arenas before
FIRST_SHARE, SHARE = 0.35, 0.7  # of the time for the first solve; of what is left for a later one
ARENA_SHARE = 0.25  # of the time left, for an arena


def solve_with_arena(
    graph: Graph,
    budget_bytes: int,
    time_limit_s: float,
    solve_within: Callable[[int, float, int, Plan | None], Solution],
) -> Solution:
    """The cheapest plan found that has an arena within the budget; or the one that misses it by least.

    An arena is larger than the plan's load by its gaps. The next round solves for a budget that is smaller by them,
    with another seed, which leads to another order and other recomputation. If the first plan fits, the rest of the
    time improves it.

    Args:
        solve_within: (budget, seconds, how many solves were before, a plan to start from) -> the solution.
    """
    deadline = time.monotonic() + time_limit_s
    seconds, counted = FIRST_SHARE * time_limit_s, budget_bytes
    first, nearest, least = None, None, (0, 0)
    for n_before in range(ROUNDS):
        has_fit = nearest is not None and not least[0]
        found = solve_within(counted, seconds, n_before, nearest.plan if has_fit and nearest else None)
        if first is None or (has_fit and (found.bound or 0) > (first.bound or 0)):
            first = found  # the best bound for the whole budget
        if found.plan is not None and found.peak_bytes is not None:
            left_s = max(0.1, ARENA_SHARE * (deadline - time.monotonic()))
            arena = found.plan.arena(graph, budget_bytes, left_s)
            missed = arena.excess_bytes
            if nearest is None or (missed, found.cost or 0) < least:
                nearest, least = _restated(found, first, arena), (missed, found.cost or 0)
            if has_fit or (not missed and (n_before or found.status is Status.OPTIMAL)):
                break
            if missed:
                counted = min(counted - 1, budget_bytes - (arena.total_bytes - found.peak_bytes))
        elif nearest is None:
            return found
        else:  # too small: what is between
            counted = (counted + budget_bytes) // 2
        seconds = SHARE * (deadline - time.monotonic())
        if seconds < 0.02 * time_limit_s:
            break
    assert nearest is not None
    return nearest


def _restated(found: Solution, first: Solution, arena: Arena) -> Solution:
    """A solution for a smaller budget as one for the whole; the bound is that of `first`, which had all of it."""
    assert found.cost is not None
    assert arena.budget_bytes is not None
    notes = [found.message] if found.message else []
    if arena.excess_bytes:
        notes.append(f"the arena misses the budget by {format_size(arena.excess_bytes)}")
    elif found.budget_bytes < arena.budget_bytes:
        notes.append(f"planned for {format_size(found.budget_bytes)}, so that its arena fits")
    bound = first.bound or 0
    is_optimal = is_proven(found.cost, bound, first.proven_by)
    return replace(
        found, budget_bytes=arena.budget_bytes, bound=first.bound, certificate=first.certificate,
        proven_by=first.proven_by, gap=relative_gap(found.cost, bound),
        status=Status.OPTIMAL if is_optimal else Status.FEASIBLE, plan=arena.plan, arena=arena,
        message="; ".join(notes),
    )  # fmt: skip
