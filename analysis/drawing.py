"""Draws the table, the figures and the page of one run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from analysis import matrices, memory, network, overhead
from analysis.charts import save, style_context
from analysis.overhead_data import overhead_data
from analysis.page import write_page
from analysis.results import Run, load_run
from analysis.shown_plans import chosen_plan, store_all
from analysis.table import write_csv

FIGURES = ("overhead", "memory", "matrices", "network")


def draw_run(folder: Path) -> list[Path]:
    """See `analysis.draw_run`."""
    run = load_run(folder)
    written = [write_csv(run, folder / "table.csv")]
    target = folder / "figures"
    drawn = set()
    with style_context():
        for name, figure in figures(run):
            written += save(figure, target / name)
            drawn.add(name)
    for name in set(FIGURES) - drawn:  # an earlier call drew it, but these results do not support it
        for ending in (".png", ".pdf"):
            (target / name).with_suffix(ending).unlink(missing_ok=True)
    written.append(write_page(run, folder / "page.html"))
    return written


def figures(run: Run) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every figure that the run's results support."""
    data = overhead_data(run)
    if data is not None:
        yield "overhead", overhead.draw(data, run)
    if run.graph is None:
        return
    shown = chosen_plan(run)
    if shown is not None:
        yield "memory", memory.draw(run.graph, shown, store_all(run.graph, str(shown.row.accounting)))
        if len(run.graph) <= matrices.MAX_OPERATIONS:
            yield "matrices", matrices.draw(run.graph, shown)
    yield "network", network.draw(run.graph)
