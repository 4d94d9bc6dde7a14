"""Which implementations the plans use, and why some are never chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from analysis.bars import heatmap
from analysis.monet.points import JOINT, LEVELS, NO_WINOGRAD, gib, read_points
from analysis.parts import Part, Table, prose


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """Counts by budget, and the reasons."""
    facts, _ = read_points(folder)
    label = {net["name"]: net["label"] for net in facts}
    used, never = document["used"], document["never"]
    everywhere = _never_anywhere(document)
    nowhere = ", ".join(f"{kind} {way}" for kind, way in everywhere) or "none"
    groups = {}
    for entry in never:
        groups.setdefault(entry["reason"].partition(":")[0], []).append(entry)
    counts = "; ".join(f"{words}: {len(entries)}" for words, entries in groups.items()) or "none"
    figures = []
    if used:
        figures = [
            (f"implementations_{level}", f"Operations that run in each way in the portfolio's plan, {LEVELS[level]}; "
             "shade: the share of those that have it; empty: no plan", _figure(document, facts, level))
            for level in (NO_WINOGRAD, JOINT)
        ]  # fmt: skip
    return Part(
        *prose(__file__, never=nowhere, reasons=counts),
        figures,
        [_used_table(used, document["available"], label), _never_table(never, label)],
    )


def _never_anywhere(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    chosen = {(e["kind"], e["way"]) for e in document["used"]}
    return sorted({(short(e["kind"]), e["way"]) for e in document["available"] if (e["kind"], e["way"]) not in chosen})


def short(kind: str) -> str:
    """``relu_ backward`` for ``aten::relu__ip_grad``."""
    name = kind.rpartition("::")[2]
    for ending, words in (("_ip_grad", " backward"), ("_param_grad", " weight grad")):
        if name.endswith(ending):
            return name.removesuffix(ending) + words
    return name


def _used_table(
    used: Sequence[Mapping[str, Any]], available: Sequence[Mapping[str, Any]], label: Mapping[str, str]
) -> Table:
    most = {(e["network"], e["kind"], e["way"]): e["operations"] for e in available}
    rows = [
        [label[e["network"]], LEVELS[e["level"]], e["strategy"], gib(e["budget_bytes"]), short(e["kind"]), e["way"],
         str(e["operations"]), str(most[e["network"], e["kind"], e["way"]])]
        for e in used
    ]  # fmt: skip
    return Table("monet_used", "Operations that run in another way than the default one", [
        "network", "implementations", "strategy", "GiB", "operation", "way", "operations", "that have it",
    ], rows)  # fmt: skip


def _never_table(never: Sequence[Mapping[str, Any]], label: Mapping[str, str]) -> Table:
    rows = [[label[e["network"]], LEVELS[e["level"]], short(e["kind"]), e["way"], str(e["operations"]), e["reason"]]
            for e in never]  # fmt: skip
    return Table("monet_never", "Implementations that no plan of a network uses, and why", [
        "network", "implementations", "operation", "way", "that have it", "reason",
    ], rows)  # fmt: skip


def _figure(document: Mapping[str, Any], facts: Sequence[Mapping[str, Any]], level: str) -> Figure:
    most = {(e["network"], e["kind"], e["way"]): e["operations"] for e in document["available"]}
    offered = {(e["kind"], e["way"]) for e in document["available"] if level == JOINT or e["way"] != "winograd"}
    ways = sorted(offered, key=lambda w: (_is_backward(w[0]), *w))
    counts = {
        (e["network"], e["budget_bytes"], e["kind"], e["way"]): e["operations"]
        for e in document["used"] if e["level"] == level and e["strategy"] == "portfolio"
    }  # fmt: skip
    columns = [(net, budget) for net in facts for budget in sorted(net["budgets_bytes"], reverse=True)]
    solved = {(network, budget) for network, budget, _, _ in counts}
    shares = np.full((len(ways), len(columns)), np.nan)
    texts = np.full(shares.shape, "", dtype=object)
    for j, (net, budget) in enumerate(columns):
        for i, (kind, way) in enumerate(ways):
            if (net["name"], kind, way) in most and (net["name"], budget) in solved:
                n = counts.get((net["name"], budget, kind, way), 0)
                shares[i, j], texts[i, j] = n / most[net["name"], kind, way], str(n)
    figure = Figure(figsize=(0.42 * len(columns) + 3.4, 0.21 * len(ways) + 1.3), layout="constrained")
    axes = figure.subplots()
    heatmap(axes, shares, texts, [f"{short(kind)}: {way}" for kind, way in ways],
            [gib(budget) for _, budget in columns], colours="Purples", top=1)  # fmt: skip
    start = 0
    for net in facts:
        n = len(net["budgets_bytes"])
        axes.annotate(net["label"], (start + n / 2, -0.3), ha="center", va="bottom", fontsize=8,
                      annotation_clip=False)  # fmt: skip
        start += n
        if start < len(columns):
            axes.axvline(start, color="#777777", lw=0.8)
    axes.set_xlabel("Memory budget (GiB)")
    return figure


def _is_backward(kind: str) -> bool:
    return kind.endswith(("_ip_grad", "_param_grad"))
