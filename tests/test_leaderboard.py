"""The leaderboard against small cases done by hand, and as a command that runs what is missing."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from sweep_helpers import make_row

import remat
from analysis import leaderboard, leaderboard_page, ranking
from analysis.results import read_store_rows
from experiments import cli
from experiments.config import register
from experiments.leaderboard import stored_problems
from experiments.row import Row
from experiments.store import Store, row_key
from remat.files import write_table
from remat.graph import Graph
from remat.solution import Family, Member

GRAPH = "0" * 64


def row(strategy: str, budget: int, cost: int | None, **more: object) -> Row:
    """A row whose plan needs the whole budget; without a cost, one without a plan."""
    status = "NO_PLAN" if cost is None else "FEASIBLE"
    values = {
        "key": row_key({"strategy": strategy, "budget": budget, "cost": cost, **more}),
        "strategy": strategy, "budget_bytes": budget, "cost": cost, "status": status, "bound": None, "gap": None,
        "peak_bytes": None if cost is None else budget, "overhead": None, "graph_sha256": GRAPH,
    }  # fmt: skip
    return make_row(**(values | more))


def shown(folder: Path, rows: list[Row]) -> leaderboard_page.Leaderboard:
    store = Store(folder)
    for one in rows:
        store.write_row(one)
    return leaderboard_page.read_leaderboard(folder)


# By hand. Best known: 100 at 10; 100 at 20; at 30 a's plan for 20 fits too, so 100 and not 120.
# a: 1, 1, none. b: none, 1.1, 1.2. c was run at 10 only.
BY_HAND = [
    row("a", 10, 100), row("a", 20, 100), row("a", 30, None),
    row("b", 10, None), row("b", 20, 110), row("b", 30, 120),
    row("c", 10, 400),
]  # fmt: skip


def test_ranking_by_hand(tmp_path: Path) -> None:
    (board,) = shown(tmp_path, BY_HAND).boards
    a, b, c = board.entries
    assert [s.entrant for s in board.entries] == ["a", "b", "c"]
    assert a.score == pytest.approx((1 * 1 * 10) ** (1 / 3))
    assert b.score == pytest.approx((10 * 1.1 * 1.2) ** (1 / 3))
    assert c.score is None  # with it the others would share one problem of three
    assert (len(board.common), len(board.ratios)) == (3, 3)
    assert [(s.solved, s.best, s.counted, s.attempted) for s in (a, b, c)] == [(2, 2, 3, 3), (2, 0, 3, 3), (1, 0, 1, 1)]


def test_profiles_by_hand(tmp_path: Path) -> None:
    (board,) = shown(tmp_path, BY_HAND).boards
    taus, shares = ranking.profile(board.common["a"].tolist())
    assert (taus.tolist(), shares.tolist()) == ([1.0], [2 / 3])
    taus, shares = ranking.profile(board.common["b"].tolist())
    assert (taus.tolist(), shares.tolist()) == ([1.0, 1.1, 1.2], [0.0, 1 / 3, 2 / 3])
    taus, shares = ranking.profile([math.inf])
    assert (taus.tolist(), shares.tolist()) == ([1.0], [0.0])


def test_a_profile_counts_what_a_definition_counts() -> None:
    ratios = [*np.random.default_rng(0).integers(4, 20, 30) / 4, math.inf, math.inf]
    taus, shares = ranking.profile(ratios)
    for tau in (1.0, 1.1, 1.25, 2.6, 5.0):
        value = shares[np.searchsorted(taus, tau, side="right") - 1]
        assert value == sum(one <= tau for one in ratios) / len(ratios)


def test_a_ratio_above_the_worst_counts_as_no_plan_does() -> None:
    assert ranking.geometric_mean([1.0, math.inf]) == ranking.geometric_mean([1.0, 50.0]) == pytest.approx(10**0.5)
    assert ranking.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_ranked_are_those_that_share_half_the_problems() -> None:
    def choose(**attempted: str) -> list[str]:
        return ranking.choose_ranked(pd.DataFrame({k: [c == "x" for c in v] for k, v in attempted.items()}))

    assert choose(a="xxxx", b="xx..", c="..xx") == ["a", "b"]
    assert choose(a="xxxx", b="xxx.", c="xx..") == ["a", "b", "c"]
    assert choose(a="xxxx", b="x...") == ["a"]
    assert choose(a="xxxx", b="....") == ["a"]


def test_the_latest_solve_counts_and_the_others_are_counted(tmp_path: Path) -> None:
    rows = [
        row("a", 10, 100, finished_at="2026-01-01T00:00:00"),
        row("a", 10, 130, finished_at="2026-01-02T00:00:00"),  # a later version of the code is worse: it counts
        row("b", 10, 120, finished_at="2026-01-01T00:00:00"),
        row("b", 20, 110, plan_from=10),  # carried by a sweep: not what b found at 20
        row("b", 30, 90, ended="interrupted"),
        row("a", 20, 190, cost_cap=200),  # of a largest batch: it ended as soon as it was below the cap
    ]
    found = shown(tmp_path, rows)
    (board,) = found.boards
    assert (found.counted.superseded, found.counted.carried, found.counted.cut_short) == (1, 1, 1)
    assert found.counted.capped == 1
    assert board.ratios["a"].tolist() == [130 / 120]
    assert board.ratios["b"].tolist() == [1.0]
    text = leaderboard_page.summary(found)[0]
    assert text.startswith(
        "2 solves of 1 problem on 1 graph; not counted: 1 superseded by later ones, 1 ended by a cost"
    )


def test_a_row_stored_again_with_a_better_bound_is_one_solve(tmp_path: Path) -> None:
    solved = row("a", 10, 100, bound=80, gap=0.2)
    again = row("a", 10, 100, bound=95, gap=0.05, key="again")
    found = shown(tmp_path, [solved, again])
    assert found.counted.superseded == 0
    assert found.boards[0].entries[0].gap == pytest.approx(0.05)


def test_several_seeds_give_the_median_and_the_higher_of_two(tmp_path: Path) -> None:
    rows = [row("best", 10, 100), *(row("a", 10, cost, seed=i) for i, cost in enumerate((120, 100, 110)))]
    rows += [row("b", 10, cost, seed=i) for i, cost in enumerate((110, None))]
    (board,) = shown(tmp_path, rows).boards
    assert board.ratios["a"].tolist() == [1.1]
    assert board.ratios["b"].tolist() == [math.inf]


def test_time_limits_are_apart_unless_the_strategy_ignores_the_budget(tmp_path: Path) -> None:
    graph = remat.Graph.from_nodes("chain", [[], [0], [1]], [4, 5, 6], [1, 2, 3])
    plan = remat.Plan.from_order(graph, [0, 1, 2])
    Store(tmp_path).write_family("k", Family("f", (Member(plan, 6, 11, {}),)), graph, "exact")
    rows = []
    for day, (limit, cost) in enumerate(((60.0, 120), (10.0, 110)), start=1):
        when = f"2026-01-0{day}T00:00:00"
        rows += [row(name, 10, cost, time_limit_s=limit, finished_at=when) for name in ("a", "f")]
    found = shown(tmp_path, rows)
    (board,) = found.boards
    assert dict(board.ratios.iloc[0]) == {"a (10 s)": 1.0, "a (60 s)": 120 / 110, "f": 1.0}  # f: the latest
    assert found.counted.superseded == 1


def test_options_are_apart(tmp_path: Path) -> None:
    given = json.dumps({"solver": "scip", "formulation": "published"})
    (board,) = shown(tmp_path, [row("a", 10, 100), row("a", 10, 110, options=given, key="other")]).boards
    assert [s.entrant for s in board.entries] == ["a", "a (formulation=published, solver=scip)"]
    styles = leaderboard.looks(board.entries)
    assert len({style.line for style in styles.values()}) == len({style.label for style in styles.values()}) == 2


def test_what_does_not_apply_is_no_failure(tmp_path: Path) -> None:
    rows = [row("a", 10, 100), row("a", 20, 100), row("b", 10, 110), row("b", 20, None, status="SKIPPED"),
            row("c", 10, None, status="FAILED"), row("c", 20, None, status="TIMEOUT")]  # fmt: skip
    (board,) = shown(tmp_path, rows).boards
    by_name = {s.entrant: s for s in board.entries}
    assert (by_name["b"].attempted, by_name["b"].skipped, by_name["b"].solved) == (1, 1, 1)
    assert (by_name["c"].attempted, by_name["c"].skipped, by_name["c"].solved) == (2, 0, 0)
    assert len(board.common) == 1  # of budget 20 b says nothing
    assert by_name["c"].score == pytest.approx(10.0)


def test_scopes_and_accountings_are_boards_of_their_own(tmp_path: Path) -> None:
    rows = [row("a", 10, 100), row("a", 20, 100), row("b", 10, 90, scope="free")]
    rows += [row("c", 10, 80, accounting="published")]
    found = shown(tmp_path, rows).boards
    assert [(board.scope, board.accounting) for board in found] == [
        ("staged", "exact"), ("free", "exact"), ("staged", "published"),
    ]  # fmt: skip
    assert all(board.ratios.to_numpy().min() == 1.0 for board in found)


def test_problems_without_any_plan_are_named_and_left_out(tmp_path: Path) -> None:
    (board,) = shown(tmp_path, [row("a", 10, None, status="INFEASIBLE"), row("a", 20, 100)]).boards
    assert (board.without_plan, len(board.ratios)) == (1, 1)
    assert "1 problem with a known plan, 1 without" in leaderboard_page.notes(board)[0]
    (nothing,) = shown(tmp_path / "other", [row("a", 10, None)]).boards
    assert (nothing.entries, nothing.without_plan) == ((), 1)


def test_a_graph_that_costs_nothing_has_ratios(tmp_path: Path) -> None:
    (board,) = shown(tmp_path, [row("a", 10, 0), row("b", 10, 5)]).boards
    assert board.ratios.iloc[0].tolist() == [1.0, math.inf]


def test_a_refuted_claim_is_named(tmp_path: Path) -> None:
    found = shown(tmp_path, [row("a", 10, 100), row("b", 20, None, status="INFEASIBLE")])
    assert any("contradicted: b claims that no plan fits" in line for line in leaderboard_page.summary(found))


def test_an_unreadable_row_is_left_out_and_named(tmp_path: Path) -> None:
    Store(tmp_path).write_row(row("a", 20, 100))
    (tmp_path / "rows" / "broken.parquet").write_bytes(b"PAR1")
    path = tmp_path / "rows" / "old.parquet"
    Store(tmp_path).write_row(row("a", 10, 100, key="old"))
    write_table(path, pq.read_table(path).drop_columns(["scope"]))
    found = leaderboard_page.read_leaderboard(tmp_path)
    assert len(found.counted.rows) == 1
    text = "\n".join(leaderboard_page.summary(found))
    assert "2 unreadable" in text
    assert "broken.parquet" in text
    assert "old.parquet: lacks the columns scope" in text


def test_everything_is_drawn_and_repeats(tmp_path: Path) -> None:
    rows = [*BY_HAND, row("<b>", 10, 100), row("only", 10, None, scope="free")]
    shown(tmp_path / "store", rows)
    folder = tmp_path / "board"
    folder.mkdir()
    (folder / leaderboard.FILE).write_text(json.dumps({"store": "../store"}))
    (folder / "figures").mkdir()
    (folder / "figures" / "profile_of_an_earlier_call.png").touch()
    drawn = leaderboard.draw_leaderboard(folder)
    assert [str(path.relative_to(folder)) for path in drawn] == [
        "table.csv", "problems.csv", "figures/profile_staged_exact.png", "figures/profile_staged_exact.pdf",
        "page.html",
    ]  # fmt: skip
    assert not (folder / "figures" / "profile_of_an_earlier_call.png").exists()
    before = [path.read_bytes() for path in drawn]
    assert [path.read_bytes() for path in leaderboard.draw_leaderboard(folder)] == before
    text = drawn[-1].read_text()
    assert "\\u003cb\\u003e" in text  # no text from a row becomes markup
    table = pd.read_csv(folder / "table.csv")
    assert table.loc[table["entrant"] == "a", "rank"].item() == 1
    problems = pd.read_csv(folder / "problems.csv")
    assert problems.loc[(problems["entrant"] == "b") & (problems["budget_bytes"] == 30), "ratio"].item() == 1.2


def test_a_wrong_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert leaderboard.command("m", "F", leaderboard.draw_leaderboard, [str(tmp_path)]) == 1
    (tmp_path / leaderboard.FILE).write_text(json.dumps({"store": "nowhere"}))
    assert leaderboard.command("m", "F", leaderboard.draw_leaderboard, [str(tmp_path)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "not a leaderboard's folder" in errors[0]
    assert "holds no results yet" in errors[1]


CHAIN = ["model=chain", "model.options.n=4", "points=3"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    return tmp_path


def test_an_empty_store_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experiment=leaderboard"]) == 1
    assert capsys.readouterr().err == f"error: {Path('runs/store')} {leaderboard_page.EMPTY}\n"
    assert not list(here.glob("runs/leaderboard_*"))


@pytest.mark.slow
def test_named_strategies_are_run_where_they_are_missing(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def blank(_: object, stem: Path) -> list[Path]:
        stem.parent.mkdir(exist_ok=True)
        stem.with_suffix(".png").touch()
        return [stem.with_suffix(".png")]

    monkeypatch.setattr(leaderboard, "save", blank)  # figures take seconds and have a test of their own
    with monkeypatch.context() as quick:
        quick.setattr("analysis.draw_run", lambda folder: [])
        assert cli.main([*CHAIN, "strategies=[checkpoint_all,chen_sqrtn]"]) == 0
        assert cli.main([*CHAIN, "model.options.n=5", "strategies=[checkpoint_all]"]) == 0
    rows, _ = read_store_rows(here / "runs" / "store")
    problems = set(zip(rows["graph_sha256"], rows["budget_bytes"], strict=True))
    capsys.readouterr()
    board = ["experiment=leaderboard", "time_limit=5"]
    assert cli.main(board) == 0
    assert "solved now" not in capsys.readouterr().out  # without names nothing is run
    named = [*board, "strategies=[griewank,lp_rounding]", "options.lp_rounding.improve=false"]
    assert cli.main(named) == 0
    out = capsys.readouterr().out
    assert f"{2 + len(problems)} solved now, 0 taken from the store" in out  # two families, a rounding per problem
    assert cli.main(named) == 0
    assert f"0 solved now, {2 + len(problems)} taken from the store" in capsys.readouterr().out
    (folder,) = (path.parent for path in here.glob("runs/leaderboard_*/table.csv") if "griewank" in path.read_text())
    table = pd.read_csv(folder / "table.csv").set_index("entrant")
    assert table.loc["griewank", "attempted"] == table.loc["griewank", "problems"] == len(problems)
    assert table.loc["lp_rounding (improve=False)", "attempted"] == len(problems)
    assert table.loc["chen_sqrtn", "attempted"] < len(problems)  # asked about one of the graphs only
    new, _ = read_store_rows(here / "runs" / "store")
    assert set(new.loc[new["strategy"] == "griewank", "experiment"]) == {"leaderboard"}


def test_a_scope_without_problems_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(here / "runs" / "store").write_row(row("a", 10, 100))
    assert cli.main(["experiment=leaderboard", "strategies=[chen_sqrtn]", "scope=free"]) == 1
    assert capsys.readouterr().err == "error: runs/store holds no problem of free scope and exact accounting\n"


def test_a_proof_counts_for_the_strategy_that_made_it(tmp_path: Path) -> None:
    """A solve that another strategy's proof ended is stored as OPTIMAL; it proved nothing itself."""
    rows = [
        row("a", 10, 100, status="OPTIMAL", bound=100, gap=0.0),
        row("b", 10, 100, status="OPTIMAL", bound=100, gap=0.0, proof_from="a"),
    ]
    (board,) = shown(tmp_path, rows).boards
    proven = {s.entrant: (s.proven, s.gap) for s in board.entries}
    assert (proven["a"], proven["b"]) == ((1, 0.0), (0, None))


def test_what_a_cost_cap_ended_is_no_problem_for_others(tmp_path: Path) -> None:
    register()
    store = Store(tmp_path)
    graph = Graph.from_nodes("pair", [[], [0]], [1, 1], [1, 1])
    store.write_graph(graph)
    sha = graph.sha256()
    store.write_row(row("a", 10, 100, graph_sha256=sha))
    store.write_row(row("a", 20, 90, graph_sha256=sha, cost_cap=95))
    (settings,) = cli.check(["experiment=leaderboard"], multirun=False)
    assert [budgets for _, budgets in stored_problems(store, settings)] == [[10]]
