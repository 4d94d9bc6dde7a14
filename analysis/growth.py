"""Seconds to a plan, quality and memory of a strategy against the number of operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from analysis.saving import save, style_context
from analysis.style import BLUE, VERMILLION

LOOKS = {"layered": (BLUE, "o"), "chain": (VERMILLION, "s")}


def draw_growth(rows: Sequence[Mapping[str, Any]], path: Path) -> list[Path]:
    """Draw `rows` of `experiments.growth` as a PNG and a PDF beside it.

    Returns:
        The files written.
    """
    with style_context():
        return save(_figure(rows), path.with_suffix(""))


def _figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    times, quality, memory = figure.subplots(1, 3)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        colour, marker = LOOKS.get(kind, ("black", "x"))
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["n_operations"])
        sizes = [row["n_operations"] for row in own]
        lines = (
            (times, "within_1pct_s", 1.0, "-", f"{kind}: within 1 % of the last plan"),
            (times, "first_plan_s", 1.0, "--", f"{kind}: first plan"),
            (quality, "overhead", 100.0, "-", kind),
            (memory, "peak_memory_bytes", 2.0**-20, "-", kind),
        )
        for axes, key, factor, style, label in lines:
            found = [(size, factor * row[key]) for size, row in zip(sizes, own, strict=True) if row[key] is not None]
            if found:
                # Open markers lie above full ones, so that both show if the first plan is the last.
                face = colour if style == "-" else "white"
                axes.plot(
                    *zip(*found, strict=True), color=colour, marker=marker, linestyle=style, label=label,
                    markerfacecolor=face,
                )  # fmt: skip
    limit = max((row["time_limit_s"] for row in rows), default=0)
    times.set(xscale="log", yscale="log", ylabel="seconds", title="Time to a plan")
    quality.set(xscale="log", ylabel="overhead (%) at 90 % of the peak", title=f"Best plan after {limit:g} s")
    memory.set(ylabel="MiB", title="Memory of the process")  # linear axes show its growth
    for axes in (quality, memory):
        axes.set_ylim(bottom=0)
    times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    times.yaxis.set_major_formatter("{x:g}")
    times.yaxis.set_minor_formatter(NullFormatter())
    memory.xaxis.set_major_locator(MaxNLocator(4))
    for axes in (times, quality, memory):
        axes.set_xlabel("operations")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    if times.get_legend_handles_labels()[0]:
        figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure
