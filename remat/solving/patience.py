"""Solves that end when waiting is not worth it: runs of growing length, each from the best plan of those before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat.context import Context
from remat.incumbent import relative_gap
from remat.solution import Outcome

# The first run's seconds on a graph of size 1. Each run is GROWTH times as long as the one before, or shorter, if
# patience ends before it does.
FIRST_S, GROWTH = 1.5, 2.0
PATIENCE_S = 1.0  # without a gain, for size 1 and a gap of `least_gain`; it grows with the root of the gap
LEAST, IMPLEMENTATIONS, SMALL = 0.4, 1000, 550  # the least size; it grows by 1 for so many, beyond SMALL
MOST_SLOWER = 2.0
LEAST_S, SHORTEST_S = 0.1, 1e-3  # the shortest run; the resolution of a clock
SEED_STEP = 15_485_863  # between the seeds of runs


def enough_at(
    costs: Sequence[tuple[float, int]], bound: int, now: float, least_gain: float, patience_s: float
) -> float:  # fmt: skip
    """Seconds since the start from which on more time is not worth it, if nothing is found until then.

    So it is if the gap is at most `least_gain`, or if the cost has fallen by no more than that share for half of the
    time, and for the longer the wider the gap is.

    Args:
        costs: (seconds, cost) of each better plan, in their order.
        bound: on the cost of every plan.
        now: seconds since the start.
        patience_s: without a gain, for a gap of `least_gain`.
    """
    if not costs:
        return math.inf
    cost = costs[-1][1]
    gap = relative_gap(cost, bound)
    if gap <= least_gain:
        return now
    if not least_gain:
        return math.inf
    since = next((seconds for seconds, before in costs if before - cost <= least_gain * cost), now)
    return max(2 * since, since + patience_s * math.sqrt(gap / least_gain))


def in_runs(context: Context, run: Callable[[Context], Outcome]) -> Outcome:
    """Runs of growing length until more time is not worth it, the solve is decided, or the time is over."""
    incumbent, least_gain = context.incumbent, context.options.least_gain
    assert least_gain is not None
    from remat.search.ready import is_ready  # here, because it imports Numba

    # A child compiles the search first, and what needs no search goes on meanwhile.
    size = max(LEAST, (len(context.problem.graph.every_implementation()) - SMALL) / IMPLEMENTATIONS)
    seconds = FIRST_S * size if is_ready() else math.inf
    known, stats, n = None, {}, 0
    wall_s, used_s = time.perf_counter(), time.process_time()
    while True:
        own = context.with_options(
            least_gain=None, seed=context.options.seed + SEED_STEP * n,
            warm_start=incumbent.plan or context.options.warm_start,
        )  # fmt: skip
        is_last = seconds * (1 + 1 / GROWTH) >= context.remaining_s()  # rather than a short one after it
        outcome = run(own if is_last else own.until(time.monotonic() + seconds))
        stats |= outcome.stats
        proof = outcome.certificate
        known = proof if known is None or (proof is not None and proof.bound > known.bound) else known
        outcome = replace(outcome, certificate=known, stats=stats)
        is_over = is_last or context.is_solved() or outcome.infeasible
        now = time.time() - incumbent.began
        slowness = slower_by(time.perf_counter() - wall_s, time.process_time() - used_s)
        patience_s = PATIENCE_S * size * slowness
        ends = enough_at(incumbent.costs(), incumbent.bound, now, least_gain, patience_s)
        if is_over or ends <= now:
            return outcome
        seconds, n = min(seconds * GROWTH, max(LEAST_S, ends - now)), n + 1


def slower_by(wall_s: float, used_s: float) -> float:
    """Seconds for each processor second that this process used: above 1 where others take the processors.

    Patience is longer by that, so that a busy machine does not end a search before it has searched, but at most
    `MOST_SLOWER` times, because a user waits.
    """
    return min(MOST_SLOWER, max(1.0, wall_s / max(used_s, SHORTEST_S)))
