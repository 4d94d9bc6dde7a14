"""Overhead against budget for every strategy (Fig. 5 of Checkmate, Jain et al., MLSys 2020), for print."""

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from analysis.overhead_data import KNEE_PERCENT, Curve, OverheadData, beyond, covered, ticks, widest_gap
from analysis.results import WITH_PLAN, Run
from analysis.scales import binary_scale
from analysis.style import GREY, LIGHT_GREY, PALE, Style, order_of

STRIP = {  # [status] its words in legends
    "OPTIMAL": "proven optimal", "FEASIBLE": "plan, not proven optimal", "NO_PLAN": "no plan fits",
    "INFEASIBLE": "proven infeasible", "TIMEOUT": "no plan in time", "SKIPPED": "does not apply", "FAILED": "failed",
}  # fmt: skip
BLACK_LINE = "#222222"


def draw(data: OverheadData, run: Run) -> Figure:
    """The printed figure: curves above, a strip with the status of every solve below."""
    n = len(data.curves)
    strip_height = 0.17 * n + 0.1
    figure = Figure(figsize=(9.4, 4.1 + strip_height), layout="constrained")
    axes, strip = figure.subplots(2, 1, sharex=True, height_ratios=(4.0, strip_height))
    draw_axes(axes, data, run)
    _shade_impossible(strip, data)
    axes.tick_params(labelbottom=False)
    _draw_strip(strip, data)
    strip.set_xlabel(f"Memory budget ({data.scale.unit}, everything included)")
    axes.set_title(run.title, loc="left", fontweight="bold", parse_math=False)
    handles = [*legend([data]), *strip_legend(data)]
    place_legend(figure, handles)
    return figure


def place_legend(figure: Figure, handles: Sequence[Line2D | Patch]) -> None:
    """A legend on the right; the figure becomes as high as the legend where it is not."""
    spacing = 0.45
    lines = sum(1 + str(handle.get_label()).count("\n") for handle in handles)
    lines_in = lines * (1.03 + spacing) * mpl.rcParams["legend.fontsize"] / 72
    figure.set_figheight(max(figure.get_figheight(), lines_in + 0.25))
    figure.legend(handles=handles, loc="outside right upper", handlelength=2.6, labelspacing=spacing)


def draw_axes(axes: Axes, data: OverheadData, run: Run) -> None:
    """Draw the curves and their axes, without title, strip and legend."""
    factor = data.scale.factor
    for curve in data.curves:
        _draw_curve(axes, curve, data)
    if data.bound is not None:
        at, over = data.bound
        axes.step(at / factor, 100 * over, where="pre", color=GREY, lw=0.9, ls=(0, (1, 1.5)), zorder=1.5)
        axes.fill_between(at / factor, 0, 100 * over, step="pre", color=PALE, alpha=0.45, lw=0, zorder=0.5)
    _shade_impossible(axes, data)
    if data.is_bent:
        axes.set_yscale("asinh", linear_width=KNEE_PERCENT)
        axes.set_yticks(ticks(data), [f"{t:g}" for t in ticks(data)], minor=False)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(-0.12 * KNEE_PERCENT, 100 * data.y_top)
    else:
        axes.set_ylim(-3 * data.y_top, 100 * data.y_top)
    axes.set_xlim(data.x_range[0] / factor, data.x_range[1] / factor)
    axes.set_ylabel("Compute overhead (%, arcsinh scale)" if data.is_bent else "Compute overhead (%)")
    _binary_axis(axes, data)
    if data.gpu_bytes is not None:
        axes.annotate(
            f"{run.gpu_name} memory", (data.gpu_bytes / factor, widest_gap(data, data.gpu_bytes)),
            xycoords=("data", "axes fraction"), xytext=(-3, 0), textcoords="offset points", rotation=90, ha="right",
            va="center", fontsize=7.5, color=GREY, zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8},
        )  # fmt: skip


def _shade_impossible(axes: Axes, data: OverheadData) -> None:
    """Hatch the budgets that no plan can meet, and mark the memory of the GPU."""
    factor = data.scale.factor
    if data.impossible_bytes is not None:
        axes.axvspan(
            data.x_range[0] / factor, data.impossible_bytes / factor, facecolor="#F1F1F1", edgecolor="#CFCFCF",
            hatch="////", lw=0, zorder=0,
        )  # fmt: skip
    if data.gpu_bytes is not None:
        axes.axvline(data.gpu_bytes / factor, color=BLACK_LINE, lw=1.0, ls=(0, (5, 2)), zorder=2)


def _draw_curve(axes: Axes, curve: Curve, data: OverheadData) -> None:
    factor, style = data.scale.factor, curve.style
    line = {"color": style.colour, "lw": style.width, "ls": style.line}
    if curve.members is not None:
        axes.plot(
            curve.members["peak_bytes"].astype(float) / factor, 100 * curve.members["overhead"].astype(float),
            ls="", marker=style.marker, ms=2.6, mfc=style.colour, mec="none", alpha=0.35, zorder=2,
        )  # fmt: skip
    rows = curve.rows
    x, y = rows["budget_bytes"].astype(float) / factor, 100 * rows["overhead"].astype(float)
    if curve.steps is not None:
        at, over = curve.steps
        axes.step(np.append(at, max(at[-1], data.x_range[1])) / factor, 100 * np.append(over, over[-1]),
                  where="post", alpha=0.9, zorder=2.5, **line)  # fmt: skip
    elif len(rows):  # a plan fits every larger budget too
        right = max(x.max(), data.x_range[1] / factor)
        axes.step(np.append(x, right), np.append(y, y.iloc[-1]), where="post", zorder=3, **line)
    proven = (rows["status"] == "OPTIMAL").to_numpy()
    for mask, face in ((proven, style.colour), (~proven, "white")):
        axes.plot(x[mask], y[mask], ls="", marker=style.marker, ms=5.5 if style.marker != "*" else 8, mfc=face,
                  mec=style.colour, mew=1.1, zorder=4 if curve.steps is None else 3.5)  # fmt: skip


def _binary_axis(axes: Axes, data: OverheadData) -> None:
    """Show the same budgets in GiB along the top."""
    binary = binary_scale(data.scale)
    if binary.factor == data.scale.factor:
        return
    ratio = data.scale.factor / binary.factor
    top = axes.secondary_xaxis("top", functions=(lambda v: np.multiply(v, ratio), lambda v: np.divide(v, ratio)))
    top.set_xlabel(binary.unit, loc="right", labelpad=2, color=GREY)
    top.tick_params(colors=GREY)
    top.spines["top"].set_visible(True)
    top.spines["top"].set_color(LIGHT_GREY)


def _draw_strip(strip: Axes, data: OverheadData) -> None:
    factor = data.scale.factor
    for level, curve in enumerate(data.curves):
        for status, group in curve.all_rows.groupby("status", sort=True):
            x = group["budget_bytes"].astype(float) / factor
            strip.plot(x, [level] * len(x), ls="", clip_on=False, zorder=3, **strip_marker(str(status), curve.style))
    strip.set_ylim(len(data.curves) - 0.4, -0.6)
    strip.set_yticks(range(len(data.curves)), [curve.style.label for curve in data.curves], fontsize=7)
    strip.grid(visible=False)
    strip.tick_params(axis="y", length=0)


def strip_marker(status: str, style: Style) -> dict[str, Any]:
    """How a status is drawn: filled if proven, hollow for any other plan, and a sign without a plan."""
    if status in WITH_PLAN:
        face = style.colour if status == "OPTIMAL" else "white"
        return {"marker": "o", "ms": 4.5, "mfc": face, "mec": style.colour, "mew": 1.0}
    shape = {"NO_PLAN": "x", "INFEASIBLE": "X", "TIMEOUT": "1", "SKIPPED": "_", "FAILED": "$F$"}.get(status, "$?$")
    return {"marker": shape, "ms": 4.5, "color": GREY if status != "FAILED" else "#C00000", "mew": 0.9}


def legend(several: Sequence[OverheadData]) -> list[Line2D | Patch]:
    """One handle for each thing that these figures show."""
    shown = [c for data in several for c in data.curves if len(c.rows) or c.steps is not None]
    curves, hidden = {c.strategy: c for c in shown}, covered(several)
    names = sorted(curves, key=order_of)
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=c.style.colour, ls=c.style.line, lw=c.style.width, marker=c.style.marker, ms=5,
               mfc="white", label=c.style.label + beyond(several, c.style.label))
        for c in (curves[name] for name in names if name not in hidden)
    ]  # fmt: skip
    if hidden:
        under = ", ".join(curves[name].style.label for name in names if name in hidden)
        handles.append(Line2D([], [], ls="", label=textwrap.fill(f"(under it: {under})", 34)))
    handles.append(Line2D([], [], ls="", label=""))
    if any(c.members is not None for c in shown):
        handles.append(Line2D([], [], ls="", marker="o", ms=2.6, color=GREY, alpha=0.5, label="member of a family"))
    handles.append(
        Line2D([], [], ls="", marker="o", ms=5, mfc=GREY, mec=GREY, label="filled: proven optimal, by any strategy")
    )
    handles.append(Line2D([], [], ls="", marker="o", ms=5, mfc="white", mec=GREY, label="hollow: not proven"))
    if any(data.bound is not None for data in several):
        handles.append(Line2D([], [], color=GREY, lw=0.9, ls=(0, (1, 1.5)), label="proven lower bound"))
    if any(data.impossible_bytes is not None for data in several):
        handles.append(Patch(facecolor="#F1F1F1", edgecolor="#BBBBBB", hatch="////", lw=0, label="infeasible (proven)"))
    return handles


def strip_legend(data: OverheadData) -> list[Line2D]:
    """Handles of the strip's markers for solves without a plan."""
    present = {s for c in data.curves for s in c.all_rows["status"].unique()}
    return [
        Line2D([], [], ls="", label=words, **strip_marker(status, data.curves[0].style))  # type: ignore[arg-type]
        for status, words in STRIP.items() if status in present and status not in WITH_PLAN
    ]  # fmt: skip
