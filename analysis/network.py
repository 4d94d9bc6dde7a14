"""Cost and bytes of every operation of the network, in graph order."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.scales import Scale, byte_scale, cost_scale
from analysis.style import BACKWARD, FORWARD, GREY
from remat.graph import Graph
from remat.units import format_size

NAMED = 60  # the axis names the operations of graphs up to this size
LONGEST = 26  # characters of a name above a bar
ACROSS = 120  # such characters across the panel


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """[N] cost, [N] bytes produced, [N] is_backward, and their scales."""

    cost: np.ndarray
    size: np.ndarray
    backward: np.ndarray
    names: list[str]
    cost_scale: Scale
    byte_scale: Scale


def bars_of(graph: Graph) -> Bars:
    """Cost of each operation and bytes of its outputs."""
    cost = graph.costs.astype(float)
    sizes = graph.value_bytes
    size = np.array([sum(int(sizes[v]) for v in op.outputs) for op in graph.operations], dtype=float)
    backward = np.array([op.is_backward for op in graph.operations], dtype=bool)
    return Bars(
        cost, size, backward, [op.name for op in graph.operations],
        cost_scale(cost.max(initial=0.0), graph.cost_unit), byte_scale(size.max(initial=0.0)),
    )  # fmt: skip


def draw(graph: Graph) -> Figure:
    """Two panels of bars, forward and backward in two colours, with the names of the largest."""
    bars = bars_of(graph)
    n = len(graph)
    named = n <= NAMED
    figure = Figure(figsize=(8.2, 5.6 if named else 4.8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _panel(upper, bars, bars.cost / bars.cost_scale.factor, f"Cost ({bars.cost_scale.unit})", named)
    _panel(lower, bars, bars.size / bars.byte_scale.factor, f"Bytes produced ({bars.byte_scale.unit})", named)
    if named:
        lower.set_xticks(range(n), bars.names, rotation=90, fontsize=6.5, parse_math=False)
        lower.tick_params(axis="x", length=2, pad=1)
    else:
        lower.set_xlabel("Operation, in graph order")
    upper.set_xlim(-0.8, n - 0.2)
    handles = [Patch(color=FORWARD, label="forward")]
    if bars.backward.any():
        handles.append(Patch(color=BACKWARD, label="backward"))
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    fixed = f"fixed: {format_size(graph.fixed_bytes)}" if graph.fixed_bytes else "nothing fixed"
    upper.set_title(f"{graph.name}: {n} operations, {fixed}", loc="left", fontweight="bold", parse_math=False)
    return figure


def _panel(axes: Axes, bars: Bars, height: np.ndarray, label: str, named: bool) -> None:
    at = np.arange(len(height))
    # One filled staircase per pass, because a thousand rectangles would take seconds, and megabytes in the PDF.
    edges = np.arange(len(height) + 1) - 0.5
    for mask, colour in ((~bars.backward, FORWARD), (bars.backward, BACKWARD)):
        if named:
            axes.bar(at[mask], height[mask], width=0.8, color=colour)
        elif mask.any():
            axes.stairs(np.where(mask, height, 0.0), edges, color=colour, fill=True, lw=0.3, ec=colour)
    axes.set_ylabel(label, parse_math=False)
    axes.set_ylim(0, 1.18 * height.max(initial=0.0) or 1.0)
    axes.grid(visible=False, axis="x")
    if not named:
        for k in landmarks(height, bars.names):
            axes.annotate(shown(bars.names[k]), (k, height[k]), xytext=(0, 2), textcoords="offset points", ha="center",
                          fontsize=6.5, color=GREY, parse_math=False)  # fmt: skip


def shown(name: str) -> str:
    """A name; a long one without its middle."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2 - 1]}…{name[-(LONGEST // 2) :]}"


def landmarks(height: np.ndarray, names: list[str]) -> list[int]:
    """Up to three of the highest bars, far enough apart for their names; none if more than three are highest."""
    if np.count_nonzero(height == height.max(initial=0.0)) > 3:
        return []
    chosen: list[int] = []
    width = [len(shown(name)) for name in names]
    for k in np.argsort(-height, kind="stable")[:20].tolist():
        # Names are centred on their bars.
        if all(abs(k - other) > len(height) * max(0.1, (width[k] + width[other]) / 2 / ACROSS) for other in chosen):
            chosen.append(k)
    return chosen[:3]
