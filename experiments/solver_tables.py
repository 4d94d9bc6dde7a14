"""The solver benchmark for docs/results/solvers.md, from the rows under results/bench."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.bench_cases import above_once, asked_for, median_of
from experiments.bench_solvers import certified_gap
from experiments.documents import DOCS, ROOT, Document, Drawing, LongTable, link_to, markdown_table
from remat.errors import InvalidInput
from remat.incumbent import GAP_TOLERANCE, is_closed

ROWS = ROOT / "results" / "bench"
FILES = ("2026-11-26_60s.jsonl", "2026-11-24_600s.jsonl")  # the second has cases open for their goal at 600 s
READ = (
    "instance", "budget", "budget_bytes", "scope", "strategy", "status", "cost", "overhead", "bound", "gap", "wall_s",
    "record_cost", "record_proven", "record_s", "published_overhead", "time_limit_s", "threads", "cpu",
    "finished_at", "stats", "git_commit", "proven_by", "certified_bound", "total_cost", "seed",
)  # fmt: skip
COLUMNS = (  # of the long tables
    "instance", "budget", "budget_bytes", "scope", "strategy", "status", "cost", "overhead", "bound", "gap",
    "proven_by", "certified_bound", "start_s", "first_plan_s", "within_1pct_s", "wall_s", "peak_memory_bytes",
    "record_cost", "record_proven", "record_s", "published_overhead", "time_limit_s", "threads", "seed", "machine",
    "date",
)  # fmt: skip
MET = 1.0001  # largest ratio to a proven record that counts as equal; a record without proof must be beaten


def draw(arguments: Sequence[str]) -> Drawing:
    """Tables from a file of rows, by default the stored one. Of several seeds, the solve of the median gap counts.

    Raises:
        InvalidInput: the file cannot be read, or there is more than one argument.
    """
    if len(arguments) > 1:
        raise InvalidInput("name one file of rows of experiments.bench_solvers, or none")
    files = map(Path, arguments) if arguments else (ROWS / name for name in FILES)
    rows = [row for file in files for row in rows_of(file)]
    medians, stale = _without_stale(_medians(rows))
    long = _long("solvers_time_limit", rows)
    text = "\n\n".join([
        _where(rows) + stale,
        markdown_table(["instances", "seconds", "recorded or published by", "solves", "as good or better", "proven",
                        "bounds as asked for", "seconds to 1 % of the final cost, median"], _summary(medians)),
        markdown_table(["instance", "scope", "budget", "seconds", "bound above once, %", "gap, %", "asked for",
                        "proven by", "certified, %", "Gurobi"], _open(medians)),
        f"Tables: {link_to(long, DOCUMENT.page)}.",
    ])  # fmt: skip
    commits = {row["git_commit"] for row in rows}
    columns = sorted(set.intersection(*(set(row) for row in rows)))
    return Drawing(text, [long], columns=columns, commit=commits.pop() if len(commits) == 1 else None)


def _medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The row of the median gap of each case and time limit."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["time_limit_s"], row["instance"], row["budget"], row["scope"]), []).append(row)
    return [median_of(found, lambda row: row["gap"]) for found in cases.values()]


def _without_stale(medians: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """(the rows without those whose case has a newer one with a smaller gap in a shorter time, a sentence about these).

    The search has become better since.
    """

    def case(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["instance"], row["budget"], row["scope"]

    def is_stale(row: dict[str, Any]) -> bool:
        return any(
            case(r) == case(row) and r["time_limit_s"] < row["time_limit_s"] and r["finished_at"] > row["finished_at"]
            and None not in (r["gap"], row["gap"]) and r["gap"] < row["gap"] for r in medians
        )  # fmt: skip

    stale = [row for row in medians if is_stale(row)]
    if not stale:
        return list(medians), ""
    seconds = ", ".join(f"{limit:g}" for limit in dict.fromkeys(row["time_limit_s"] for row in stale))
    words = (
        f" {len(stale)} older solves of {seconds} s are left out here, because a newer solve of the case has a smaller "
        "gap in less time."
    )
    return [row for row in medians if row not in stale], words


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file with a JSON object in each line.

    Raises:
        InvalidInput: it cannot be read, or a row lacks a column.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: {error}") from None
    for i, row in enumerate(rows):
        if lacking := [column for column in READ if column not in row]:
            raise InvalidInput(f"{path}: row {i} lacks the columns {', '.join(lacking)}")
    if not rows:
        raise InvalidInput(f"{path}: has no rows")
    return [_flat(row) for row in rows]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `experiments.bench_solvers` with the `COLUMNS` beside its own."""
    stats = json.loads(row["stats"])
    return {
        **row, **{name: stats.get(name) for name in ("start_s", "first_plan_s", "within_1pct_s")},
        "peak_memory_bytes": stats.get("solver_peak_memory_bytes"), "machine": row["cpu"],
        "date": row["finished_at"][:10],
    }  # fmt: skip


def _long(name: str, rows: Sequence[dict[str, Any]]) -> LongTable:
    return LongTable(name, COLUMNS, [["" if row[c] is None else str(row[c]) for c in COLUMNS] for row in rows])


def _where(rows: Sequence[dict[str, Any]]) -> str:
    def each(column: str) -> str:
        return ", ".join(f"{value:g}" if isinstance(value, float) else str(value)
                         for value in dict.fromkeys(row[column] for row in rows))  # fmt: skip

    seeds = len({row["seed"] for row in rows})
    shown = "one seed" if seeds == 1 else f"up to {seeds} seeds; the solve of the median gap is shown"
    return (f"{each('date')}, {each('machine')}: {each('strategy')}, {each('time_limit_s')} s for each solve, "
            f"{each('threads')} threads, {shown}.")  # fmt: skip


def as_good(row: dict[str, Any]) -> bool | None:
    """Whether a solve is as good as the recorded or published result; None without one."""
    if row["published_overhead"] is not None:
        return row["overhead"] is not None and round(100 * row["overhead"], 1) <= row["published_overhead"]
    if row["record_cost"] is None:
        return None
    if row["cost"] is None:
        return False
    return row["cost"] <= row["record_cost"] * MET if row["record_proven"] else row["cost"] < row["record_cost"]


def _summary(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for each folder of instances, scope and time limit."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["instance"].partition("/")[0], row["scope"], row["time_limit_s"]), []).append(row)
    lines = []
    for (folder, scope, limit_s), mine in groups.items():
        judged = [good for row in mine if (good := as_good(row)) is not None]
        met = [is_met for row in mine if (is_met := asked_for(row)[1]) is not None]
        source = "published overheads" if mine[0]["published_overhead"] is not None else "Gurobi, up to 24 h"
        times = [row["within_1pct_s"] for row in mine if row["within_1pct_s"] is not None]
        lines.append([
            f"{folder}, scope {scope}", f"{limit_s:g}", source if judged else "none", str(len(mine)),
            f"{sum(judged)} of {len(judged)}" if judged else "",
            f"{sum(row['status'] == 'INFEASIBLE' or is_closed(row['gap']) for row in mine)}",
            f"{sum(met)} of {len(met)}" if met else "",
            f"{statistics.median_high(times):.1f}" if times else "",
        ])  # fmt: skip
    return lines


def _open(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for each solve whose gap, or certified gap, is not closed, or whose bound is not as asked for."""
    lines = []
    for row in rows:
        certified = certified_gap(row["cost"], row["certified_bound"])
        if row["gap"] is None or not row["proven_by"] or max(row["gap"], certified or 0.0) <= GAP_TOLERANCE:
            continue
        text, is_met = asked_for(row)
        record_gap, record_s = row.get("record_gap"), row["record_s"]
        lines.append([
            row["instance"], row["scope"], row["budget"], f"{row['time_limit_s']:g}",
            f"{100 * above_once(row):.3f}", f"{100 * row['gap']:.3f}",
            f"{text}, not met" if is_met is False else text, row["proven_by"],
            "" if certified is None else f"{100 * certified:.3f}",
            "" if record_gap is None else f"{100 * record_gap:.3f} %, {record_s:,.0f} s",
        ])  # fmt: skip
    return lines


DOCUMENT = Document("solvers", DOCS / "results" / "solvers.md", draw, "", READ)
