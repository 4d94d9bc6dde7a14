"""Slowdown against memory on the logs of DTR: published, online, offline, and a proven bound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.marks import mark_break
from analysis.saving import save_in_run
from analysis.style import BLACK, GREY, OURS, style_of

COLUMNS = 3
ONLINE = "dtr"


def draw_dtr(networks: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw the figure from the networks of `experiments.dtr`; the paths written."""
    return save_in_run(folder, "dtr", lambda: figure(networks))


def figure(networks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A panel for each network: slowdown for each share of the program's peak."""
    n_rows = -(-len(networks) // COLUMNS)
    drawing = Figure(figsize=(10, 0.6 + 2.7 * n_rows), layout="constrained")
    panels = drawing.subplots(n_rows, COLUMNS, squeeze=False).flatten()
    for axes, (name, network) in zip(panels, networks.items(), strict=False):
        _panel(axes, name, network)
    for axes in panels[len(networks) :]:
        axes.axis("off")
    for axes in panels[::COLUMNS]:
        axes.set_ylabel("slowdown")
    for axes in panels[max(0, len(networks) - COLUMNS) : len(networks)]:
        axes.set_xlabel("memory / the program's peak")
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return drawing


def _panel(axes: Axes, name: str, network: Mapping[str, Any]) -> None:
    online, offline = style_of(ONLINE), style_of(OURS)
    lines = (
        ("DTR as published (measured, with its search)", GREY, "s", "--", lambda row: row["published"]),
        (f"{online.label}, exact heuristic", online.colour, online.marker, "-", lambda row: row["online"]["exact"]),
        (offline.label, offline.colour, offline.marker, offline.line, lambda row: row["offline"]),
        ("Proven bound", BLACK, "", ":", lambda row: row["bound"]),
    )
    for label, colour, marker, line, number in lines:
        found = [(row["ratio"], number(row)) for row in network["rows"] if number(row) is not None]
        if found:
            axes.plot(*zip(*found, strict=True), color=colour, marker=marker, linestyle=line, markersize=4.5,
                      linewidth=1.2, label=label)  # fmt: skip
    axes.set_title(name)
    axes.set_xlim(0.15, 1.0)
    axes.set_ylim(bottom=0.98)
    mark_break(axes)
