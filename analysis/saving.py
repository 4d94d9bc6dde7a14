"""Saves figures, drawn with the project's settings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from analysis.style import RC
from remat.files import replacing


def style_context() -> AbstractContextManager[None]:
    """The figures' settings; the user's matplotlibrc must not change them."""
    return style.context(RC, after_reset=True)  # pyright: ignore[reportArgumentType] (its keys are literals)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write PNG and PDF without dates, so that equal results give equal files; returns the paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    png, pdf = stem.with_suffix(".png"), stem.with_suffix(".pdf")
    with replacing(png) as scratch:
        figure.savefig(scratch, format="png", metadata={"Software": None})
    figure.set_layout_engine("none")  # the PDF keeps the layout of the PNG
    with replacing(pdf) as scratch:
        figure.savefig(scratch, format="pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return [png, pdf]


def save_in_run(folder: Path, name: str, draw: Callable[[], Figure]) -> list[Path]:
    """Draw a figure of a run into its folder, as ``figures/<name>.png`` and ``.pdf``; returns the paths."""
    with style_context():
        return save(draw(), folder / "figures" / name)
