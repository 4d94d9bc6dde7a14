"""The sweep: its budgets, what it takes from the store, and which plans it reuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sweep_helpers import MIRROR, N, at, sweep

import remat
from experiments import solving
from experiments.budget_sweep import is_reusable, sweep_budgets, through
from experiments.progress import SolveProgress, make_console
from experiments.solving import reuse_plans
from experiments.store import Row, Store
from remat.search.sequence import anneal


def test_budgets_are_even_whole_and_hold_both_ends() -> None:
    assert sweep_budgets(10, 20, 5) == [10, 12, 15, 17, 20]
    assert sweep_budgets(0, 2**53 + 1, 3) == [0, 2**52, 2**53 + 1]  # beyond what a float can hold
    assert sweep_budgets(10, 80, 4, by_factor=True) == [10, 20, 40, 80]
    for by_factor in (False, True):
        assert sweep_budgets(10, 12, 16, by_factor=by_factor) == [10, 11, 12]  # each once
        assert sweep_budgets(20, 10, 4, by_factor=by_factor) == [20]  # nothing to save
    assert through([10, 20, 40, 80], 35) == [10, 20, 35, 80]
    for budget in (20, 80):  # one of them, or an end
        assert through([10, 20, 40, 80], budget) == [10, 20, 40, 80]
    assert through([10, 20], 15) == [10, 20]


def test_a_cheaper_plan_of_a_smaller_budget_is_taken_and_says_so() -> None:
    tight, wide = reuse_plans([at(20, 150, 100), at(10, 120, 110)], 1e-4)
    assert (tight.budget_bytes, tight.cost, tight.plan_from, tight.key) == (10, 120, None, "10")
    assert (wide.budget_bytes, wide.cost, wide.plan_from, wide.status) == (20, 120, 10, "FEASIBLE")
    assert (wide.plan_file, wide.peak_bytes, wide.overhead) == ("plans/10.json", 9, pytest.approx(0.2))
    assert (wide.bound, wide.gap) == (100, pytest.approx(20 / 120))  # the tight budget's 110 proves nothing here
    assert wide.key != "20"
    assert "plan found at 10 B" in wide.message


def test_a_row_without_a_plan_gets_the_nearest_smaller_one_but_not_its_proof() -> None:
    rows = [at(10, 130, 100), at(20, 125, 125, "OPTIMAL"), at(30, None, 105, "TIMEOUT"), at(40, None, None)]
    assert [(row.plan_from, row.cost, row.bound, row.status) for row in reuse_plans(rows, 1e-4)[2:]] == [
        (20, 125, 105, "FEASIBLE"), (20, 125, 100, "FEASIBLE"),  # one pass over the graph, where nothing is proven
    ]  # fmt: skip


def test_a_bound_of_a_larger_budget_serves_a_smaller_one_and_says_so() -> None:
    tight, wide = reuse_plans([at(10, 120, 100), at(20, 120, 120, "OPTIMAL")], 1e-4)
    assert (tight.status, tight.bound, tight.gap, tight.plan_from) == ("OPTIMAL", 120, 0.0, None)
    assert "bound proven at 20 B" in tight.message
    assert wide == at(20, 120, 120, "OPTIMAL")


def test_a_certified_bound_is_not_hidden_by_a_higher_one_within_tolerances() -> None:
    """The solver's bound of 120000 alone would leave the cheaper plan FEASIBLE; the certificate proves it optimal."""
    wide = replace(at(20, 130_000, 120_000), proven_by="highs", certified_bound=119_990)
    _, taken = reuse_plans([at(10, 120_001, 100_000), wide], 1e-4)
    assert (taken.cost, taken.status, taken.bound, taken.proven_by) == (120_001, "OPTIMAL", 119_990, "certificate")
    narrow = replace(at(10, 120_001, 119_000), certified_bound=119_000)
    raised, _ = reuse_plans([narrow, replace(at(20, 119_500, 119_400), proven_by="highs")], 1e-4)
    assert (raised.bound, raised.proven_by, raised.certified_bound) == (119_400, "highs", 119_000)


def test_rows_that_gain_nothing_stay_as_they_are() -> None:
    rows = [at(10, None, None, "INFEASIBLE"), at(20, 120, 110), at(30, 110, 110, "OPTIMAL")]
    assert reuse_plans(rows, 1e-4) == rows


def test_baselines_are_never_reused() -> None:
    assert [is_reusable(name) for name in ("checkmate_milp", "chen_greedy", "checkpoint_all")] == [True, False, False]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row], list[str]]:
    folder = tmp_path_factory.mktemp("store")
    rows, families, graph_run = sweep(folder)
    assert (graph_run.solved, graph_run.reused) == (5, 0)  # two families, the MILP at three budgets
    return folder, rows, families


def test_a_sweep_reaches_from_the_smallest_budget_to_checkpoint_all_and_rows_hold_their_plans(
    done: tuple[Path, list[Row], list[str]],
) -> None:
    folder, rows, families = done
    # All forward values and the first gradient: 5 bytes. A gradient, its input and the gradient before: 3.
    assert sorted({row.budget_bytes for row in rows}) == [3, 4, 5]
    milp = [row for row in rows if row.strategy == "checkmate_milp"]
    assert [(row.status, row.gap, row.proven_by) for row in milp] == [
        ("FEASIBLE", 0, "highs"), ("FEASIBLE", 0, "highs"), ("OPTIMAL", 0, None),  # only the last needs no proof
    ]  # fmt: skip
    assert (milp[-1].cost, len(families), len(rows)) == (2 * N, 2, 9)
    assert {row.solver_build.split()[0] for row in milp if row.solver_build} == {"highs"}
    for row in rows:
        if row.plan_file is None:
            assert row.cost is None
            continue
        trace = remat.simulate(MIRROR, Store(folder).read_plan(row, MIRROR))
        assert (trace.cost, trace.peak_bytes) == (row.cost, row.peak_bytes)
        assert trace.peak_bytes <= row.budget_bytes
        assert json.loads(row.versions)["numpy"]
        assert row.cpu
        assert row.finished_at


def test_a_repeated_sweep_solves_nothing_and_says_the_same_but_another_time_limit_is_another_question(
    done: tuple[Path, list[Row], list[str]],
) -> None:
    folder, rows, families = done
    again, families_again, graph_run = sweep(folder)
    assert (graph_run.solved, again, families_again) == (0, rows, families)
    only = {"strategies": ("checkpoint_all",), "options": {"checkpoint_all": {}}}
    assert sweep(folder, **only, time_limit_s=30.0)[2].solved == 1


def test_what_a_strategy_compiles_is_compiled_before_the_first_solve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = {"fastsa": False}
    monkeypatch.setattr(solving, "is_compiled", lambda function: ready["fastsa"] or function is not anneal)
    asked = []

    def solve_sweep(graph: remat.Graph, budgets: list[int], name: str, **options: object) -> None:
        asked.append((name, options["time_limit_s"]))
        ready[name] = True

    monkeypatch.setattr(remat, "solve_sweep", solve_sweep)
    with SolveProgress(make_console()) as progress:
        solving.compile_first(["fastsa", "chen_sqrtn", "fastsa", "rotor"], progress.note)
        solving.compile_first(["fastsa"], progress.note)
    assert asked == [("fastsa", solving.COMPILE_S)]
    assert "compiling fastsa, once on this machine" in capsys.readouterr().out
