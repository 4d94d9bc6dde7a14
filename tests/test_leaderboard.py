"""The leaderboard against small cases done by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis import ranking
from analysis.leaderboard import leaderboard as ranked
from analysis.leaderboard import page, summary

Row = dict[str, Any]


def row(strategy: str, budget: int, cost: int | None, **more: Any) -> Row:
    """A row whose plan needs the whole budget; without a cost, one without a plan."""
    return {
        "strategy": strategy, "budget_bytes": budget, "cost": cost, "status": "NO_PLAN" if cost is None else "FEASIBLE",
        "bound": None, "gap": None, "peak_bytes": None if cost is None else budget, "graph_sha256": "0" * 64,
        "graph_name": "g", "instance": "g", "family": "chain", "scope": "staged", "accounting": "exact", "options": {},
        "time_limit_s": 10.0, "seed": 0, "wall_s": 1.0, "start_s": None, "trajectory": [], "memory": None,
        "message": "", "total_cost": 100, "plain_peak_bytes": 50, "n_operations": 3,
    } | more  # fmt: skip


# By hand. Best known: 100 at 10; 100 at 20; at 30 a's plan for 20 fits too, so 100 and not 120.
# a: 1, 1, none. b: none, 1.1, 1.2. c was run at 10 only.
BY_HAND = [
    row("a", 10, 100), row("a", 20, 100), row("a", 30, None),
    row("b", 10, None), row("b", 20, 110), row("b", 30, 120),
    row("c", 10, 400),
]  # fmt: skip


def test_ranking_by_hand() -> None:
    (board,) = ranked(BY_HAND).boards
    assert [(s.entrant, s.score, s.solved, s.best, s.counted, s.attempted) for s in board.entries] == [
        ("a", pytest.approx((1 * 1 * 10) ** (1 / 3)), 2, 2, 3, 3),
        ("b", pytest.approx((10 * 1.1 * 1.2) ** (1 / 3)), 2, 0, 3, 3),
        ("c", None, 1, 0, 1, 1),  # with it the others would share one problem of three
    ]
    assert (len(board.common), len(board.ratios)) == (3, 3)


def test_a_profile_counts_what_a_definition_counts() -> None:
    ratios = [*np.random.default_rng(0).integers(4, 20, 30) / 4, math.inf, math.inf]
    taus, shares = ranking.profile(ratios)
    for tau in (1.0, 1.1, 2.6, 5.0):
        at = np.searchsorted(taus, tau, side="right") - 1
        assert shares[at] == sum(one <= tau for one in ratios) / len(ratios)


def test_ranked_are_those_that_share_half_the_problems() -> None:
    def choose(**attempted: str) -> list[str]:
        return ranking.choose_ranked(pd.DataFrame({k: [c == "x" for c in v] for k, v in attempted.items()}))

    assert choose(a="xxxx", b="xx..", c="..xx") == ["a", "b"]
    assert choose(a="xxxx", b="xxx.", c="xx..") == ["a", "b", "c"]
    assert choose(a="xxxx", b="x...") == ["a"]
    assert choose(a="xxxx", b="....") == ["a"]


def test_seeds_give_the_median_and_time_limits_are_apart_unless_the_strategy_ignores_the_budget() -> None:
    rows = [row("best", 10, 100), *(row("a", 10, cost, seed=i) for i, cost in enumerate((120, 100, 110)))]
    rows += [row("b", 10, cost, seed=i) for i, cost in enumerate((110, None))]
    (board,) = ranked(rows).boards
    assert (board.ratios["a"].tolist(), board.ratios["b"].tolist()) == ([1.1], [math.inf])  # the higher of two
    limits = ((60.0, 120), (10.0, 110))
    found = ranked(row(name, 10, cost, time_limit_s=s) for s, cost in limits for name in ("a", "chen_sqrtn"))
    (board,) = found.boards
    assert dict(board.ratios.iloc[0]) == {"a (10 s)": 1.0, "a (60 s)": 120 / 110, "chen_sqrtn": 1.0}  # its last
    assert len(found.rows) == 3


def test_what_does_not_apply_is_no_failure() -> None:
    rows = [row("a", 10, 100), row("a", 20, 100), row("b", 10, 110), row("b", 20, None, status="SKIPPED"),
            row("c", 10, None, status="FAILED"), row("c", 20, None, status="TIMEOUT")]  # fmt: skip
    (board,) = ranked(rows).boards
    by_name = {s.entrant: (s.attempted, s.skipped, s.solved, s.score) for s in board.entries}
    assert by_name["b"][:3] == (1, 1, 1)
    assert by_name["c"] == (2, 0, 0, pytest.approx(10.0))
    assert len(board.common) == 1  # of budget 20 b says nothing


def test_scopes_and_accountings_are_boards_of_their_own_and_a_refuted_claim_is_named() -> None:
    rows = [row("a", 10, 100), row("a", 20, 100), row("b", 10, 90, scope="free")]
    rows += [row("c", 10, 80, accounting="published")]
    found = ranked(rows)
    places = [(board.scope, board.accounting) for board in found.boards]
    assert places == [("staged", "exact"), ("free", "exact"), ("staged", "published")]
    assert all(board.ratios.to_numpy().min() == 1.0 for board in found.boards)
    rows.append(row("d", 20, None, status="INFEASIBLE"))
    assert any("contradicted: d claims that no plan fits" in line for line in summary(ranked(rows)))


def test_the_page_repeats_and_escapes() -> None:
    found = ranked([*BY_HAND, row("<b>", 10, 100), row("only", 10, None, scope="free")])
    text = page(found, "Leaderboard")
    assert text == page(found, "Leaderboard")
    assert "\\u003cb\\u003e" in text  # no text from a row becomes markup
    records = [*ranking.as_records(found.boards)]
    assert [each["rank"] for each in records if each["entrant"] == "a"] == [1]
