"""The solver benchmark for docs/results/solvers.md, from the rows under results/bench."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.bench_solvers import certified_gap
from experiments.documents import DOCS, ROOT, Document, Drawing, LongTable, link_to, markdown_table
from remat.errors import InvalidInput
from remat.incumbent import GAP_TOLERANCE

ROWS = ROOT / "results" / "bench"
BY_TIME, BY_GAP = "2026-11-23_60s.jsonl", "2026-11-23_gaps.jsonl"
READ = (
    "instance", "budget", "budget_bytes", "scope", "strategy", "status", "cost", "overhead", "bound", "gap", "wall_s",
    "record_cost", "record_proven", "record_s", "published_overhead", "goal_gap", "time_limit_s", "threads", "cpu",
    "finished_at", "stats", "git_commit", "proven_by", "certified_bound",
)  # fmt: skip
COLUMNS = (  # of the long tables
    "instance", "budget", "budget_bytes", "scope", "strategy", "status", "cost", "overhead", "bound", "gap",
    "proven_by", "certified_bound", "start_s", "first_plan_s", "within_1pct_s", "wall_s", "peak_memory_bytes",
    "record_cost", "record_proven", "record_s", "published_overhead", "target_gap", "time_limit_s", "threads",
    "machine", "date",
)  # fmt: skip
MET = 1.0001  # largest ratio to a proven record that counts as equal; a record without proof must be beaten


def draw(arguments: Sequence[str]) -> Drawing:
    """Tables from two files of rows (by default the stored ones): solves to a time limit, and solves to a gap.

    Raises:
        InvalidInput: a file cannot be read, or the number of arguments is not 0 or 2.
    """
    if len(arguments) not in (0, 2):
        raise InvalidInput("name two files of rows, solves to a time limit and solves to a gap, or none")
    files = [Path(argument) for argument in arguments] or [ROWS / BY_TIME, ROWS / BY_GAP]
    timed, gaps = (rows_of(path) for path in files)
    long = [_long("solvers_time_limit", timed), _long("solvers_gaps", gaps)]
    text = "\n\n".join([
        _where(timed),
        markdown_table(["instances", "recorded or published by", "solves", "as good or better", "proven",
                        "seconds to 1 % of the final cost, median"], _summary(timed)),
        markdown_table(["instance", "scope", "budget", "gap, %", "proven by", "certified gap, %"], _open(timed)),
        markdown_table(["instance", "gap asked for", "reached", "slowest, s"], _reached(gaps)),
        f"Tables: {', '.join(link_to(table, DOCUMENT.page) for table in long)}.",
    ])  # fmt: skip
    commits = {row["git_commit"] for row in (*timed, *gaps)}
    columns = sorted(set.intersection(*(set(row) for row in (*timed, *gaps))))
    return Drawing(text, long, columns=columns, commit=commits.pop() if len(commits) == 1 else None)


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
        "peak_memory_bytes": stats.get("solver_peak_memory_bytes"), "target_gap": row["goal_gap"],
        "machine": row["cpu"], "date": row["finished_at"][:10],
    }  # fmt: skip


def _long(name: str, rows: Sequence[dict[str, Any]]) -> LongTable:
    return LongTable(name, COLUMNS, [["" if row[c] is None else str(row[c]) for c in COLUMNS] for row in rows])


def _where(rows: Sequence[dict[str, Any]]) -> str:
    def each(column: str) -> str:
        return ", ".join(f"{value:g}" if isinstance(value, float) else str(value)
                         for value in dict.fromkeys(row[column] for row in rows))  # fmt: skip

    return (f"{each('date')}, {each('machine')}: {each('strategy')}, {each('time_limit_s')} s for each solve, "
            f"{each('threads')} threads.")  # fmt: skip


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
    """A line for each folder of instances and each scope."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["instance"].partition("/")[0], row["scope"]), []).append(row)
    lines = []
    for (folder, scope), mine in groups.items():
        judged = [good for row in mine if (good := as_good(row)) is not None]
        source = "published overheads" if mine[0]["published_overhead"] is not None else "Gurobi, up to 24 h"
        times = [row["within_1pct_s"] for row in mine if row["within_1pct_s"] is not None]
        lines.append([
            f"{folder}, scope {scope}", source if judged else "none", str(len(mine)),
            f"{sum(judged)} of {len(judged)}" if judged else "",
            f"{sum(row['status'] in ('OPTIMAL', 'INFEASIBLE') for row in mine)}",
            f"{statistics.median_high(times):.1f}" if times else "",
        ])  # fmt: skip
    return lines


def _open(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for each solve that had to prove something and whose gap, or certified gap, is not closed."""
    lines = []
    for row in rows:
        certified = certified_gap(row["cost"], row["certified_bound"])
        if row["gap"] is None or not row["proven_by"] or max(row["gap"], certified or 0.0) <= GAP_TOLERANCE:
            continue
        lines.append([row["instance"], row["scope"], row["budget"], f"{100 * row['gap']:.3f}", row["proven_by"],
                      "" if certified is None else f"{100 * certified:.3f}"])  # fmt: skip
    return lines


def _reached(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """For each instance: its target gaps, the number of budgets that reached theirs, the longest time in s."""
    lines = []
    for name in dict.fromkeys(row["instance"] for row in rows):
        mine = [row for row in rows if row["instance"] == name]
        asked = sorted({row["target_gap"] for row in mine})
        reached = sum(row["gap"] is not None and row["gap"] <= row["target_gap"] for row in mine)
        lines.append([name, f"{asked[0]:.2%} to {asked[-1]:.2%}", f"{reached} of {len(mine)}",
                      f"{max(row['wall_s'] for row in mine):.0f}"])  # fmt: skip
    return lines


DOCUMENT = Document("solvers", DOCS / "results" / "solvers.md", draw, "", READ)
