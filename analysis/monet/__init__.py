"""Figures, tables and page of a run of ``experiment=paper/monet``; never runs a solver."""

from __future__ import annotations

from pathlib import Path

from analysis import parts
from analysis.monet import implementations, overhead
from analysis.monet.bars import ablation, ten_percent
from analysis.monet.solving import records, solver_time
from analysis.parts import Front, Part, Reports, draw_parts, read_parts
from analysis.results import read_json

REPORTS: Reports = {
    "overhead": overhead.report, "ablation": ablation, "ten_percent": ten_percent, "solver_time": solver_time,
    "records": records, "implementations": implementations.report,
}  # fmt: skip


def parts_of(folder: Path) -> list[tuple[str, Part]]:
    """(name, part) of every part of this run, see `analysis.parts.read_parts`."""
    return read_parts(REPORTS, folder)


def front(folder: Path) -> Front:
    """Title and first paragraphs of the page."""
    head = read_json(folder / "monet.json")
    scale, config = head["scale"], head["config"]
    joint = scale["time_limit_s"] * scale["joint_factor"]
    longer = "" if scale["joint_factor"] == 1 else f" ({joint:g} s for the portfolio's with implementations)"
    threads = f"{config['threads']} thread{'s' * (config['threads'] > 1)}"
    limit = f"{scale['time_limit_s']:g} s for each solve{longer}"
    return parts.front(__file__, scale=config["scale"], limit=limit, threads=threads, cores=head["cores"])


def draw_monet(folder: Path) -> list[Path]:
    """Draw every part of the run: ``figures/``, ``tables/`` and ``page.html``; returns the files written.

    Raises:
        InvalidInput: the folder is no run of this experiment, or a file of it cannot be read.
    """
    folder = Path(folder)
    return draw_parts(REPORTS, folder, read_json(folder / "monet.json"), front(folder))
