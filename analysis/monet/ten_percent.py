"""Memory at 10 % overhead, and the two claims about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from analysis.bars import grouped_bars
from analysis.monet.points import CPU, GIB, NO_WINOGRAD, NONE, P100, Facts, Point, contained_words, gib, read_points
from analysis.parts import Part, Table, prose
from analysis.style import BLACK, GREY, ORANGE, SKY, WINE

Found: TypeAlias = Mapping[tuple[str, str], Mapping[str, Any]]  # [network, level]
BARS = ((NONE, "Default implementations (Checkmate's problem)", SKY),
        (CPU, "All, ratios of a CPU", ORANGE), (NO_WINOGRAD, "All, ratios of the roofline", WINE))  # fmt: skip


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """Bars of memory, and ratios to plain PyTorch and to Checkmate's problem."""
    facts, points = read_points(folder)
    found = {(entry["network"], entry["level"]): entry for entry in document["found"]}
    limit = 100 * document["overhead"]
    return Part(
        *prose(__file__, percent=limit, ratios=_ratios(facts, found)),
        [("ten_percent", f"Smallest memory with a plan of at most {limit:g} % overhead", _figure(facts, found))],
        [_table(facts, found, document["overhead"]), _tightest(facts, points)],
    )  # fmt: skip


def _published(net: Mapping[str, Any], overhead: float) -> float | None:
    """The smallest published budget within that overhead, in GiB."""
    pairs = zip(net["budgets_gib"], net["overheads_percent"], strict=True)
    return min((gib for gib, measured in pairs if measured <= 100 * overhead), default=None)


def _ratio(above: float, below: float) -> str:
    return f"{above / below:.2f}x"


def _ratios(facts: Facts, found: Found) -> str:
    def spread(ratios: Sequence[float]) -> str:
        return f"{min(ratios):.2f}x to {max(ratios):.2f}x"

    texts = []
    for level, label, _ in BARS[1:]:
        sizes = [found[net["name"], level]["found_bytes"] for net in facts]
        of_plain = [net["pytorch_peak_bytes"] / size for net, size in zip(facts, sizes, strict=True)]
        of_checkmate = [found[net["name"], NONE]["found_bytes"] / size for net, size in zip(facts, sizes, strict=True)]
        texts.append(
            f"{label}: {spread(of_plain)} less than plain PyTorch, {spread(of_checkmate)} less than with default "
            "implementations"
        )
    return "; ".join(texts) + "."


def _table(facts: Facts, found: Found, overhead: float) -> Table:
    rows = []
    for net in facts:
        none, slow, fast = three = [found[net["name"], level] for level, _, _ in BARS]
        plain, published = net["pytorch_peak_bytes"], _published(net, overhead)
        rows.append([
            net["label"], "" if published is None else f"{published:g}",
            "" if published is None else _ratio(net["pytorch_gib"], published), gib(plain),
            *(gib(one["found_bytes"]) for one in three),
            *(gib(one["not_found_bytes"]) for one in three),
            *(_ratio(plain, one["found_bytes"]) for one in three),
            *(_ratio(none["found_bytes"], one["found_bytes"]) for one in (slow, fast)),
        ])  # fmt: skip
    return Table(
        "monet_ten_percent", f"Memory in GiB at {100 * overhead:g} % overhead, and ratios", [
            "network", "published", "PyTorch / published", "PyTorch", "default", "all, CPU", "all, roofline",
            "default: none found at", "all, CPU: none found at", "all, roofline: none found at", "PyTorch / default",
            "PyTorch / all, CPU", "PyTorch / all, roofline", "default / all, CPU", "default / all, roofline",
        ], rows,
    )  # fmt: skip


def _tightest(facts: Facts, points: Sequence[Point]) -> Table:
    """How much less memory than PyTorch at the smallest budget, and at what overhead: published and ours."""
    rows = []
    for net in facts:
        budget, least = min(net["budgets_bytes"]), min(net["budgets_gib"])
        published = dict(zip(net["budgets_gib"], net["overheads_percent"], strict=True))
        rows.append([
            net["label"], f"{least:g}", _ratio(net["pytorch_gib"], least), f"{published[least]:.2f} %", gib(budget),
            _ratio(net["pytorch_peak_bytes"], budget),
            *(contained_words(points, net["name"], level, budget) for level in (NONE, CPU, P100, NO_WINOGRAD)),
        ])  # fmt: skip
    return Table("monet_tightest", "At the smallest budget: memory saved against plain PyTorch, and its overhead", [
        "network", "published GiB", "less than PyTorch", "published overhead", "GiB", "less than PyTorch (simulated)",
        "default", "all, CPU", "all, P100", "all, roofline",
    ], rows)  # fmt: skip


def _figure(facts: Facts, found: Found) -> Figure:
    figure = Figure(figsize=(8.2, 3.5), layout="constrained")
    axes = figure.subplots()
    plain = [net["pytorch_peak_bytes"] / GIB for net in facts]
    series = {label: [found[net["name"], level]["found_bytes"] / GIB for net in facts] for level, label, _ in BARS}
    ratios = [[f"{most / size:.1f}x" for most, size in zip(plain, sizes, strict=True)] for sizes in series.values()]
    grouped_bars(axes, [net["label"] for net in facts], {"Plain PyTorch, simulated": plain, **series},
                 [GREY, *(colour for *_, colour in BARS)], [[""] * len(plain), *ratios], inside=True)  # fmt: skip
    limits = [(x, limit) for x, net in enumerate(facts) if (limit := _published(net, 0.1)) is not None]
    axes.hlines([limit for _, limit in limits], [x - 0.42 for x, _ in limits], [x + 0.42 for x, _ in limits],
                color=BLACK, lw=1.2, ls=(0, (3, 2)), label="MONeT published, within 10 %")  # fmt: skip
    axes.set_ylabel("Memory (GiB)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
