"""Figures, tables and page of a run of ``experiment=paper/monet``; never runs a solver."""

from __future__ import annotations

from pathlib import Path

from analysis.monet import ablation, implementations, overhead, records, solver_time, ten_percent
from analysis.paper.page import Front
from analysis.paper.report import Parts, draw_parts, read_parts
from analysis.results import read_json

REPORTS = {
    "overhead": overhead.report,
    "ablation": ablation.report,
    "ten_percent": ten_percent.report,
    "solver_time": solver_time.report,
    "records": records.report,
    "implementations": implementations.report,
}

__all__ = ["draw_monet", "front", "parts_of"]


def parts_of(folder: Path) -> Parts:
    """What `analysis.paper.report.read_parts` finds of this run."""
    return read_parts(REPORTS, folder)


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
    return draw_parts(parts_of, folder, head, first)
