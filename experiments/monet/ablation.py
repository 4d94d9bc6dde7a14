"""The ablation: the portfolio, and MONeT's program, with the implementations of each level."""

from __future__ import annotations

from typing import Any

from experiments.monet.desk import JOINT, NO_WINOGRAD, Case, Desk
from remat.frontends.monet import LEVELS
from remat.programs.monet import estimate_columns


def run(desk: Desk) -> dict[str, Any]:
    """A row for each network, level and method at the smallest budgets."""
    cases = []
    levels = (*(JOINT if level == LEVELS[-1] else level for level in desk.levels), NO_WINOGRAD)
    for network in desk.networks:
        for budget in sorted(desk.budgets(network))[: desk.scale.ablation_budgets]:
            for level in levels:
                cases.append(Case(network.name, level, "portfolio", budget))
                if desk.scale.all_budgets and estimate_columns(desk.graph(network, level)) <= desk.scale.monet_columns:
                    cases.append(Case(network.name, level, "monet", budget))
    return {"rows": desk.solve(cases), "levels": list(levels)}
