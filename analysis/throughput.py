"""Reasons to want a larger batch: samples per second against batch size, and the largest models that train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.charts import legend_below, log_numbers, panels, points
from analysis.style import BLUE, GREY, ORANGE, OURS, WINE, style_of

KINDS = {  # [kind of a trial] (colour, marker, label)
    "fits": (BLUE, "o", "trains within the memory"),
    "ruled out": (WINE, "x", "proven impossible, or larger than such"),
    "undecided": (ORANGE, "D", "no plan found, not ruled out"),
}


SPEED_HEADS = ("network", "batch", "fits without recomputation", "status", "step, ms", "samples/s", "at most (proven)",
               "overhead", "")  # fmt: skip
TRIAL_HEADS = ("size", "operations", "GB without recomputation", "found", "status", "share of the allowed cost")


def speed_rows(document: Mapping[str, Any], network: str) -> list[list[str]]:
    """Cells of `SPEED_HEADS` for each batch of a network."""
    rows = []
    for point in document["points"]:
        cost, found = point["cost_ns"], point["samples_per_s"]
        rows.append([
            network, str(point["batch"]), "yes" if point["batch"] <= document["plain_batch"] else "no", point["status"],
            "" if cost is None else f"{cost / 1e6:.2f}", "" if found is None else f"{found:.2f}",
            f"{point['most_per_s']:.2f}" if point["most_per_s"] else "none",
            "" if point["overhead"] is None else f"{100 * point['overhead']:.2f} %",
            "best" if point["batch"] == document["best"] else "",
        ])  # fmt: skip
    return rows


def trial_rows(search: Mapping[str, Any]) -> list[list[str]]:
    """Cells of `TRIAL_HEADS` for each size that a search tried."""
    return [[
        trial["label"], str(trial["operations"]), f"{trial['plain_peak_bytes'] / 1e9:.2f}",
        KINDS[trial["kind"]][2], trial["status"],
        "" if trial["cost"] is None else f"{100 * trial['cost'] / trial['cost_cap']:.1f} %",
    ] for trial in sorted(search["trials"], key=lambda trial: trial["size"])]  # fmt: skip


def draw_throughput(document: Mapping[str, Any]) -> Figure:
    """Samples per second, found and proven, with the best batch and the largest batch of plain training."""
    figure, (axes,) = panels(1, (6.0, 3.4), xlabel="batch size", ylabel="samples / s")
    plot(axes, document)
    memory = document["memory_bytes"] / 1e9
    axes.set_title(f"{document['network']} on {document['gpu']} ({memory:g} GB), modelled", fontweight="bold")
    best = next((p for p in document["points"] if p["batch"] == document["best"]), None)
    if best is not None:
        label = f"best: batch {best['batch']}, {best['samples_per_s']:.4g}/s, {100 * best['overhead']:.1f} % overhead"
        axes.set_title(label, loc="right", fontsize=8)
    legend_below(figure)
    return figure


def plot(axes: Axes, document: Mapping[str, Any]) -> None:
    """Draw the curve of one network, with batches on a logarithmic axis."""
    tried, style = document["points"], style_of(OURS)
    most = [(p["batch"], p["most_per_s"]) for p in tried if p["most_per_s"] > 0]
    points(axes, most, GREY, "_", ":", label="proven: no plan is faster")
    points(axes, [(p["batch"], p["samples_per_s"]) for p in tried if p["samples_per_s"] is not None], style.colour,
           style.marker, style.line, lw=style.width, label="fastest plan found")  # fmt: skip
    axes.axvline(document["plain_batch"], color=GREY, lw=0.9, ls="--", label="largest batch without recomputation")
    axes.set(xscale="log", ylim=(0, 1.12 * max((y for _, y in most), default=1.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(_apart([p["batch"] for p in tried]))
    axes.margins(x=0.08)


def _apart(batches: list[int]) -> list[int]:
    """The largest batch and others, far enough apart for their labels on a logarithmic axis."""
    shown: list[int] = []
    nearest = max(batches[-1] / batches[0], 2.0) ** 0.12
    for batch in reversed(batches):
        if not shown or shown[-1] / batch >= nearest:
            shown.append(batch)
    return shown[::-1]


def sizes(searches: Sequence[Mapping[str, Any]], memory_bytes: int) -> Figure:
    """A panel for each search: peak of plain training at each size tried, against the memory of the GPU."""
    figure, grid = panels(len(searches), (3.9, 3.1), ylabel="GB without recomputation")
    memory = memory_bytes / 1e9
    for axes, search in zip(grid, searches, strict=True):
        trials = sorted(search["trials"], key=lambda trial: trial["size"])
        for kind, (colour, marker, label) in KINDS.items():
            found = [(t["size"], t["plain_peak_bytes"] / 1e9) for t in trials if t["kind"] == kind]
            points(axes, found, colour, marker, label=label, size=6)
        axes.axhline(memory, color=GREY, lw=1.0, ls="--", label=f"memory of the GPU, {memory:g} GB")
        axes.set(xscale="log", yscale="log", title=f"{search['what']}, batch {search['batch']}")
        axes.xaxis.set_minor_locator(NullLocator())
        log_numbers(axes.yaxis)
        axes.set_xticks([t["size"] for t in trials], [t["label"] for t in trials], rotation=40, ha="right")
        axes.margins(x=0.12, y=0.15)
    legend_below(figure, 2)
    return figure
