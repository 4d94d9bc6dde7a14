"""Overhead against memory if depthwise convolutions take longer than a roofline says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.monet.points import (
    GIB,
    NO_WINOGRAD,
    OURS,
    OVERHEAD,
    Point,
    cheapest,
    gib,
    read_points,
    select,
)
from analysis.parts import Part, Table, percent, prose
from analysis.style import BLACK, FOREST, ORANGE, WINE

LOOKS = ((WINE, "*", "-"), (ORANGE, "D", "--"), (FOREST, "s", ":"))  # one for each factor
CAPTION = "Overhead over PyTorch's own step (%) against memory budget (GiB), if depthwise convolutions take longer"


@dataclass(frozen=True, slots=True)
class Found:
    """One solve: its overhead, and the least that a plan can have by the proven bound; None without a plan."""

    label: str
    factor: int
    budget_bytes: int
    published: float | None
    overhead: float | None
    least: float | None


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """The figure, and the numbers behind it."""
    found = read_found(document, folder)
    if not found:
        return Part(*prose(__file__, overheads="No network of this run has a roofline's costs and such convolutions."))
    return Part(
        *prose(__file__, overheads=_words(found)), [("depthwise", CAPTION, _figure(found))], [_table(found)],
    )  # fmt: skip


def read_found(document: Mapping[str, Any], folder: Path) -> list[Found]:
    """By network, factor and budget; a plan counts at every budget that it fits, and a bound at every smaller one."""
    facts, at_roofline = read_points(folder)
    rows = document["rows"]
    points = {1: at_roofline}
    for factor in sorted({row["factor"] for row in rows}):
        points[factor] = read_points(folder, {"rows": [row for row in rows if row["factor"] == factor]})[1]
    found = []
    for net in facts:
        told = zip(net["budgets_gib"], net["overheads_percent"], strict=True)
        published = {round(GIB * size): percents / 100 for size, percents in told}
        if net["name"] in {row["network"] for row in rows}:
            for factor, of in points.items():
                own = select(of, net["name"], NO_WINOGRAD, OURS)
                found += [_at(net["label"], factor, own, p.budget_bytes, published) for p in reversed(own)]
    return found


def _at(label: str, factor: int, own: Sequence[Point], budget: int, published: Mapping[int, float]) -> Found:
    best = cheapest(own, budget)
    least = [p.least for p in own if p.least is not None and p.budget_bytes >= budget]
    return Found(label, factor, budget, published.get(budget), None if best is None else best.overhead,
                 max(least, default=None))  # fmt: skip


def _words(found: Sequence[Found]) -> str:
    """Each network at its two smallest budgets."""
    texts = []
    for label in dict.fromkeys(one.label for one in found):
        own = [one for one in found if one.label == label]
        for budget in sorted({one.budget_bytes for one in own})[:2]:
            first, *others = (one for one in own if one.budget_bytes == budget)
            slower = ", ".join(f"{percent(one.overhead)} at {one.factor} times them" for one in others)
            texts.append(
                f"{label} at {gib(budget)} GiB, published {percent(first.published)}: {percent(first.overhead)} at the "
                f"roofline's times, {slower}. Proven: at the roofline's times no plan is below {percent(first.least)}."
            )
    return " ".join(texts)


def _times(factor: int) -> str:
    """What depthwise convolutions take."""
    return "roofline's time" if factor == 1 else f"{factor} x roofline's time"


def _table(found: Sequence[Found]) -> Table:
    factors = sorted({one.factor for one in found})
    rows = []
    for label, budget in dict.fromkeys((one.label, one.budget_bytes) for one in found):
        at = {one.factor: one for one in found if (one.label, one.budget_bytes) == (label, budget)}
        first = at[factors[0]]
        cells = [percent(number) for factor in factors for number in (at[factor].overhead, at[factor].least)]
        rows.append([label, gib(budget), percent(first.published), *cells])
    return Table("monet_depthwise", "Overhead, and the least that is not ruled out", [
        "network", "GiB", "MONeT published",
        *(f"{what}, {_times(factor)}" for factor in factors for what in ("found", "proven at least")),
    ], rows)  # fmt: skip


def _figure(found: Sequence[Found]) -> Figure:
    labels = list(dict.fromkeys(one.label for one in found))
    figure = Figure(figsize=(5.2 * len(labels), 3.6), layout="constrained")
    for axes, label in zip(figure.subplots(1, len(labels), squeeze=False)[0], labels, strict=True):
        own = [one for one in found if one.label == label and one.overhead is not None]
        for factor, (colour, marker, line) in zip(sorted({one.factor for one in own}), LOOKS, strict=False):
            at = [one for one in own if one.factor == factor]
            axes.plot([one.budget_bytes / GIB for one in at], [100 * (one.overhead or 0) for one in at], color=colour,
                      marker=marker, ls=line, label=_times(factor).capitalize())  # fmt: skip
        told = {one.budget_bytes: one.published for one in own if one.published is not None}
        axes.plot([budget / GIB for budget in told], [100 * share for share in told.values()], color=BLACK, marker="x",
                  ls="", label="MONeT published")  # fmt: skip
        axes.axhline(0, color=BLACK, lw=0.6)
        axes.set(title=label, xlabel="Memory budget (GiB)", ylabel=OVERHEAD)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
