"""The paper's figures, tables and page from a run folder of ``experiment=paper``; never runs a solver."""

from __future__ import annotations

from pathlib import Path

from analysis.paper import claims, cost_models, memory
from analysis.paper.batches import fig6, throughput
from analysis.paper.solving import rounding, solver_time, stages
from analysis.paper.sweeps import fig5, table2
from analysis.parts import Part, Reports, draw_parts, front, read_parts
from analysis.results import read_json

REPORTS: Reports = {
    "fig5": fig5, "fig6": fig6, "throughput": throughput, "table2": table2, "stages": stages, "rounding": rounding,
    "solver_time": solver_time, "memory": memory.report, "cost_models": cost_models.report, "claims": claims.report,
}  # fmt: skip


def parts_of(folder: Path) -> list[tuple[str, Part]]:
    """(name, part) of every part of this run, see `analysis.parts.read_parts`."""
    return read_parts(REPORTS, folder)


def draw_paper(folder: Path) -> list[Path]:
    """Draw every part of the run: ``figures/``, ``tables/`` and ``page.html``; returns the files written.

    Raises:
        InvalidInput: the folder is no run of the paper, or a file of it cannot be read.
    """
    head = read_json(Path(folder) / "paper.json")
    config = head["config"]
    first = front(__file__, name=config["scale"], cores=head["cores"], gpu=config["gpu"].get("name"), **head["scale"])
    return draw_parts(REPORTS, Path(folder), head, first)
