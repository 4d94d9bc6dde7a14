"""Two-phase rounding of the LP relaxation (Checkmate, section 5.2), as published and improved by the search."""

from __future__ import annotations

import numpy as np

from remat.context import Context
from remat.problem import Problem
from remat.registry import strategy
from remat.solution import Outcome
from remat.solvers._rounding import ALLOWED, NOT_IN_TIME, TRIMMED, relaxed_residency, round_all

THRESHOLDS = tuple(i / 10 for i in range(1, 10))


@strategy("lp_rounding", isolated=True, allowed=ALLOWED, version=1)
def lp_rounding(
    problem: Problem, context: Context, *, epsilon: float = 0.1, relaxation: str = TRIMMED, improve: bool = False
) -> Outcome:
    """Two-phase rounding (Checkmate, section 5.2): S from the LP by thresholds 0.1 to 0.9, then the cheapest R.

    The relaxation is solved within a share 1 - epsilon of the budget above the fixed bytes; a rounding that still
    exceeds the budget is rejected. The relaxation is that of `remat.programs.staged` with the memory rows of stage
    ends, unless the published one with FREE and U is asked for (same value on the published networks, ten times the
    time).

    Args:
        epsilon: as in the paper, 0.1.
        relaxation: ``trimmed`` or ``published``.
        improve: beyond the paper, try smaller epsilons where nothing fits, and let the search repair and improve the
            best rounding.
    """
    S_TV, note = relaxed_residency(context, epsilon, relaxation, may_shrink=improve)
    if S_TV is None:
        return Outcome(timed_out=note == NOT_IN_TIME, message=note)
    rounded = ((threshold < S_TV, {"threshold": threshold}) for threshold in THRESHOLDS)
    return round_all(context, "lp_rounding", rounded, improve, note)


@strategy("lp_rounding_search", isolated=True, allowed=ALLOWED)
def lp_rounding_search(
    problem: Problem, context: Context, *, epsilon: float = 0.1, relaxation: str = TRIMMED
) -> Outcome:
    """`lp_rounding` with ``improve=true``: the search repairs and improves the best rounding, beyond the paper.

    Args:
        epsilon: the first one tried; then a half, a quarter and nothing of it where nothing fits.
        relaxation: ``trimmed`` or ``published``.
    """
    return lp_rounding(problem, context, epsilon=epsilon, relaxation=relaxation, improve=True)


@strategy("lp_rounding_random", isolated=True, allowed=ALLOWED, version=1)
def lp_rounding_random(
    problem: Problem,
    context: Context,
    *,
    epsilon: float = 0.1,
    samples: int = 100,
    relaxation: str = TRIMMED,
    improve: bool = False,
) -> Outcome:
    """Two-phase rounding (Checkmate, section 5.2) with S[t,v] ~ Bernoulli of the LP's value, then the cheapest R.

    Args:
        epsilon: share of the budget above the fixed bytes that the relaxation leaves free, 0.1 in the paper.
        samples: number of S to draw.
        relaxation: ``trimmed`` or ``published``, see `lp_rounding`.
        improve: beyond the paper, see `lp_rounding`.
    """
    S_TV, note = relaxed_residency(context, epsilon, relaxation, may_shrink=improve)
    if S_TV is None:
        return Outcome(timed_out=note == NOT_IN_TIME, message=note)
    random = np.random.default_rng(abs(context.options.seed))
    rounded = ((random.random(S_TV.shape) < S_TV, {"sample": i}) for i in range(samples))
    return round_all(context, "lp_rounding_random", rounded, improve, note)
