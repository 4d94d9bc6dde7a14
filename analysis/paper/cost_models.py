"""The loss of a plan that is chosen under one cost model and judged by another."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_high
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.charts import heatmap, panels
from analysis.parts import Part, Study, Table, percent, prose
from analysis.results import Frame


def report(document: Mapping[str, Any], _: Study) -> Part:
    """A matrix of losses for each network and batch, and the rows."""
    rows = document["rows"]
    worst = max(rows, key=_loss, default=None)
    others = [_loss(row) for row in rows if row["chosen_under"] != row["judged_by"]]
    worst_of = dict.fromkeys(("loss", "case", "chosen_under", "judged_by"), "none")
    if worst is not None:
        worst_of = worst | {"loss": percent(_loss(worst)), "case": _case(worst)}
    proven = {case: _gap_words([row for row in rows if _case(row) == case]) for case in dict.fromkeys(map(_case, rows))}
    left_out = f" Left out: {'; '.join(document['skipped'])}." if document["skipped"] else ""
    return Part(
        *prose(__file__, "cost_models", worst=worst_of, median=percent(median_high(others or [0.0])),
               gaps="; ".join(f"{n} {w}" for n, w in proven.items()), left_out=left_out),
        [("cost_models", "Loss of a plan chosen under one cost model and judged by another", _figure(rows))]
        if rows else [],
        [Table("cost_models", [
            "network", "batch", "budget GB", "chosen under", "judged by", "loss",
        ], [
            [r["network"], str(r["batch"]), f"{r['budget_bytes'] / 1e9:.3f}", r["chosen_under"], r["judged_by"],
             percent(_loss(r))] for r in rows
        ])],
    )  # fmt: skip


def _case(row: Mapping[str, Any]) -> str:
    return f"{row['network']}, batch {row['batch']}"


def _gap_words(rows: list[dict[str, Any]]) -> str:
    """The widest gap of the plans of each cost model."""
    words = []
    for cost in dict.fromkeys(row["chosen_under"] for row in rows):
        of = [row["gap"] for row in rows if row["chosen_under"] == cost]
        words.append(f"{cost} {'no bound' if None in of else percent(max(of))}")
    return ", ".join(words)


def _loss(row: Mapping[str, Any]) -> float:
    return row["cost"] / row["best"] - 1


def _figure(rows: list[dict[str, Any]]) -> Figure:
    """Networks across; above the published batch, below the one that a CPU can run."""
    frame: Frame = pd.DataFrame([row | {"loss": 100 * _loss(row)} for row in rows])
    networks = list(frame["network"].unique())
    figure, grid = panels(2 * len(networks), (2.2, 2.0), len(networks), xlabel="judged by", ylabel="chosen under")
    top = frame["loss"].max() or 1.0
    for (network, batch), own in frame.groupby(["network", "batch"], sort=False):
        axes = grid[len(networks) * int(batch == frame["batch"].min()) + networks.index(network)]
        costs = list(own["chosen_under"].unique())
        largest = own.pivot_table("loss", "chosen_under", "judged_by", aggfunc="max")
        losses = largest.reindex(index=costs, columns=costs).to_numpy()
        heatmap(axes, losses, np.char.mod("%.1f", losses), costs, costs, colours="cividis_r", top=top)
        axes.set_title(f"{network}, batch {batch}", fontsize=9)
    for axes in grid:
        axes.set_visible(axes.has_data())
    figure.suptitle("Largest loss over the budgets, in per cent", x=0.01, ha="left", fontsize=9)
    return figure
