"""Solves that end when waiting is not worth it: runs of growing length, each from the best plan of those before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat.context import Context
from remat.incumbent import relative_gap
from remat.solution import Outcome

# The first run's seconds for so many implementations, in proportion for other graphs. Each run is GROWTH times as long
# as the one before.
FIRST_S, IMPLEMENTATIONS, GROWTH = 1.5, 1000, 2.0
PATIENCE_S = 1.0  # without a gain, for as many and a gap of `least_gain`; it grows with the root of the gap
LEAST = 0.4  # of both times, on a small graph
SEED_STEP = 15_485_863  # between the seeds of runs


def is_enough(
    costs: Sequence[tuple[float, int]], bound: int, now: float, least_gain: float, patience_s: float = PATIENCE_S
) -> bool:
    """Whether more time is not worth it.

    So it is if the gap is at most `least_gain`, or if the cost has fallen by no more than that share for half of the
    time, and for the longer the wider the gap is.

    Args:
        costs: (seconds, cost) of each better plan, in their order.
        bound: on the cost of every plan.
        now: seconds since the start.
        patience_s: without a gain, for a gap of `least_gain`.
    """
    if not costs:
        return False
    cost = costs[-1][1]
    gap = relative_gap(cost, bound)
    if gap <= least_gain:
        return True
    if not least_gain:
        return False
    since = next((seconds for seconds, before in costs if before - cost <= least_gain * cost), now)
    return now - since >= max(now / 2, patience_s * math.sqrt(gap / least_gain))


def in_runs(context: Context, run: Callable[[Context], Outcome]) -> Outcome:
    """Runs of growing length until more time is not worth it, the solve is decided, or the time is over."""
    incumbent, least_gain = context.incumbent, context.options.least_gain
    assert least_gain is not None
    from remat.search.ready import is_ready  # here, because it imports Numba

    # A child compiles the search first, and what needs no search goes on meanwhile.
    size = max(LEAST, len(context.problem.graph.every_implementation()) / IMPLEMENTATIONS)
    seconds = FIRST_S * size if is_ready() else math.inf
    known, stats, n = None, {}, 0
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
        if is_over or is_enough(incumbent.costs(), incumbent.bound, now, least_gain, PATIENCE_S * size):
            return outcome
        seconds, n = seconds * GROWTH, n + 1
