"""Solver times: first plan, 5 %, 1 % and proof; the published form of the MILP, the trimmed one, and ours."""

from __future__ import annotations

from typing import Any

from experiments.paper.graphs import Context, budgets_at, published_or_extracted
from experiments.solving import GraphRun, solve_each

FORMS = (
    ("published MILP", "checkmate_milp", {"formulation": "published"}),
    ("trimmed MILP", "checkmate_milp", {"formulation": "trimmed"}),
    ("portfolio", "portfolio", {}),
)
# [number of budgets] tenths of the way from the smallest budget to checkpoint-all's peak
SHARES = {1: (3,), 2: (2, 5), 3: (1, 3, 6), 4: (1, 3, 5, 7)}


def run(context: Context) -> dict[str, Any]:
    """Solve each network at a few budgets in each form, each time from nothing.

    The seed is another than a sweep's, because rows of a sweep start from the plans of smaller budgets.
    """
    asked: list[tuple[GraphRun, str, int]] = []
    of: list[dict[str, str]] = []
    for network in context.networks:
        subject = published_or_extracted(context, network)
        budgets: list[int] = []
        for label, strategy, options in FORMS:
            graph_run = context.graph_run(
                subject, "paper/solver_time", strategies=(strategy,), options={strategy: options},
                seed=context.settings.seed + 1,
            )  # fmt: skip
            budgets = budgets or budgets_at(graph_run, SHARES[context.scale.solver_points])
            asked += [(graph_run, strategy, budget) for budget in budgets]
            of += [{"form": label, "network": network.label}] * len(budgets)
    rows = [{"key": row.key, **entry} for row, entry in zip(solve_each(asked), of, strict=True)]
    return {"rows": rows}
