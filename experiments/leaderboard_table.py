"""The text of the benchmark's ranking, and its figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.charts import save, style_context
from analysis.leaderboard import draw
from analysis.leaderboard_page import Leaderboard, cells
from analysis.ranking import Board, geometric_mean
from analysis.results import as_objects
from analysis.style import OURS, style_of
from experiments.documents import markdown_table
from remat.units import format_size

GPT2, CHAINS = "gpt2_5", ("hierarchical", "rotor", "portfolio")
EQUAL = 1e-4  # costs within this share of each other count as equal
EARLY_S = 1.0  # after the process is ready
Problem = tuple[str, int]


def text(shown: Leaderboard) -> str:
    """Ranking, families, and every row in which a rival is cheaper than the portfolio in equal time."""
    board = shown.boards[0]
    rows = [row for row in as_objects(shown.rows) if (row.scope, row.accounting) == (board.scope, board.accounting)]
    limits = sorted({row.time_limit_s for row in rows})
    graphs = len({row.instance for row in rows})
    threads = {1: "one thread"}.get(rows[0].threads, f"{rows[0].threads} threads")
    parts = [
        f"{len(rows):,} solves on {graphs} graphs at {len({_problem(row) for row in rows})} budgets; "
        f"{' and '.join(f'{limit:g} s' for limit in limits)}, {threads} each; {rows[0].cpu}; "
        f"{' to '.join(dict.fromkeys(end(row.date for row in rows) for end in (min, max)))}.",
        markdown_table(
            ["", "strategy", "mean cost / best", "with a plan", "best", "closed gap", "median gap", "median time",
             "ran on", "does not apply"],
            [cells(place, entry) for place, entry in enumerate(board.entries, start=1)], "rlrrrrrrrr",
        ),
        _families(board, rows), *_hierarchy(rows),
    ]  # fmt: skip
    for limit in limits:
        parts += _duels(f"{limit:g} s", [row for row in rows if row.time_limit_s == limit])
    return "\n\n".join([*parts, *(f"contradicted: {line}" for line in shown.refuted)])


def figure(shown: Leaderboard, folder: Path) -> Path:
    """The performance profiles of the first board."""
    with style_context():
        return save(draw(shown.boards[0]), folder / "leaderboard")[0]


def _families(board: Board, rows: Sequence[Any]) -> str:
    """The mean ratio of each entrant on each family of graphs; with the number of problems if it ran on some only."""
    family = {row.graph_sha256: row.family for row in rows}
    names = sorted({family[graph] for graph, _ in board.ratios.index})
    of = {name: [key for key in board.ratios.index if family[key[0]] == name] for name in names}
    lines = []
    for entry in board.entries:
        cells = []
        for keys in of.values():
            ratios = board.ratios[entry.entrant].loc[keys].dropna().tolist()
            some = f" ({len(ratios)})" if 0 < len(ratios) < len(keys) else ""
            cells.append(f"{geometric_mean(ratios):.4f}{some}" if ratios else "–")
        if set(cells) != {"–"}:
            lines.append([entry.entrant, *cells])
    return markdown_table(["mean cost / best", *(f"{name} ({len(of[name])})" for name in names)], lines)


def _hierarchy(rows: Sequence[Any]) -> Iterator[str]:
    """HiRemate's and Rotor's methods on a GPT-2 of five layers, beside the best bound."""
    mine = [row for row in rows if row.instance == GPT2]
    lines = []
    for budget in sorted({row.budget_bytes for row in mine}):
        at = [row for row in mine if row.budget_bytes == budget]
        bound = max(row.bound or row.total_cost for row in at)
        costs = [min((row.cost for row in at if row.strategy == name and row.cost), default=None) for name in CHAINS]
        over = [f"{cost / bound - 1:.2%}" if cost else "no plan" for cost in costs]
        lines.append([format_size(int(budget)), f"{bound / at[0].total_cost - 1:.2%}", *over])
    if lines:
        names = [f"{name}, cost above the bound" for name in CHAINS]
        yield markdown_table([f"{GPT2}, budget", "bound, above once", *names], lines)


def _duels(limit: str, rows: Sequence[Any]) -> Iterator[str]:
    """The portfolio against each other strategy, at the end and `EARLY_S` after its process is ready; what it loses."""
    ends, early = _ratios(rows, _cost), _ratios(rows, _early)
    lines = []
    for rival in sorted(ends):
        counts = [text for ratios in (ends[rival], early[rival]) for text in _counts(ratios)]
        lines.append([style_of(rival).label, str(len(ends[rival])), *counts])
    heads = [
        f"{head} {when}"
        for when in (f"at {limit}", f"at {EARLY_S:g} s")
        for head in ("cheaper", "equal", "not as cheap")
    ]
    yield markdown_table([f"portfolio against, solves of {limit}", "problems", *heads], lines)
    for when, ratios in ((f"at {limit}", ends), (f"{EARLY_S:g} s after its process was ready", early)):
        yield from _worse(when, rows, ratios)


def _ratios(rows: Sequence[Any], cost_of: Callable[[Any], int | None]) -> dict[str, dict[Problem, float]]:
    """[rival][problem] the portfolio's cost over the rival's: 1 if both have no plan, 0 or inf if one has none."""
    ours = {_problem(row): cost_of(row) for row in rows if row.strategy == OURS}
    ratios: dict[str, dict[Problem, float]] = {}
    for row in rows:
        if row.strategy != OURS and row.status != "SKIPPED" and _problem(row) in ours:
            pair = ours[_problem(row)], cost_of(row)
            ratios.setdefault(row.strategy, {})[_problem(row)] = _ratio(*pair)
    return ratios


def _counts(ratios: Mapping[Problem, float]) -> list[str]:
    better = sum(x < 1 - EQUAL for x in ratios.values())
    equal = sum(abs(x - 1) <= EQUAL for x in ratios.values())
    return [str(better), str(equal), str(len(ratios) - better - equal)]


def _worse(when: str, rows: Sequence[Any], ratios: Mapping[str, Mapping[Problem, float]]) -> Iterator[str]:
    """The problems on which the portfolio lost, each with its cheapest rival."""
    ours = {_problem(row): row for row in rows if row.strategy == OURS}
    lines = []
    for problem, mine in sorted(ours.items(), key=lambda item: (item[1].instance, item[1].budget_bytes)):
        x, rival = max(((of[problem], rival) for rival, of in ratios.items() if problem in of), default=(0.0, ""))
        if x > 1 + EQUAL:
            lines.append([
                mine.instance, format_size(mine.budget_bytes), rival, f"{x:.4f}" if math.isfinite(x) else "no plan",
                "" if mine.gap is None else f"{mine.gap:.2%}",
            ])  # fmt: skip
    if lines:
        heads = [f"not as cheap, {when}", "budget", "cheaper", "portfolio's cost / its", "portfolio's gap at the end"]
        yield markdown_table(heads, lines, "lrlrr")


def _cost(row: Any) -> int | None:
    return row.cost


def _ratio(mine: int | None, theirs: int | None) -> float:
    """1 if both have no plan."""
    if mine is None or theirs is None:
        return 1.0 if mine == theirs else math.inf if mine is None else 0.0
    return mine / theirs if theirs else 1.0


def _early(row: Any) -> int | None:
    """The cost of the best plan `EARLY_S` after the process of a solve was ready.

    What ignores the budget keeps no record of times; it takes milliseconds, and counts as there.
    """
    steps = row.trajectory
    until = (row.start_s or 0.0) + EARLY_S
    return min((cost for at, cost in steps if at <= until), default=None) if steps else row.cost


def _problem(row: Any) -> Problem:
    return row.graph_sha256, int(row.budget_bytes)
