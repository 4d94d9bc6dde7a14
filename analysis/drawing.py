"""Draws everything about one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from analysis import matrices, memory, network, overhead
from analysis.choice import chosen_plan, store_all
from analysis.page import write_page
from analysis.panel import panel_of
from analysis.results import Run, load_run
from analysis.style import RC
from analysis.table import write_csv
from remat.files import replacing

FIGURES = ("overhead", "memory", "matrices", "network")


def draw_run(folder: Path) -> list[Path]:
    """See `analysis.draw_run`."""
    run = load_run(folder)
    written = [write_csv(run, folder / "table.csv")]
    target = folder / "figures"
    target.mkdir(exist_ok=True)
    drawn = set()
    with style_context():
        for name, figure in figures(run):
            written += save(figure, target / name)
            drawn.add(name)
    for name in FIGURES:  # what an earlier call drew and these results do not support
        if name not in drawn:
            for ending in (".png", ".pdf"):
                (target / name).with_suffix(ending).unlink(missing_ok=True)
    written.append(write_page(run, folder / "page.html"))
    return written


@contextmanager
def style_context() -> Iterator[None]:
    """The figures' settings; the user's matplotlibrc must not change them."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(RC)  # pyright: ignore[reportCallIssue, reportArgumentType] (its keys are literals)
        yield


def figures(run: Run) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every figure that the run's results support."""
    panel = panel_of(run)
    if panel is not None:
        yield "overhead", overhead.draw(panel, run)
    if run.graph is None:
        return
    shown = chosen_plan(run)
    if shown is not None:
        yield "memory", memory.draw(run.graph, shown, store_all(run.graph, str(shown.row.accounting)))
        if len(run.graph) <= matrices.MAX_OPERATIONS:
            yield "matrices", matrices.draw(run.graph, shown)
    yield "network", network.draw(run.graph)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write PNG and PDF without dates, so that equal results give equal files."""
    FigureCanvasAgg(figure)
    png, pdf = stem.with_suffix(".png"), stem.with_suffix(".pdf")
    with replacing(png) as scratch:
        figure.savefig(scratch, format="png", metadata={"Software": None})
    figure.set_layout_engine("none")  # the layout just computed serves the PDF as well
    with replacing(pdf) as scratch:
        figure.savefig(scratch, format="pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return [png, pdf]
