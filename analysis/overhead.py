"""Overhead against budget for every strategy (Fig. 5 of Checkmate, Jain et al., MLSys 2020).

`panel_of` gathers what is drawn; `draw` puts it on paper and `interactive` on the page, so that
both show the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from analysis.results import WITH_PLAN, Frame, Run
from analysis.scales import Scale, binary_scale, byte_scale
from analysis.style import GREY, LIGHT_GREY, PALE, Style, style_of

# Markers of the status strip: one glyph and what it means.
STRIP = {
    "OPTIMAL": "proven optimal", "FEASIBLE": "plan, not proven optimal", "NO_PLAN": "no plan fits",
    "INFEASIBLE": "proven infeasible", "TIMEOUT": "no plan in time", "SKIPPED": "does not apply", "FAILED": "failed",
}  # fmt: skip


# Where the best overheads are tiny beside the others', the axis is arcsinh(percent / this): linear
# near 0, logarithmic above. Otherwise it is linear.
KNEE_PERCENT = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One strategy: its solved rows, its steps if it is a family, all members.

    Attributes:
        rows: those with a plan.
        all_rows: every row, failures included.
        steps: (budget_bytes, overhead) corners of the cheapest member that fits, or None.
        members: (peak_bytes, overhead, parameters) of every member, or None.
    """

    strategy: str
    style: Style
    rows: Frame
    all_rows: Frame
    steps: tuple[np.ndarray, np.ndarray] | None
    members: Frame | None


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """What the figure shows.

    Attributes:
        x_range: bytes, left and right end of the axis.
        y_top: overhead at the top of the axis; what is above is named in a note.
        above: largest overhead of each strategy (by label) that goes on above the axis.
        is_bent: the axis is arcsinh, see `KNEE_PERCENT`.
        impossible_bytes: below it no plan exists (proven), or None.
        bound: (budget_bytes, overhead) of the best proven lower bound, or None if trivial.
        gpu_bytes: the GPU's memory if it lies on the axis.
    """

    curves: list[Curve]
    x_range: tuple[float, float]
    y_top: float
    above: dict[str, float]
    is_bent: bool
    scale: Scale
    impossible_bytes: int | None
    bound: tuple[np.ndarray, np.ndarray] | None
    gpu_bytes: int | None


def panel_of(run: Run) -> Panel | None:
    """What to draw, or None if no strategy has a plan."""
    planned = run.planned
    if not len(planned):
        return None
    curves = [_curve(run, strategy) for strategy in run.strategies]
    budgets = run.shown["budget_bytes"].astype(float).to_numpy()
    working_set = run.graph.largest_working_set()[0] if run.graph is not None else None
    proven = run.shown.loc[run.shown["status"] == "INFEASIBLE", "budget_bytes"]
    impossible = max([v for v in (working_set, *proven.tolist()) if v is not None], default=None)
    low = min(float(budgets.min()), float(impossible or budgets.min()))
    high = float(budgets.max())
    width = max(high - low, 0.02 * high)
    x_range = (max(0.0, low - 0.06 * width), high + 0.04 * width)
    gpu = run.gpu_memory_bytes
    if gpu is not None and high < gpu <= high + 0.15 * width:  # just outside: worth a little room
        x_range = (x_range[0], gpu + 0.03 * width)
    y_top, above = _y_top(curves, x_range)
    bent = _is_bent(curves, y_top)
    return Panel(
        curves, x_range, (1.3 if bent else 1.0) * y_top, above, bent, byte_scale(x_range[1]), impossible, _bound(run),
        gpu if gpu is not None and x_range[0] <= gpu <= x_range[1] else None,
    )  # fmt: skip


def _curve(run: Run, strategy: str) -> Curve:
    mine = run.shown[run.shown["strategy"] == strategy].sort_values("budget_bytes")
    rows = mine[mine["status"].isin(WITH_PLAN) & mine["cost"].notna()]
    members = run.families[run.families["strategy"] == strategy]
    if len(mine) and len(members):
        members = members[members["accounting"] == mine["accounting"].iloc[0]]
    if not len(members):
        return Curve(strategy, style_of(strategy), rows, mine, None, None)
    ordered = members.sort_values(["peak_bytes", "overhead"])
    peaks = ordered["peak_bytes"].astype(float).to_numpy()
    best = np.minimum.accumulate(ordered["overhead"].astype(float).to_numpy())
    corner = np.concatenate([[True], np.diff(best) < 0])
    return Curve(strategy, style_of(strategy), rows, mine, (peaks[corner], best[corner]), ordered)


def _y_top(curves: list[Curve], x_range: tuple[float, float]) -> tuple[float, dict[str, float]]:
    """(top of the axis, {label: largest overhead} of those beyond it).

    Room for all but outliers: one method at 900 % must not flatten all others.
    """
    largest = {}
    for curve in curves:
        seen = curve.rows["overhead"].astype(float).tolist()
        if curve.steps is not None:
            at, over = curve.steps
            seen += over[(at >= x_range[0]) & (at <= x_range[1])].tolist()
        if seen:
            largest[curve.style.label] = max(seen)
    positive = sorted(v for v in largest.values() if v > 0)
    if not positive:
        return 0.1, {}
    middle = positive[(len(positive) - 1) // 2]
    top = positive[0]
    for value in positive:  # up to the first gap beyond what most need
        if value > max(3 * middle, 0.3) and value > 1.6 * top:
            break
        top = value
    return 1.08 * top, {label: value for label, value in largest.items() if value > 1.08 * top}


def _is_bent(curves: list[Curve], y_top: float) -> bool:
    """Whether a linear axis would press the best plans onto zero."""
    over = [v for curve in curves for v in curve.rows["overhead"].astype(float).tolist() if v > 0]
    return bool(over) and y_top > 30 * min(over)


def bend(percent: Any) -> Any:
    """Height of an overhead on the bent axis."""
    return np.arcsinh(np.asarray(percent, dtype=float) / KNEE_PERCENT)


def ticks(panel: Panel) -> list[float]:
    """Tick positions of the bent axis, in per cent."""
    steps = [0.2, 0.5, *(m * 10**p for p in range(6) for m in (1, 2, 5))]
    return [0.0, *(t for t in steps if t <= 100 * panel.y_top)]


def _bound(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """Best lower bound per budget within the commonest scope; it holds for every smaller budget too."""
    rows = run.shown[run.shown["bound"].notna()]
    if not len(rows) or not run.total_cost:
        return None
    rows = rows[rows["scope"] == rows["scope"].mode().iloc[0]]
    best = rows.groupby("budget_bytes")["bound"].max().sort_index()
    at = best.index.to_numpy(dtype=float)
    over = np.maximum.accumulate(best.to_numpy(dtype=float)[::-1])[::-1] / run.total_cost - 1
    return (at, over) if over.max() > 1e-6 else None


def draw(panel: Panel, run: Run) -> Figure:
    """The figure for paper: curves above, a strip with every solve's status below."""
    n = len(panel.curves)
    strip_height = 0.17 * n + 0.1
    figure = Figure(figsize=(8.2, 4.1 + strip_height), layout="constrained")
    axes, strip = figure.subplots(2, 1, sharex=True, height_ratios=(4.0, strip_height))
    factor = panel.scale.factor
    for curve in panel.curves:
        _draw_curve(axes, curve, panel)
    if panel.bound is not None:
        at, over = panel.bound
        axes.step(at / factor, 100 * over, where="pre", color=GREY, lw=0.9, ls=(0, (1, 1.5)), zorder=1.5)
        axes.fill_between(at / factor, 0, 100 * over, step="pre", color=PALE, alpha=0.45, lw=0, zorder=0.5)
    for ax in (axes, strip):
        if panel.impossible_bytes is not None and panel.impossible_bytes > panel.x_range[0]:
            ax.axvspan(
                panel.x_range[0] / factor, panel.impossible_bytes / factor, facecolor="#F1F1F1",
                edgecolor="#CFCFCF", hatch="////", lw=0, zorder=0,
            )  # fmt: skip
        if panel.gpu_bytes is not None:
            ax.axvline(panel.gpu_bytes / factor, color=BLACK_LINE, lw=1.0, ls=(0, (5, 2)), zorder=2)
    if panel.is_bent:
        axes.set_yscale("asinh", linear_width=KNEE_PERCENT)
        axes.set_yticks(ticks(panel), [f"{t:g}" for t in ticks(panel)], minor=False)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(-0.12 * KNEE_PERCENT, 100 * panel.y_top)
    else:
        axes.set_ylim(-3 * panel.y_top, 100 * panel.y_top)
    axes.set_xlim(panel.x_range[0] / factor, panel.x_range[1] / factor)
    axes.set_ylabel("Compute overhead (%, arcsinh scale)" if panel.is_bent else "Compute overhead (%)")
    axes.tick_params(labelbottom=False)
    _binary_axis(axes, panel)
    if panel.gpu_bytes is not None:
        axes.annotate(
            f"{run.gpu_name} memory", (panel.gpu_bytes / factor, 1), xycoords=("data", "axes fraction"),
            xytext=(-3, -4), textcoords="offset points", rotation=90, ha="right", va="top", fontsize=7.5, color=GREY,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8},
        )  # fmt: skip
    _draw_strip(strip, panel)
    strip.set_xlabel(f"Memory budget ({panel.scale.unit}, everything included)")
    axes.set_title(run.title, loc="left", fontweight="bold")
    figure.legend(handles=_legend(panel), loc="outside right upper", handlelength=2.6, labelspacing=0.45)
    return figure


BLACK_LINE = "#222222"


def _draw_curve(axes: Axes, curve: Curve, panel: Panel) -> None:
    factor, style = panel.scale.factor, curve.style
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
        axes.step(np.append(at, max(at[-1], panel.x_range[1])) / factor, 100 * np.append(over, over[-1]),
                  where="post", alpha=0.9, zorder=2.5, **line)  # fmt: skip
    else:
        axes.plot(x, y, zorder=3, **line)
    proven = (rows["status"] == "OPTIMAL").to_numpy()
    for which, face in ((proven, style.colour), (~proven, "white")):
        axes.plot(x[which], y[which], ls="", marker=style.marker, ms=5.5 if style.marker != "*" else 8, mfc=face,
                  mec=style.colour, mew=1.1, zorder=4 if curve.steps is None else 3.5)  # fmt: skip


def _binary_axis(axes: Axes, panel: Panel) -> None:
    """The same budgets in GiB along the top."""
    binary = binary_scale(panel.scale)
    if binary.factor == panel.scale.factor:
        return
    ratio = panel.scale.factor / binary.factor
    top = axes.secondary_xaxis("top", functions=(lambda v: np.multiply(v, ratio), lambda v: np.divide(v, ratio)))
    top.set_xlabel(binary.unit, loc="right", labelpad=2, color=GREY)
    top.tick_params(colors=GREY)
    top.spines["top"].set_visible(True)
    top.spines["top"].set_color(LIGHT_GREY)


def _draw_strip(strip: Axes, panel: Panel) -> None:
    factor = panel.scale.factor
    for level, curve in enumerate(panel.curves):
        for status, group in curve.all_rows.groupby("status", sort=True):
            x = group["budget_bytes"].astype(float) / factor
            strip.plot(x, [level] * len(x), ls="", clip_on=False, zorder=3, **strip_marker(str(status), curve.style))
    strip.set_ylim(len(panel.curves) - 0.4, -0.6)
    strip.set_yticks(range(len(panel.curves)), [curve.style.label for curve in panel.curves], fontsize=7)
    strip.grid(visible=False)
    strip.tick_params(axis="y", length=0)


def strip_marker(status: str, style: Style) -> dict[str, Any]:
    """Filled: proven; hollow: plan; cross: no plan; and so on."""
    if status in WITH_PLAN:
        face = style.colour if status == "OPTIMAL" else "white"
        return {"marker": "o", "ms": 4.5, "mfc": face, "mec": style.colour, "mew": 1.0}
    shape = {"NO_PLAN": "x", "INFEASIBLE": "X", "TIMEOUT": "1", "SKIPPED": "_", "FAILED": "$F$"}.get(status, "$?$")
    return {"marker": shape, "ms": 4.5, "color": GREY if status != "FAILED" else "#C00000", "mew": 0.9}


def beyond(panel: Panel, label: str) -> str:
    """What to add to the label of a strategy that leaves the axis at the top."""
    return f" (↑ {100 * panel.above[label]:,.0f} %)" if label in panel.above else ""


def _legend(panel: Panel) -> list[Line2D | Patch]:
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=c.style.colour, ls=c.style.line, lw=c.style.width, marker=c.style.marker, ms=5,
               mfc="white", label=c.style.label + beyond(panel, c.style.label))
        for c in panel.curves if len(c.rows) or c.steps is not None
    ]  # fmt: skip
    handles.append(Line2D([], [], ls="", label=""))
    if any(c.members is not None for c in panel.curves):
        handles.append(Line2D([], [], ls="", marker="o", ms=2.6, color=GREY, alpha=0.5, label="member of a family"))
    handles.append(Line2D([], [], ls="", marker="o", ms=5, mfc=GREY, mec=GREY, label="filled: proven optimal"))
    handles.append(Line2D([], [], ls="", marker="o", ms=5, mfc="white", mec=GREY, label="hollow: not proven"))
    if panel.bound is not None:
        handles.append(Line2D([], [], color=GREY, lw=0.9, ls=(0, (1, 1.5)), label="proven lower bound"))
    if panel.impossible_bytes is not None and panel.impossible_bytes > panel.x_range[0]:
        handles.append(Patch(facecolor="#F1F1F1", edgecolor="#BBBBBB", hatch="////", lw=0, label="infeasible (proven)"))
    present = {s for c in panel.curves for s in c.all_rows["status"].unique()}
    handles += [
        Line2D([], [], ls="", label=words, **strip_marker(status, panel.curves[0].style))  # type: ignore[arg-type]
        for status, words in STRIP.items() if status in present and status not in WITH_PLAN
    ]  # fmt: skip
    return handles
