"""A leaderboard: read from a store, shown in the terminal and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from analysis import html_page, interactive
from analysis.claims import contradictions
from analysis.ranking import BOARD, LEAST_SHARED, PROBLEM, WORST, Board, Counted, Entry, best_costs, boards, count_rows
from analysis.results import Frame, as_objects, read_pieces, read_store_rows
from analysis.scales import show_count, show_percent, show_seconds
from analysis.style import order_of, style_of
from remat.errors import InvalidInput
from remat.files import read_table
from remat.registry import get_strategy, strategies
from remat.units import format_size

EMPTY = "holds no results yet: run something first, e.g. python run.py model=vgg19 budget=sweep"
HEADS = (
    "", "Strategy", "Mean cost / best", "Solved", "Best", "Proven", "Median gap", "Median wall", "Attempted", "Skipped",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Leaderboard:
    """All that the terminal and the page show.

    Attributes:
        families: strategies that ignore the budget.
        unreadable: a line for each row file that cannot be read.
        refuted: a line for each claim that a plan refutes.
    """

    boards: list[Board]
    counted: Counted
    families: list[str]
    unreadable: list[str]
    refuted: list[str]


def read_leaderboard(store: Path) -> Leaderboard:
    """The leaderboard of a store.

    Raises:
        InvalidInput: the store holds no rows.
    """
    rows, unreadable = read_store_rows(store)
    if not len(rows):
        raise InvalidInput(f"{store} {EMPTY}")
    return _leaderboard(rows, family_names(store), unreadable)


def read_benchmark(folder: Path) -> Leaderboard:
    """The leaderboard of a benchmark's rows, one file for each instance.

    Raises:
        InvalidInput: there are none, or a file cannot be read.
    """
    rows = read_pieces(folder)
    families = [name for name in strategies() if get_strategy(name).ignores_budget]
    return _leaderboard(rows, families, [])


def _leaderboard(rows: Frame, families: list[str], unreadable: list[str]) -> Leaderboard:
    counted = count_rows(rows, families)
    found = boards(counted.rows, families)
    return Leaderboard(found, counted, families, unreadable, contradictions(as_objects(counted.rows)))


def family_names(store: Path) -> list[str]:
    """The strategies that ignore the budget, according to the store."""
    names: set[str] = set()
    for path in sorted((store / "families").glob("*.parquet")):
        try:
            names |= set(read_table(path)["strategy"].to_pylist())
        except (InvalidInput, KeyError):
            continue  # it would have added one name at most; the next run computes it again
    return sorted(names)


def cells(place: int, s: Entry) -> list[str]:
    """One row of the table, as text."""
    of = f"/{s.counted}"
    return [
        str(place) if s.score is not None else "–", s.entrant, f"{s.score:.4f}" if s.score is not None else "–",
        f"{s.solved}{of}", f"{s.best}{of}", f"{s.proven}{of}", f"{show_percent(s.gap)} ({s.gaps})",
        show_seconds(s.wall_s), str(s.attempted), str(s.skipped or ""),
    ]  # fmt: skip


def notes(board: Board) -> list[str]:
    """Which problems the numbers of a board cover."""
    without = f", {board.without_plan} without" if board.without_plan else ""
    lines = [
        f"{show_count(len(board.ratios), 'problem')} with a known plan{without}; ranked over the "
        f"{len(board.common)} that all ranked strategies attempted. Mean cost / best is geometric; no plan counts "
        f"as {WORST:g}. Best: within 0.01 % of the cheapest plan known."
    ]
    if len(board.ranked) < len(board.entries):
        lines.append(
            f"–: not ranked, because with it the ranked strategies would share less than {LEAST_SHARED:.0%} of the "
            "problems; its numbers cover the problems that it attempted."
        )
    return lines


def summary(shown: Leaderboard) -> list[str]:
    """Which solves count and which do not."""
    counted, rows = shown.counted, shown.counted.rows
    problems = rows[[*PROBLEM, *BOARD]].drop_duplicates()
    line = (
        f"{show_count(len(rows), 'solve')} of {show_count(len(problems), 'problem')} on "
        f"{show_count(problems['graph_sha256'].nunique(), 'graph')}"
    )
    reasons = (
        (counted.superseded, "superseded by later ones"),
        (counted.capped, "ended by a cost cap"),
        (counted.carried, "with a plan found at another budget"),
        (counted.cut_short, "cut short"),
        (len(shown.unreadable), "unreadable"),
    )
    left_out = [f"{count} {reason}" for count, reason in reasons if count]
    lines = [f"{line}; not counted: {', '.join(left_out) or 'none'}"]
    lines += [f"left out: {text}" for text in shown.unreadable[:3]]
    return lines + [f"contradicted: {text}" for text in shown.refuted]


def tables(shown: Leaderboard) -> list[Table | Text]:
    """For the terminal: a table with notes for each board."""
    parts: list[Table | Text] = [Text(line) for line in summary(shown)]
    for board in shown.boards:
        title = Text(f"Leaderboard, {board.name}", style="table.title")
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
        for i, head in enumerate(HEADS):
            table.add_column(head, justify="left" if i == 1 else "right", no_wrap=i == 1)
        for place, s in enumerate(board.entries, start=1):
            table.add_row(*map(Text, cells(place, s)))
        parts += [table, *(Text(line) for line in notes(board))]
    return parts


def page(shown: Leaderboard, title: str) -> str:
    """One self-contained HTML file; its script filters, ranks and draws the same rows."""
    from plotly.offline import get_plotlyjs  # here, because it takes half a second

    data = payload(shown.counted.rows, shown.families)
    shared = {"worst": WORST, "leastShared": LEAST_SHARED, "font": interactive.FONT, "grid": interactive.GRID}
    lead = "".join(f"<p>{escape(line)}</p>" for line in summary(shown))
    body = [f"<h1>{escape(title)}</h1>", lead, html_page.read("leaderboard.html")]
    return html_page.page(title, body, data=data | shared, scripts=(get_plotlyjs(), html_page.read("leaderboard.js")))


def payload(rows: Frame, families: Sequence[str]) -> dict[str, Any]:
    """What the page's script reads.

    ``problems`` hold the cheapest known cost and the best proven bound; ``solves`` are lists in the order of
    ``columns``, with the places of their problem and entrant.

    Args:
        rows: from `ranking.count_rows`; those of a benchmark also have its columns.
        families: strategies that ignore the budget; they have no time limit.
    """
    rows = rows.assign(entrant=list(_entrants(rows)), planned=rows["status"].isin(("OPTIMAL", "FEASIBLE")))
    problems = list(_problems(rows))
    places = {tuple(problem.pop("key")): i for i, problem in enumerate(problems)}
    entrants = sorted(
        {(row.strategy, row.entrant) for row in rows.itertuples()}, key=lambda pair: (order_of(pair[0]), pair[1])
    )
    names = [name for _, name in entrants]
    columns = ("problem", "entrant", "limit", "status", "cost", "bound", "peak", "wall", "steps", "memory", "message")
    return {
        "problems": problems,
        "entrants": [_entrant(strategy, name, strategy in families) for strategy, name in entrants],
        "columns": columns,
        "solves": [
            [places[_key(row)], names.index(row.entrant), row.time_limit_s, row.status, row.cost, row.bound,
             row.peak_bytes, round(row.wall_s, 3), _steps(row), getattr(row, "memory", None), row.message]
            for row in as_objects(rows)
        ],
    }  # fmt: skip


def _entrants(rows: Frame) -> Iterator[str]:
    """Each row's strategy, with its options."""
    for row in rows.itertuples():
        yield f"{row.strategy} ({row.options})" if row.options else row.strategy


def _entrant(strategy: str, name: str, is_family: bool) -> dict[str, Any]:
    style = style_of(strategy)
    label = style.label + name.removeprefix(strategy)
    return {"name": name, "label": label, "colour": style.colour, "dash": style.dash, "family": is_family}


def _key(row: Any) -> tuple[Any, ...]:
    return row.scope, row.accounting, row.graph_sha256, int(row.budget_bytes)


def _problems(rows: Frame) -> Iterator[dict[str, Any]]:
    """Each graph at each budget of a scope and an accounting."""
    for _, board in rows.groupby(list(BOARD), sort=True):
        best = best_costs(board).set_index(list(PROBLEM))["best"].to_dict()
        for _, problem in board.groupby(list(PROBLEM), sort=True):
            row = next(as_objects(problem))
            proofs = board[
                (board["graph_sha256"] == row.graph_sha256) & (board["budget_bytes"] >= row.budget_bytes)
                & (board["status"] != "FAILED") & board["bound"].notna()
            ]["bound"]  # fmt: skip
            yield {
                "key": _key(row),
                "name": getattr(row, "instance", None) or row.graph_name,
                "family": getattr(row, "family", None) or "",
                "board": f"{row.scope}, {row.accounting}",
                "budget": int(row.budget_bytes),
                "text": format_size(int(row.budget_bytes), digits=3),
                "operations": row.n_operations,
                "total": row.total_cost,
                "plain": row.store_all_peak_bytes,
                "best": best.get((row.graph_sha256, row.budget_bytes)),
                "bound": max([row.total_cost, *map(int, proofs)]),
            }


def _steps(row: Any) -> list[list[float]]:
    """[seconds after its process was ready, cost] of each improvement; without any record, the end of the solve."""
    stats = json.loads(getattr(row, "stats", None) or "{}")
    steps = json.loads(getattr(row, "trajectory", None) or "[]") or stats.get("trajectory", [])
    start = getattr(row, "start_s", None) or stats.get("start_s") or 0.0
    if not steps:
        return [] if row.cost is None else [[round(row.wall_s, 3), row.cost]]
    return [[round(max(0.0, step[0] - start), 3), step[1]] for step in steps]
