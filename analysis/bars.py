"""Grouped bars and heatmaps with text, for the parts of the papers; seaborn places bars, colours and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes


def grouped_bars(
    axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], colours: Sequence[str],
    labels: Sequence[Sequence[str]], *, inside: bool = False,
) -> None:  # fmt: skip
    """Draw a group of bars for each of `groups`, with one bar for each of `series`; None has no bar.

    Args:
        series: [name] the value in each group.
        colours: of each series.
        labels: [series, group] the text at the end of the bar, or in its middle.
    """
    frame = pd.DataFrame(series, index=list(groups)).fillna(0.0).melt(ignore_index=False, var_name="series")
    sns.barplot(frame.reset_index(names="group"), x="group", y="value", hue="series", palette=list(colours),
                saturation=1, width=0.84, gap=0.08, errorbar=None, legend=False, ax=axes)  # fmt: skip
    for container, name, texts in zip(axes.containers, series, labels, strict=True):
        container.set_label(name)
        where: dict[str, Any] = {"label_type": "center", "color": "white"} if inside else {"padding": 2}
        axes.bar_label(container, texts, fontsize=6.5, **where)  # pyright: ignore[reportArgumentType]
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="")


def heatmap(
    axes: Axes, values: np.ndarray, texts: np.ndarray | None, rows: Sequence[str], columns: Sequence[str],
    *, colours: str, top: float,
) -> None:  # fmt: skip
    """Draw values [rows, columns] from 0 to `top` as colours, with their texts in the cells; NaN is an empty cell."""
    sns.heatmap(values, annot=texts, fmt="", cmap=colours, vmin=0, vmax=top, cbar=False, annot_kws={"fontsize": 7},
                xticklabels=list(columns), yticklabels=list(rows), ax=axes)  # fmt: skip
    axes.tick_params(axis="y", labelrotation=0)
    axes.grid(visible=False)
