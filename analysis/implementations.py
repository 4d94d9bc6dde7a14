"""Step times of plans that choose implementations, beside those that only recompute: predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.saving import save_in_run
from analysis.style import BLUE, GREEN, GREY, ORANGE

COLOURS = {"default": GREY, "exact": GREEN, "joint": BLUE}
PLAIN = ORANGE


def draw_implementations(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw the figure from rows of executed steps (`experiments.steps.row`); the paths written."""
    return save_in_run(folder, "implementations", lambda: figure(rows))


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each network: step time over the plain step's, for each budget with a plan."""
    plans = [row for row in rows if row.get("measured_ratio") and row["method"] == "portfolio"]
    models = list(dict.fromkeys(row["model"] for row in plans))
    drawing = Figure(figsize=(9.2, 2.9), layout="constrained")
    panels = drawing.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        _panel(axes, model, [row for row in plans if row["model"] == model])
    panels[0].set_ylabel("step time / plain step's")
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawing.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles))
    return drawing


def _panel(axes: Axes, title: str, plans: Sequence[Mapping[str, Any]]) -> None:
    budgets = sorted({row["parameter"] for row in plans}, reverse=True)
    for shift, (name, colour) in enumerate(COLOURS.items(), start=-1):
        mine = [row for row in plans if row["implementations"] == name]
        x = [budgets.index(row["parameter"]) + 0.22 * shift for row in mine]
        measured = [row["measured_ratio"] for row in mine]
        quartiles = [row.get("ratio_quartiles") or (row["measured_ratio"],) * 2 for row in mine]
        spread = [[y - q[0] for y, q in zip(measured, quartiles, strict=True)],
                  [q[1] - y for y, q in zip(measured, quartiles, strict=True)]]  # fmt: skip
        axes.errorbar(x, measured, yerr=spread, fmt="o", color=colour, markersize=5, linewidth=1.2,
                      label=f"{name}, measured")  # fmt: skip
        axes.plot(x, [1 + row["predicted_overhead"] for row in mine], "D", color=colour, markerfacecolor="none",
                  markersize=5, linestyle="none", label=f"{name}, predicted")  # fmt: skip
    axes.axhline(1.0, color=PLAIN, linewidth=0.9, zorder=1)
    axes.set(title=title, xlabel="budget / plain peak", xlim=(-0.5, len(budgets) - 0.5))
    axes.set_xticks(range(len(budgets)), budgets)
