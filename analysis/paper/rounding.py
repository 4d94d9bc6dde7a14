"""Cost and memory of rounded relaxations: thresholds against random samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from analysis.parts import Part, Table, percent, prose
from analysis.results import Run, load_run
from analysis.scales import byte_scale
from analysis.style import BLACK, BLUE, GREEN, ORANGE, OURS, PURPLE, WINE

KINDS = (  # relaxation, strategy, label, colour, marker
    ("trimmed", "lp_rounding_random", "random samples, trimmed LP", ORANGE, "o"),
    ("published", "lp_rounding_random", "random samples, published LP", PURPLE, "x"),
    ("trimmed", "lp_rounding", "thresholds 0.1 to 0.9, trimmed LP", BLUE, "D"),
    ("published", "lp_rounding", "thresholds 0.1 to 0.9, published LP", GREEN, "s"),
)
Runs: TypeAlias = Mapping[str, Run]  # [relaxation]


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """A scatter for each network, and how many roundings fit."""
    runs = [
        (panel["label"], {name: load_run(folder / path) for name, path in panel["folders"].items()})
        for panel in document["panels"]
    ]  # fmt: skip
    rows = [row for label, run in runs for row in _rows(label, run)]
    return Part(
        *prose(__file__, naive=_naive(document)),
        [("rounding", "Cost against peak memory of every rounding", _figure(runs))],
        [Table("rounding", "Roundings that fit, and the cheapest of them", [
            "network", "kind", "roundings", "fit", "cheapest that fits / optimum", "optimum proven within",
            "why none fits",
        ], rows)],
    )  # fmt: skip


def _naive(document: Mapping[str, Any]) -> str:
    """How many random roundings of R and S are plans that fit."""
    parts = [
        f"{panel['label']} {panel['naive_feasible']:,} feasible of {panel['naive_samples']:,}"
        if panel["naive_feasible"] is not None else f"{panel['label']}: the relaxation was not solved in time"
        for panel in document["panels"]
    ]  # fmt: skip
    return ", ".join(parts)


def _points(run: Run, strategy: str) -> list[tuple[int, int]]:
    """(cost, peak in bytes) of every rounding."""
    rows = run.shown[run.shown["strategy"] == strategy]
    return [tuple(point) for stats in rows["stats"] for point in json.loads(stats).get("points", [])]


def _best(runs: Runs) -> Any:
    """The portfolio's row; None if it has no plan."""
    run = runs["trimmed"]
    return next(run.planned[run.planned["strategy"] == OURS].itertuples(), None)


def _figure(runs: Sequence[tuple[str, Runs]]) -> Figure:
    figure = Figure(figsize=(4.3 * len(runs) + 0.4, 3.7), layout="constrained")
    all_axes = figure.subplots(1, len(runs), squeeze=False)[0]
    for axes, (label, both) in zip(all_axes, runs, strict=True):
        run = both["trimmed"]
        budget = int(run.rows["budget_bytes"].iloc[0])
        scale = byte_scale(budget)
        for relaxation, strategy, words, colour, marker in KINDS:
            points = _points(both[relaxation], strategy)
            if points:
                cost, peak = zip(*points, strict=True)
                axes.plot([p / scale.factor for p in peak], [100 * (c / run.total_cost - 1) for c in cost], ls="",
                          marker=marker, color=colour, ms=4, alpha=0.75, label=words)  # fmt: skip
        best = _best(both)
        if best is not None:
            axes.plot([int(best.peak_bytes) / scale.factor], [100 * float(best.overhead)], ls="", marker="*", ms=11,
                      color=WINE, label=OURS)  # fmt: skip
            axes.axhline(100 * float(best.overhead), color=WINE, lw=1.0, ls=":")
        axes.axvline(budget / scale.factor, color=BLACK, lw=1.0, ls=(0, (5, 2)), label="budget")
        axes.set_title(label, loc="left")
        axes.set_xlabel(f"Peak memory ({scale.unit})")
    all_axes[0].set_ylabel("Compute overhead (%)")
    pairs = [pair for axes in all_axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    shown = {label: handle for handle, label in reversed(pairs)}
    figure.legend([*shown.values()][::-1], [*shown][::-1], loc="outside lower center", ncols=3)
    return figure


def _rows(label: str, runs: Runs) -> list[list[str]]:
    best, rows = _best(runs), []
    for relaxation, strategy, words, *_ in KINDS:
        run = runs[relaxation]
        budget, points = int(run.rows["budget_bytes"].iloc[0]), _points(run, strategy)
        fitting = [cost for cost, peak in points if peak <= budget]
        ratio = f"{min(fitting) / int(best.cost):.3f}" if fitting and best is not None else ""
        within = "" if best is None or best.gap is None else percent(float(best.gap))
        least = min((peak for _, peak in points), default=None)
        why = "" if fitting else _why(run, strategy) if least is None else (
            f"the least peak of all is {least / 1e9:.2f} GB, the budget {budget / 1e9:.2f} GB"
        )  # fmt: skip
        rows.append([label, words, str(len(points)), str(len(fitting)), ratio, within, why])
    return rows


def _why(run: Run, strategy: str) -> str:
    """The solver's reason for having no plan."""
    rows = run.shown[run.shown["strategy"] == strategy]
    return " ".join(str(message).partition(";")[0] for message in rows["message"].unique())
