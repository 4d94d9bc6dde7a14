"""Two-phase rounding of both relaxations: thresholds against random samples, at one budget of each network."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from experiments.paper.graphs import Context, budgets_at, published_or_extracted, remember, write_run_folder
from experiments.paper.naive_rounding import count_feasible
from experiments.solving import GraphRun
from remat import min_budget

EPSILON = 0.1  # of the budget, as published
SHARE = 3  # tenths of the way from the smallest budget to checkpoint-all's peak
NETWORKS = ("vgg16", "mobilenet", "unet")
RELAXATIONS = ("trimmed", "published")


def run(context: Context) -> dict[str, Any]:
    """Solve by both roundings as published (nothing repaired), and by the portfolio."""
    shown = []
    for network in [n for n in context.networks if n.name in NETWORKS] or context.networks[:1]:
        subject = published_or_extracted(context, network)
        slow = context.scale.rounding_s if network.has_slow_lp else context.scale.time_limit_s
        limit, budget, folders = max(20.0, slow), 0, dict[str, str]()
        for relaxation in RELAXATIONS:
            same = {"improve": False, "relaxation": relaxation}
            options = {"lp_rounding": same, "lp_rounding_random": same | {"samples": context.scale.samples}}
            graph_run = context.graph_run(
                subject, "paper/rounding", strategies=(*options, "portfolio"), options=options, time_limit_s=limit,
                time_limits={"portfolio": context.scale.time_limit_s},
            )  # fmt: skip
            budget = budget or rounding_budget(graph_run)
            found = graph_run.run_budgets(graph_run.settings.strategies, [budget]).values()
            folders[relaxation] = write_run_folder(
                context, f"rounding/{network.name}_{relaxation}", graph_run, [row for row, in found], [],
                f"{network.label}: rounding of the {relaxation} relaxation",
            )  # fmt: skip
        samples, seed = context.scale.naive_samples, context.settings.seed
        determines = {"part": "naive rounding", "graph": subject.graph.sha256(), "budget": budget, "samples": samples,
                      "seed": seed, "limit": limit}  # fmt: skip
        feasible = remember(context, determines, partial(count_feasible, subject.graph, budget, samples, seed, limit))
        shown.append({"folders": folders, "label": network.label, "naive_samples": samples, "naive_feasible": feasible})
    return {"panels": shown}


def rounding_budget(graph_run: GraphRun) -> int:
    """A budget with recomputation, whose relaxation can have a solution without the published epsilon of the budget.

    It lies `SHARE` tenths of the way to checkpoint-all's peak.
    """
    fixed = graph_run.subject.graph.fixed_bytes
    least = min_budget(graph_run.subject.graph, graph_run.settings.scope).bytes
    return budgets_at(graph_run, [SHARE], fixed + math.ceil((least - fixed) / (1 - EPSILON)))[0]
