"""Overhead against memory, a panel for each network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from analysis.monet.points import (
    ALL,
    GIB,
    GIST,
    JOINT,
    MILP,
    NO_WINOGRAD,
    NONE,
    OURS,
    PROGRAM,
    Facts,
    Point,
    cheapest,
    gib,
    overhead_words,
    read_points,
    select,
)
from analysis.parts import Part, Table, percent, prose
from analysis.style import BLACK, BLUE, FOREST, GREY, OLIVE, ORANGE, SKY, WINE

TOP, BOTTOM = 32.0, -12.0  # percent; the frame grows downwards if a curve needs it
LINES = (  # label, level, strategy, colour, marker, line
    ("Checkmate MILP, default implementations", NONE, MILP, BLUE, "o", ":"),
    ("Portfolio, default implementations", NONE, OURS, SKY, "s", "-"),
    ("Portfolio, all but Winograd", NO_WINOGRAD, OURS, WINE, "*", "-"),
    ("Portfolio, all (modelled Winograd)", JOINT, OURS, ORANGE, "D", "--"),
    ("MONeT's program, all but Winograd", NO_WINOGRAD, PROGRAM, FOREST, "p", "-."),
    ("MONeT's program, all", JOINT, PROGRAM, OLIVE, "h", ":"),
)
CAPTION = "Overhead (%) against memory budget (GiB); plans beyond the frame stand at its top with their value"
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
        ours, checkmate = (
            overhead_words(select(points, net["name"], level), budget) or "not tried" for level in (NO_WINOGRAD, NONE)
        )
        texts.append(f"{net['label']} at {gib(budget)} GiB {ours} (default implementations: {checkmate})")
    return "; ".join(texts)


def _program_words(points: Sequence[Point]) -> str:
    own = [p for p in points if p.strategy == PROGRAM]
    if not own:
        return ""
    with_plan = sum(p.cost is not None for p in own)
    ended = sum(bool(p.stats.get("monet_optimal")) for p in own)
    return (
        f"MONeT's program, with HiGHS instead of Gurobi and {own[0].limit_s:g} s for each solve, found a plan "
        f"in {with_plan} of {len(own)} solves; {ended} ran to the end."
    )


def _main_table(facts: Facts, points: Sequence[Point]) -> Table:
    rows = []
    for net in facts:
        budgets = [round(gibibytes * GIB) for gibibytes in net["budgets_gib"]]
        published = dict(zip(budgets, net["overheads_percent"], strict=True))
        for budget in sorted(net["budgets_bytes"], reverse=True):
            cells = [overhead_words(select(points, net["name"], level, who), budget) for level, who in (
                (NONE, ALL), (NO_WINOGRAD, OURS), (NO_WINOGRAD, PROGRAM), (JOINT, OURS), (JOINT, PROGRAM),
            )]  # fmt: skip
            known = published.get(budget)
            rows.append([net["label"], gib(budget), "" if known is None else f"{known:.2f} %", *cells])
    return Table(
        "monet_overhead", "Overhead of the cheapest plan within a budget; empty: not tried, or not published",
        ["network", "GiB", "MONeT published", "Checkmate's optimum, as found", "portfolio, all but Winograd",
         "MONeT's program, all but Winograd", "portfolio, all", "MONeT's program, all"], rows,
    )  # fmt: skip


def _plain_table(facts: Facts, points: Sequence[Point]) -> Table:
    rows = []
    for net in facts:
        gist = next(iter(select(points, net["name"], GIST, "gist")), None)
        rows.append([
            net["label"], str(net["batch"]), COST_NAMES[net["costs"]], str(net["operations"]),
            str(net["implementations"]), f"{net['total_cost'] / 1e6:.1f}", gib(net["default_peak_bytes"]),
            f"{net['pytorch_gib']:.2f}", gib(net["pytorch_peak_bytes"]),
            percent(net["pytorch_cost"] / net["total_cost"] - 1),
            "" if gist is None or gist.peak_bytes is None else gib(gist.peak_bytes),
            "" if gist is None else percent(gist.overhead),
        ])  # fmt: skip
    return Table(
        "monet_plain", "One pass without recomputation: default implementations, plain PyTorch, Gist (memory in GiB)",
        ["network", "batch", "costs", "operations", "other implementations", "pass ms", "default peak",
         "PyTorch published", "PyTorch peak", "PyTorch overhead", "Gist peak", "Gist overhead"], rows,
    )  # fmt: skip


def _all_solves(facts: Facts, points: Sequence[Point]) -> Table:
    label = {net["name"]: net["label"] for net in facts}
    total = {net["name"]: net["total_cost"] for net in facts}
    rows = [
        [label[p.network], p.level, p.strategy, gib(p.budget_bytes), p.status, percent(p.overhead),
         "" if p.peak_bytes is None else gib(p.peak_bytes),
         "" if p.bound is None else percent(p.bound / total[p.network] - 1),
         f"{p.wall_s:.1f}"]
        for p in points
    ]  # fmt: skip
    return Table("monet_solves", "Every solve of this part; bound as overhead", [
        "network", "implementations", "strategy", "GiB", "status", "overhead", "peak GiB", "bound", "seconds",
    ], rows)  # fmt: skip


def _figure(facts: Facts, points: Sequence[Point]) -> Figure:
    columns = min(3, len(facts) + 1)
    lines = -(-(len(facts) + 1) // columns)
    figure = Figure(figsize=(3.9 * columns, 3.3 * lines + 0.2), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for axes, net in zip(grid, facts, strict=False):
        _panel(axes, net, points)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    for axes in grid[len(facts) :]:
        axes.set_axis_off()
    grid[len(facts)].legend(handles.values(), handles.keys(), loc="center left", handlelength=2.8, labelspacing=0.6)
    return figure


def _panel(axes: Axes, net: Mapping[str, Any], points: Sequence[Point]) -> None:
    own = [p for p in points if p.network == net["name"]]
    xs = [budget / GIB for budget in net["budgets_bytes"]]
    lowest = min([100 * p.overhead for p in own if p.overhead is not None], default=0.0)
    bottom = min(BOTTOM, 5 * ((lowest - 4) // 5))
    axes.axhline(0, color=GREY, lw=0.7, zorder=1)
    for label, level, strategy, colour, marker, line in LINES:
        budgets = sorted({p.budget_bytes for p in select(own, net["name"], level, strategy)})
        found = [(b, cheapest(select(own, net["name"], level, strategy), b)) for b in budgets]
        shown = [(b / GIB, 100 * p.overhead) for b, p in found if p is not None and p.overhead is not None]
        if shown:
            axes.plot([x for x, _ in shown], [min(y, TOP) for _, y in shown], color=colour, marker=marker, ls=line,
                      lw=1.5, ms=7 if marker == "*" else 4.5, label=label, zorder=3)  # fmt: skip
        for x, y in shown:
            if y > TOP:
                side = -1 if strategy == MILP else 1 if level == JOINT else 0
                axes.annotate(f"{y:.0f}", (x, TOP), (15 * side, 3), textcoords="offset points", ha="center", fontsize=6,
                              color=colour, annotation_clip=False)  # fmt: skip
    gists = [(p.peak_bytes / GIB, 100 * p.overhead) for p in select(own, net["name"], GIST, "gist")
             if p.overhead is not None and p.peak_bytes]  # fmt: skip
    for x, y in gists:
        axes.plot(x, y, color=BLACK, marker="X", ls="", ms=7, label="Gist, lossless", zorder=4)
        xs.append(x)
    plain = net["pytorch_peak_bytes"] / GIB
    axes.plot(plain, 100 * (net["pytorch_cost"] / net["total_cost"] - 1), color=BLACK, marker="P", ls="", ms=7,
              label="Plain PyTorch, simulated", zorder=4)  # fmt: skip
    axes.plot([*net["budgets_gib"][::-1], net["pytorch_gib"]], [*net["overheads_percent"][::-1], 0.0], color=BLACK,
              marker="o", mfc="white", ms=4, lw=1.1, ls=(0, (4, 2)), label="MONeT published, measured",
              zorder=2)  # fmt: skip
    axes.set_ylim(bottom, TOP)
    axes.set_xlim(min(*xs, *net["budgets_gib"]) - 0.5, max(*xs, plain, net["pytorch_gib"]) + 0.6)
    axes.xaxis.set_major_locator(MultipleLocator(2))
    axes.set_title(f"{net['label']} ({net['batch']}), {COST_NAMES[net['costs']]}", loc="left", fontsize=9, pad=10)
    axes.set(xlabel="Memory budget (GiB)", ylabel="Overhead (%)")
