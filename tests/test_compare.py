"""What `python -m analysis.compare` calls a change, a contradiction, and noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_run
import pandas as pd
import pytest

from analysis import compare, comparison
from analysis.results import load_run
from remat import Plan

GRAPH = fake_run.chain(4)
TOTAL = GRAPH.total_cost
BUDGET = 1_000_000
ANYTIME, FAMILY = "search", "chen_greedy"


def row(strategy: str = ANYTIME, status: str = "FEASIBLE", cost: int | None = None, **more: Any) -> dict[str, Any]:
    """A row without a stored plan; its cost is given in per mille of one pass."""
    cost = None if cost is None else TOTAL * cost // 1000
    bound = more.pop("bound", 1000 if cost is not None else None)
    bound = None if bound is None else TOTAL * bound // 1000
    budget = more.pop("budget", BUDGET)
    more = {"key": f"{strategy}-{budget}-{more.get('seed', 0)}-{more.get('scope', 'staged')}"} | more
    return fake_run.row(GRAPH, strategy, budget, status) | {
        "cost": cost, "bound": bound, "gap": None if cost is None or bound is None else (cost - bound) / cost,
        "overhead": None if cost is None else cost / TOTAL - 1, "peak_bytes": None if cost is None else budget,
    } | more  # fmt: skip


def run(root: Path, *rows: dict[str, Any], **config: Any) -> Path:
    root.mkdir()
    members = [
        {"strategy": FAMILY, "parameters": "{}", "cost": TOTAL, "overhead": 0.0, "peak_bytes": BUDGET}
    ] if any(one["strategy"] == FAMILY for one in rows) else []  # fmt: skip
    folder = fake_run.write_run(root, GRAPH, [(one, None) for one in rows], members)
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"config": info["config"] | config}))
    return folder


def compared(tmp_path: Path, a: list[dict[str, Any]], b: list[dict[str, Any]], **config: Any) -> comparison.Comparison:
    folders = run(tmp_path / "a", *a, **config), run(tmp_path / "b", *b, **config)
    return comparison.compare(*map(load_run, folders))


def only(found: comparison.Comparison) -> comparison.Pair:
    (pair,) = found.pairs
    return pair


@pytest.mark.parametrize(
    ("before", "after", "verdict"), [(1100, 1101, ""), (1100, 1099, ""), (1100, 1102, "worse"), (1100, 1098, "better")]
)
def test_costs_at_the_clock_change_beyond_the_tolerance(tmp_path: Path, before: int, after: int, verdict: str) -> None:
    pair = only(compared(tmp_path, [row(cost=before)], [row(cost=after)]))  # 1 in 1100 is below 0.1 %, 2 above
    assert pair.tolerance == comparison.TOLERANCE
    assert pair.verdict == verdict
    assert bool(pair.changes) == bool(verdict)


def test_a_family_is_compared_exactly(tmp_path: Path) -> None:
    a, b = row(FAMILY, cost=1100), row(FAMILY, cost=1100)
    b["cost"] += 1
    b["peak_bytes"] -= 1
    pair = only(compared(tmp_path, [a], [b]))
    assert (pair.tolerance, pair.verdict) == (0.0, "worse")
    assert [change.split()[0] for change in pair.changes] == ["cost", "peak"]


def test_two_proven_optima_must_agree(tmp_path: Path) -> None:
    a, b = (row(status="OPTIMAL", cost=1100, bound=1100) for _ in "ab")
    b |= {"cost": a["cost"] - 50, "bound": a["bound"] - 50}
    found = compared(tmp_path, [a], [b])
    assert only(found).verdict == "better"
    assert only(found).changes[0].startswith("cost -")
    assert len(found.refuted) == 1  # A's bound is above B's cost


def test_deterministic_runs_of_one_seed_are_compared_exactly(tmp_path: Path) -> None:
    a, b = row(cost=1100), row(cost=1100)
    b["cost"] += 1
    assert only(compared(tmp_path, [a], [b], deterministic=True)).verdict == "worse"


def test_another_seed_of_a_deterministic_run_may_differ(tmp_path: Path) -> None:
    a, b = row(cost=1100), row(cost=1100, seed=1)
    b["cost"] += 1
    assert only(compared(tmp_path, [a], [b], deterministic=True)).verdict == ""


def test_seeds_say_how_much_is_noise(tmp_path: Path) -> None:
    seeds = [row(cost=cost, seed=i) for i, cost in enumerate((1000, 1050, 1020))]
    found = compared(tmp_path, seeds, [row(cost=1060)])
    pair = only(found)
    assert pair.tolerance == pytest.approx(0.05)
    assert pair.a["cost"] == TOTAL * 1020 // 1000  # the median
    assert pair.verdict == ""


@pytest.mark.parametrize(
    ("a", "b", "verdict", "first"),
    [
        (row(status="TIMEOUT"), row(cost=1100), "better", "plan found"),
        (row(cost=1100), row(status="NO_PLAN"), "worse", "plan lost"),
        (row(cost=1100), row(status="OPTIMAL", cost=1100, bound=1100), "better", "status"),
        (row(status="TIMEOUT"), row(status="NO_PLAN"), "other", "status"),
        (row(cost=1100, bound=1000), row(cost=1100, bound=1050), "better", "bound +5.00 %"),
        (row(cost=1100, bound=1050), row(cost=1000, bound=1000), "better", "cost -9.09 %"),  # the cost says more
    ],
)
def test_what_is_better(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], verdict: str, first: str) -> None:
    pair = only(compared(tmp_path, [a], [b]))
    assert (pair.verdict, pair.changes[0]) == (verdict, first)


def test_a_bound_above_the_other_runs_plan_is_refuted(tmp_path: Path) -> None:
    proven = row("checkmate_milp", "OPTIMAL", 1200, bound=1200)
    cheaper = row(cost=1100)
    found = compared(tmp_path, [proven], [cheaper])
    (line,) = found.refuted
    assert line.startswith("A: checkmate_milp claims the bound")
    assert "a plan of B: search" in line


@pytest.mark.parametrize(("scope", "n_refuted"), [("staged", 1), ("free", 0)])
def test_infeasible_is_refuted_within_the_scope_only(tmp_path: Path, scope: str, n_refuted: int) -> None:
    claim = row("checkmate_milp", "INFEASIBLE")
    found = compared(tmp_path, [claim], [row(cost=1100, scope=scope)])
    assert len(found.refuted) == n_refuted


def test_a_free_bound_holds_for_staged_plans_too(tmp_path: Path) -> None:
    claim = row("portfolio", cost=1300, bound=1200, scope="free")
    assert len(compared(tmp_path, [claim], [row(cost=1100)]).refuted) == 1


def test_a_plan_that_does_not_fit_refutes_nothing(tmp_path: Path) -> None:
    claim = row("checkmate_milp", "INFEASIBLE")
    assert not compared(tmp_path, [claim], [row(cost=1100, budget=BUDGET + 1)]).refuted


def test_rows_of_one_run_only_are_counted_and_nearer_plans_named(tmp_path: Path) -> None:
    a = [row(cost=1100), row(cost=1050, budget=3 * BUDGET), row("portfolio", cost=1000)]
    b = [row(cost=1040, budget=2 * BUDGET)]
    found = compared(tmp_path, a, b)
    assert not found.pairs
    assert (len(found.only_a), len(found.only_b)) == (3, 1)
    (line,) = found.nearer  # B's plan fits three megabytes; A's own is dearer. B has none for one megabyte.
    assert line.startswith("search at 3.0")
    assert "5.00 % there; B's plan" in line
    assert "fits with 4.00 %" in line


def test_options_tell_rows_apart(tmp_path: Path) -> None:
    given = json.dumps({"formulation": "published"})
    found = compared(tmp_path, [row(cost=1100)], [row(cost=1100, options=given)])
    assert not found.pairs
    assert found.only_b["options"].tolist() == ["formulation=published"]


def test_scopes_in_names_are_no_difference(tmp_path: Path) -> None:
    # load_run names the scope where a run has several; the other run has one.
    found = compared(tmp_path, [row(cost=1100), row(cost=1100, scope="free")], [row(cost=1100)])
    assert len(found.pairs) == len(found.only_a) == 1


def test_nothing_in_common_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run(tmp_path / "a", row(cost=1100))
    (tmp_path / "b").mkdir()
    b = fake_run.failed_run(tmp_path / "b")  # a longer chain
    assert compare.main([str(a), str(b)]) == 1
    assert compare.main([str(a), str(tmp_path)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert errors[0].startswith("error: nothing in common: ")
    assert "chain4_b1" in errors[0]
    assert "chain12_b1" in errors[0]
    assert "not a run folder" in errors[1]


def test_times_are_judged_by_medians(tmp_path: Path) -> None:
    budgets = range(BUDGET, BUDGET + 3)
    a = [row(cost=1100, budget=budget, wall_s=1.0, key=f"a{budget}") for budget in budgets]
    b = [row(cost=1100, budget=x, wall_s=s, key=f"b{x}") for x, s in zip(budgets, (1.0, 2.0, 9.0), strict=True)]
    found = compared(tmp_path, a, b)
    assert comparison.time_ratios(found.pairs) == {ANYTIME: [1.0, 2.0, 9.0]}
    said: list[str] = []
    compare._print_times(found.pairs, 1.5, said.append)
    assert "2.00 times as long as A, the median of 3 solves: slower" in said[0]
    assert said[1].startswith("  search: 2.00 times")
    said.clear()
    compare._print_times(found.pairs, 2.5, said.append)
    assert len(said) == 1
    assert "within the noise" in said[0]


def test_the_same_stored_row_says_nothing_about_time(tmp_path: Path) -> None:
    found = compared(tmp_path, [row(cost=1100)], [row(cost=1100)])
    assert comparison.time_ratios(found.pairs) == {}


def test_the_command_prints_sources_first_and_fails_on_contradictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = run(tmp_path / "a", row(cost=1100), row("checkmate_milp", "INFEASIBLE"))
    versions = json.dumps({"remat": "0.2.0"})
    b = run(tmp_path / "b", row(cost=1050, git_commit="fedcba", versions=versions, time_limit_s=30.0))
    table = tmp_path / "pairs.csv"
    assert compare.main([str(a), str(b), "--csv", str(table)]) == 1
    lines = capsys.readouterr().out.splitlines()

    def place(*words: str) -> int:
        return next(i for i, line in enumerate(lines) if all(word in line for word in words))

    order = [
        place("git_commit", "0123456789ab", "fedcba"), place("time_limit_s", "60.0", "30.0"),
        place("remat", "0.1.0", "0.2.0"), place("contradicted: A: checkmate_milp claims that no plan fits"),
        place("1 solve in both runs", "1 better in B"), place("search", "10.0 %", "5.00 %", "better: cost -4.55 %"),
        place("only in A: 1 solve: checkmate_milp"),
    ]  # fmt: skip
    assert order == sorted(order)
    (pair,) = pd.read_csv(table).to_dict("records")
    assert (pair["strategy"], pair["verdict"], pair["tolerance"]) == ("search", "better", 1e-3)
    assert pair["cost_b"] / pair["cost_a"] == pytest.approx(1050 / 1100, rel=1e-6)


def test_a_run_beside_itself_has_no_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fake_run.full_run(tmp_path, GRAPH, points=3)
    assert compare.main([str(folder), str(folder)]) == 0
    out = capsys.readouterr().out
    assert "15 solves in both runs (15 of them the very same row of one store): 0 better in B, 0 worse" in out
    assert "15 unchanged" in out
    assert "the same" in out.splitlines()[2]


def test_stored_plans_of_real_rows_refute_nothing(tmp_path: Path) -> None:
    plan = Plan.from_order(GRAPH, range(len(GRAPH)))
    real = fake_run.row(GRAPH, "checkpoint_all", fake_run.store_all_peak(GRAPH), "OPTIMAL", plan)
    folder = fake_run.write_run(tmp_path, GRAPH, [(real, plan)])
    assert comparison.compare(load_run(folder), load_run(folder)).refuted == []


def test_two_runs_of_the_paper_are_compared_panel_by_panel(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for panel in (one / "fig5" / "unet_ours", two / "fig5" / "unet_ours", two / "fig5" / "vgg16_ours"):
        panel.mkdir(parents=True)
        (panel / "run.json").write_text("{}")
    assert compare.panels_of(one, two) == [(one / "fig5" / "unet_ours", two / "fig5" / "unet_ours")]
    assert compare.panels_of(one, tmp_path / "other") == [(one, tmp_path / "other")]
