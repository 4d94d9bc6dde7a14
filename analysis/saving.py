"""Figures as files, drawn with the project's settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from analysis.style import RC
from remat.files import replacing


@contextmanager
def style_context() -> Iterator[None]:
    """The figures' settings; the user's matplotlibrc must not change them."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(RC)  # pyright: ignore[reportCallIssue, reportArgumentType] (its keys are literals)
        yield


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write PNG and PDF without dates, so that equal results give equal files; makes their folder."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    png, pdf = stem.with_suffix(".png"), stem.with_suffix(".pdf")
    with replacing(png) as scratch:
        figure.savefig(scratch, format="png", metadata={"Software": None})
    figure.set_layout_engine("none")  # the layout just computed serves the PDF as well
    with replacing(pdf) as scratch:
        figure.savefig(scratch, format="pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return [png, pdf]
