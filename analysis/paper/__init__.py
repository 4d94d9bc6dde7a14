"""The figures and tables of ``experiment=paper`` from its rows; never runs a solver."""

from analysis.paper import claims
from analysis.paper.sizes import fig6, memory_part, throughput
from analysis.paper.solving import rounding, solver_time, stages
from analysis.paper.sweeps import cost_models, fig5, table2
from analysis.parts import Report

REPORTS: dict[str, tuple[str, Report]] = {
    "fig5": ("fig5", fig5), "fig6": ("fig6", fig6), "throughput": ("throughput", throughput),
    "table2": ("fig5", table2), "stages": ("stages", stages), "rounding": ("rounding", rounding),
    "solver_time": ("solver_time", solver_time), "memory": ("memory", memory_part),
    "cost_models": ("cost_models", cost_models), "claims": ("fig5", claims.report),
}  # fmt: skip
