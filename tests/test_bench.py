"""The benchmark command: rows outlive an interruption, verdicts follow the records, figures are drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import experiments.bench_cases as bench_cases
import experiments.bench_solvers as bench
import experiments.solver_tables as solver_tables
from experiments.engine import LocalEngine
from experiments.store import Store
from remat import load_graph, save_graph, verify_bound
from remat.frontends.synthetic import chain

COMMITTED = Path(__file__).parents[1] / "results" / "bench"
SHARED = {"instance", "budget", "budget_bytes", "scope", "strategy", "status", "cost", "bound", "gap", "overhead",
          "wall_s", "record_cost", "published_overhead", "goal_gap", "goal_s"}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_solvers", *arguments])
    bench.main()


def test_generated_graphs_give_a_table_that_the_next_run_continues(monkeypatch, tmp_path, capsys):
    out, markdown = tmp_path / "rows.jsonl", tmp_path / "table.md"
    arguments = ["--generated", "--only", "chain_n48 90%", "--time-limit", "2", "--out", str(out)]
    run(monkeypatch, *arguments, "--markdown", str(markdown))
    first = capsys.readouterr().out
    assert "Scope staged:" in first
    assert "generated/chain_n48 | 90% | " in first
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["cost"] >= row["bound"] > 0
    assert f"{row['cost']:,}" in markdown.read_text()
    for path in COMMITTED.glob("*.jsonl"):
        assert all(row.keys() >= SHARED <= json.loads(line).keys() for line in path.read_text().splitlines())
    assert Store(bench.STORE_FOLDER).read_row(row["key"], load_graph(next(tmp_path.glob("runs/store/graphs/*"))))
    monkeypatch.setattr(LocalEngine, "submit", lambda *_: pytest.fail("what is finished is not solved again"))
    run(monkeypatch, *arguments)
    assert f"{row['cost']:,}" in capsys.readouterr().out
    assert [json.loads(line) for line in out.read_text().splitlines()] == [row]


@pytest.mark.parametrize(
    ("cost", "proven", "goal"),
    [(100_000, True, "met"), (100_010, True, "met"), (100_011, True, "MISSED"),
     (99_999, False, "met"), (100_000, False, "MISSED"), (None, True, "MISSED")],
)  # fmt: skip
def test_goals_are_within_a_ten_thousandth_of_an_optimum_and_below_what_was_not_proven(cost, proven, goal):
    case = bench.Case("i", chain(n=4), 1 << 30, "1 GiB", record_cost=100_000, record_proven=proven)
    row = SimpleNamespace(cost=cost)
    result = bench.Comparison(case, row)
    assert result.goal == goal


def test_records_of_a_folder_become_cases(tmp_path):
    graph = chain(n=4, name="tiny")
    (tmp_path / "p100").mkdir()
    save_graph(graph, tmp_path / "p100" / "tiny.json")
    record = {"instance": "p100/tiny", "budget_bytes": 1 << 20, "budget_gib": 0.5, "cost_ns": 9, "solve_s": 3.0}
    (tmp_path / "records.json").write_text(json.dumps([record | {"status": "optimal"}]))
    (case,) = bench_cases.published(tmp_path)
    assert (case.instance, case.budget, case.record_cost, case.record_proven) == ("p100/tiny", "0.5 GiB", 9, True)


def test_large_graphs_have_goals_and_budgets_that_need_recomputation():
    found = list(bench_cases.large())
    assert [len(case.graph) for case in found] == [500] * 6 + [1000] * 6 + [3405] * 3 + [8925] * 3 + [16_000]
    for case in found:
        key = (case.instance, case.budget, case.scope)
        assert any(goal is not None for goal in bench_cases.goals(*key, 60))
        assert bench_cases.goals(*key, 59) == (None, None)
        assert case.budget_bytes < bench_cases.share_of_peak(case.graph, 0.97)


def test_of_several_seeds_the_table_has_the_median_gap():
    rows: list[Any] = [SimpleNamespace(gap=gap) for gap in (0.3, None, 0.1, 0.2)]
    assert bench_cases.median_of(rows, lambda row: row.gap).gap == 0.2
    assert bench_cases.median_of(rows[:3], lambda row: row.gap).gap == 0.3
    assert bench_cases.median_of(rows[:1], lambda row: row.gap).gap == 0.3


def test_certificates_of_the_best_bounds_are_copied(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "cases", lambda _: bench_cases.generated())
    arguments = ["--only", "chain_n48 75%", "--seeds", "2", "--time-limit", "3", "--out", str(tmp_path / "rows.jsonl")]
    run(monkeypatch, *arguments, "--certificates", str(tmp_path / "bounds"))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == [0, 1]
    (file,) = (tmp_path / "bounds").iterdir()
    assert file.name == "generated_chain_n48_staged_75_percent.json.gz"
    (case,) = (case for case in bench_cases.generated() if (case.graph.name, case.budget) == ("chain_n48", "75%"))
    proven = verify_bound(case.graph, file, budget=case.budget_bytes, scope=case.scope)
    assert proven == max(row["certified_bound"] for row in rows) > case.graph.total_cost


def check_certificates(cases) -> int:
    """Number of the committed certificates that hold for their cases and bounds of rows."""
    rows = [json.loads(line) for line in (COMMITTED / solver_tables.FILES[0]).read_text().splitlines()]
    certified = {(row["instance"], row["budget"], row["scope"]): row["certified_bound"] for row in rows}
    found = 0
    for case in cases:
        file = COMMITTED.parent / "bounds" / f"{case.certificate_name}.json.gz"
        if file.exists():
            bound = verify_bound(case.graph, file, budget=case.budget_bytes, scope=case.scope)
            assert bound >= certified[case.instance, case.budget, case.scope]
            found += 1
    return found


def test_committed_certificates_hold():
    assert check_certificates(case for case in bench_cases.large() if len(case.graph) <= 500) == 6


@pytest.mark.slow
def test_all_committed_certificates_hold(instances):
    held = check_certificates(bench_cases.cases(instances))
    assert held == len(list((COMMITTED.parent / "bounds").iterdir())) > 40


def test_growth_is_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "GROWTH_LAYERED", (30,))
    monkeypatch.setattr(bench, "GROWTH_CHAINS", (20, 40))
    figure = tmp_path / "growth.png"
    run(monkeypatch, "--growth", "--time-limit", "1", "--figure", str(figure))
    assert capsys.readouterr().out.count("first plan") == 3
    assert figure.stat().st_size > 5000
    assert figure.with_suffix(".pdf").exists()


def test_a_heuristic_is_compared_too(monkeypatch, capsys):
    """One that ignores the budget: its family is solved once."""
    run(monkeypatch, "--generated", "--only", "chain_n48", "--strategy", "chen_sqrtn", "--time-limit", "2")
    out = capsys.readouterr().out
    assert out.count("| generated/chain_n48 | ") == 6  # each when it is done, and in the table
    assert "FEASIBLE" in out


@pytest.mark.slow
def test_formulations_are_compared(monkeypatch, capsys):
    arguments = ("--generated", "--only", "chain_n48 90%", "--compare", "--repeats", "2", "--time-limit", "8")
    run(monkeypatch, *arguments)
    assert "generated/chain_n48 90%: trimmed " in capsys.readouterr().out
