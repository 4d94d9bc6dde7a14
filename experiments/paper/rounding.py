"""Two-phase rounding: thresholds against random samples, beside the optimum, at one budget of each network."""

from __future__ import annotations

import math
from typing import Any

from experiments.budget_sweep import sweep_budgets
from experiments.paper.graphs import Context, published_or_extracted, remember, write_run_folder
from experiments.paper.naive_rounding import count_feasible
from experiments.solving import GraphRun
from remat import min_budget

EPSILON = 0.1  # of the budget, as published
SHARE = 3  # of 10 steps from the smallest budget to checkpoint-all's peak
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
        samples = context.scale.naive_samples
        limit = graph_run.settings.time_limit_s
        determines = {"part": "naive rounding", "graph": subject.graph.sha256(), "budget": budget, "samples": samples,
                      "seed": graph_run.settings.seed, "limit": limit}  # fmt: skip

        def naive(
            graph_run: GraphRun = graph_run, budget: int = budget, samples: int = samples, limit: float = limit
        ) -> Any:
            return count_feasible(graph_run.subject.graph, budget, samples, graph_run.settings.seed, limit)

        shown.append({"folder": name, "label": network.label, "naive_samples": samples,
                      "naive_feasible": remember(context, determines, naive)})  # fmt: skip
    return {"panels": shown}


def rounding_budget(graph_run: GraphRun) -> int:
    """`middle_budget` among those whose relaxation, with the published epsilon taken off, can have a solution."""
    fixed = graph_run.subject.graph.fixed_bytes
    least = min_budget(graph_run.subject.graph, graph_run.settings.scope).bytes
    within = fixed + math.ceil((least - fixed) / (1 - EPSILON))
    return sweep_budgets(within, graph_run.store_all_peak_bytes, 11)[SHARE]


def middle_budget(graph_run: GraphRun, share: int = SHARE) -> int:
    """A budget where there is something to decide: `share` tenths of the way to checkpoint-all's peak."""
    least = min_budget(graph_run.subject.graph, graph_run.settings.scope).bytes
    return sweep_budgets(least, graph_run.store_all_peak_bytes, 11)[share]
