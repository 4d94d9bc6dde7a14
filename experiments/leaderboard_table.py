"""The tables of docs/results/leaderboard.md, from the rows of the benchmark under results/."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from analysis.leaderboard import draw
from analysis.leaderboard_page import cells, read_benchmark
from analysis.ranking import Board, boards, geometric_mean
from analysis.results import as_objects
from analysis.saving import save, style_context
from analysis.style import style_of
from experiments.documents import DOCS, ROOT, Document, Drawing, markdown_table
from remat.units import format_size

PIECES = ROOT / "results" / "benchmark" / "field"
OURS = "portfolio"
EQUAL = 1e-4  # costs within this share of each other count as equal
EARLY_S = 1.0  # after the process is ready
Problem = tuple[str, int]


def draw_tables(_arguments: Sequence[str]) -> Drawing:
    """Ranking, families, and every row in which a rival is cheaper than the portfolio in equal time.

    Raises:
        InvalidInput: there are no rows.
    """
    shown = read_benchmark(PIECES)
    frame = shown.counted.rows
    rows = list(as_objects(frame))
    limits = sorted({row.time_limit_s for row in rows})
    (board,) = boards(frame[frame["time_limit_s"] == limits[0]], shown.families)
    graphs = len({row.instance for row in rows})
    parts = [
        f"{len(rows):,} solves on {graphs} graphs at {len({_problem(row) for row in rows})} budgets; "
        f"{' and '.join(f'{limit:g} s' for limit in limits)}, one thread each; {rows[0].cpu}; "
        f"{min(row.finished_at for row in rows)[:10]} to {max(row.finished_at for row in rows)[:10]}.",
        markdown_table(
            ["", "strategy", "mean cost / best", "with a plan", "best", "closed gap", "median gap", "median time",
             "ran on", "does not apply"],
            [cells(place, entry) for place, entry in enumerate(board.entries, start=1)], "rlrrrrrrrr",
        ),
        _families(board, rows),
    ]  # fmt: skip
    for limit in limits:
        at = [row for row in rows if row.time_limit_s == limit]
        parts.append(_duels(f"after {limit:g} s", at, lambda row: row.cost))
        parts.append(_duels(f"{EARLY_S:g} s after the process is ready (solves of {limit:g} s)", at, _early))
    with tempfile.TemporaryDirectory() as folder, style_context():
        (png, *_) = save(draw(board), Path(folder, "leaderboard"))
        picture = Path(tempfile.gettempdir(), "leaderboard.png")
        picture.write_bytes(png.read_bytes())
    return Drawing("\n\n".join(parts), figures={"leaderboard": picture})


def _families(board: Board, rows: Sequence[Any]) -> str:
    """The mean ratio of each ranked entrant on each family of graphs."""
    family = {row.graph_sha256: row.family for row in rows}
    names = sorted({family[graph] for graph, _ in board.common.index})
    of = {name: [key for key in board.common.index if family[key[0]] == name] for name in names}
    lines = []
    for entry in board.ranked:
        means = (geometric_mean(board.common[entry.entrant].loc[keys].tolist()) for keys in of.values())
        lines.append([entry.entrant, *(f"{mean:.4f}" for mean in means)])
    return markdown_table(["mean cost / best", *(f"{name} ({len(of[name])})" for name in names)], lines)


def _duels(when: str, rows: Sequence[Any], cost_of: Callable[[Any], int | None]) -> str:
    """The portfolio against each other strategy: problems where its plan is cheaper, as cheap, and not as cheap."""
    ours = {_problem(row): row for row in rows if row.strategy == OURS}
    lines, worse = [], []
    for rival in sorted({row.strategy for row in rows} - {OURS}):
        pairs = {
            _problem(row): (cost_of(ours[_problem(row)]), cost_of(row))
            for row in rows if row.strategy == rival and row.status != "SKIPPED" and _problem(row) in ours
        }  # fmt: skip
        ratios = {problem: _ratio(*pair) for problem, pair in pairs.items()}
        better = sum(x < 1 - EQUAL for x in ratios.values())
        equal = sum(abs(x - 1) <= EQUAL for x in ratios.values())
        both = [mine / theirs for mine, theirs in pairs.values() if mine and theirs]
        lines.append([
            style_of(rival).label, str(len(ratios)), str(better), str(equal), str(len(ratios) - better - equal),
            f"{statistics.geometric_mean(both):.4f}" if both else "",
        ])  # fmt: skip
        worse += [(ours[key], rival, x) for key, x in ratios.items() if x > 1 + EQUAL]
    table = markdown_table(
        [f"portfolio against, {when}", "problems", "cheaper", "equal", "not as cheap", "its cost / theirs"], lines
    )
    return "\n\n".join([table, *_worse(worse)])


def _worse(found: Sequence[tuple[Any, str, float]]) -> Iterator[str]:
    """The problems on which the portfolio lost, each with its cheapest rival."""
    most = dict[Problem, tuple[Any, str, float]]()
    for mine, rival, x in sorted(found, key=lambda each: each[2]):
        most[_problem(mine)] = (mine, rival, x)
    if most:
        heads = ["graph", "budget", "cheaper", "portfolio's cost / its", "portfolio's gap"]
        yield markdown_table(heads, [
            [mine.instance, format_size(mine.budget_bytes), rival, f"{x:.4f}" if math.isfinite(x) else "no plan",
             "" if mine.gap is None else f"{mine.gap:.2%}"]
            for mine, rival, x in sorted(most.values(), key=lambda each: (each[0].instance, each[0].budget_bytes))
        ], "lrlrr")  # fmt: skip


def _ratio(mine: int | None, theirs: int | None) -> float:
    """1 if both have no plan."""
    if mine is None or theirs is None:
        return 1.0 if mine == theirs else math.inf if mine is None else 0.0
    return mine / theirs if theirs else 1.0


def _early(row: Any) -> int | None:
    """The cost of the best plan `EARLY_S` after the process of a solve was ready."""
    until = (row.start_s or 0.0) + EARLY_S
    steps = [cost for at, cost in json.loads(row.trajectory) if at <= until]
    return min(steps) if steps else row.cost if row.wall_s <= EARLY_S else None


def _problem(row: Any) -> Problem:
    return row.graph_sha256, int(row.budget_bytes)


DOCUMENT = Document("leaderboard", DOCS / "results" / "leaderboard.md", draw_tables)
