"""Overhead against memory, a panel for each network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from analysis.charts import legend_below, panels, write_beyond
from analysis.charts import points as draw_points
from analysis.monet.points import (
    ALGORITHMS,
    ALL,
    CPU,
    GIB,
    GIST,
    MILP,
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
    overhead_words,
    read_points,
    select,
)  # fmt: skip
from analysis.parts import Part, Study, Table, percent, prose
from analysis.style import BLACK, BLUE, FOREST, GREY, ORANGE, SKY, WINE

TOP, BOTTOM = 32.0, -12.0  # percent; the frame grows downwards if a curve needs it
Line: TypeAlias = tuple[str, str, str, str, str, str]  # label, level, strategy, colour, marker, line
LINES: Sequence[Line] = (  # beside a band between the portfolio's plans at two sets of costs
    ("Checkmate MILP, default implementations", NONE, MILP, BLUE, "o", ":"),
    ("Portfolio, default implementations", NONE, OURS, SKY, "s", "-"),
    ("MONeT's program, ratios of the roofline (hollow: its start)", NO_WINOGRAD, PROGRAM, FOREST, "p", "-."),
)
MEASURED_LINES: Sequence[Line] = (("MONeT's program with HiGHS", ALGORITHMS, PROGRAM, FOREST, "p", "-."),)
EDGE = "Portfolio, all implementations, ratios of a P100"
BAND = "... from ratios of the roofline to ratios of a CPU"
LOGGED = "MONeT's program with Gurobi, from its logs"
CAPTION = (
    "Overhead over PyTorch's own step (%) against memory budget (GiB); the band lies between two assumptions about the "
    "costs of implementations; plans beyond the frame stand at its top with their value"
)
COST_NAMES = {"profile": "published P100 costs", "roofline": "roofline costs"}


def report(document: Mapping[str, Any], study: Study) -> Part:
    """The figure, and the numbers behind it."""
    facts, points = read_points(study)
    peaks = [f"{net['label']} {gib(net['pytorch_peak_bytes'])} (published {net['pytorch_gib']:g})" for net in facts]
    return Part(
        *prose(__file__, "overhead", overheads=_overheads(facts, points), algorithms=_algorithm_words(facts, points),
               peaks=", ".join(peaks), program=_program(points),
               pytorch=", ".join(f"{net['logged']['pytorch_ms']:.0f} ms" for net in facts if net["logged"])),
        [("overhead", CAPTION, _figure(facts, points))],
        [_main_table(facts, points), _algorithms_table(facts, points), _plain_table(facts, points),
         _all_solves(facts, points)],
    )  # fmt: skip


def _overheads(facts: Facts, points: Sequence[Point]) -> str:
    """Each network at its smallest budget."""
    texts = []
    for net in facts:
        budget = min(net["budgets_bytes"])
        fast, ours, slow, none = (
            contained_words(points, net["name"], level, budget) or "not tried"
            for level in (NO_WINOGRAD, P100, CPU, NONE)
        )
        texts.append(f"{net['label']} at {gib(budget)} GiB {ours} ({fast} to {slow}; default implementations: {none})")
    return "; ".join(texts)


def _algorithm_words(facts: Facts, points: Sequence[Point]) -> str:
    """Ms of our plan and of that of MONeT's program, with the measured algorithms, at each budget that has both."""
    texts = []
    for net in facts:
        found = []
        for budget, ms in net["logged"].get("program_ms", {}).items():
            ours = contained(points, net["name"], ALGORITHMS, int(budget), (OURS, PROGRAM))
            if ours is not None and ours.cost is not None:
                found.append(f"{ours.cost / 1e6:.0f} and {ms:.0f} at {gib(int(budget))} GiB")
        if found:
            texts.append(
                f"{net['label']} with measured algorithms, ms of the better one of the portfolio's plan and that of "
                f"MONeT's program with HiGHS, and of the plan of its program with Gurobi: {', '.join(found)}."
            )
    return " ".join(texts)


def _program(points: Sequence[Point]) -> dict[str, float]:
    """What MONeT's program found, for the prose."""
    own = [p for p in points if p.strategy == PROGRAM]
    return {
        "limit_s": max((p.limit_s for p in own), default=0.0), "solves": len(own),
        "better": sum(p.cost is not None and not p.is_only_start for p in own),
        "ended": sum(bool(p.stats.get("monet_optimal")) for p in own),
        "with_plan": sum(p.cost is not None for p in own),
    }  # fmt: skip


def _main_table(facts: Facts, points: Sequence[Point]) -> Table:
    rows = []
    for net in facts:
        budgets = [round(gibibytes * GIB) for gibibytes in net["budgets_gib"]]
        published = dict(zip(budgets, net["overheads_percent"], strict=True))
        for budget in sorted(net["budgets_bytes"], reverse=True):
            cells = [
                overhead_words(select(points, net["name"], NONE, ALL), budget),
                *(contained_words(points, net["name"], level, budget) for level in (P100, NO_WINOGRAD, CPU)),
                overhead_words(select(points, net["name"], NO_WINOGRAD, PROGRAM), budget),
            ]
            known = published.get(budget)
            rows.append([net["label"], gib(budget), "" if known is None else f"{known:.2f} %", *cells])
    return Table(
        "monet_overhead",
        ["network", "GiB", "MONeT published", "Checkmate's optimum, as found", "portfolio, ratios of a P100",
         "portfolio, ratios of the roofline", "portfolio, ratios of a CPU", "MONeT's program, ratios of the roofline"],
        rows,
    )  # fmt: skip


def _algorithms_table(facts: Facts, points: Sequence[Point]) -> Table:
    """Our plans beside those of MONeT's program, on its own measured costs."""
    rows = []
    for net in facts:
        plain = net["logged"].get("pytorch_ms")
        told = zip(net["budgets_gib"], net["overheads_percent"], strict=True)
        published = {round(size * GIB): percents for size, percents in told}
        for budget, ms in net["logged"].get("program_ms", {}).items():
            ours, program = (contained(points, net["name"], ALGORITHMS, int(budget), of) for of in (OURS, PROGRAM))
            least = [p.bound for p in select(points, net["name"], ALGORITHMS, OURS)
                     if p.bound and p.budget_bytes >= int(budget)]  # fmt: skip
            rows.append([
                net["label"], gib(int(budget)), f"{published[int(budget)]:.2f} %", f"{ms:.2f}",
                percent(ms / plain - 1),
                *(cell for own in (ours, program)
                  for cell in (("", "") if own is None else (f"{(own.cost or 0) / 1e6:.2f}", percent(own.overhead)))),
                f"{max(least) / 1e6:.2f}" if least else "",
            ])  # fmt: skip
    return Table("monet_algorithms", [
        "network", "GiB", "MONeT published", "its program with Gurobi, ms", "its program with Gurobi", "portfolio, ms",
        "portfolio", "its program with HiGHS, ms", "its program with HiGHS", "proven at least, ms",
    ], rows)  # fmt: skip


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
        "monet_plain", ["network", "batch", "costs", "operations", "other implementations", "pass ms", "default peak",
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
    return Table("monet_solves", [
        "network", "implementations", "strategy", "GiB", "status", "overhead", "peak GiB", "bound", "seconds",
    ], rows)  # fmt: skip


def _figure(facts: Facts, points: Sequence[Point]) -> Figure:
    """A panel for each network, and one for each network with measured algorithms; the legend is below."""
    shown = [(net, False) for net in facts]
    shown += [(net, True) for net in facts if select(points, net["name"], ALGORITHMS, OURS)]
    figure, grid = panels(len(shown), (3.9, 3.3), 3, xlabel="Memory budget (GiB)", ylabel=OVERHEAD)
    for axes, (net, measured) in zip(grid, shown, strict=True):
        _panel(axes, net, points, measured)
    legend_below(figure, 3, handlelength=2.8)
    return figure


def _panel(axes: Axes, net: Mapping[str, Any], points: Sequence[Point], measured: bool) -> None:
    """`measured`: with measured algorithms of convolutions, beside the logs of MONeT's program."""
    own = [p for p in points if p.network == net["name"]]
    budgets = sorted(net["budgets_bytes"])
    axes.axhline(0, color=GREY, lw=0.7, zorder=1)
    ours = _edge(own, net["name"], ALGORITHMS if measured else P100, budgets)
    _capped(axes, ours, WINE, "*", "-", label=EDGE)
    shown = [(WINE, ours)]
    if measured:
        plain = net["logged"]["pytorch_ms"]
        logged = {int(b) / GIB: 100 * (ms / plain - 1) for b, ms in net["logged"]["program_ms"].items()}
        shown += [*_draw_lines(axes, own, net["name"], budgets, MEASURED_LINES), (ORANGE, logged)]
        _capped(axes, logged, ORANGE, "D", "--", label=LOGGED)
    else:
        edges = [_edge(own, net["name"], level, budgets) for level in (NO_WINOGRAD, CPU)]
        both = sorted(edges[0].keys() & edges[1].keys())
        low, high = ([min(edge[x], TOP) for x in both] for edge in edges)
        axes.fill_between(both, low, high, color=WINE, alpha=0.25, lw=0, label=BAND, zorder=2)
        shown += _draw_lines(axes, own, net["name"], budgets, LINES)
        gist = [(p.peak_bytes / GIB, 100 * p.overhead) for p in own
                if p.level == GIST and p.overhead is not None and p.peak_bytes]  # fmt: skip
        draw_points(axes, gist, BLACK, "X", size=7, label="Gist, lossless", zorder=4)
        draw_points(axes, [(net["pytorch_peak_bytes"] / GIB, 0)], BLACK, "P", size=7, label="Plain PyTorch, simulated",
                    zorder=4)  # fmt: skip
    write_beyond(axes, TOP, shown)
    published = zip([*net["budgets_gib"][::-1], net["pytorch_gib"]], [*net["overheads_percent"][::-1], 0], strict=True)
    draw_points(axes, published, BLACK, "o", (0, (4, 2)), size=4, mfc="white", label="MONeT published, measured")
    lowest = min((y for _, line in shown for y in line.values()), default=0.0)
    axes.set_ylim(min(BOTTOM, 5 * ((lowest - 4) // 5)), TOP)
    right = max(net["pytorch_peak_bytes"] / GIB, net["pytorch_gib"])
    axes.set_xlim(min(*budgets, min(net["budgets_gib"]) * GIB) / GIB - 0.5, right + 0.6)
    axes.xaxis.set_major_locator(MultipleLocator(2))
    what = "measured algorithms" if measured else COST_NAMES[net["costs"]]
    axes.set_title(f"{net['label']} ({net['batch']}), {what}", loc="left", fontsize=9, pad=12)


def _capped(axes: Axes, line: Mapping[float, float], colour: str, marker: str, dashes: str, **more: Any) -> None:
    """Draw [GiB] percentages; those above the frame stand at its top."""
    draw_points(axes, [(x, min(y, TOP)) for x, y in line.items()], colour, marker, dashes,
                **{"size": 4.5, "lw": 1.5, "zorder": 3} | more)  # fmt: skip


def _draw_lines(
    axes: Axes, own: Sequence[Point], net: str, budgets: Sequence[int], lines: Sequence[Line]
) -> list[tuple[str, dict[float, float]]]:
    """Draw these lines; (colour, [GiB] percentage) of each."""
    shown = []
    for label, level, strategy, colour, marker, line in lines:
        best = {b / GIB: cheapest(select(own, net, level, strategy), b) for b in budgets}
        mine = {x: 100 * p.overhead for x, p in best.items() if p is not None and p.overhead is not None}
        shown.append((colour, mine))
        _capped(axes, mine, colour, marker, line, label=label)
        starts = {x: mine[x] for x, p in best.items() if x in mine and p is not None and p.is_only_start}
        _capped(axes, starts, colour, marker, "", mfc="white", zorder=3.1)
    return shown


def _edge(points: Sequence[Point], net: str, level: str, budgets: Sequence[int]) -> dict[float, float]:
    """[GiB] the percentage of the portfolio's best plan of the level, or of a level that it contains."""
    found = {b / GIB: contained(points, net, level, b) for b in budgets}
    return {x: 100 * p.overhead for x, p in found.items() if p is not None and p.overhead is not None}
