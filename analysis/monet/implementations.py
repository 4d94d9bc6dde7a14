"""Which implementations the plans use, and why some are never chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from analysis.charts import heatmap, panels
from analysis.monet.points import CPU, LEVELS, NO_WINOGRAD, OURS, Facts, gib, read_points
from analysis.parts import Part, Study, Table, prose

Entries = Sequence[Mapping[str, Any]]  # of the document; its key "way" is the name of an implementation


def report(document: Mapping[str, Any], study: Study) -> Part:
    """Counts by budget, and the reasons."""
    facts, _ = read_points(study)
    label = {net["name"]: net["label"] for net in facts}
    used, never, available = document["used"], document["never"], document["available"]
    most = {(e["network"], e["kind"], e["way"]): e["operations"] for e in available}
    chosen = {(e["kind"], e["way"]) for e in used}
    nowhere = sorted({(short(e["kind"]), e["way"]) for e in available if (e["kind"], e["way"]) not in chosen})
    reasons = Counter(e["reason"].partition(":")[0] for e in never)
    figures = []
    if used:
        figures = [
            (f"implementations_{level}", "Operations that run with each implementation in the portfolio's plan, "
             f"{LEVELS[level]}; shade: the share of those that have it; empty: no plan",
             _figure(used, most, facts, level))
            for level in (NO_WINOGRAD, CPU)
        ]  # fmt: skip
    return Part(
        *prose(__file__, "implementations", never=", ".join(f"{kind} {name}" for kind, name in nowhere) or "none",
               reasons="; ".join(f"{words}: {n}" for words, n in reasons.items()) or "none"),
        figures,
        [_used_table(used, most, label), _never_table(never, label)],
    )  # fmt: skip


def short(kind: str) -> str:
    """``relu_ backward`` for ``aten::relu__ip_grad``."""
    name = kind.rpartition("::")[2]
    for ending, words in (("_ip_grad", " backward"), ("_param_grad", " weight grad")):
        if name.endswith(ending):
            return name.removesuffix(ending) + words
    return name


def _used_table(used: Entries, most: Mapping[tuple[str, str, str], int], label: Mapping[str, str]) -> Table:
    rows = [
        [label[e["network"]], LEVELS[e["level"]], e["strategy"], gib(e["budget_bytes"]), short(e["kind"]), e["way"],
         str(e["operations"]), str(most[e["network"], e["kind"], e["way"]])]
        for e in used
    ]  # fmt: skip
    return Table("monet_used", [
        "network", "implementations", "strategy", "GiB", "operation", "implementation", "operations", "that have it",
    ], rows)  # fmt: skip


def _never_table(never: Entries, label: Mapping[str, str]) -> Table:
    rows = [[label[e["network"]], LEVELS[e["level"]], short(e["kind"]), e["way"], str(e["operations"]), e["reason"]]
            for e in never]  # fmt: skip
    return Table("monet_never", [
        "network", "implementations", "operation", "implementation", "that have it", "reason",
    ], rows)  # fmt: skip


def _figure(used: Entries, most: Mapping[tuple[str, str, str], int], facts: Facts, level: str) -> Figure:
    """Kinds and their implementations down, networks and budgets across."""
    offered = {(kind, name) for _, kind, name in most}
    lines = sorted(offered, key=lambda line: (line[0].endswith(("_ip_grad", "_param_grad")), *line))
    counts = {
        (e["network"], e["budget_bytes"], e["kind"], e["way"]): e["operations"]
        for e in used if e["level"] == level and e["strategy"] == OURS
    }  # fmt: skip
    columns = [(net["name"], budget) for net in facts for budget in sorted(net["budgets_bytes"], reverse=True)]
    solved = {(network, budget) for network, budget, _, _ in counts}
    shares = np.full((len(lines), len(columns)), np.nan)
    texts = np.full(shares.shape, "", dtype=object)
    for i, j in np.ndindex(shares.shape):
        (kind, name), (network, budget) = lines[i], columns[j]
        if (network, kind, name) in most and (network, budget) in solved:
            n = counts.get((network, budget, kind, name), 0)
            shares[i, j], texts[i, j] = n / most[network, kind, name], str(n)
    figure, (axes,) = panels(1, (0.42 * len(columns) + 3.0, 0.21 * len(lines) + 0.7), xlabel="Memory budget (GiB)")
    heatmap(axes, shares, texts, [f"{short(kind)}: {name}" for kind, name in lines],
            [gib(budget) for _, budget in columns], colours="Purples", top=1)  # fmt: skip
    start = 0
    for net in facts:
        n = len(net["budgets_bytes"])
        axes.annotate(net["label"], (start + n / 2, -0.3), ha="center", va="bottom", fontsize=8,
                      annotation_clip=False)  # fmt: skip
        start += n
        if start < len(columns):
            axes.axvline(start, color="#777777", lw=0.8)
    return figure
