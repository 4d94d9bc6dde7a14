"""Peak and step time of compiled steps: remat's plans beside PyTorch's knob."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.marks import mark_break
from analysis.saving import save_in_run
from analysis.style import BLACK, ORANGE, OURS, SKY, style_of

Models = Mapping[str, Sequence[Mapping[str, Any]]]
LOOKS = {
    "plain": (BLACK, "s", "torch.compile"), "dp": (ORANGE, "^", "its knob, dp"), "ilp": (SKY, "v", "its knob, ilp"),
    "remat": (style_of(OURS).colour, style_of(OURS).marker, "remat"),
}  # fmt: skip


def draw_compiled(models: Models, folder: Path) -> list[Path]:
    """Draw the figure from the rows of ``experiment=compiled``, by network; the paths written."""
    return save_in_run(folder, "compiled", lambda: figure(models))


def figure(models: Models) -> Figure:
    """A panel for each network: step time over that of plain ``torch.compile``, with quartiles, for each peak."""
    drawing = Figure(figsize=(3.4 * len(models) + 1.2, 3.4), layout="constrained")
    panels = drawing.subplots(1, len(models), squeeze=False)[0]
    for axes, (name, rows) in zip(panels, models.items(), strict=True):
        _panel(axes, name, rows)
    panels[0].set_ylabel("step time / torch.compile's")
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return drawing


def _panel(axes: Axes, name: str, model: Sequence[Mapping[str, Any]]) -> None:
    plain = next(row["measured_bytes"] for row in model if row["variant"] == "plain")
    for variant, (colour, marker, label) in LOOKS.items():
        rows = sorted((row for row in model if row["variant"] == variant), key=lambda row: row["measured_bytes"])
        quartiles = [statistics.quantiles(row["ratios"], n=4) for row in rows]
        middle = [q[1] for q in quartiles]
        spread = [[q[1] - q[0] for q in quartiles], [q[2] - q[1] for q in quartiles]]
        peaks = [row["measured_bytes"] / plain for row in rows]
        line = "-" if variant == "remat" else "none"
        axes.errorbar(peaks, middle, yerr=spread, fmt=marker, color=colour, linestyle=line, markersize=5,
                      linewidth=1, label=label)  # fmt: skip
    mark_break(axes)
    axes.set_title(name)
    axes.set_xlabel("peak / torch.compile's")
