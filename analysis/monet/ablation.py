"""The ablation: overhead with the implementations of each level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.bars import grouped_bars
from analysis.monet.points import (
    LEVELS,
    NO_WINOGRAD,
    NONE,
    OURS,
    OVERHEAD,
    PROGRAM,
    Point,
    cheapest,
    contained,
    contained_words,
    gib,
    no_plan,
    read_points,
    select,
)
from analysis.parts import Part, Table, percent, prose
from analysis.style import GREY, LIGHT_GREY, OLIVE, ORANGE, SKY, WINE

COLOURS = {NONE: LIGHT_GREY, "in_place": SKY, "conv": ORANGE, "output": OLIVE, NO_WINOGRAD: WINE}


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """Bars at the smallest budget, and every level at every budget of the ablation."""
    facts, points = read_points(folder, document)
    levels = document["levels"]
    cases = [
        (net, budget)
        for net in facts
        for budget in sorted({p.budget_bytes for p in select(points, net["name"], levels, (OURS, PROGRAM))})
    ]
    return Part(
        *prose(__file__, overheads=_overheads(cases, points, levels)),
        [("ablation", "Overhead at the smallest budget, by level of implementations; x: no plan",
          _figure(cases, points, levels))],
        [_table(cases, points, levels)],
    )  # fmt: skip


def _value(points: Sequence[Point], net: str, level: str, budget: int) -> float | None:
    """The overhead of the cheapest plan of that level within the budget; the plan may be of a smaller budget."""
    found = cheapest([p for p in select(points, net, level, OURS) if p.budget_bytes <= budget], budget)
    return None if found is None else found.overhead


def _overheads(cases: Sequence[Any], points: Sequence[Point], levels: Sequence[str]) -> str:
    """Each network at its smallest budget."""
    texts = []
    for label, own in groupby(cases, key=lambda case: case[0]["label"]):
        net, budget = next(own)
        steps = []
        for level in levels:
            words = contained_words(points, net["name"], level, budget)
            steps += [f"{LEVELS[level]} {words}"] if words else []
        texts.append(f"{label} at {gib(budget)} GiB: {', '.join(steps)}")
    return ". ".join(texts) + "." if texts else "Nothing was solved."


def _table(cases: Sequence[Any], points: Sequence[Point], levels: Sequence[str]) -> Table:
    rows = []
    for net, budget in cases:
        for level in levels:
            own = select(points, net["name"], level, OURS)
            monet = cheapest(select(points, net["name"], level, PROGRAM), budget)
            value = _value(points, net["name"], level, budget)
            best = contained(points, net["name"], level, budget)
            rows.append([net["label"], gib(budget), LEVELS[level], percent(value) or no_plan(own, budget),
                         "" if best is None else percent(best.overhead),
                         "" if monet is None else percent(monet.overhead)])  # fmt: skip
    return Table("monet_ablation", "Overhead by level of implementations; empty: not tried, or no plan", [
        "network", "GiB", "implementations", "portfolio", "as contained", "MONeT's program",
    ], rows)  # fmt: skip


def _figure(cases: Sequence[Any], points: Sequence[Point], levels: Sequence[str]) -> Figure:
    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    axes = figure.subplots()
    smallest = {net["name"]: (net["label"], budget) for net, budget in reversed(cases)}
    at = [(name, budget) for name, (_, budget) in reversed(smallest.items())]
    groups = [f"{label}\n{gib(budget)} GiB" for label, budget in reversed(smallest.values())]
    values = {level: [_percent(_value(points, name, level, b)) for name, b in at] for level in levels}
    levels = [level for level in levels if any(value is not None for value in values[level])]
    series = {LEVELS[level]: values[level] for level in levels}
    tried = {level: {name for name, _ in at if select(points, name, level, OURS)} for level in levels}
    labels = [
        ["" if name not in tried[level] else "x" if value is None else f"{value:.1f}"
         for (name, _), value in zip(at, series[LEVELS[level]], strict=True)] for level in levels
    ]  # fmt: skip
    grouped_bars(axes, groups, series, [COLOURS[level] for level in levels], labels)
    axes.axhline(0, color=GREY, lw=0.8)
    axes.margins(y=0.12)
    axes.set_ylabel(OVERHEAD)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
