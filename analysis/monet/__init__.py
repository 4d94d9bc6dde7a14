"""The figures and tables of ``experiment=monet`` from its rows; never runs a solver."""

from __future__ import annotations

from analysis.monet import implementations, overhead
from analysis.monet.bars import ablation, ten_percent
from analysis.monet.solving import records, solver_time
from analysis.parts import Report

REPORTS: dict[str, tuple[str, Report]] = {
    "overhead": ("overhead", overhead.report), "ablation": ("ablation", ablation),
    "ten_percent": ("ten_percent", ten_percent), "solver_time": ("overhead", solver_time),
    "records": ("records", records), "implementations": ("implementations", implementations.report),
}  # fmt: skip
