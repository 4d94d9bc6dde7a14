"""Peak memory against step time of every method that trained a model, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.marks import mark_break
from analysis.saving import save_in_run
from analysis.style import BLACK, ORANGE, OURS, SKY, Style, style_of

# PyTorch's own methods, which are not strategies.
_BY_HAND = {
    "plain": Style("Plain PyTorch", BLACK, "s"),
    "checkpoint_blocks": Style("torch.utils.checkpoint per block", ORANGE, "o", ":"),
    "selective_checkpoint": Style("Selective checkpointing", SKY, "P", ":"),
}


def draw_execution(rows: Sequence[Mapping[str, Any]], folder: Path, name: str) -> Path:
    """Draw the figure from rows of one PyTorch model (`experiments.steps.measure`); returns its path."""
    return save_in_run(folder, name, lambda: figure(rows))[0]


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Two panels with the same axes: predicted, measured."""
    rows = [row for row in rows if row["measured_peak_bytes"]]
    first = rows[0]
    drawing = Figure(figsize=(9.2, 4.0), layout="constrained")
    predicted, measured = drawing.subplots(1, 2, sharex=True, sharey=True)
    plain_ns = next(row["predicted_ns"] for row in rows if row["method"] == "plain")
    _panel(predicted, "Predicted", [
        (row["method"], row["predicted_peak_bytes"], row["predicted_ns"] / plain_ns)
        for row in rows if row["predicted_peak_bytes"]
    ])  # fmt: skip
    bars = ", bars: quartiles" if any(row["ratio_quartiles"] for row in rows) else ""
    _panel(measured, f"Measured ({first['device']}; medians of {first['rounds']} rounds{bars})", [
        (row["method"], row["measured_peak_bytes"], row["measured_ratio"], *(row["ratio_quartiles"] or ()))
        for row in rows
    ])  # fmt: skip
    mark_break(predicted)
    predicted.set_ylabel("step time / plain PyTorch's")
    drawing.suptitle(f"torch_{first['model']}, batch {first['batch']}", fontsize=10)
    handles, labels = measured.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
    return drawing


def _panel(axes: Axes, title: str, points: Sequence[tuple[Any, ...]]) -> None:
    """Points are (method, peak, time), and where measured the lower and the upper quartile of the time."""
    for method in dict.fromkeys(point[0] for point in points):
        style = _BY_HAND.get(method) or style_of(method)
        for number, (_, peak, time, *quartiles) in enumerate(point for point in points if point[0] == method):
            spread = [[max(0.0, time - quartiles[0])], [max(0.0, quartiles[1] - time)]] if quartiles else None
            axes.errorbar(
                peak / 1e6, time, yerr=spread, label=None if number else style.label, color=style.colour,
                marker=style.marker, linestyle="none", elinewidth=0.9, markersize=7 if method == OURS else 5.5,
                zorder=3 if method == OURS else 2,
            )  # fmt: skip
    axes.axhline(1.0, color="#999999", linewidth=0.8, zorder=1)
    axes.set(title=title, xlabel="peak memory (MB)")
