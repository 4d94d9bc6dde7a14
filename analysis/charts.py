"""What all figures share: panels, curves and points, heatmaps, the legend below them, and their files."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from analysis.style import BLACK
from remat.files import replacing


def style_context() -> AbstractContextManager[None]:
    """The figures' settings; the user's matplotlibrc must not change them."""
    return style.context(Path(__file__).with_name("figures.mplstyle"), after_reset=True)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write PNG and PDF without dates, so that equal results give equal files; returns the paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    png, pdf = stem.with_suffix(".png"), stem.with_suffix(".pdf")
    with style_context(), replacing(png) as scratch:
        figure.savefig(scratch, format="png", metadata={"Software": None})
    figure.set_layout_engine("none")  # the PDF keeps the layout of the PNG
    with style_context(), replacing(pdf) as scratch:
        figure.savefig(scratch, format="pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return [png, pdf]


def panels(
    n: int, size: tuple[float, float], columns: int | None = None, *, xlabel: str = "", ylabel: str = "", **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with `n` panels of `size` inches; the outer ones have the labels.

    Args:
        columns: panels beside each other; None: all.
        shared: arguments of `Figure.subplots`.
    """
    across = max(1, min(n, columns or n))
    lines = max(1, -(-n // across))
    figure = Figure(figsize=(across * size[0] + 0.4, lines * size[1] + 0.6), layout="constrained")
    grid = figure.subplots(lines, across, squeeze=False, **shared).ravel()
    for i, axes in enumerate(grid[:n]):
        axes.set(xlabel=xlabel if i + across >= n else "", ylabel=ylabel if i % across == 0 else "")
        if i + across >= n:  # also above an empty place, where shared axes would have none
            axes.tick_params(labelbottom=True)
    for axes in grid[n:]:
        axes.set_axis_off()
    return figure, list(grid[:n])


def points(
    axes: Axes, found: Iterable[Sequence[float]], colour: str, marker: str = "", line: Any = "", *,
    label: str | None = None, size: float = 5.0, **more: Any,
) -> None:  # fmt: skip
    """Draw (x, y) or, with quartiles, (x, y, lower, upper) of each point; without points the legend has no entry.

    Args:
        line: between the points; '' for none.
        more: arguments of `Axes.plot`.
    """
    known = [*found]
    if not known:
        return
    x, y = np.array([point[:2] for point in known], dtype=float).T
    looks = {"color": colour, "marker": marker, "ls": line, "ms": 1.5 * size if marker == "*" else size, "lw": 1.2}
    if all(len(point) == 2 for point in known):
        axes.plot(x, y, label=label, **looks | more)
        return
    low, high = np.array([point[2:] or (point[1], point[1]) for point in known], dtype=float).T
    axes.errorbar(x, y, yerr=np.maximum(0.0, [y - low, high - y]), elinewidth=0.9, label=label, **looks | more)


def legend_below(figure: Figure, columns: int | None = None, **more: Any) -> None:
    """A legend of everything with a label in any panel, each once."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns or len(handles),
                      **more)  # fmt: skip


def log_numbers(axis: Axis, *subs: float) -> None:
    """Plain numbers on a logarithmic axis: at `subs` times the powers of ten."""
    axis.set_major_locator(LogLocator(subs=subs or (1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def mark_break(axes: Axes) -> None:
    """Show that the vertical axis does not begin at zero: two strokes across its foot."""
    strokes: dict[str, Any] = {"transform": axes.transAxes, "color": BLACK, "lw": 1.0, "clip_on": False}
    for height in (0.012, 0.032):
        axes.plot((-0.014, 0.014), (height - 0.012, height + 0.012), **strokes)


def heatmap(
    axes: Axes, values: np.ndarray, texts: np.ndarray | None, rows: Sequence[str], columns: Sequence[str],
    *, colours: str, top: float,
) -> None:  # fmt: skip
    """Draw values [rows, columns] from 0 to `top` as colours, with their texts in the cells; NaN is an empty cell."""
    import seaborn as sns  # late: it loads SciPy's statistics, which takes a second

    labels = {"xlabel": axes.get_xlabel(), "ylabel": axes.get_ylabel()}  # seaborn removes them
    sns.heatmap(values, annot=texts, fmt="", cmap=colours, vmin=0, vmax=top, cbar=False, annot_kws={"fontsize": 7},
                xticklabels=list(columns), yticklabels=list(rows), ax=axes)  # fmt: skip
    axes.tick_params(axis="y", labelrotation=0)
    axes.set(**labels)
    axes.grid(visible=False)
