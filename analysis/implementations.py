"""Step times of plans that choose implementations, beside those that only recompute: predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.marks import mark_break
from analysis.saving import save_in_run
from analysis.style import BLUE, GREEN, GREY, LIGHT_GREY, ORANGE, OURS

COLOURS = {"default": GREY, "exact": GREEN, "joint": BLUE}
PLAIN = ORANGE
NO_PLAN = "no plan"
BETWEEN, BESIDE = 0.28, 0.055  # neighbouring choices; predicted and measured marks of one plan, from their middle


def draw_implementations(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw the figure from rows of executed steps (`experiments.steps.measure`); the paths written."""
    return save_in_run(folder, "implementations", lambda: figure(rows))


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each network: step time over the plain step's, for each budget; a cross where there is no plan."""
    asked = [row for row in rows if row["method"] == OURS]
    models = list(dict.fromkeys(row["model"] for row in asked))
    drawing = Figure(figsize=(9.2, 3.2), layout="constrained")
    panels = drawing.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        _panel(axes, model, [row for row in asked if row["model"] == model])
    panels[0].set_ylabel("step time / plain step's")
    mark_break(panels[0])
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = [f"{name}, {how}" for name in COLOURS for how in ("measured", "predicted")]  # a column for each choice
    labels += [NO_PLAN] if NO_PLAN in handles else []
    drawing.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=4)
    return drawing


def _panel(axes: Axes, title: str, asked: Sequence[Mapping[str, Any]]) -> None:
    budgets = sorted({row["parameter"] for row in asked}, reverse=True)
    for shift, (name, colour) in enumerate(COLOURS.items(), start=-1):
        mine = [row for row in asked if row["implementations"] == name]
        plans = [row for row in mine if row.get("measured_ratio")]
        middle = {budget: index + BETWEEN * shift for index, budget in enumerate(budgets)}
        measured = [row["measured_ratio"] for row in plans]
        quartiles = [row.get("ratio_quartiles") or (row["measured_ratio"],) * 2 for row in plans]
        spread = [[y - q[0] for y, q in zip(measured, quartiles, strict=True)],
                  [q[1] - y for y, q in zip(measured, quartiles, strict=True)]]  # fmt: skip
        x = [middle[row["parameter"]] for row in plans]
        axes.errorbar([place + BESIDE for place in x], measured, yerr=spread, fmt="o", color=colour, markersize=4.5,
                      linewidth=1.2, label=f"{name}, measured")  # fmt: skip
        axes.plot([place - BESIDE for place in x], [1 + row["predicted_overhead"] for row in plans], "D", color=colour,
                  markerfacecolor="none", markersize=4.5, linestyle="none", label=f"{name}, predicted")  # fmt: skip
        without = [middle[row["parameter"]] for row in mine if not row.get("predicted_peak_bytes")]
        at_the_foot = axes.get_xaxis_transform()  # y from 0 at the foot of the panel to 1 at its head
        axes.plot(without, [0.03] * len(without), "x", color=colour, markersize=5, transform=at_the_foot,
                  linestyle="none")  # fmt: skip
    if any(not row.get("predicted_peak_bytes") for row in asked):
        axes.plot([], [], "x", color=LIGHT_GREY, markersize=5, linestyle="none", label=NO_PLAN)
    axes.axhline(1.0, color=PLAIN, linewidth=0.9, zorder=1)
    axes.set(title=title, xlabel="budget / activations", xlim=(-0.5, len(budgets) - 0.5))
    axes.set_xticks(range(len(budgets)), budgets)
