"""Executed training steps: peak memory and time of every method, predicted and measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.charts import legend_below, mark_break, panels, points
from analysis.style import BLACK, BLUE, GREEN, GREY, LIGHT_GREY, ORANGE, OURS, Style, label_of, style_of

# PyTorch's own methods, which are not strategies.
_BY_HAND = {
    "plain": Style("Plain PyTorch", BLACK, "s"),
    "checkpoint_blocks": replace(style_of("full"), label="torch.utils.checkpoint per block"),
    "selective_checkpoint": replace(style_of("selective"), label="Selective checkpointing"),
}
MISSED = 0.075  # a measured time that is further from the predicted one, in plain steps, has this beside it
CHOICES = {"default": GREY, "exact": GREEN, "joint": BLUE}  # [implementations] colour
BETWEEN, BESIDE = 0.28, 0.055  # neighbouring choices; predicted and measured marks of one plan, from their middle


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Two panels with the same axes, predicted and measured, of one PyTorch model."""
    rows = [row for row in rows if row["measured_peak_bytes"]]
    first = rows[0]
    drawing, (predicted, measured) = panels(2, (4.4, 3.4), xlabel="peak memory (MB)",
                                            ylabel="step time / plain PyTorch's", sharex=True, sharey=True)  # fmt: skip
    plain_ns = next(row["predicted_ns"] for row in rows if row["method"] == "plain")
    bars = ", bars: quartiles" if any(row.get("ratio_quartiles") for row in rows) else ""
    predicted.set_title("Predicted")
    measured.set_title(f"Measured ({first['device']}; medians of {first['rounds']} rounds{bars})")
    for method in dict.fromkeys(row["method"] for row in rows):
        own, style = [row for row in rows if row["method"] == method], _BY_HAND.get(method) or style_of(method)
        looks = {"size": 5.5, "label": style.label, "zorder": 3 if method == OURS else 2}
        points(predicted, [(row["predicted_peak_bytes"] / 1e6, row["predicted_ns"] / plain_ns) for row in own
                           if row.get("predicted_peak_bytes")], style.colour, style.marker, **looks)  # fmt: skip
        points(measured, [(row["measured_peak_bytes"] / 1e6, row["measured_ratio"], *(row.get("ratio_quartiles") or ()))
                          for row in own], style.colour, style.marker, **looks)  # fmt: skip
        for row in own:
            said = row["predicted_ns"] / plain_ns if row.get("predicted_ns") else row["measured_ratio"]
            if abs(row["measured_ratio"] - said) > MISSED:
                measured.annotate(
                    f"predicted {said:.2f}",
                    (row["measured_peak_bytes"] / 1e6, row["measured_ratio"]),
                    (0, 7),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6.5,
                    color=GREY,
                )
    for axes in (predicted, measured):
        axes.axhline(1.0, color=LIGHT_GREY, linewidth=0.8, zorder=1)
    mark_break(predicted)
    drawing.suptitle(f"{label_of(first['model'])}, batch {first['batch']}", fontsize=10)
    legend_below(drawing, 5)
    return drawing


def implementation_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each network: step time over the plain step's, for each budget; a cross where there is no plan."""
    asked = [row for row in rows if row["method"] == OURS]
    models = list(dict.fromkeys(row["model"] for row in asked))
    drawing, grid = panels(len(models), (2.3, 2.6), xlabel="budget / activations", ylabel="step time / plain step's",
                           sharey=True)  # fmt: skip
    for axes, model in zip(grid, models, strict=True):
        _choices(axes, model, [row for row in asked if row["model"] == model])
    mark_break(grid[0])
    legend_below(drawing, 4)
    return drawing


def _choices(axes: Axes, title: str, asked: Sequence[Mapping[str, Any]]) -> None:
    budgets = sorted({row["parameter"] for row in asked}, reverse=True)
    for shift, (name, colour) in enumerate(CHOICES.items(), start=-1):
        mine = [(row, budgets.index(row["parameter"]) + BETWEEN * shift)
                for row in asked if row["implementations"] == name]  # fmt: skip
        plans = [(row, x) for row, x in mine if row.get("measured_ratio")]
        points(axes, [(x + BESIDE, row["measured_ratio"], *(row.get("ratio_quartiles") or ())) for row, x in plans],
               colour, "o", label=f"{name}, measured")  # fmt: skip
        points(axes, [(x - BESIDE, 1 + row["predicted_overhead"]) for row, x in plans], colour, "D", mfc="none",
               label=f"{name}, predicted")  # fmt: skip
        without = [(x, 0.03) for row, x in mine if not row.get("predicted_peak_bytes")]
        points(axes, without, colour, "x", transform=axes.get_xaxis_transform())  # at the foot of the panel
    if any(not row.get("predicted_peak_bytes") for row in asked):
        axes.plot([], [], "x", color=LIGHT_GREY, ms=5, label="no plan")
    axes.axhline(1.0, color=ORANGE, linewidth=0.9, zorder=1)
    axes.set(title=title, xlim=(-0.5, len(budgets) - 0.5))
    axes.set_xticks(range(len(budgets)), budgets)
