"""The numbers of the overhead figure, for print and for the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.results import WITH_PLAN, Frame, Run
from analysis.scales import Scale, byte_scale
from analysis.style import Style, style_of
from remat.incumbent import GAP_TOLERANCE

# If the best overheads are tiny beside the others, the axis is arcsinh(percent / this): linear near 0,
# logarithmic above. Otherwise it is linear.
KNEE_PERCENT = 0.5
COVERED = 0.008  # marks nearer than this share of the axis's height lie on each other


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The results of one strategy.

    Attributes:
        rows: the rows with a plan.
        all_rows: all rows, failures included. A plan that the bound of any strategy proves optimal has that status.
        steps: of a family, the corners (budget_bytes, overhead) of the cheapest member that fits; else None.
        members: of a family, (peak_bytes, overhead, parameters) of every member; else None.
    """

    strategy: str
    style: Style
    rows: Frame
    all_rows: Frame
    steps: tuple[np.ndarray, np.ndarray] | None
    members: Frame | None


@dataclass(frozen=True, slots=True, eq=False)
class OverheadData:
    """The curves of the figure and its axes.

    Attributes:
        x_range: bytes at the left and right end of the axis.
        y_top: overhead at the top of the axis; a note names the strategies that go above it.
        above: [label] largest overhead of each of those strategies.
        is_bent: whether the axis is arcsinh, see `KNEE_PERCENT`.
        impossible_bytes: proven to be too small for any plan, or None.
        bound: (budget_bytes, overhead) of the best proven lower bound, or None if it is trivial.
        gpu_bytes: memory of the GPU if it lies on the axis, else None.
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


def overhead_data(run: Run, most: float = np.inf) -> OverheadData | None:
    """The data of a run, or None if no strategy has a plan.

    Args:
        most: overhead at which the axis ends if not before; strategies that are nowhere below it are left out.
    """
    planned = run.planned
    if not len(planned):
        return None
    curves = [_curve(run, strategy) for strategy in run.strategies]
    budgets = run.rows["budget_bytes"].astype(float).to_numpy()
    working_set = run.info.get("working_set_bytes")
    if run.graph is not None:
        working_set = run.graph.largest_working_set()[0]
    proven = run.rows.loc[run.rows["status"] == "INFEASIBLE", "budget_bytes"]
    impossible = max([v for v in (working_set, *proven.tolist()) if v is not None], default=0) or None
    low = min(float(budgets.min()), float(impossible or budgets.min()))
    high = float(budgets.max())
    width = max(high - low, 0.02 * high)
    x_range = (max(0.0, low - 0.06 * width), high + 0.04 * width)
    gpu = run.gpu_memory_bytes
    if gpu is not None and high < gpu <= high + 0.15 * width:  # just outside: widen the axis a little
        x_range = (x_range[0], gpu + 0.03 * width)
    y_top, above = _y_top(curves, x_range)
    if most < np.inf:
        y_top, above = min(y_top, most), {}
        curves = [curve for curve in curves if (curve.rows["overhead"] <= most).any()]
    over = [v for curve in curves for v in curve.rows["overhead"].astype(float).tolist() if v > 0]
    bent = bool(over) and y_top > 30 * min(over)  # a linear axis would press the best plans onto zero
    return OverheadData(
        curves, x_range, (1.3 if bent else 1.0) * y_top, above, bent, byte_scale(x_range[1]), impossible, _bound(run),
        gpu if gpu is not None and x_range[0] <= gpu <= x_range[1] else None,
    )  # fmt: skip


def _curve(run: Run, strategy: str) -> Curve:
    solves = run.rows[run.rows["strategy"] == strategy].sort_values("budget_bytes")
    is_planned = solves["status"].isin(WITH_PLAN) & solves["cost"].notna()
    is_closed = solves["budget_bytes"].map(best_bounds(run)) >= (1 - GAP_TOLERANCE) * solves["cost"].astype(float)
    solves = solves.assign(status=solves["status"].mask(is_planned & is_closed, "OPTIMAL"))
    rows = solves[is_planned]
    members = run.families[run.families["strategy"] == strategy]
    if len(solves) and len(members):
        members = members[members["accounting"] == solves["accounting"].iloc[0]]
    steps = ordered = None
    if len(members):
        ordered = members.sort_values(["peak_bytes", "overhead"])
        peaks = ordered["peak_bytes"].astype(float).to_numpy()
        best = np.minimum.accumulate(ordered["overhead"].astype(float).to_numpy())
        corner = np.diff(best, prepend=np.inf) < 0
        steps = peaks[corner], best[corner]
    return Curve(strategy, style_of(strategy), rows, solves, steps, ordered)


def _y_top(curves: list[Curve], x_range: tuple[float, float]) -> tuple[float, dict[str, float]]:
    """(top of the axis, {label: largest overhead} of the strategies above it).

    The axis leaves out outliers, because one strategy at 900 % would flatten all others.
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
    for value in positive:  # up to the first large gap above the median
        if value > max(3 * middle, 0.3) and value > 1.6 * top:
            break
        top = value
    return 1.08 * top, {label: value for label, value in largest.items() if value > 1.08 * top}


def bend(percent: Any) -> Any:
    """Height of an overhead on the arcsinh axis."""
    return np.arcsinh(np.asarray(percent, dtype=float) / KNEE_PERCENT)


def ticks(data: OverheadData) -> list[float]:
    """Tick positions of the arcsinh axis, in percent."""
    steps = [0.2, 0.5, *(m * 10**p for p in range(6) for m in (1, 2, 5))]
    return [0.0, *(t for t in steps if t <= 100 * data.y_top)]


def best_bounds(run: Run) -> pd.Series:
    """[budget_bytes] the best proven bound; one of a larger budget holds, too."""
    best: Any = run.rows.groupby("budget_bytes")["bound"].max().astype(float).sort_index(ascending=False)
    return best.cummax().ffill().clip(lower=run.total_cost).fillna(run.total_cost).sort_index()


def _bound(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """`best_bounds` as overheads; None if they are trivial."""
    best, total = best_bounds(run), run.total_cost
    if not total or best.max() <= (1 + 1e-6) * total:
        return None
    return best.index.to_numpy(dtype=float), best.to_numpy() / total - 1


def beyond(several: Sequence[OverheadData], label: str) -> str:
    """A note for the label of a strategy that goes above the axis of some of these panels; '' for the others."""
    over = [f"{100 * data.above[label]:,.0f}" for data in several if label in data.above]
    return f" (↑ {', '.join(over)} %)" if over else ""


def covered(several: Sequence[OverheadData]) -> list[str]:
    """The strategies whose marks all lie under the topmost curve, in every panel that has any of them."""
    names = dict.fromkeys(curve.strategy for data in several for curve in data.curves)
    return [name for name in names if {_is_covered(data, name) for data in several} in ({True}, {True, None})]


def _is_covered(data: OverheadData, strategy: str) -> bool | None:
    """Whether the topmost curve covers that of a strategy; None if it has no marks."""
    own = next((curve for curve in data.curves if curve.strategy == strategy), None)
    if own is None or not len(own.rows):
        return None
    top = data.curves[-1]
    if own is top or own.steps is not None:  # a family's line has corners between the budgets
        return False
    marks, over = (each.rows.groupby("budget_bytes")["overhead"].min().astype(float) for each in (own, top))
    apart = np.abs(height(data, over.reindex(marks.index).to_numpy()) - height(data, marks.to_numpy()))
    return bool((apart <= COVERED).all())  # NaN where only one of the two has a plan


def height(data: OverheadData, overhead: Any) -> np.ndarray:
    """Overheads as shares of the axis's height."""
    percents = 100 * np.asarray(overhead, dtype=float)
    return bend(percents) / bend(100 * data.y_top) if data.is_bent else percents / (100 * data.y_top)


def widest_gap(data: OverheadData, at_bytes: float) -> float:
    """The middle of the widest part of the axis, as a share of its height, that no curve crosses at a budget."""
    crossed = []
    for curve in data.curves:
        rows = curve.rows[curve.rows["budget_bytes"] <= at_bytes]
        crossed += height(data, rows["overhead"].astype(float).to_numpy()[-1:]).tolist()
    edges = np.array([0.0, *sorted(h for h in crossed if 0 < h < 1), 1.0])
    widest = int(np.argmax(np.diff(edges)))
    return float(edges[widest : widest + 2].mean())
