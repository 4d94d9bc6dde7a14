"""The paper's figures, tables and page from a run folder of ``experiment=paper``; never runs a solver."""

from __future__ import annotations

import importlib
from pathlib import Path

from analysis.drawing import save, style_context
from analysis.paper.page import write_page
from analysis.paper.part import Part
from analysis.paper.tables import write_table
from analysis.results import read_json

ORDER = (
    "fig5", "fig6", "throughput", "table2", "stages", "rounding", "solver_time", "memory", "cost_models", "claims",
)  # fmt: skip

__all__ = ["draw_paper", "parts_of"]


def parts_of(folder: Path) -> list[tuple[str, Part]]:
    """(name, part) of every part that the folder holds; figures want `analysis.drawing.style_context`.

    Raises:
        InvalidInput: a file of the folder cannot be read.
    """
    return [
        (name, importlib.import_module(f"analysis.paper.{name}").report(read_json(folder / f"{name}.json"), folder))
        for name in ORDER
        if (folder / f"{name}.json").is_file()
    ]


def draw_paper(folder: Path) -> list[Path]:
    """Draw every part that the folder holds: ``figures/``, ``tables/`` and ``page.html``; the files written.

    Raises:
        InvalidInput: the folder is no run of the paper, or a file of it cannot be read.
    """
    folder = Path(folder)
    head = read_json(folder / "paper.json")
    written: list[Path] = []
    for sub in ("figures", "tables"):
        (folder / sub).mkdir(exist_ok=True)
    with style_context():
        parts = parts_of(folder)
        for _, part in parts:
            for file, _, figure in part.figures:
                written += save(figure, folder / "figures" / file)
            written += [write_table(table, folder / "tables" / f"{table.name}.csv") for table in part.tables]
    written.append(write_page(head, parts, folder))
    return written
