"""Two-phase rounding of both relaxations: thresholds against random samples, at one budget of each network."""

import math
from functools import partial
from typing import Any

import numpy as np

from experiments.paper.graphs import Context, budgets_at, panel_of, subject_of
from experiments.store import code_version
from remat import min_budget
from remat.bounds.lp import solve_relaxation
from remat.errors import InvalidPlan
from remat.graph import Graph
from remat.plan import Plan
from remat.programs.staged import build_staged_model
from remat.simulator import simulate

EPSILON = 0.1  # of the budget, as published
SHARE = 3  # tenths of the way from the smallest budget to checkpoint-all's peak
NETWORKS = ("vgg16", "mobilenet", "unet")
RELAXATIONS = ("trimmed", "published")


def run(context: Context) -> dict[str, Any]:
    """Solve by both roundings as published (nothing repaired), and by the portfolio."""
    shown = []
    for network in [n for n in context.networks if n.name in NETWORKS] or context.networks[:1]:
        subject = subject_of(context, network)
        slow = context.scale.rounding_s if network.has_slow_lp else context.scale.time_limit_s
        limit, budget, panels = max(20.0, slow), 0, dict[str, Any]()
        for relaxation in RELAXATIONS:
            same = {"relaxation": relaxation}
            options = {"lp_rounding": same, "lp_rounding_random": same | {"samples": context.scale.samples}}
            graph_run = context.graph_run(
                subject, "paper/rounding", strategies=(*options, "portfolio"), options=options, time_limit_s=limit,
                time_limits={"portfolio": context.scale.time_limit_s},
            )  # fmt: skip
            if not budget:  # with recomputation; the relaxation can have a solution without the published epsilon of it
                fixed, least = subject.graph.fixed_bytes, min_budget(subject.graph, graph_run.settings.scope).bytes
                budget = budgets_at(graph_run, [SHARE], fixed + math.ceil((least - fixed) / (1 - EPSILON)))[0]
            found = graph_run.run_budgets(graph_run.settings.strategies, [budget]).values()
            title = f"{network.label}: rounding of the {relaxation} relaxation"
            panels[relaxation] = panel_of(graph_run, [row for (row,) in found], [], title)
        samples, seed = context.scale.naive_samples, context.settings.seed
        determines = {"part": "naive rounding", "graph": subject.graph.sha256(), "budget": budget, "samples": samples,
                      "seed": seed, "limit": limit, "code": code_version(whole=True)}  # fmt: skip
        # A result None means that a time limit ended it; the store does not keep it.
        feasible = context.run.store.remember(
            "paper", determines, partial(count_feasible, subject.graph, budget, samples, seed, limit)
        )
        shown.append({"panels": panels, "label": network.label, "naive_samples": samples, "naive_feasible": feasible})
    return {"panels": shown}


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
