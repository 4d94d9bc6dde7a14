"""Solves against the clock and against records: seconds to a good plan, and recorded results beside ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from analysis.charts import legend_below, panels, write_beyond
from analysis.charts import points as draw_points
from analysis.monet.points import (
    CPU,
    GIB,
    LEVELS,
    MILP,
    NO_WINOGRAD,
    NONE,
    OURS,
    PROGRAM,
    Point,
    gib,
    read_points,
)  # fmt: skip
from analysis.paper.solving import reached, seconds_figure
from analysis.parts import Part, Study, Table, prose
from analysis.style import BLACK, BLUE, FOREST, ORANGE, WINE

NEAR = 1.05
FORMS = {
    (OURS, NO_WINOGRAD): (WINE, "*"), (OURS, CPU): (ORANGE, "D"), (PROGRAM, NO_WINOGRAD): (FOREST, "p"),
}  # fmt: skip
NAMES = {OURS: "Portfolio", PROGRAM: "MONeT's program"}


@dataclass(frozen=True, slots=True)
class Timed:
    """When a solve had its first plan, and one within 5 % of the best known plan of its problem; None for never.

    The plan from which MONeT's program starts is not its own.
    """

    point: Point
    first_s: float | None
    near_s: float | None
    best: int | None


def solver_time(document: Mapping[str, Any], study: Study) -> Part:
    """A row for each solve."""
    facts, points = read_points(study, document)
    label = {net["name"]: net["label"] for net in facts}
    solves = timed([p for p in points if p.level in (NO_WINOGRAD, CPU) and p.strategy in (OURS, PROGRAM)])
    counts = "; ".join(
        f"{_form(strategy, level)}: {sum(t.near_s is not None for t in own)} of {len(own)}"
        for strategy, level in FORMS
        if (own := [t for t in solves if (t.point.strategy, t.point.level) == (strategy, level)])
    )
    rows = [
        [label[t.point.network], gib(t.point.budget_bytes), LEVELS[t.point.level], NAMES[t.point.strategy],
         t.point.status, _seconds(t.first_s), _seconds(t.near_s),
         "" if t.point.cost is None or t.best is None else f"{100 * (t.point.cost / t.best - 1):.2f} %",
         f"{t.point.wall_s:.1f}", str(t.point.stats.get("columns", ""))]
        for t in sorted(solves, key=lambda t: (list(label).index(t.point.network), -t.point.budget_bytes))
    ]  # fmt: skip
    return Part(
        *prose(__file__, "solver_time", counts=counts, limit_s=max((t.point.limit_s for t in solves), default=0)),
        [("solver_time", "Seconds to within 5 % of the best known, a mark for each budget; hollow, at the right edge: "
          "not reached", _dots(solves, label))],
        [Table("monet_solver_time", [
            "network", "GiB", "implementations", "strategy", "status", "first plan", "within 5 %", "above best known",
            "seconds", "columns",
        ], rows)],
    )  # fmt: skip


def timed(points: Sequence[Point]) -> list[Timed]:
    """Each solve; the best known plan is over all solves of the same network, level and budget."""
    costs: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for p in points:
        costs[p.network, p.level, p.budget_bytes] += [] if p.cost is None else [p.cost]
    found = []
    for p in points:
        best = min(costs[p.network, p.level, p.budget_bytes], default=None)
        own = None if p.is_only_start else p.cost
        first = reached(p.trajectory, own, p.wall_s, None)
        near = None if best is None else reached(p.trajectory, own, p.wall_s, NEAR * best)
        found.append(Timed(p, first, near, best))
    return found


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def _dots(solves: Sequence[Timed], label: Mapping[str, str]) -> Figure:
    dots = {
        _form(*form): [(label[t.point.network], t.near_s) for t in solves if (t.point.strategy, t.point.level) == form]
        for form in FORMS
    }
    looks = {_form(*form): look for form, look in FORMS.items()}
    limit = max((t.point.limit_s for t in solves), default=1.0)
    return seconds_figure({"": dots}, looks, list(label.values()), limit, (7.0, 0.6 * len(label) + 0.9))


def _form(strategy: str, level: str) -> str:
    return f"{NAMES[strategy]}, {LEVELS[level]}"


COMPARED = (
    (OURS, "Portfolio", WINE, "*"), (MILP, "Checkmate MILP (HiGHS)", BLUE, "s"),
    (PROGRAM, "MONeT's program (HiGHS)", FOREST, "p"),
)  # fmt: skip
TOP = 20.0


def records(document: Mapping[str, Any], study: Study) -> Part:
    """A row for each record."""
    known = document["records"]
    if not known:
        title, published, *_ = prose(__file__, "records", **_outcome([], []))
        return Part(title, published, f"Skipped: {document['absent']}.", "Nothing was compared.")
    facts, points = read_points(study, document)
    label = {net["name"]: net["label"] for net in facts}
    total = {net["name"]: net["total_cost"] for net in facts}
    return Part(
        *prose(__file__, "records", **_outcome(known, points)),
        [("records", "Cost above the recorded one at the recorded budgets; values beyond the frame stand at its top",
          _records_figure(known, points, label))],
        [_record_rows(known, points, label, total)],
    )  # fmt: skip


def _own(points: Sequence[Point], record: Mapping[str, Any]) -> dict[str, Point]:
    """[strategy] its solve of the recorded problem."""
    place = record["network"], NONE, record["budget_bytes"]
    return {p.strategy: p for p in points if (p.network, p.level, p.budget_bytes) == place}


def _outcome(records: Sequence[Mapping[str, Any]], points: Sequence[Point]) -> dict[str, float]:
    """The portfolio beside the records, for the prose."""
    pairs = [(r, p) for r in records if (p := _own(points, r).get(OURS))]
    known = [(r["cost_ns"], p.cost) for r, p in pairs if r["cost_ns"] is not None and p.cost is not None]
    agree = sum(r["cost_ns"] is None and p.status == "INFEASIBLE" for r, p in pairs)
    impossible = sum(r["cost_ns"] is None for r, _ in pairs)
    above = [100 * (ours / theirs - 1) for theirs, ours in known] or [0.0]
    cheaper, equal = sum(each < -0.01 for each in above), sum(abs(each) <= 0.01 for each in above)
    return {"cheaper": cheaper, "equal": equal, "known": len(known), "more": len(known) - cheaper - equal,
            "worst": max(above), "best": -min(above), "impossible": impossible, "agree": agree}  # fmt: skip


def _record_rows(
    records: Sequence[Mapping[str, Any]], points: Sequence[Point], label: Mapping[str, str], total: Mapping[str, int]
) -> Table:
    rows = []
    for record in records:
        cost, bound = record["cost_ns"], record["bound_ns"]
        cells = [
            label[record["network"]], gib(record["budget_bytes"]), record["status"], _ms(cost), _ms(bound),
            f"{record['solve_s']:.0f}", "" if record["t_within_5pct_s"] is None else f"{record['t_within_5pct_s']:.0f}",
        ]  # fmt: skip
        own = _own(points, record)
        best = min([c for c in (cost, *(p.cost for p in own.values())) if c is not None], default=None)
        for strategy, *_ in COMPARED:
            p = own.get(strategy)
            if p is None:
                cells += ["", "", ""]
                continue
            change = "" if p.cost is None or cost is None else f" ({100 * (p.cost / cost - 1):+.2f} %)"
            near = None if best is None else reached(p.trajectory, p.cost, p.wall_s, NEAR * best)
            words = p.status if p.cost is None else _ms(p.cost) + change
            has_bound = p.bound is not None and p.bound > total[record["network"]] and p.status != "INFEASIBLE"
            cells += [words, _ms(p.bound) if has_bound else "", "" if near is None else f"{near:.1f}"]
        rows.append(cells)
    heads = ["network", "GiB", "recorded status", "recorded ms", "recorded bound", "recorded s", "recorded s to 5 %"]
    for _, name, _, _ in COMPARED:
        heads += [f"{name} ms", "bound", "s to 5 %"]
    return Table("monet_records", heads, rows)


def _ms(cost: float | None) -> str:
    return "" if cost is None else f"{cost / 1e6:.2f}"


def _records_figure(records: Sequence[Mapping[str, Any]], points: Sequence[Point], label: Mapping[str, str]) -> Figure:
    names = [name for name in label if any(r["network"] == name for r in records)]
    figure, grid = panels(len(names), (3.1, 2.6), xlabel="Memory budget (GiB)", ylabel="Cost above the recorded (%)",
                          sharey=True)  # fmt: skip
    for axes, name in zip(grid, names, strict=True):
        own = [r for r in records if r["network"] == name and r["cost_ns"] is not None]
        axes.axhline(0, color=BLACK, lw=0.9, label="Recorded cost")
        beyond = list[tuple[str, dict[float, float]]]()
        bounds = [(r["budget_bytes"] / GIB, 100 * (r["bound_ns"] / r["cost_ns"] - 1)) for r in own if r["bound_ns"]]
        draw_points(axes, bounds, BLACK, "_", size=9, label="Recorded bound")
        for i, (strategy, words, colour, marker) in enumerate(COMPARED):
            above = {r["budget_bytes"] / GIB: 100 * (p.cost / r["cost_ns"] - 1) for r in own
                     if (p := _own(points, r).get(strategy)) and p.cost is not None}  # fmt: skip
            draw_points(axes, [(x + 0.1 * (i - 1), min(y, TOP)) for x, y in above.items()], colour, marker, label=words)
            beyond.append((colour, above))
        write_beyond(axes, TOP, beyond)
        axes.set_title(label[name], pad=18)
        axes.margins(x=0.12)
        axes.set_ylim(-10, TOP)
    legend_below(figure)
    return figure
