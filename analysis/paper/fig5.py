"""Overhead against budget, a figure for each network."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis import overhead
from analysis.overhead_data import overhead_data
from analysis.paper.sweeps import Sweep, best_costs, best_heuristic, largest_gain, proven_words, sweeps
from analysis.parts import Part, Table, percent, prose

PUBLISHED = "The published graphs carry the costs behind the published figure"
SOURCE = {"published": "published graph, V100 costs", "ours": "our extraction, roofline costs"}


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """A figure for each network, and the cost of the best plan at each budget."""
    all_sweeps = list(sweeps(document, folder))
    figures = []
    for label, group in groupby(all_sweeps, key=lambda sweep: sweep.label):
        drawn = _figure(list(group))
        if drawn is not None:
            name = f"fig5_{label.lower().replace(' ', '_').replace('-', '')}"
            figures.append((name, f"{label}: compute overhead against memory budget", drawn))
    gain = largest_gain(all_sweeps)
    gain_words = "" if gain is None else (
        f" The largest gain over the best heuristic, where that at most doubles the cost, is {gain.ratio:.3f}x, on "
        f"{gain.sweep.label} ({SOURCE[gain.sweep.source]})."
    )  # fmt: skip
    has_published = any(sweep.source == "published" for sweep in all_sweeps)
    published = PUBLISHED if has_published else "The published graphs were not there (set REMAT_INSTANCES)"
    return Part(
        *prose(__file__, sweeps=len(all_sweeps), gain=gain_words, proven=proven_words(all_sweeps), published=published),
        figures,
        [Table("fig5_best", "Cheapest plan, proven lower bound and best heuristic, as overhead", *_table(all_sweeps))],
    )  # fmt: skip


def _figure(group: list[Sweep]) -> Figure | None:
    panels = [(overhead_data(sweep.run), sweep) for sweep in group]
    shown = [(panel, sweep) for panel, sweep in panels if panel is not None]
    if not shown:
        return None
    figure = Figure(figsize=(4.4 * len(shown) + 3.2, 3.9), layout="constrained")
    all_axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (panel, sweep) in zip(all_axes, shown, strict=True):
        overhead.draw_axes(axes, panel, sweep.run)
        axes.set_title(f"{sweep.label}: {SOURCE[sweep.source]}", loc="left", fontsize=9)
        axes.set_xlabel(f"Memory budget ({panel.scale.unit})")
    overhead.place_legend(figure, overhead.legend([panel for panel, _ in shown]))
    return figure


def _table(all_sweeps: list[Sweep]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for sweep in all_sweeps:
        total = sweep.run.total_cost
        for budget, (cost, bound) in best_costs(sweep.run).items():
            heuristic = best_heuristic(sweep.run, budget)
            rows.append([
                sweep.label, SOURCE[sweep.source], f"{budget / 1e9:.2f}", percent(cost / total - 1),
                "" if bound is None else percent(max(bound, total) / total - 1),
                "none fits" if heuristic is None else percent(heuristic[0] / total - 1),
            ])  # fmt: skip
    return ["network", "graph and costs", "budget GB", "best plan", "lower bound", "best heuristic"], rows
