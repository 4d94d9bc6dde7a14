"""The figures and tables of ``experiment=paper`` from its rows; never runs a solver."""

from __future__ import annotations

from analysis.paper import claims, cost_models, memory
from analysis.paper.batches import fig6, throughput
from analysis.paper.solving import rounding, solver_time, stages
from analysis.paper.sweeps import fig5, table2
from analysis.parts import Report

REPORTS: dict[str, tuple[str, Report]] = {
    "fig5": ("fig5", fig5), "fig6": ("fig6", fig6), "throughput": ("throughput", throughput),
    "table2": ("fig5", table2), "stages": ("stages", stages), "rounding": ("rounding", rounding),
    "solver_time": ("solver_time", solver_time), "memory": ("memory", memory.report),
    "cost_models": ("cost_models", cost_models.report), "claims": ("fig5", claims.report),
}  # fmt: skip
