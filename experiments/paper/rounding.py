"""Two-phase rounding: thresholds against random samples, beside the optimum, at one budget of each network."""

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
NETWORKS = ("vgg16", "mobilenet")


def run(context: Context) -> dict[str, Any]:
    """Solve by both roundings as published (nothing repaired), and by the portfolio."""
    shown = []
    for network in [n for n in context.networks if n.name in NETWORKS] or context.networks[:1]:
        subject = published_or_extracted(context, network)
        options = {"lp_rounding": {"improve": False},
                   "lp_rounding_random": {"improve": False, "samples": context.scale.samples}}  # fmt: skip
        graph_run = context.graph_run(subject, "paper/rounding", strategies=(*options, "portfolio"), options=options,
                          time_limit_s=max(20.0, context.scale.time_limit_s))  # fmt: skip
        budget = rounding_budget(graph_run)
        rows = [rows[0] for rows in graph_run.run_budgets(graph_run.settings.strategies, [budget]).values()]
        name = write_run_folder(context, f"rounding/{network.name}", graph_run, rows, [], f"{network.label}: rounding")
        samples, seed = context.scale.naive_samples, graph_run.settings.seed
        limit = graph_run.settings.time_limit_s
        determines = {"part": "naive rounding", "graph": subject.graph.sha256(), "budget": budget, "samples": samples,
                      "seed": seed, "limit": limit}  # fmt: skip
        feasible = remember(context, determines, partial(count_feasible, subject.graph, budget, samples, seed, limit))
        shown.append({"folder": name, "label": network.label, "naive_samples": samples, "naive_feasible": feasible})
    return {"panels": shown}


def rounding_budget(graph_run: GraphRun) -> int:
    """A budget with recomputation, whose relaxation can have a solution without the published epsilon of the budget.

    It lies `SHARE` tenths of the way to checkpoint-all's peak.
    """
    fixed = graph_run.subject.graph.fixed_bytes
    least = min_budget(graph_run.subject.graph, graph_run.settings.scope).bytes
    return budgets_at(graph_run, [SHARE], fixed + math.ceil((least - fixed) / (1 - EPSILON)))[0]
