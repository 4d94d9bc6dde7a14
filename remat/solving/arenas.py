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
# Operations from which the first plan is for a smaller budget at once, because an arena at the load is seldom found and
# a second plan of that size takes as long as the first; and by which share.
LARGE, MARGIN = 1500, 0.02
FIRST_SHARE, LARGE_SHARE, SHARE = 0.35, 0.6, 0.7  # of the time for the first solve; of what is left for a later one
ARENA_SHARE, LARGE_ARENA_SHARE = 0.25, 0.5  # of the time left, for an arena


def solve_with_arena(
    graph: Graph,
    budget_bytes: int,
    time_limit_s: float,
    solve_within: Callable[[int, float, int, Plan | None], Solution],
) -> Solution:
    """The cheapest plan found that has an arena within the budget; or the one that misses it by least.

    An arena is larger than the plan's load by its gaps. The next round solves for a budget that is smaller by them,
    with another seed, which leads to another order and other recomputation. If the first plan fits, the rest of the
    time improves it. The bound is that of the solves for the whole budget; there may be none.

    Args:
        solve_within: (budget, seconds, how many solves were before, a plan to start from) -> the solution.
    """
    deadline = time.monotonic() + time_limit_s
    is_large = len(graph) >= LARGE
    counted = budget_bytes - int(MARGIN * budget_bytes * is_large)
    seconds = time_limit_s * (LARGE_SHARE if is_large else FIRST_SHARE)
    nearest: tuple[Solution, Arena] | None = None
    prover: Solution | None = None  # has the best bound for the whole budget
    for n_before in range(ROUNDS):
        has_fit = nearest is not None and not nearest[1].excess_bytes
        if has_fit and prover is None:
            counted = budget_bytes
        found = solve_within(counted, seconds, n_before, nearest[0].plan if nearest and has_fit else None)
        if counted == budget_bytes and (prover is None or (found.bound or 0) > (prover.bound or 0)):
            prover = found
        if found.plan is not None and found.peak_bytes is not None:
            left_s = max(0.1, (LARGE_ARENA_SHARE if is_large else ARENA_SHARE) * (deadline - time.monotonic()))
            arena = found.plan.arena(graph, budget_bytes, left_s)
            if nearest is None or _misses(found, arena) < _misses(*nearest):
                nearest = found, arena
            missed = arena.excess_bytes
            if has_fit or (not missed and prover and (n_before or found.status is Status.OPTIMAL)):
                break
            if missed:
                counted = max(0, min(counted - 1, budget_bytes - (arena.total_bytes - found.peak_bytes)))
        elif nearest is None:
            if counted == budget_bytes:
                return found
            counted = budget_bytes
        else:  # too small: what is between
            counted = (counted + budget_bytes) // 2
        left_s = SHARE * (deadline - time.monotonic())
        if nearest is not None and left_s < 0.02 * time_limit_s:
            break
        seconds = max(0.1, left_s)
    assert nearest is not None
    return _restated(*nearest, prover)


def _misses(found: Solution, arena: Arena) -> tuple[int, int]:
    """How far a plan is from what is asked: bytes above the budget, then its cost."""
    return arena.excess_bytes, found.cost or 0


def _restated(found: Solution, arena: Arena, prover: Solution | None) -> Solution:
    """A solution for a smaller budget as one for the whole, with the bound of `prover`, which had all of it."""
    assert found.cost is not None
    assert arena.budget_bytes is not None
    notes = [found.message] if found.message else []
    if arena.excess_bytes:
        notes.append(f"the arena misses the budget by {format_size(arena.excess_bytes)}")
    elif found.budget_bytes < arena.budget_bytes:
        notes.append(f"planned for {format_size(found.budget_bytes)}, so that its arena fits")
    bound, proven_by = (prover.bound, prover.proven_by) if prover else (None, "")
    is_optimal = bound is not None and is_proven(found.cost, bound, proven_by)
    return replace(
        found, budget_bytes=arena.budget_bytes, bound=bound, certificate=prover and prover.certificate,
        proven_by=proven_by, gap=None if bound is None else relative_gap(found.cost, bound),
        status=Status.OPTIMAL if is_optimal else Status.FEASIBLE, plan=arena.plan, arena=arena,
        message="; ".join(notes),
    )  # fmt: skip
