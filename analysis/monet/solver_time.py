"""Seconds until a plan within 5 % of the best known: MONeT's program and the portfolio."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.monet.points import CPU, LEVELS, NO_WINOGRAD, OURS, PROGRAM, Point, gib, read_points
from analysis.parts import Part, Table, prose
from analysis.solver_seconds import draw, reached
from analysis.style import FOREST, ORANGE, WINE

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


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """A row for each solve."""
    facts, points = read_points(folder, document)
    label = {net["name"]: net["label"] for net in facts}
    solves = timed(points)
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
        *prose(__file__, counts=counts, limit_s=max((t.point.limit_s for t in solves), default=0)),
        [("solver_time", "Seconds to within 5 % of the best known, a mark for each budget; hollow, at the right edge: "
          "not reached", _figure(solves, label))],
        [Table("monet_solver_time", "Seconds; empty: not reached", [
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


def _figure(solves: Sequence[Timed], label: Mapping[str, str]) -> Figure:
    dots = {
        _form(*form): [(label[t.point.network], t.near_s) for t in solves if (t.point.strategy, t.point.level) == form]
        for form in FORMS
    }
    looks = {_form(*form): look for form, look in FORMS.items()}
    limit = max((t.point.limit_s for t in solves), default=1.0)
    return draw({"": dots}, looks, list(label.values()), limit, (7.4, 0.6 * len(label) + 1.5))


def _form(strategy: str, level: str) -> str:
    return f"{NAMES[strategy]}, {LEVELS[level]}"
