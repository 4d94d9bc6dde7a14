"""The paper's figures, tables and page from a run folder of ``experiment=paper``; never runs a solver."""

from __future__ import annotations

from pathlib import Path

from analysis.paper import claims, cost_models, fig5, fig6, memory, rounding, solver_time, stages, table2, throughput
from analysis.paper.report import Parts, draw_parts, read_parts
from analysis.results import read_json

REPORTS = {
    "fig5": fig5.report,
    "fig6": fig6.report,
    "throughput": throughput.report,
    "table2": table2.report,
    "stages": stages.report,
    "rounding": rounding.report,
    "solver_time": solver_time.report,
    "memory": memory.report,
    "cost_models": cost_models.report,
    "claims": claims.report,
}

__all__ = ["draw_paper", "parts_of"]


def parts_of(folder: Path) -> Parts:
    """What `analysis.paper.report.read_parts` finds of this run."""
    return read_parts(REPORTS, folder)


def draw_paper(folder: Path) -> list[Path]:
    """Draw every part that the folder holds: ``figures/``, ``tables/`` and ``page.html``; the files written.

    Raises:
        InvalidInput: the folder is no run of the paper, or a file of it cannot be read.
    """
    folder = Path(folder)
    return draw_parts(parts_of, folder, read_json(folder / "paper.json"))
