"""Bars: overhead with the implementations of each level (the ablation), and memory at 10 % overhead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from analysis.charts import grouped_bars, legend_below, panels
from analysis.monet.points import (
    CPU,
    GIB,
    LEVELS,
    NO_WINOGRAD,
    NONE,
    OURS,
    OVERHEAD,
    P100,
    PROGRAM,
    Facts,
    Point,
    cheapest,
    contained,
    contained_words,
    gib,
    no_plan,
    read_points,
    select,
)  # fmt: skip
from analysis.parts import Part, Study, Table, percent, prose
from analysis.style import BLACK, GREY, LIGHT_GREY, OLIVE, ORANGE, SKY, WINE

COLOURS = {NONE: LIGHT_GREY, "in_place": SKY, "conv": ORANGE, "output": OLIVE, NO_WINOGRAD: WINE}


def ablation(document: Mapping[str, Any], study: Study) -> Part:
    """Bars at the smallest budget, and every level at every budget of the ablation."""
    facts, points = read_points(study, document)
    levels = document["levels"]
    cases = [
        (net, budget)
        for net in facts
        for budget in sorted({p.budget_bytes for p in select(points, net["name"], levels, (OURS, PROGRAM))})
    ]
    return Part(
        *prose(__file__, "ablation", overheads=_overheads(cases, points, levels)),
        [("ablation", "Overhead at the smallest budget, by level of implementations; x: no plan",
          _level_bars(cases, points, levels))],
        [_levels(cases, points, levels)],
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


def _levels(cases: Sequence[Any], points: Sequence[Point], levels: Sequence[str]) -> Table:
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
    return Table("monet_ablation", [
        "network", "GiB", "implementations", "portfolio", "as contained", "MONeT's program",
    ], rows)  # fmt: skip


def _level_bars(cases: Sequence[Any], points: Sequence[Point], levels: Sequence[str]) -> Figure:
    figure, (axes,) = panels(1, (8.2, 3.0), ylabel=OVERHEAD)
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
    legend_below(figure, 6)
    return figure


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


Found: TypeAlias = Mapping[tuple[str, str], Mapping[str, Any]]  # [network, level]
BARS = ((NONE, "Default implementations (Checkmate's problem)", SKY),
        (CPU, "All, ratios of a CPU", ORANGE), (NO_WINOGRAD, "All, ratios of the roofline", WINE))  # fmt: skip


def ten_percent(document: Mapping[str, Any], study: Study) -> Part:
    """Bars of memory, and ratios to plain PyTorch and to Checkmate's problem."""
    facts, points = read_points(study)
    found = {(entry["network"], entry["level"]): entry for entry in document["found"]}
    limit = 100 * document["overhead"]
    return Part(
        *prose(__file__, "ten_percent", percent=limit, ratios=_ratios(facts, found)),
        [("ten_percent", f"Smallest memory with a plan of at most {limit:g} % overhead", _memory_bars(facts, found))],
        [_memory(facts, found, document["overhead"]), _tightest(facts, points)],
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


def _memory(facts: Facts, found: Found, overhead: float) -> Table:
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
        "monet_ten_percent", [
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
    return Table("monet_tightest", [
        "network", "published GiB", "less than PyTorch", "published overhead", "GiB", "less than PyTorch (simulated)",
        "default", "all, CPU", "all, P100", "all, roofline",
    ], rows)  # fmt: skip


def _memory_bars(facts: Facts, found: Found) -> Figure:
    figure, (axes,) = panels(1, (7.8, 2.9), ylabel="Memory (GiB)")
    plain = [net["pytorch_peak_bytes"] / GIB for net in facts]
    series = {label: [found[net["name"], level]["found_bytes"] / GIB for net in facts] for level, label, _ in BARS}
    ratios = [[f"{most / size:.1f}x" for most, size in zip(plain, sizes, strict=True)] for sizes in series.values()]
    grouped_bars(axes, [net["label"] for net in facts], {"Plain PyTorch, simulated": plain, **series},
                 [GREY, *(colour for *_, colour in BARS)], [[""] * len(plain), *ratios], inside=True)  # fmt: skip
    limits = [(x, limit) for x, net in enumerate(facts) if (limit := _published(net, 0.1)) is not None]
    axes.hlines([limit for _, limit in limits], [x - 0.42 for x, _ in limits], [x + 0.42 for x, _ in limits],
                color=BLACK, lw=1.2, ls=(0, (3, 2)), label="MONeT published, within 10 %")  # fmt: skip
    legend_below(figure, 3)
    return figure
