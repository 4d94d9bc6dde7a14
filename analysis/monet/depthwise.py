"""Overhead against memory if depthwise convolutions take longer than a roofline says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.monet.points import GIB, OVERHEAD, gib
from analysis.parts import Part, Table, percent, prose
from analysis.results import WITH_PLAN, as_objects, read_rows
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
    """By network, factor and budget; a plan counts at every budget that it fits."""
    entries = document["rows"]
    stored = read_rows(folder / document["store"], [entry["key"] for entry in entries])
    rows = {row.key: row for row in as_objects(stored)}
    found = []
    for entry in entries:
        same = [rows[other["key"]] for other in entries if other["key"] in rows
                and (other["network"], other["factor"]) == (entry["network"], entry["factor"])]  # fmt: skip
        plain, budget = entry["pytorch_cost"], entry["budget_bytes"]
        costs = [row.cost for row in same if row.status in WITH_PLAN and row.peak_bytes <= budget]
        bounds = [row.bound for row in same if row.bound is not None and row.budget_bytes >= budget]
        published = entry["published_percent"]
        found.append(
            Found(
                entry["label"], entry["factor"], budget, None if published is None else published / 100,
                min(costs) / plain - 1 if costs else None, max(bounds) / plain - 1 if bounds else None,
            )
        )  # fmt: skip
    return found


def _words(found: Sequence[Found]) -> str:
    """Each network at its two smallest budgets."""
    texts = []
    for label in dict.fromkeys(one.label for one in found):
        own = [one for one in found if one.label == label]
        for budget in sorted({one.budget_bytes for one in own})[:2]:
            at = [one for one in own if one.budget_bytes == budget]
            by_factor = ", ".join(f"{percent(one.overhead)} (times {one.factor})" for one in at)
            texts.append(
                f"{label} at {gib(budget)} GiB, published {percent(at[0].published)}: {by_factor}; at the roofline's "
                f"times no plan is below {percent(at[0].least)}, which is proven"
            )
    return ". ".join(texts) + "."


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
        *(f"{what}, times {factor}" for factor in factors for what in ("found", "proven at least")),
    ], rows)  # fmt: skip


def _figure(found: Sequence[Found]) -> Figure:
    labels = list(dict.fromkeys(one.label for one in found))
    figure = Figure(figsize=(5.2 * len(labels), 3.6), layout="constrained")
    for axes, label in zip(figure.subplots(1, len(labels), squeeze=False)[0], labels, strict=True):
        own = [one for one in found if one.label == label and one.overhead is not None]
        for factor, (colour, marker, line) in zip(sorted({one.factor for one in own}), LOOKS, strict=False):
            at = [one for one in own if one.factor == factor]
            axes.plot([one.budget_bytes / GIB for one in at], [100 * (one.overhead or 0) for one in at], color=colour,
                      marker=marker, ls=line, label=f"Depthwise times {factor}")  # fmt: skip
        told = {one.budget_bytes: one.published for one in own if one.published is not None}
        axes.plot([budget / GIB for budget in told], [100 * share for share in told.values()], color=BLACK, marker="x",
                  ls="", label="MONeT published")  # fmt: skip
        axes.axhline(0, color=BLACK, lw=0.6)
        axes.set(title=label, xlabel="Memory budget (GiB)", ylabel=OVERHEAD)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
