"""Samples per second against batch size: ``python -m analysis.throughput RUN`` redraws stored results."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.command import command
from analysis.results import read_json
from analysis.saving import save_in_run
from analysis.style import GREY, OURS, style_of
from analysis.table import write_frame
from remat.errors import InvalidInput


def draw_run(folder: Path) -> list[Path]:
    """Write ``table.csv`` and the figure of a run; returns the paths.

    Raises:
        InvalidInput: the folder is not a run of this experiment.
    """
    document = read_json(folder / "run.json")
    if "points" not in document:
        raise InvalidInput(f"{folder / 'run.json'}: not a run of experiment=throughput")
    table = write_frame(pd.DataFrame(document["points"]), folder / "table.csv")
    return [table, *save_in_run(folder, "throughput", lambda: draw(document))]


def draw(document: Mapping[str, Any]) -> Figure:
    """Samples per second, found and proven, with the best batch and the largest batch of plain training."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    plot(axes, document)
    memory = document["memory_bytes"] / 1e9
    axes.set_title(
        f"{document['network']} on {document['gpu']} ({memory:g} GB), modelled", loc="left", fontweight="bold"
    )
    best = next((p for p in document["points"] if p["batch"] == document["best"]), None)
    if best is not None:
        label = f"best: batch {best['batch']}, {best['samples_per_s']:.4g}/s, {100 * best['overhead']:.1f} % overhead"
        axes.set_title(label, loc="right", fontsize=8)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def plot(axes: Axes, document: Mapping[str, Any]) -> None:
    """Draw the curve of one network, with batches on a logarithmic axis."""
    points = [p for p in document["points"] if p["samples_per_s"] is not None]
    style = style_of(OURS)
    open_points = [p for p in document["points"] if p["most_per_s"] > 0]
    axes.plot([p["batch"] for p in open_points], [p["most_per_s"] for p in open_points], color=GREY, lw=1.0, ls=":",
              marker="_", label="proven: no plan is faster")  # fmt: skip
    axes.plot([p["batch"] for p in points], [p["samples_per_s"] for p in points], color=style.colour, lw=style.width,
              marker=style.marker, ms=7, label="fastest plan found")  # fmt: skip
    axes.axvline(document["plain_batch"], color=GREY, lw=0.9, ls="--", label="largest batch without recomputation")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(_apart([p["batch"] for p in document["points"]]))
    axes.margins(x=0.08)
    axes.set_ylim(0, 1.12 * max((p["most_per_s"] for p in open_points), default=1.0))
    axes.set(xlabel="batch size", ylabel="samples / s")


def _apart(batches: list[int]) -> list[int]:
    """The largest batch and others, far enough apart for their labels on a logarithmic axis."""
    shown: list[int] = []
    nearest = max(batches[-1] / batches[0], 2.0) ** 0.12
    for batch in reversed(batches):
        if not shown or shown[-1] / batch >= nearest:
            shown.append(batch)
    return shown[::-1]


if __name__ == "__main__":
    sys.exit(command("analysis.throughput", "RUN", draw_run, sys.argv[1:]))
