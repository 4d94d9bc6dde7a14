"""Solver times: first plan, 5 %, 1 % and proof; the published form of the MILP against the trimmed one and ours."""

from __future__ import annotations

from typing import Any

from experiments.budget_sweep import sweep_budgets
from experiments.paper.graphs import Context, published_or_extracted
from experiments.solving import GraphRun, solve_each
from remat import min_budget

FORMS = (
    ("published MILP", "checkmate_milp", {"formulation": "published"}),
    ("trimmed MILP", "checkmate_milp", {"formulation": "trimmed"}),
    ("portfolio", "portfolio", {}),
)
SHARES = {1: (3,), 2: (2, 5), 4: (1, 3, 5, 7)}  # of 10 steps from the smallest budget to checkpoint-all's peak


def run(context: Context) -> dict[str, Any]:
    """Solve each network at a few budgets in each form, each time from nothing.

    With a seed of their own, so that rows of a sweep, which start from the plans of smaller budgets, are not taken.
    """
    asked: list[tuple[GraphRun, str, int]] = []
    of: list[dict[str, str]] = []
    for network in context.networks:
        subject = published_or_extracted(context, network)
        least = min_budget(subject.graph, context.settings.scope).bytes
        for label, strategy, options in FORMS:
            graph_run = context.graph_run(
                subject, "paper/solver_time", strategies=(strategy,), options={strategy: options},
                seed=context.settings.seed + 1,
            )  # fmt: skip
            steps = sweep_budgets(least, graph_run.store_all_peak_bytes, 11)
            for share in SHARES[context.scale.solver_points]:
                budget = steps[min(share, len(steps) - 1)]
                asked.append((graph_run, strategy, budget))
                of.append({"form": label, "network": network.label})
    rows = [{"key": row.key, **entry} for row, entry in zip(solve_each(asked), of, strict=True)]
    return {"rows": rows, "store": context.store_from(context.folder)}
