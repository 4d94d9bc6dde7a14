"""A ranking of strategies from rows of solves: performance profiles and their summaries.

A problem is a graph, a budget, a scope and an accounting. On each, an entrant's ratio is its cost over the best known
cost (Dolan and Moré, Benchmarking optimization software with performance profiles, Math. Programming 91, 2002), and
infinite if it ended without a plan. A problem that it never ran, or that it does not apply to, does not count for it.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.results import WITH_PLAN, Frame
from remat.incumbent import GAP_TOLERANCE, is_closed

WORST = 10.0  # in the geometric mean, a higher ratio and a problem without a plan count as this
LEAST_SHARED = 0.5  # all ranked entrants have attempted at least this share of the problems
BOARD = ("scope", "accounting")
PROBLEM = ("graph_sha256", "budget_bytes")
HELD_OUT = "held out"
SAME_SOLVE = (*BOARD, *PROBLEM, "strategy", "options", "time_limit_s", "seed")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entrant of a board.

    Attributes:
        entrant: the strategy, with options and time limit if they tell entrants apart.
        score: geometric mean of the ratios over the common problems, see `WORST`; None if not ranked.
        solved, best, proven: number of counted problems with a plan; with a plan within `GAP_TOLERANCE` of the best;
            proven optimal.
        counted: number of common problems; if not ranked, of attempted ones.
        gap: median over the counted problems; None if fewer than half have a gap to a bound of its own.
        gaps: number of those that have one.
        wall_s: median wall time of the counted problems with a plan, seconds.
        attempted: number of problems on the board that it applies to and ran on.
        skipped: number of problems that it does not apply to.
    """

    entrant: str
    strategy: str
    score: float | None
    solved: int
    best: int
    proven: int
    counted: int
    gap: float | None
    gaps: int
    wall_s: float | None
    attempted: int
    skipped: int


@dataclass(frozen=True, slots=True, eq=False)
class Board:
    """The ranking of one scope and accounting.

    Attributes:
        ratios: [problem, entrant] cost over best cost; inf without a plan, NaN if not attempted.
        common: `ratios` of the problems that all ranked entrants have attempted.
        entries: the ranked ones, best first; then the others, those with most best plans first.
    """

    scope: str
    accounting: str
    ratios: Frame
    common: Frame
    entries: tuple[Entry, ...]

    @property
    def ranked(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.score is not None)

    @property
    def name(self) -> str:
        return f"{self.scope} scope, {self.accounting} accounting"


def count_rows(rows: Frame, families: Sequence[str] = ()) -> Frame:
    """The last row of each `SAME_SOLVE`, with the options as text; held-out graphs are a family of their own.

    Args:
        families: strategies that ignore the budget; their last row counts, with any time limit and seed.
    """
    texts = [", ".join(f"{key}={value}" for key, value in sorted(given.items())) for given in rows["options"]]
    rows = rows.assign(options=texts)
    if "held_out" in rows:
        rows["family"] = rows["family"].mask(rows["held_out"].fillna(False).astype(bool), HELD_OUT)
    keys = rows[list(SAME_SOLVE)].copy()
    keys.loc[keys["strategy"].isin(families), ["time_limit_s", "seed"]] = 0
    return rows[~keys.duplicated(keep="last")]


def boards(rows: Frame, families: Sequence[str] = ()) -> list[Board]:
    """A board for each scope and accounting, the one with most problems first.

    Args:
        rows: from `count_rows`.
        families: strategies that ignore the budget; their time limits do not tell entrants apart.
    """
    found = [_board(scope, accounting, part, families) for (scope, accounting), part in rows.groupby(list(BOARD))]
    return sorted(found, key=lambda board: (-len(board.ratios), board.scope, board.accounting))


def _board(scope: str, accounting: str, rows: Frame, families: Sequence[str]) -> Board:
    planned = rows["status"].isin(WITH_PLAN) & rows["cost"].notna()
    # A bound that says that every operation runs once gives no gap, unless it closes it.
    is_trivial = (rows["bound"] <= rows["total_cost"]) & (rows["gap"] > GAP_TOLERANCE)
    gap = rows["gap"].mask(is_trivial.fillna(False).astype(bool))
    rows = rows.assign(entrant=_entrants(rows, families), planned=planned, gap=gap)
    rows = rows.merge(best_costs(rows), on=list(PROBLEM))
    rows = rows.assign(ratio=[ratio(row) for row in rows.itertuples()])
    results = _medians(rows)
    ratios: Frame = (
        results.set_index([*PROBLEM, "entrant"])["ratio"].unstack("entrant") if len(results) else pd.DataFrame()
    )
    ranked = choose_ranked(ratios.notna())
    common = ratios[ranked].notna().all(axis=1) if ranked else pd.Series(dtype=bool)
    entries = []
    for name in ratios.columns:
        own = results[results["entrant"] == name]
        counted = own[~own["ratio"].isna()]
        if name in ranked:
            on_common = [bool(common[tuple(key)]) for key in counted[list(PROBLEM)].itertuples(index=False)]
            counted = counted[on_common]
        entries.append(_entry(name, own, counted, is_ranked=name in ranked))
    entries.sort(key=lambda s: (s.score is None, s.score or 0.0, -s.best, -s.attempted, s.entrant))
    return Board(scope, accounting, ratios, ratios[common], tuple(entries))


def best_costs(rows: Frame) -> Frame:
    """[problem] `best`: cost of the cheapest known plan that fits, made for any budget; only problems with one."""
    found = []
    for graph, group in rows.groupby("graph_sha256", sort=True):
        plans = group[group["planned"]]
        for budget in sorted(set(group["budget_bytes"])):
            fitting = plans[plans["peak_bytes"] <= budget]
            if len(fitting):
                found.append({"graph_sha256": graph, "budget_bytes": budget, "best": int(fitting["cost"].min())})
    return pd.DataFrame(found, columns=[*PROBLEM, "best"])


def ratio(row: Any) -> float:
    """cost / best; infinite without a plan; NaN if the strategy does not apply."""
    if row.status == "SKIPPED":
        return math.nan
    if not row.planned:
        return math.inf
    if row.best:
        return float(row.cost / row.best)
    return 1.0 if row.cost == 0 else math.inf


def _entrants(rows: Frame, families: Sequence[str]) -> list[str]:
    """Names of entrants: the strategy with its options, and with the time limit if it ran with several."""
    limits = rows.groupby(["strategy", "options"])["time_limit_s"].nunique()
    names = []
    for row in rows.itertuples():
        notes = [row.options] if row.options else []
        if limits[(row.strategy, row.options)] > 1 and row.strategy not in families:
            notes.append(f"{row.time_limit_s:g} s")
        names.append(f"{row.strategy} ({', '.join(notes)})" if notes else row.strategy)
    return names


def _medians(rows: Frame) -> Frame:
    """Each entrant on each problem: the row of the median ratio over the seeds, the higher of two."""
    by = [*PROBLEM, "entrant"]
    ordered = rows.sort_values([*by, "ratio"], na_position="first", kind="stable")
    groups = ordered.groupby(by)["entrant"]
    ordered = ordered.assign(runs=groups.transform("size"))
    columns = [*by, "strategy", "gap", "wall_s", "ratio"]
    return ordered.loc[groups.cumcount() == ordered["runs"] // 2, columns].reset_index(drop=True)


def choose_ranked(attempted: Frame) -> list[str]:
    """The entrants to rank: drops those that attempted least, one by one, until the others share enough problems.

    Args:
        attempted: [problem, entrant] whether the entrant ran and applies.
    """
    names = sorted(attempted.columns, key=lambda name: (-int(attempted[name].sum()), name))
    names = [name for name in names if attempted[name].any()]
    while names and attempted[names].all(axis=1).sum() < LEAST_SHARED * len(attempted):
        names.pop()
    return names


def geometric_mean(ratios: Sequence[float]) -> float:
    """Geometric mean of the ratios, each at most `WORST`."""
    return statistics.geometric_mean([min(value, WORST) for value in ratios])


def _entry(name: str, own: Frame, counted: Frame, *, is_ranked: bool) -> Entry:
    has_plan = np.isfinite(counted["ratio"])
    gaps = counted["gap"].astype(float).where(has_plan).fillna(math.inf)
    middle = gaps.median()
    return Entry(
        entrant=name,
        strategy=str(own["strategy"].iloc[0]),
        score=geometric_mean(counted["ratio"].tolist()) if is_ranked else None,
        solved=int(has_plan.sum()),
        best=int((counted["ratio"] <= 1 + GAP_TOLERANCE).sum()),
        proven=int(counted["gap"].map(is_closed).sum()),
        counted=len(counted),
        gap=float(middle) if math.isfinite(middle) else None,
        gaps=int(np.isfinite(gaps).sum()),
        wall_s=float(counted.loc[has_plan, "wall_s"].median()) if has_plan.any() else None,
        attempted=int(own["ratio"].notna().sum()),
        skipped=int(own["ratio"].isna().sum()),
    )


def profile(ratios: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Corners of a step function: (ratios, ascending from 1; the share of problems with at most that ratio).

    A ratio within `GAP_TOLERANCE` of 1 is 1.
    """
    finite = np.sort([value if value > 1 + GAP_TOLERANCE else 1.0 for value in ratios if math.isfinite(value)])
    taus = np.unique(np.concatenate([[1.0], finite]))
    return taus, np.searchsorted(finite, taus, side="right") / max(1, len(ratios))


def as_records(found: Sequence[Board]) -> Iterator[dict[str, object]]:
    """A line for each entrant of each board."""
    for board in found:
        for place, entry in enumerate(board.entries, start=1):
            rank = None if entry.score is None else place
            yield {"scope": board.scope, "accounting": board.accounting, "rank": rank, **asdict(entry),
                   "problems": len(board.ratios)}  # fmt: skip
