"""Memory over time of a plan, against checkpoint-all."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.results import ShownPlan
from analysis.scales import Scale, byte_scale, cost_scale
from analysis.style import AGAIN, BLACK, BLUE, GREEN, GREY, LIGHT_GREY, PALE, style_of
from remat.graph import Graph
from remat.plan import OFFLOAD, PREFETCH
from remat.simulator import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A plan's memory as steps.

    Attributes:
        edges: [C + 1] start of each computation, then the end of the last one.
        held_bytes: [C] bytes held while the computation runs.
        again: [C] bool, whether it is a recomputation.
        backward_at: start of the first backward operation, or None.
        by_cost: time is the cost spent; if all costs are 0, it is the index of the computation.
    """

    edges: np.ndarray
    held_bytes: np.ndarray
    again: np.ndarray
    backward_at: float | None
    by_cost: bool

    def highest(self, n: int) -> list[int]:
        """[n] the most bytes held in each of n equal parts of the time."""
        parts = np.linspace(0.0, self.edges[-1], n + 1)
        first = np.clip(np.searchsorted(self.edges, parts[:-1], side="right") - 1, 0, len(self.held_bytes) - 1)
        last = np.maximum(first + 1, np.searchsorted(self.edges[:-1], parts[1:], side="left"))
        return [int(self.held_bytes[i:j].max()) for i, j in zip(first, last, strict=True)]


def timeline(graph: Graph, trace: Trace) -> Timeline:
    """The timeline of a simulated plan."""
    order = trace.order.astype(np.int64)
    by_cost = trace.cost > 0
    ends = trace.end_cost.astype(float) if by_cost else np.arange(1, len(order) + 1, dtype=float)
    edges = np.concatenate([[0.0], ends])
    again = np.ones(len(order), dtype=bool)
    again[np.unique(order, return_index=True)[1]] = False
    backward = np.array([op.is_backward for op in graph.operations], dtype=bool)[order]
    first = np.nonzero(backward)[0]
    return Timeline(edges, trace.running_bytes, again, float(edges[first[0]]) if len(first) else None, by_cost)


def time_axis(graph: Graph, largest: float, by_cost: bool) -> tuple[Scale, str]:
    """(scale, axis label) of the time axis."""
    if not by_cost:
        return Scale(1.0, ""), "Computations"
    scale = cost_scale(largest, graph.cost_unit)
    label = "Time, summed costs of the operations" if graph.cost_unit == "ns" else "Cost spent"
    return scale, f"{label} ({scale.unit})"


def draw(graph: Graph, shown: ShownPlan, plain: Trace) -> Figure:
    """The plan as a filled line, checkpoint-all behind it, recomputations as a strip of ticks below."""
    mine, base = timeline(graph, shown.trace), timeline(graph, plain)
    budget = int(shown.row.budget_bytes)
    scale = byte_scale(max(plain.peak_bytes, shown.trace.peak_bytes))
    time, label = time_axis(graph, mine.edges[-1], mine.by_cost)
    style = style_of(shown.strategy)
    figure = Figure(figsize=(8.2, 4.2), layout="constrained")
    heights = (12, 1, 1.6) if len(shown.trace.copies) else (12, 1)
    axes, ticks, *link = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    axes.stairs(
        base.held_bytes / scale.factor, base.edges / time.factor, color=GREY, lw=1.0, ls=(0, (2, 1.2)), baseline=None
    )
    held = mine.held_bytes / scale.factor
    axes.stairs(held, mine.edges / time.factor, color=style.colour, fill=True, alpha=0.18, lw=0)
    axes.stairs(held, mine.edges / time.factor, color=style.colour, lw=1.3, baseline=None)
    axes.axhline(budget / scale.factor, color=BLACK, lw=1.1, ls=(0, (6, 2)))
    if graph.fixed_bytes:
        axes.axhspan(0, graph.fixed_bytes / scale.factor, facecolor=PALE, edgecolor=LIGHT_GREY, hatch="...", lw=0)
    peak = shown.trace.peak_computation
    if peak >= 0:
        middle = (mine.edges[peak] + mine.edges[peak + 1]) / 2 / time.factor
        axes.plot([middle], [shown.trace.peak_bytes / scale.factor], marker="v", ms=6, color=style.colour, ls="",
                  zorder=5, clip_on=False)  # fmt: skip
    top = 1.12 * max(plain.peak_bytes, shown.trace.peak_bytes, min(budget, 1.3 * plain.peak_bytes)) / scale.factor
    for where, colour in ((mine.backward_at, BLACK), (base.backward_at, LIGHT_GREY)):
        if where is not None:
            axes.axvline(where / time.factor, color=colour, lw=1.0, ls=":", zorder=1)
    if mine.backward_at is not None:
        axes.annotate("backward starts", (mine.backward_at / time.factor, top), xytext=(0, 2), ha="center",
                      va="bottom", textcoords="offset points", fontsize=7.5, annotation_clip=False)  # fmt: skip
    right = max(mine.edges[-1], base.edges[-1]) / time.factor * 1.005
    axes.set(xlim=(0, right), ylim=(0, top), ylabel=f"Memory held ({scale.unit})")
    axes.set_title(shown.title, loc="left", fontweight="bold", pad=16, parse_math=False)
    starts, ends = mine.edges[:-1][mine.again], mine.edges[1:][mine.again]
    least = mine.edges[-1] / 800  # so that short recomputations are visible
    for start, end in zip(starts, np.maximum(ends, starts + least), strict=True):
        ticks.axvspan(start / time.factor, end / time.factor, color=AGAIN, lw=0)
    ticks.set_yticks([0.5], ["recomputing"], fontsize=7.5)
    ticks.set_ylim(0, 1)
    ticks.grid(visible=False)
    ticks.tick_params(axis="y", length=0)
    for lanes in link:
        _draw_copies(lanes, shown.trace, time, least)
    (*link, ticks)[0].set_xlabel(label, parse_math=False)
    figure.legend(handles=_legend(graph, shown, plain, mine, scale), loc="outside lower center", ncols=3)
    return figure


def _draw_copies(axes: Axes, trace: Trace, time: Scale, least: float) -> None:
    """A lane for each direction of the link."""
    for lane, kind in enumerate((OFFLOAD, PREFETCH)):
        times = trace.copies_of(kind)[:, 1:] / time.factor
        spans = [(start, max(end - start, least / time.factor)) for start, end in times.tolist()]
        axes.broken_barh(spans, (0.6 - 0.5 * lane, 0.3), facecolors=(BLUE, GREEN)[lane], lw=0)
    axes.set_yticks([0.25, 0.75], ["from the host", "to the host"], fontsize=7.5)
    axes.set_ylim(0, 1)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)


def _legend(graph: Graph, shown: ShownPlan, plain: Trace, mine: Timeline, scale: Scale) -> list[Line2D | Patch]:
    style = style_of(shown.strategy)

    def size(n: int) -> str:
        return f"{n / scale.factor:.2f} {scale.unit}"

    handles: list[Line2D | Patch] = [
        Line2D([], [], color=style.colour, lw=1.3, marker="v", ms=5,
               label=f"{style.label}: peak {size(shown.trace.peak_bytes)}"),
        Line2D([], [], color=GREY, lw=1.0, ls=(0, (2, 1.2)), label=f"Checkpoint all: peak {size(plain.peak_bytes)}"),
        Line2D([], [], color=BLACK, lw=1.1, ls=(0, (6, 2)), label=f"Budget {size(int(shown.row.budget_bytes))}"),
    ]  # fmt: skip
    if graph.fixed_bytes:
        handles.append(Patch(facecolor=PALE, edgecolor=LIGHT_GREY, hatch="...", lw=0,
                             label=f"Fixed (parameters, ...): {size(graph.fixed_bytes)}"))  # fmt: skip
    count = int(mine.again.sum())
    over = shown.trace.cost / plain.cost - 1 if plain.cost else 0.0
    handles.append(Patch(color=AGAIN, label=f"{count} recomputation{'s' * (count != 1)}, {100 * over:.1f} % overhead"))
    return handles
