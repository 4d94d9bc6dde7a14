"""Two runs side by side: the solves that both have, their changes, and the claims that a plan refutes.

Rows match by graph content, strategy, options, budget, scope and accounting. Solves that repeat exactly (strategies
that ignore the budget; runs with `deterministic` or `work_limit` and the same seed) are compared exactly, and so are
the costs of two proven optima. The clock ends every other solve: only a change beyond a tolerance counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.claims import contradictions
from analysis.results import WITH_PLAN, Frame, Run, as_objects, distinct, options_of
from analysis.scales import show_percent
from analysis.style import order_of
from remat.errors import InvalidInput
from remat.units import format_size

TOLERANCE = 1e-3  # relative, of a cost or bound; more if the seeds of a run differ by more
LEAST_S = 0.05  # shorter solves tell nothing about speed
PROBLEM = ("graph_sha256", "strategy", "options", "scope", "accounting")
SOURCES = ("git_commit", "git_dirty", "cpu", "solver_build", "threads", "time_limit_s", "seed", "gpu", "cost_source")


@dataclass(frozen=True, slots=True)
class Pair:
    """One question that both runs answered.

    Attributes:
        a, b: the row of each run; with several seeds, the row of median cost.
        tolerance: a smaller relative difference of costs is no change; 0 if both repeat or both are proven.
        changes: one text for each change.
        verdict: ``better`` or ``worse`` (B against A), ``other``, or '' for no change.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    tolerance: float
    changes: tuple[str, ...]
    verdict: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The common solves of two runs, and the others.

    Attributes:
        sources: (name, in A, in B) of each difference in provenance or configuration.
        only_a, only_b: rows without a match in the other run.
        nearer: a line for each of those rows if the other run has a cheaper plan that fits.
        refuted: a line for each claim that a plan of either run refutes.
    """

    sources: list[tuple[str, str, str]]
    pairs: list[Pair]
    only_a: Frame
    only_b: Frame
    nearer: list[str]
    refuted: list[str]


def compare(a: Run, b: Run, tolerance: float = TOLERANCE) -> Comparison:
    """Compare two runs.

    Raises:
        InvalidInput: they have no graph in common.
    """
    rows_a, rows_b = _prepared(a), _prepared(b)
    if not set(rows_a["graph_sha256"]) & set(rows_b["graph_sha256"]):
        raise InvalidInput(f"nothing in common: {_graphs(a, rows_a)}; {_graphs(b, rows_b)}")
    exact = set(a.families["strategy"]) | set(b.families["strategy"])
    repeats = _repeats(a) and _repeats(b) and _values(rows_a, "seed") == _values(rows_b, "seed")
    keys = [*PROBLEM, "budget_bytes"]
    groups_a, groups_b = dict(list(rows_a.groupby(keys))), dict(list(rows_b.groupby(keys)))
    pairs = [
        _pair(groups_a[key], groups_b[key], tolerance, repeats or key[keys.index("strategy")] in exact)
        for key in groups_a
        if key in groups_b
    ]
    pairs.sort(key=lambda pair: (pair.a["graph_name"], order_of(pair.a["strategy"]), pair.a["budget_bytes"]))
    only_a = pd.concat([rows_a.iloc[:0], *(rows for key, rows in groups_a.items() if key not in groups_b)])
    only_b = pd.concat([rows_b.iloc[:0], *(rows for key, rows in groups_b.items() if key not in groups_a)])
    nearer = [*_nearer("A", only_a, "B", rows_b, tolerance), *_nearer("B", only_b, "A", rows_a, tolerance)]
    both = pd.concat([rows_a.assign(run="A"), rows_b.assign(run="B")], ignore_index=True)
    refuted = contradictions(as_objects(both))
    return Comparison(_sources(a, b, rows_a, rows_b), pairs, only_a, only_b, nearer, refuted)


def _prepared(run: Run) -> Frame:
    """The rows with a column of options and without the scope in the strategy's name."""
    rows = run.rows.assign(options=options_of(run.rows))
    pairs = zip(rows["strategy"].astype(str), rows["scope"].astype(str), strict=True)
    return rows.assign(strategy=[name.removesuffix(f" ({scope})") for name, scope in pairs])


def _graphs(run: Run, rows: Frame) -> str:
    return f"{run.folder} has {', '.join(distinct(rows, 'graph_name')) or 'no rows'}"


def _repeats(run: Run) -> bool:
    config = run.info.get("config") or {}
    return bool(config.get("deterministic") or config.get("work_limit"))


def _pair(rows_a: Frame, rows_b: Frame, tolerance: float, is_exact: bool) -> Pair:
    a, b = _median_row(rows_a), _median_row(rows_b)
    if is_exact or a["status"] == b["status"] == "OPTIMAL":
        cost_tolerance = 0.0
    else:
        cost_tolerance = max(tolerance, _spread(rows_a), _spread(rows_b))
    changes, verdict = _changes(a, b, cost_tolerance, 0.0 if is_exact else max(tolerance, cost_tolerance), is_exact)
    return Pair(a, b, cost_tolerance, tuple(changes), verdict)


def _median_row(rows: Frame) -> dict[str, Any]:
    """The row of median cost, the higher of two; a missing plan ranks above every cost."""
    ordered = rows.sort_values("cost", na_position="last", kind="stable")
    return ordered.iloc[len(ordered) // 2].to_dict()


def _spread(rows: Frame) -> float:
    """(largest - smallest) / smallest cost over the seeds of one question; 0 for one seed."""
    costs = rows["cost"].dropna()
    return float(costs.max() / costs.min() - 1) if len(costs) > 1 and costs.min() else 0.0


def _changes(
    a: dict[str, Any], b: dict[str, Any], cost_tolerance: float, bound_tolerance: float, is_exact: bool
) -> tuple[list[str], str]:
    """(the changes, the verdict); a plan weighs more than its cost, and its cost more than a proof."""
    changes, verdict = [], ""
    if a["status"] != b["status"]:
        had, has = a["status"] in WITH_PLAN, b["status"] in WITH_PLAN
        changes.append("plan found" if has and not had else "plan lost" if had and not has else "status")
        verdict = "better" if has and not had else "worse" if had and not has else "other"
    for what, column, tolerance, better in (
        ("cost", "cost", cost_tolerance, -1), ("bound", "bound", bound_tolerance, 1), ("peak", "peak_bytes", 0.0, 0),
    ):  # fmt: skip
        before, after = a[column], b[column]
        if pd.isna(before) or pd.isna(after) or before == after or (what == "peak" and not is_exact):
            continue
        change = after / before - 1 if before else float("inf")
        if abs(change) <= tolerance:
            continue
        changes.append(f"{what} {signed(change)}")
        if better and verdict in ("", "other"):
            verdict = "better" if better * change > 0 else "worse"
        verdict = verdict or "other"
    if verdict == "other" and {a["status"], b["status"]} == {"OPTIMAL", "FEASIBLE"}:
        verdict = "better" if b["status"] == "OPTIMAL" else "worse"
    return changes, verdict


def signed(change: float) -> str:
    """``+1.20 %``; a change too small for two decimals is shown with two digits."""
    percent = 100 * change
    return f"{percent:+.2f} %" if abs(percent) >= 0.01 else f"{percent:+.1e} %"


def _nearer(who: str, rows: Frame, other: str, others: Frame, tolerance: float) -> Iterator[str]:
    """A line for each row without a match if the other run has a cheaper plan that fits its budget.

    That run made the plan for another budget. The converse is no news: nobody asked that run about this budget.
    """
    plans = dict(list(others[others["cost"].notna()].groupby(list(PROBLEM))))
    for row in rows.sort_values(["strategy", "budget_bytes"]).itertuples():
        same: Frame = plans.get(tuple(getattr(row, column) for column in PROBLEM), others.iloc[:0])
        fitting = same[same["peak_bytes"] <= row.budget_bytes].sort_values("cost", kind="stable")
        if len(fitting) and (pd.isna(row.cost) or fitting["cost"].iloc[0] < row.cost * (1 - tolerance)):
            best = fitting.iloc[0]
            yield (
                f"{row.strategy} at {format_size(int(row.budget_bytes))}, asked in {who} only: "
                f"{'no plan' if pd.isna(row.cost) else show_percent(row.overhead)} there; {other}'s plan for "
                f"{format_size(int(best['budget_bytes']))} fits with {show_percent(best['overhead'])}"
            )


def _sources(a: Run, b: Run, rows_a: Frame, rows_b: Frame) -> list[tuple[str, str, str]]:
    found = [(name, _values(rows_a, name), _values(rows_b, name)) for name in SOURCES]
    versions = _versions(rows_a), _versions(rows_b)
    packages = sorted(versions[0] | versions[1])
    found += [(name, versions[0].get(name, ""), versions[1].get(name, "")) for name in packages]
    known = {name for name, _, _ in found} | {"time_limit"}
    configs = a.info.get("config") or {}, b.info.get("config") or {}
    asked = sorted({*configs[0], *configs[1]} - known)
    found += [(key, json.dumps(configs[0].get(key)), json.dumps(configs[1].get(key))) for key in asked]
    return [line for line in found if line[1] != line[2]]


def _values(rows: Frame, column: str) -> str:
    return ", ".join(value[:12] if column == "git_commit" else value for value in distinct(rows, column))


def _versions(rows: Frame) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for text in distinct(rows, "versions"):
        for package, version in json.loads(text).items():
            found.setdefault(package, set()).add(str(version))
    return {package: ", ".join(sorted(versions)) for package, versions in found.items()}


def time_ratios(pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """[strategy] wall time in B over wall time in A, for each pair of different rows that take `LEAST_S` or more."""
    ratios: dict[str, list[float]] = {}
    for pair in pairs:
        walls = float(pair.a["wall_s"]), float(pair.b["wall_s"])
        if pair.a["key"] != pair.b["key"] and min(walls) >= LEAST_S:
            ratios.setdefault(pair.a["strategy"], []).append(walls[1] / walls[0])
    return ratios
