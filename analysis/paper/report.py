"""What runs made of parts have in common: reading the parts of a folder, and drawing all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from analysis.paper.page import Front, write_page
from analysis.paper.part import Part
from analysis.paper.tables import write_table
from analysis.results import read_json
from analysis.saving import save, style_context

Parts = list[tuple[str, Part]]


def read_parts(reports: Mapping[str, Callable[[Any, Path], Part]], folder: Path) -> Parts:
    """(name, part) of every report whose document the folder holds, in the order of `reports`.

    Figures want `analysis.saving.style_context`.

    Raises:
        InvalidInput: a file of the folder cannot be read.
    """
    return [
        (name, report(read_json(folder / f"{name}.json"), folder))
        for name, report in reports.items()
        if (folder / f"{name}.json").is_file()
    ]


def draw_parts(
    parts_of: Callable[[Path], Parts], folder: Path, head: Mapping[str, Any], front: Front | None = None
) -> list[Path]:
    """Write ``figures/``, ``tables/`` and ``page.html`` of every part that the folder holds; the files written."""
    written: list[Path] = []
    for sub in ("figures", "tables"):
        (folder / sub).mkdir(exist_ok=True)
    with style_context():
        parts = parts_of(folder)
        for _, part in parts:
            for file, _, figure in part.figures:
                written += save(figure, folder / "figures" / file)
            written += [write_table(table, folder / "tables" / f"{table.name}.csv") for table in part.tables]
    written.append(write_page(head, parts, folder, front))
    return written
