"""The paper's figures, tables and page from a run folder of ``experiment=paper``; never runs a solver."""

from __future__ import annotations

from pathlib import Path

from analysis.paper.report import Parts, draw_parts, read_parts
from analysis.results import read_json

ORDER = (
    "fig5", "fig6", "throughput", "table2", "stages", "rounding", "solver_time", "memory", "cost_models", "claims",
)  # fmt: skip

__all__ = ["draw_paper", "parts_of"]


def parts_of(folder: Path) -> Parts:
    """What `analysis.paper.report.read_parts` finds of this run."""
    return read_parts("analysis.paper", ORDER, folder)


def draw_paper(folder: Path) -> list[Path]:
    """Draw every part that the folder holds: ``figures/``, ``tables/`` and ``page.html``; the files written.

    Raises:
        InvalidInput: the folder is no run of the paper, or a file of it cannot be read.
    """
    folder = Path(folder)
    return draw_parts(parts_of, folder, read_json(folder / "paper.json"))
