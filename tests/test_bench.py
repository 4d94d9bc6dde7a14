"""The benchmark command: rows outlive an interruption, verdicts follow the records, figures are drawn."""

from __future__ import annotations

import json
import sys

import pytest

import experiments.bench_solvers as bench
from remat import save_graph
from remat.frontends.synthetic import chain


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
    monkeypatch.setattr(bench, "run_case", lambda *_: pytest.fail("what is finished is not solved again"))
    run(monkeypatch, *arguments)
    assert f"{row['cost']:,}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cost", "proven", "goal"),
    [(100_000, True, "met"), (100_010, True, "met"), (100_011, True, "MISSED"),
     (99_999, False, "met"), (100_000, False, "MISSED"), (None, True, "MISSED")],
)  # fmt: skip
def test_goals_are_within_a_ten_thousandth_of_an_optimum_and_below_what_was_not_proven(cost, proven, goal):
    result = bench.Result(
        "i", "1 GiB", 1 << 30, "staged", "portfolio", 60, 2, "", "FEASIBLE", cost, 0.0, 1, None, None, None, 1.0, None,
        100_000, proven, 1.0, None, "", "",
    )  # fmt: skip
    assert result.goal == goal


def test_records_of_a_folder_become_cases(tmp_path):
    graph = chain(n=4, name="tiny")
    (tmp_path / "p100").mkdir()
    save_graph(graph, tmp_path / "p100" / "tiny.json")
    record = {"instance": "p100/tiny", "budget_bytes": 1 << 20, "budget_gib": 0.5, "cost_ns": 9, "solve_s": 3.0}
    (tmp_path / "records.json").write_text(json.dumps([record | {"status": "optimal"}]))
    (case,) = bench.cases(tmp_path)
    assert (case.instance, case.label, case.record_cost, case.record_proven) == ("p100/tiny", "0.5 GiB", 9, True)


def test_growth_is_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "GROWTH_LAYERED", (30,))
    monkeypatch.setattr(bench, "GROWTH_CHAINS", (20, 40))
    figure = tmp_path / "growth.png"
    run(monkeypatch, "--growth", "--time-limit", "1", "--figure", str(figure))
    assert capsys.readouterr().out.count("first plan") == 3
    assert figure.stat().st_size > 5000
    assert figure.with_suffix(".pdf").exists()
