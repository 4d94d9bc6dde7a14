"""The leaderboard: the rows of a benchmark, ranked, their page and their performance profiles."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from analysis import html_page, interactive
from analysis.claims import contradictions
from analysis.ranking import BOARD, LEAST_SHARED, PROBLEM, WORST, Board, Entry, best_costs, boards, count_rows, profile
from analysis.results import WITH_PLAN, Frame, as_objects, frame_of
from analysis.scales import show_count, show_percent, show_seconds
from analysis.style import GREY, Style, order_of, style_of
from remat.incumbent import GAP_TOLERANCE
from remat.registry import get_strategy, strategies
from remat.units import format_size

KNEE_PERCENT = 0.1  # the profile's axis is linear below and logarithmic above
MOST_MARKS = 80  # if all curves have more corners, only the start of each has a marker
LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True, slots=True, eq=False)
class Leaderboard:
    """What is shown.

    Attributes:
        rows: those that count.
        families: strategies that ignore the budget.
        refuted: a line for each claim that a plan refutes.
    """

    boards: list[Board]
    rows: Frame
    families: list[str]
    refuted: list[str]


def leaderboard(rows: Sequence[Mapping[str, Any]]) -> Leaderboard:
    """The ranking of the rows of a benchmark; `experiments.benchmark` describes them."""
    families = [name for name in strategies() if get_strategy(name).ignores_budget]
    counted = count_rows(frame_of([dict(row) for row in rows]), families)
    return Leaderboard(boards(counted, families), counted, families, contradictions(as_objects(counted)))


def cells(place: int, s: Entry) -> list[str]:
    """One row of the table, as text."""
    of = f"/{s.counted}"
    return [
        str(place) if s.score is not None else "–", s.entrant, f"{s.score:.4f}" if s.score is not None else "–",
        f"{s.solved}{of}", f"{s.best}{of}", f"{s.proven}{of}", f"{show_percent(s.gap)} ({s.gaps}{of})",
        show_seconds(s.wall_s), str(s.attempted), str(s.skipped or ""),
    ]  # fmt: skip


def summary(shown: Leaderboard) -> list[str]:
    """How many solves there are, and what is refuted."""
    problems = shown.rows[[*PROBLEM, *BOARD]].drop_duplicates()
    line = (
        f"{show_count(len(shown.rows), 'solve')} of {show_count(len(problems), 'problem')} on "
        f"{show_count(problems['graph_sha256'].nunique(), 'graph')}"
    )
    return [line, *(f"contradicted: {text}" for text in shown.refuted)]


def page(shown: Leaderboard, title: str) -> str:
    """One self-contained HTML file; its script filters, ranks and draws the same rows."""
    from plotly.offline import get_plotlyjs  # here, because it takes half a second

    data = payload(shown.rows, shown.families)
    shared = {"worst": WORST, "leastShared": LEAST_SHARED, "tolerance": GAP_TOLERANCE, "font": interactive.FONT,
              "grid": interactive.GRID}  # fmt: skip
    lead = html_page.Html("".join(f"<p>{escape(line)}</p>" for line in summary(shown)))
    body = html_page.filled("leaderboard.html", {"title": title, "lead": lead})
    return html_page.page(title, body, data | shared, (get_plotlyjs(), html_page.read("leaderboard.js")))


def payload(rows: Frame, families: Sequence[str]) -> dict[str, Any]:
    """What the page's script reads.

    ``problems`` hold the cheapest known cost and the best proven bound; ``solves`` are lists in the order of
    ``columns``, with the places of their problem and entrant.

    Args:
        rows: from `ranking.count_rows`.
        families: strategies that ignore the budget; they have no time limit.
    """
    names = [f"{row.strategy} ({row.options})" if row.options else row.strategy for row in rows.itertuples()]
    rows = rows.assign(entrant=names, planned=rows["status"].isin(WITH_PLAN))
    problems = list(_problems(rows))
    places = {tuple(problem.pop("key")): i for i, problem in enumerate(problems)}
    entrants = sorted(
        {(row.strategy, row.entrant) for row in rows.itertuples()}, key=lambda pair: (order_of(pair[0]), pair[1])
    )
    names = [name for _, name in entrants]
    columns = ("problem", "entrant", "limit", "status", "cost", "bound", "peak", "wall", "steps", "memory", "message",
               "made")  # fmt: skip
    return {
        "problems": problems,
        "entrants": [
            {"name": name, "label": style.label + name.removeprefix(strategy), "colour": style.colour,
             "dash": style.dash, "family": strategy in families}
            for strategy, name in entrants for style in [style_of(strategy)]
        ],
        "columns": columns,
        "solves": [
            [places[_key(row)], names.index(row.entrant), row.time_limit_s, row.status, row.cost, row.bound,
             row.peak_bytes, round(row.wall_s, 3), _steps(row), row.memory, row.message,
             _made(row)]
            for row in as_objects(rows)
        ],
    }  # fmt: skip


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
                "name": row.instance,
                "family": row.family,
                "board": f"{row.scope}, {row.accounting}",
                "budget": int(row.budget_bytes),
                "text": format_size(int(row.budget_bytes), digits=3),
                "operations": row.n_operations,
                "total": row.total_cost,
                "plain": row.plain_peak_bytes,
                "best": best.get((row.graph_sha256, row.budget_bytes)),
                "bound": max([row.total_cost, *map(int, proofs)]),
            }


def _made(row: Any) -> str:
    """Threads, processor, date, version and load of a solve, as far as its row has them."""
    of = {name: getattr(row, name, None) for name in ("solver", "threads", "cpu", "date", "git_commit", "load", "seed")}
    words = {"threads": "{} threads", "git_commit": "commit {:.7}", "load": "load {:g}", "seed": "seed {}"}
    return ", ".join(words.get(name, "{}").format(value) for name, value in of.items() if value not in (None, ""))


def _steps(row: Any) -> list[list[float]]:
    """[seconds after its process was ready, cost] of each improvement; without any record, the end of the solve."""
    if not row.trajectory:
        return [] if row.cost is None else [[round(row.wall_s, 3), row.cost]]
    return [[round(max(0.0, at - (row.start_s or 0.0)), 3), cost] for at, cost in row.trajectory]


def draw(board: Board) -> Figure:
    """Performance profiles: the share of the common problems solved within each distance of the best known cost."""
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    axes = figure.subplots()
    styles = looks(board.ranked)
    curves = [(styles[s.entrant], *profile(board.common[s.entrant].tolist())) for s in board.ranked]
    right = max([5.0, *(1.15 * 100 * (taus[-1] - 1) for _, taus, _ in curves)])
    mark_all = sum(len(taus) for _, taus, _ in curves) <= MOST_MARKS
    handles = []
    for place, (style, taus, shares) in enumerate(curves, start=1):
        percent = 100 * (taus - 1)
        axes.step(np.append(percent, right), 100 * np.append(shares, shares[-1]), where="post", color=style.colour,
                  lw=style.width, ls=style.line, zorder=3 + 1 / place)  # fmt: skip
        marked = slice(None) if mark_all else slice(1)
        axes.plot(percent[marked], 100 * shares[marked], ls="", marker=style.marker, ms=4.5, mfc="white",
                  mec=style.colour, clip_on=False, zorder=5 + 1 / place)  # fmt: skip
        label = f"{place}. {style.label}: {100 * shares[0]:.0f} % → {100 * shares[-1]:.0f} %"
        handles.append(Line2D([], [], color=style.colour, lw=style.width, ls=style.line, marker=style.marker, ms=5,
                              mfc="white", label=label))  # fmt: skip
    axes.set_xscale("asinh", linear_width=KNEE_PERCENT)
    at = [0.0, *(m * 10.0**p for p in range(-1, 5) for m in ((1, 2, 5) if p < 2 else (1,)))]
    axes.set_xticks([t for t in at if t <= right], [f"{t:,g}" for t in at if t <= right])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.3 * KNEE_PERCENT, right)
    axes.set_ylim(-2, 102)
    axes.set_xlabel("Cost above the best known plan, at most (%, arcsinh scale)")
    axes.set_ylabel(f"Share of {len(board.common)} problems (%)")
    axes.set_title(f"Performance profiles, {board.name}", loc="left", fontweight="bold")
    figure.legend(handles=handles, loc="outside right upper", handlelength=2.8, labelspacing=0.5,
                  title="rank, share with the best plan → with any", title_fontsize=7.5, alignment="left")  # fmt: skip
    figure.text(1, 0, "after Dolan and Moré (2002)", ha="right", va="bottom", fontsize=6.5, color=GREY)
    return figure


def looks(entries: Sequence[Entry]) -> dict[str, Style]:
    """[entrant] the style of its strategy; entrants of one strategy differ in the line."""
    styles: dict[str, Style] = {}
    seen: dict[str, int] = {}
    for s in sorted(entries, key=lambda s: s.entrant):
        base = style_of(s.strategy)
        i = seen[s.strategy] = seen.get(s.strategy, -1) + 1
        line = LINES[(LINES.index(base.line) + i) % len(LINES)]
        styles[s.entrant] = replace(base, label=base.label + s.entrant.removeprefix(s.strategy), line=line)
    return styles
