"""A leaderboard: read from a store, shown in the terminal and as a page."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

import pyarrow.parquet as pq
from rich import box
from rich.table import Table
from rich.text import Text

from analysis import html_page
from analysis.claims import contradictions
from analysis.ranking import BOARD, LEAST_SHARED, PROBLEM, WORST, Board, Counted, Entry, boards, count_rows
from analysis.results import as_objects, read_store_rows
from analysis.scales import show_count, show_percent, show_seconds
from remat.errors import InvalidInput

EMPTY = "holds no results yet: run something first, e.g. python run.py model=vgg19 budget=sweep"
HEADS = (
    "", "Strategy", "Mean cost / best", "Solved", "Best", "Proven", "Median gap", "Median wall", "Attempted", "Skipped",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Leaderboard:
    """All that the terminal and the page show.

    Attributes:
        unreadable: a line for each row file that cannot be read.
        refuted: a line for each claim that a plan refutes.
    """

    boards: list[Board]
    counted: Counted
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
    families = family_names(store)
    counted = count_rows(rows, families)
    found = boards(counted.rows, families)
    return Leaderboard(found, counted, unreadable, contradictions(as_objects(counted.rows)))


def family_names(store: Path) -> list[str]:
    """The strategies that ignore the budget, according to the store."""
    names: set[str] = set()
    for path in sorted((store / "families").glob("*.parquet")):
        try:
            names |= set(pq.read_table(path, columns=["strategy"])["strategy"].to_pylist())
        except (OSError, ValueError):
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


def page(shown: Leaderboard, pictures: dict[str, Path]) -> str:
    """The same as one self-contained HTML file."""
    body = ["<h1>Leaderboard</h1>", *(f"<p>{escape(line)}</p>" for line in summary(shown))]
    for board in shown.boards:
        body.append(f"<h2>{escape(board.name[0].upper() + board.name[1:])}</h2>")
        body += [f"<p>{escape(line)}</p>" for line in notes(board)]
        rows = [cells(place, s) for place, s in enumerate(board.entries, start=1)]
        body.append(html_page.table(HEADS, rows, [head != "Strategy" for head in HEADS]))
        if board.name in pictures:
            body.append(html_page.figure(pictures[board.name], "Performance profiles"))
        problems = html_page.table(("Graph", "Budgets", "Strategies"), _problems(board), (False, True, True))
        body.append(f"<h3>Problems</h3>{problems}")
    return html_page.page("Leaderboard", body)


def _problems(board: Board) -> list[list[str]]:
    groups = board.rows.groupby(["graph_name", "graph_sha256"], sort=True) if len(board.rows) else ()
    return [
        [f"{name} ({sha[:8]})", str(part["budget_bytes"].nunique()), str(part["entrant"].nunique())]
        for (name, sha), part in groups
    ]
