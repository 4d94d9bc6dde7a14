"""Figures, tables and page of a run of ``experiment=paper/monet``; never runs a solver."""

from __future__ import annotations

import importlib
from pathlib import Path

from analysis.drawing import save, style_context
from analysis.paper.page import Front, write_page
from analysis.paper.part import Part
from analysis.paper.tables import write_table
from analysis.results import read_json

ORDER = ("overhead", "ablation", "ten_percent", "solver_time", "records", "implementations")

__all__ = ["draw_monet", "front", "parts_of"]


def parts_of(folder: Path) -> list[tuple[str, Part]]:
    """(name, part) of every part that the folder holds; figures want `analysis.drawing.style_context`.

    Raises:
        InvalidInput: a file of the folder cannot be read.
    """
    return [
        (name, importlib.import_module(f"analysis.monet.{name}").report(read_json(folder / f"{name}.json"), folder))
        for name in ORDER
        if (folder / f"{name}.json").is_file()
    ]


def front(folder: Path) -> Front:
    """Title and first paragraphs of the page."""
    head = read_json(folder / "monet.json")
    scale, config = head["scale"], head["config"]
    joint = scale["time_limit_s"] * scale["joint_factor"]
    longer = "" if scale["joint_factor"] == 1 else f" ({joint:g} s for the portfolio's with implementations)"
    lead = (
        f"scale={config['scale']}: {scale['time_limit_s']:g} s for each solve{longer}, {config['threads']} thread"
        f"{'s' * (config['threads'] > 1)} each, {head['cores']} cores here. Memory is in GiB (2^30 bytes), as in the "
        "published tables, which say GB. Overhead is against one pass of the default implementations."
    )
    notes = (
        "Costs of default implementations are those published for a P100 where the page says so, else a roofline's. "
        "Costs of all other implementations are modelled: the default's times a ratio of rooflines. Above all, "
        "those of Winograd convolutions were never measured and flatter them; results without them are beside.",
        "Marks: [code] read in the authors' code or tables; [data] computed again from a published file.",
    )
    return Front("MONeT reproduced", "Shah et al., ICLR 2021: what was published, what this project gets, and why "
                 "they differ.", (lead,), notes)  # fmt: skip


def draw_monet(folder: Path) -> list[Path]:
    """Draw every part that the folder holds: ``figures/``, ``tables/`` and ``page.html``; the files written.

    Raises:
        InvalidInput: the folder is no run of this experiment, or a file of it cannot be read.
    """
    folder = Path(folder)
    head, first = read_json(folder / "monet.json"), front(folder)
    written: list[Path] = []
    for sub in ("figures", "tables"):
        (folder / sub).mkdir(exist_ok=True)
    with style_context():
        parts = parts_of(folder)
        for _, part in parts:
            for file, _, figure in part.figures:
                written += save(figure, folder / "figures" / file)
            written += [write_table(table, folder / "tables" / f"{table.name}.csv") for table in part.tables]
    written.append(write_page(head, parts, folder, first))
    return written
