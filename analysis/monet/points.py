"""The solves of a run of ``experiment=paper/monet``, read from the store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from analysis.parts import Study, percent
from analysis.results import WITH_PLAN, as_objects

GIB = 2**30
NONE, NO_WINOGRAD, P100, CPU = "none", "no_winograd", "p100", "cpu"
ALGORITHMS, GIST = "algorithms", "gist"
OURS, MILP, PROGRAM = ALL = "portfolio", "checkmate_milp", "monet"  # strategies that choose plans by budget
LEVELS = {
    NONE: "default", "in_place": "+ in place", "conv": "in place, Winograd", "output": "+ from outputs",
    NO_WINOGRAD: "all", P100: "all, ratios of a P100", CPU: "all, ratios of a CPU",
    ALGORITHMS: "all, ratios of a P100, measured algorithms", GIST: "Gist's",
}  # fmt: skip
WIDER = (NONE, "in_place", "output", CPU)  # each level's plans are plans of those after it too, and cost no more there
# [level] the levels whose plans are plans of it too
CONTAINED = {**{level: WIDER[:i] for i, level in enumerate(WIDER)}, P100: WIDER, NO_WINOGRAD: WIDER, "conv": WIDER[:2]}
OVERHEAD = "Overhead over PyTorch's own step (%)"
Facts: TypeAlias = Sequence[Mapping[str, Any]]  # of each network, see `experiments.monet.parts`


@dataclass(frozen=True, slots=True)
class Point:
    """One solve.

    Attributes:
        overhead: over plain PyTorch's own step, simulated; None without a plan.
        trajectory: (seconds, cost) of each improvement.
        least: the overhead that every plan has at least, by the proven bound; None without one.
    """

    network: str
    level: str
    strategy: str
    budget_bytes: int
    status: str
    cost: int | None
    bound: int | None
    overhead: float | None
    peak_bytes: int | None
    wall_s: float
    limit_s: float
    trajectory: tuple[tuple[float, int], ...]
    stats: Mapping[str, Any]
    least: float | None = None

    @property
    def is_only_start(self) -> bool:
        """Whether the plan is the one from which MONeT's program started; without statistics its limit ended it."""
        return self.strategy == PROGRAM and (self.cost or 0) >= self.stats.get("start_cost", 0)


def read_points(study: Study, document: Mapping[str, Any] | None = None) -> tuple[Facts, list[Point]]:
    """(facts of each network, a point for each solve of a part's document that the store has).

    Without a document, the solves are those of the part ``overhead``. An entry may have its own cost of PyTorch's step.
    """
    first = study.document("overhead")
    entries = (document or first)["rows"]
    stored = study.rows(entry["key"] for entry in entries)
    rows = {row.key: row for row in as_objects(stored)}
    plain = {net["name"]: net["pytorch_cost"] for net in first["networks"]}
    found = [
        _point(entry, rows[entry["key"]], entry.get("pytorch_cost", plain[entry["network"]]))
        for entry in entries if entry["key"] in rows
    ]  # fmt: skip
    return first["networks"], found


def _point(entry: Mapping[str, Any], row: Any, plain_cost: int) -> Point:
    cost, peak = (row.cost, row.peak_bytes) if row.status in WITH_PLAN else (None, None)
    overhead = None if cost is None else cost / plain_cost - 1
    stats = json.loads(row.stats or "{}")
    return Point(
        entry["network"], entry["level"], entry["strategy"], entry["budget_bytes"], row.status, cost, row.bound,
        overhead, peak, row.wall_s, row.time_limit_s,
        tuple((float(s), int(cost)) for s, cost, _ in stats.get("trajectory", [])), stats,
        None if row.bound is None else row.bound / plain_cost - 1,
    )  # fmt: skip


def select(
    points: Iterable[Point], network: str, levels: str | Sequence[str], strategies: str | Sequence[str] = ALL
) -> list[Point]:
    """The points of a network with these levels and strategies, by budget."""
    levels = [levels] if isinstance(levels, str) else levels
    strategies = [strategies] if isinstance(strategies, str) else strategies
    found = [p for p in points if p.network == network and p.level in levels and p.strategy in strategies]
    return sorted(found, key=lambda p: p.budget_bytes)


def cheapest(points: Iterable[Point], budget_bytes: int) -> Point | None:
    """The cheapest plan whose peak is within the budget, also if it was made for another budget."""
    fitting = [p for p in points if p.cost is not None and (p.peak_bytes or 0) <= budget_bytes]
    return min(fitting, key=lambda p: p.cost or 0, default=None)


def contained(
    points: Sequence[Point], network: str, level: str, budget_bytes: int, strategies: str | Sequence[str] = OURS
) -> Point | None:
    """The strategies' plan of least overhead within the budget, of the level or of one that it contains.

    None without one, and if the level was not tried.
    """
    if not select(points, network, level, strategies):
        return None
    inside = (*CONTAINED.get(level, ()), level)
    found = [cheapest(select(points, network, one, strategies), budget_bytes) for one in inside]
    return min((p for p in found if p is not None), key=lambda p: p.overhead or 0.0, default=None)


def no_plan(points: Iterable[Point], budget_bytes: int) -> str:
    """Why none of these has a plan at that budget: ``infeasible`` (proven), ``none found``, '' if none was asked."""
    own = [p for p in points if p.budget_bytes == budget_bytes]
    if any(p.status == "INFEASIBLE" for p in own):
        return "infeasible"
    return "none found" if own else ""


def overhead_words(points: Sequence[Point], budget_bytes: int) -> str:
    """The overhead of the cheapest plan within the budget, or why there is none."""
    found = cheapest(points, budget_bytes)
    return no_plan(points, budget_bytes) if found is None else percent(found.overhead)


def contained_words(points: Sequence[Point], network: str, level: str, budget_bytes: int) -> str:
    """The overhead of the plan of `contained`, or why there is none."""
    found = contained(points, network, level, budget_bytes)
    own = select(points, network, level, OURS)
    return no_plan(own, budget_bytes) if found is None else percent(found.overhead)


def gib(size_bytes: float) -> str:
    """``9.31``, or ``10``."""
    return f"{size_bytes / GIB:.2f}".removesuffix(".00")
