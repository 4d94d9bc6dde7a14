"""The ablation: the portfolio, and MONeT's program, with the implementations of each level."""

from __future__ import annotations

from typing import Any

from experiments.monet.cases import (
    CONV,
    NO_WINOGRAD,
    NONE,
    OURS,
    PROGRAM,
    WINOGRAD,
    Case,
    Context,
    budgets_of,
    graph_of,
    solve,
)
from remat.frontends.monet import LEVELS
from remat.programs.monet import estimate_columns


def run(context: Context) -> dict[str, Any]:
    """A row for each network, level and method at the smallest budgets that default implementations can meet."""
    cases, scale = [], context.scale
    levels = tuple({LEVELS[-1]: NO_WINOGRAD}.get(level, level) for level in scale.levels)
    for network in context.networks:
        own = [level for level in levels if level != CONV or network.name in WINOGRAD]
        default = graph_of(context, network, NONE)
        least = default.largest_working_set()[0]  # below it the levels have no plans to compare
        for budget in sorted(b for b in budgets_of(context, network) if b >= least)[: scale.ablation_budgets]:
            for level in own:
                cases.append(Case(network.name, level, OURS, budget))
                if scale.all_budgets and estimate_columns(graph_of(context, network, level)) <= scale.monet_columns:
                    cases.append(Case(network.name, level, PROGRAM, budget))
    return {"rows": solve(context, cases), "levels": list(levels)}
