"""Overhead against memory, a panel for each network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from analysis.marks import write_beyond
from analysis.monet.points import (
    ALL,
    CPU,
    GIB,
    GIST,
    JOINT,
    MILP,
    NO_WINOGRAD,
    NONE,
    OURS,
    OVERHEAD,
    PROGRAM,
    Facts,
    Point,
    cheapest,
    contained,
    contained_words,
    gib,
    overhead_words,
    read_points,
    select,
)
from analysis.parts import Part, Table, percent, prose
from analysis.style import BLACK, BLUE, FOREST, GREY, ORANGE, SKY, WINE

TOP, BOTTOM = 32.0, -12.0  # percent; the frame grows downwards if a curve needs it
# label, level, strategy, colour, marker, line; beside them a band between the portfolio's plans at two sets of costs
LINES = (
    ("Checkmate MILP, default implementations", NONE, MILP, BLUE, "o", ":"),
    ("Portfolio, default implementations", NONE, OURS, SKY, "s", "-"),
    ("MONeT's program, ratios of the roofline", NO_WINOGRAD, PROGRAM, FOREST, "p", "-."),
)
EDGE, BAND = "Portfolio, all implementations, ratios of the roofline", "... up to ratios of a CPU"
WITH_WINOGRAD = "Portfolio, with modelled Winograd"
CAPTION = (
    "Overhead over PyTorch's own step (%) against memory budget (GiB); the band lies between two assumptions about "
    "implementations without a measurement; plans beyond the frame stand at its top with their value"
)
COST_NAMES = {"profile": "published P100 costs", "roofline": "roofline costs"}


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """The figure, and the numbers behind it."""
    facts, points = read_points(folder)
    peaks = [f"{net['label']} {gib(net['pytorch_peak_bytes'])} (published {net['pytorch_gib']:g})" for net in facts]
    return Part(
        *prose(__file__, overheads=_overheads(facts, points), peaks=", ".join(peaks), program=_program_words(points)),
        [("overhead", CAPTION, _figure(facts, points))],
        [_main_table(facts, points), _plain_table(facts, points), _all_solves(facts, points)],
    )  # fmt: skip


def _overheads(facts: Facts, points: Sequence[Point]) -> str:
    """Each network at its smallest budget."""
    texts = []
    for net in facts:
        budget = min(net["budgets_bytes"])
        fast, slow, none = (
            contained_words(points, net["name"], level, budget) or "not tried" for level in (NO_WINOGRAD, CPU, NONE)
        )
        texts.append(f"{net['label']} at {gib(budget)} GiB {fast} to {slow} (default implementations: {none})")
    return "; ".join(texts)


def _program_words(points: Sequence[Point]) -> str:
    own = [p for p in points if p.strategy == PROGRAM]
    if not own:
        return ""
    with_plan = sum(p.cost is not None for p in own)
    better = sum(p.cost is not None and p.cost < p.stats.get("start_cost", 0) for p in own)
    ended = sum(bool(p.stats.get("monet_optimal")) for p in own)
    return (
        f"MONeT's program, with HiGHS instead of Gurobi and {own[0].limit_s:g} s for each solve, found a plan "
        f"in {with_plan} of {len(own)} solves, cheaper than its start in {better}; {ended} ran to the end."
    )


def _main_table(facts: Facts, points: Sequence[Point]) -> Table:
    rows = []
    for net in facts:
        budgets = [round(gibibytes * GIB) for gibibytes in net["budgets_gib"]]
        published = dict(zip(budgets, net["overheads_percent"], strict=True))
        for budget in sorted(net["budgets_bytes"], reverse=True):
            cells = [
                overhead_words(select(points, net["name"], NONE, ALL), budget),
                *(contained_words(points, net["name"], level, budget) for level in (NO_WINOGRAD, CPU)),
                overhead_words(select(points, net["name"], NO_WINOGRAD, PROGRAM), budget),
                overhead_words(select(points, net["name"], JOINT, OURS), budget),
            ]
            known = published.get(budget)
            rows.append([net["label"], gib(budget), "" if known is None else f"{known:.2f} %", *cells])
    return Table(
        "monet_overhead", "Overhead over PyTorch's own step of the cheapest plan within a budget; empty: not tried, or "
        "not published",
        ["network", "GiB", "MONeT published", "Checkmate's optimum, as found", "portfolio, ratios of the roofline",
         "portfolio, ratios of a CPU", "MONeT's program, ratios of the roofline", "portfolio, with Winograd"], rows,
    )  # fmt: skip


def _plain_table(facts: Facts, points: Sequence[Point]) -> Table:
    rows = []
    for net in facts:
        gist = next(iter(select(points, net["name"], GIST, "gist")), None)
        rows.append([
            net["label"], str(net["batch"]), COST_NAMES[net["costs"]], str(net["operations"]),
            str(net["implementations"]), f"{net['total_cost'] / 1e6:.1f}", gib(net["default_peak_bytes"]),
            f"{net['pytorch_gib']:.2f}", gib(net["pytorch_peak_bytes"]),
            percent(net["total_cost"] / net["pytorch_cost"] - 1),
            "" if gist is None or gist.peak_bytes is None else gib(gist.peak_bytes),
            "" if gist is None else percent(gist.overhead),
        ])  # fmt: skip
    return Table(
        "monet_plain", "One pass without recomputation: default implementations, plain PyTorch, Gist (memory in GiB)",
        ["network", "batch", "costs", "operations", "other implementations", "pass ms", "default peak",
         "PyTorch published", "PyTorch peak", "default overhead", "Gist peak", "Gist overhead"], rows,
    )  # fmt: skip


def _all_solves(facts: Facts, points: Sequence[Point]) -> Table:
    label = {net["name"]: net["label"] for net in facts}
    plain = {net["name"]: net["pytorch_cost"] for net in facts}
    rows = [
        [label[p.network], p.level, p.strategy, gib(p.budget_bytes), p.status, percent(p.overhead),
         "" if p.peak_bytes is None else gib(p.peak_bytes),
         "" if p.bound is None else percent(p.bound / plain[p.network] - 1),
         f"{p.wall_s:.1f}"]
        for p in points
    ]  # fmt: skip
    return Table("monet_solves", "Every solve of this part; bound as overhead", [
        "network", "implementations", "strategy", "GiB", "status", "overhead", "peak GiB", "bound", "seconds",
    ], rows)  # fmt: skip


def _figure(facts: Facts, points: Sequence[Point]) -> Figure:
    """A panel for each network, and one for each network with Winograd; the legend is below."""
    panels = [(net, False) for net in facts]
    panels += [(net, True) for net in facts if select(points, net["name"], JOINT, OURS)]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(max(6.4, 3.9 * columns), 3.3 * lines + 0.8), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for axes, (net, with_winograd) in zip(grid, panels, strict=False):
        _panel(axes, net, points, with_winograd)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, handlelength=2.8)
    return figure


def _panel(axes: Axes, net: Mapping[str, Any], points: Sequence[Point], with_winograd: bool) -> None:
    own = [p for p in points if p.network == net["name"]]
    budgets = sorted(net["budgets_bytes"])
    axes.axhline(0, color=GREY, lw=0.7, zorder=1)
    edges = [_edge(own, net["name"], level, budgets) for level in (NO_WINOGRAD, CPU)]
    both = sorted(edges[0].keys() & edges[1].keys())
    axes.plot([*edges[0]], [min(y, TOP) for y in edges[0].values()], color=WINE, marker="*", ms=7, lw=1.3, label=EDGE,
              zorder=3)  # fmt: skip
    low, high = ([min(edge[x], TOP) for x in both] for edge in edges)
    axes.fill_between(both, low, high, color=WINE, alpha=0.25, lw=0, label=BAND, zorder=2)
    shown = [("", WINE, edges[0])]
    for label, level, strategy, colour, marker, line in () if with_winograd else LINES:
        mine = {
            b / GIB: 100 * p.overhead for b in budgets if select(own, net["name"], level, strategy)
            and (p := cheapest(select(own, net["name"], level, strategy), b)) and p.overhead is not None
        }  # fmt: skip
        shown.append((label, colour, mine))
        axes.plot([*mine], [min(y, TOP) for y in mine.values()], color=colour, marker=marker, ls=line, lw=1.5, ms=4.5,
                  label=label, zorder=3)  # fmt: skip
    if with_winograd:
        joint = _edge(own, net["name"], JOINT, budgets)
        shown.append((WITH_WINOGRAD, ORANGE, joint))
        axes.plot([*joint], [*joint.values()], color=ORANGE, marker="D", ls="--", lw=1.5, ms=4.5, label=WITH_WINOGRAD)
    else:
        _gist(axes, own)
    write_beyond(axes, TOP, [(colour, line) for _, colour, line in shown])
    plain = net["pytorch_peak_bytes"] / GIB
    axes.plot(plain, 0, color=BLACK, marker="P", ls="", ms=7, label="Plain PyTorch, simulated", zorder=4)
    axes.plot([*net["budgets_gib"][::-1], net["pytorch_gib"]], [*net["overheads_percent"][::-1], 0.0], color=BLACK,
              marker="o", mfc="white", ms=4, lw=1.1, ls=(0, (4, 2)), label="MONeT published, measured",
              zorder=2)  # fmt: skip
    lowest = min((y for _, _, line in shown for y in line.values()), default=0.0)
    axes.set_ylim(min(BOTTOM, 5 * ((lowest - 4) // 5)), TOP)
    axes.set_xlim(min(*budgets, min(net["budgets_gib"]) * GIB) / GIB - 0.5, max(plain, net["pytorch_gib"]) + 0.6)
    axes.xaxis.set_major_locator(MultipleLocator(2))
    what = "with modelled Winograd" if with_winograd else COST_NAMES[net["costs"]]
    axes.set_title(f"{net['label']} ({net['batch']}), {what}", loc="left", fontsize=9, pad=12)
    axes.set(xlabel="Memory budget (GiB)", ylabel=OVERHEAD)


def _edge(points: Sequence[Point], net: str, level: str, budgets: Sequence[int]) -> dict[float, float]:
    """[GiB] the percentage of the portfolio's best plan of the level, or of a level that it contains."""
    found = {b / GIB: contained(points, net, level, b) for b in budgets}
    return {x: 100 * p.overhead for x, p in found.items() if p is not None and p.overhead is not None}


def _gist(axes: Axes, own: Sequence[Point]) -> None:
    for p in own:
        if p.level == GIST and p.overhead is not None and p.peak_bytes:
            axes.plot(p.peak_bytes / GIB, 100 * p.overhead, color=BLACK, marker="X", ls="", ms=7,
                      label="Gist, lossless", zorder=4)  # fmt: skip
