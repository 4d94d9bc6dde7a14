"""Random rounding of the relaxation's R and S without phase two: how often the result is a plan."""

from __future__ import annotations

import numpy as np

from remat.bounds.lp import solve_relaxation
from remat.errors import InvalidPlan
from remat.graph import Graph
from remat.plan import Plan
from remat.programs.staged import build_staged_model
from remat.simulator import simulate

AT_ONCE = 500


def valid_samples(R_TN: np.ndarray, S_TV: np.ndarray, graph: Graph, samples: int, seed: int) -> list[tuple]:
    """The draws R ~ Bernoulli(R_TN), S ~ Bernoulli(S_TV) in which nothing is missing, of `samples`; (R, S) as booleans.

    Inputs of an operation are resident or computed in its stage (1b), and a resident value was resident or computed in
    the stage before (1c).
    """
    random = np.random.default_rng(seed)
    producer = np.array(graph.producer)
    reads = [(k, v) for k, op in enumerate(graph.operations) for v in op.inputs]
    readers, values = (np.array(part, dtype=int) for part in zip(*reads, strict=True)) if reads else ([], [])
    found = []
    for first in range(0, samples, AT_ONCE):
        n = min(AT_ONCE, samples - first)
        R = random.random((n, *R_TN.shape)) < R_TN
        S = random.random((n, *S_TV.shape)) < S_TV
        had = S | R[:, :, producer]  # values resident at the start of a stage or computed in it
        whole = (~S[:, 1:] | had[:, :-1]).all(axis=(1, 2)) & ~S[:, 0].any(axis=1)
        whole &= (~R[:, :, readers] | had[:, :, values]).all(axis=(1, 2))
        found += [(R[i], S[i]) for i in np.nonzero(whole)[0]]
    return found


def count_feasible(graph: Graph, budget_bytes: int, samples: int, seed: int, time_limit_s: float) -> int | None:
    """How many samples of the relaxation at this budget are plans that fit; None if it is infeasible or out of time."""
    model = build_staged_model(graph, budget_bytes, memory="stage_end")
    if model.infeasible:
        return None
    solved = solve_relaxation(model, np.ones(model.shape[1], dtype=bool), time_limit_s, 1)
    if solved is None:
        return None
    feasible = 0
    for R, S in valid_samples(*model.matrices(solved[0]), graph, samples, seed):
        try:
            feasible += simulate(graph, Plan.from_matrices(graph, R, S)).peak_bytes <= budget_bytes
        except InvalidPlan:  # it recomputes a resident value
            continue
    return feasible
