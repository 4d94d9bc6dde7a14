"""The tables of the benchmark's ranking."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from analysis.leaderboard import Leaderboard, cells
from analysis.ranking import HELD_OUT, Board, as_records, geometric_mean
from analysis.results import as_objects
from analysis.style import OURS, style_of
from experiments.documents import LongTable, grouped, links, long_table, markdown_table
from remat.incumbent import GAP_TOLERANCE
from remat.units import format_size

PAGE = "results/leaderboard.md"
GPT2, CHAINS = "gpt2_5", ("hierarchical", "rotor", "portfolio")
EARLY_S = 1.0  # after the process is ready
DUELS = ("portfolio against", "solves of", "problems", "cheaper", "equal", "not as cheap", "cheaper after 1 s",
         "equal after 1 s", "not as cheap after 1 s")  # fmt: skip
LOST = ("solves of", "when", "graph", "budget", "cheaper", "portfolio's cost / its", "portfolio's gap at the end")
Problem = tuple[str, int]


def drawn(shown: Leaderboard) -> tuple[str, list[LongTable]]:
    """Ranking, families, rivals that are cheaper than the portfolio; long tables of all entrants and duels."""
    board = shown.boards[0]
    rows = [row for row in as_objects(shown.rows) if (row.scope, row.accounting) == (board.scope, board.accounting)]
    duels, lost = list[list[str]](), list[list[str]]()
    for limit in sorted({row.time_limit_s for row in rows}):
        seeds = grouped((row for row in rows if row.time_limit_s == limit), lambda row: (_problem(row), row.strategy))
        mine = [sorted(own, key=_end)[len(own) // 2] for own in seeds.values()]  # the median cost, the higher of two
        fought, missed = _duels(f"{limit:g} s", mine)
        duels, lost = duels + fought, lost + missed
    long = [long_table("leaderboard", [*as_records(shown.boards)]), LongTable("leaderboard_duels", DUELS, duels),
            LongTable("leaderboard_cheaper", LOST, lost)]  # fmt: skip
    text = "\n\n".join([
        _made(rows),
        markdown_table(
            ["", "strategy", "mean cost / best", "with a plan", "best", "closed gap", "median gap (known)",
             "median time", "ran on", "does not apply"],
            [cells(place, entry) for place, entry in enumerate(board.ranked, start=1)], "rlrrrrrrrr",
        ),
        _families(board, rows), *_hierarchy(rows),
        *([markdown_table(DUELS, [line for line in duels if (line[5], line[8]) != ("0", "0")], "lrrrrrrrr")]
          if lost else []),
        f"Tables: {links(PAGE, *long)}.",
        *(f"contradicted: {line}" for line in shown.refuted),
    ])  # fmt: skip
    return text, long


def _made(rows: Sequence[Any]) -> str:
    """What made the rows: one run has one commit, and its loads are known."""
    graphs = {row.instance: row.family for row in rows}
    held_out = sum(family == HELD_OUT for family in graphs.values())
    commits = Counter((row.git_commit or "unknown")[:7] for row in rows)
    changed = sum(bool(row.git_dirty) for row in rows) / len(rows)
    loads = [load for row in rows if (load := getattr(row, "load", None)) is not None]
    limits = " and ".join(f"{limit:g} s" for limit in sorted({row.time_limit_s for row in rows}))
    return markdown_table(["solves", "graphs, held out", "budgets", "limits", "threads", "seeds", "processor", "date",
                           "commits", "from a changed checkout", "load"], [[
        f"{len(rows):,}", f"{len(graphs)}, {held_out}", str(len({_problem(row) for row in rows})), limits,
        _distinct(row.threads for row in rows), str(len({row.seed for row in rows})),
        _distinct(row.cpu for row in rows), _distinct(row.date for row in rows), str(len(commits)), f"{changed:.0%}",
        f"{min(loads):.1f} to {max(loads):.1f}" if len(loads) == len(rows) else f"known of {len(loads)}",
    ]])  # fmt: skip


def _families(board: Board, rows: Sequence[Any]) -> str:
    """The mean ratio of each ranked entrant on each family of graphs; with a number if it ran on some only."""
    family = {row.graph_sha256: row.family for row in rows}
    names = sorted({family[graph] for graph, _ in board.ratios.index})
    of = {name: [key for key in board.ratios.index if family[key[0]] == name] for name in names}
    lines = []
    for entry in board.ranked:
        cells = []
        for keys in of.values():
            ratios = board.ratios[entry.entrant].loc[keys].dropna().tolist()
            some = f" ({len(ratios)})" if 0 < len(ratios) < len(keys) else ""
            cells.append(f"{geometric_mean(ratios):.4f}{some}" if ratios else "–")
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


def _duels(limit: str, rows: Sequence[Any]) -> tuple[list[list[str]], list[list[str]]]:
    """The portfolio against each other strategy, and the problems on which a rival is cheaper: lines of both tables."""
    ours = {_problem(row): row for row in rows if row.strategy == OURS}
    signs: dict[str, Counter[tuple[str, int]]] = {}
    lost = list[list[str]]()
    for when, cost_of in WHEN.items():
        cheapest: dict[Problem, tuple[float, str]] = {}
        for row in rows:
            mine = ours.get(_problem(row))
            if mine is None or row.strategy == OURS or row.status == "SKIPPED":
                continue
            x = _ratio(cost_of(mine), cost_of(row))
            sign = (x > 1 + GAP_TOLERANCE) - (x < 1 - GAP_TOLERANCE)
            signs.setdefault(row.strategy, Counter())[when, sign] += 1
            if sign > 0:
                cheapest[_problem(row)] = max(cheapest.get(_problem(row), (0.0, "")), (x, row.strategy))
        for problem in sorted(cheapest, key=lambda problem: (ours[problem].instance, problem[1])):
            mine, (x, rival) = ours[problem], cheapest[problem]
            lost.append([
                limit, when, mine.instance, format_size(mine.budget_bytes), rival,
                f"{x:.4f}" if math.isfinite(x) else "no plan", "" if mine.gap is None else f"{mine.gap:.2%}",
            ])  # fmt: skip
    duels = [
        [style_of(name).label, limit, str(sum(of.values()) // len(WHEN)),
         *(str(of[when, sign]) for when in WHEN for sign in (-1, 0, 1))]
        for name, of in sorted(signs.items())
    ]  # fmt: skip
    return duels, lost


def _ratio(mine: float, theirs: float) -> float:
    """1 if both have no plan, 0 or infinite if one has none."""
    return 1.0 if mine == theirs or not theirs else mine / theirs


def _end(row: Any) -> float:
    return math.inf if row.cost is None else row.cost


def _early(row: Any) -> float:
    """The cost of the best plan `EARLY_S` after the process of a solve was ready.

    What ignores the budget keeps no record of times; it takes milliseconds, and counts as there.
    """
    until = (row.start_s or 0.0) + EARLY_S
    return min((cost for at, cost in row.trajectory if at <= until), default=math.inf) if row.trajectory else _end(row)


WHEN = {"at the end": _end, f"after {EARLY_S:g} s": _early}


def _problem(row: Any) -> Problem:
    return row.graph_sha256, int(row.budget_bytes)


def _distinct(values: Any) -> str:
    found = sorted({str(value) for value in values})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"
