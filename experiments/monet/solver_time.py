"""Solver time: when the solves of `overhead` found good plans; this part solves nothing."""

from __future__ import annotations

from typing import Any

from experiments.monet.cases import CPU, NO_WINOGRAD, OURS, PROGRAM, Context, entry


def run(context: Context) -> dict[str, Any]:
    """The rows of MONeT's program and the portfolio on graphs with implementations, at the run's budgets."""
    rows = [
        entry(case, row)
        for case, row in context.rows.items()
        if case.level in (NO_WINOGRAD, CPU) and case.strategy in (OURS, PROGRAM) and case.cost_cap is None
    ]
    return {"rows": rows}
