"""Two-phase rounding of the LP relaxation, random samples."""

from __future__ import annotations

import numpy as np

from remat.context import Context
from remat.problem import Problem
from remat.registry import strategy
from remat.solution import Outcome
from remat.solvers._rounding import ALLOWED, NOT_IN_TIME, TRIMMED, relaxed_residency, round_all


@strategy("lp_rounding_random", isolated=True, allowed=ALLOWED)
def lp_rounding_random(
    problem: Problem,
    context: Context,
    *,
    epsilon: float = 0.1,
    samples: int = 100,
    relaxation: str = TRIMMED,
    improve: bool = True,
) -> Outcome:
    """Two-phase rounding (Checkmate, section 5.2) with S[t,v] ~ Bernoulli of the LP's value, then the cheapest R.

    Args:
        epsilon: share of the budget above the fixed bytes that the relaxation leaves free, 0.1 in the paper.
        samples: number of S to draw.
        relaxation: ``trimmed`` or ``published``, see `lp_rounding`.
        improve: beyond the paper, try smaller epsilons where nothing fits, and let the search repair and improve the
            best sample; False for the published method.
    """
    S_TV, note = relaxed_residency(context, epsilon, relaxation, may_shrink=improve)
    if S_TV is None:
        return Outcome(timed_out=note == NOT_IN_TIME, message=note)
    random = np.random.default_rng(abs(context.options.seed))
    rounded = ((random.random(S_TV.shape) < S_TV, {"sample": i}) for i in range(samples))
    return round_all(context, "lp_rounding_random", rounded, improve, note)
