"""The experiments that solve: rows of a solve, cases from records, certificates, and what their pages say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import dtr, measure_solve, rivals, solver_cases, solvers
from experiments.registry import Case
from experiments.store import Table
from remat import Graph, load_graph, save_graph, verify_bound
from remat.errors import InvalidInput
from remat.frontends.dtr_log import DtrLog
from remat.frontends.synthetic import chain

BOUNDS = Path(__file__).parents[1] / "results" / "bounds"


@pytest.fixture(scope="module")
def large() -> list[solver_cases.Instance]:
    """The large instances, which take seconds to make."""
    return list(solver_cases.large())


@pytest.fixture(autouse=True)
def _own_folder(here: Path, large: list[solver_cases.Instance], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REMAT_INSTANCES", raising=False)
    monkeypatch.setattr(solver_cases, "large", lambda: iter(large))


def measured(case: Case) -> dict[str, Any]:
    """The row as the table has it."""
    table = Table("solves")
    assert callable(case.measure)
    table.put(case, case.measure(**case.what), 1.0)
    return table.rows()[-1]


@pytest.mark.long
def test_a_solve_gives_a_row_its_page_and_the_best_certificate(tmp_path: Path) -> None:
    cases = list(solvers.solvers.cases(only="chain_n48 75%", seeds=2, time_limit=5.0))
    rows = [measured(case) for case in cases]
    assert [row["seed"] for row in rows] == [0, 1]
    assert all(row["cost"] >= row["bound"] > row["total_cost"] and row["wall_s"] > row["start_s"] > 0 for row in rows)
    (file,) = (tmp_path / "runs" / "solvers" / "bounds").iterdir()
    assert file.name == "generated_chain_n48_staged_75_percent.json.gz"
    (instance,) = solvers.chosen("generated/chain_n48 75%")
    proven = verify_bound(instance.graph, file, budget=instance.budget_bytes, scope=instance.scope)
    assert proven == max(row["certified_bound"] for row in rows)
    drawing = solvers.page(rows)
    assert "portfolio, 5 s for each solve, 2 threads, up to 2 seeds" in drawing.text
    assert "| generated, scope staged | 5 | none | 1 |" in drawing.text
    assert [row[0] for row in drawing.tables[0].rows] == ["generated/chain_n48"] * 2


def test_cases_with_a_goal_end_there() -> None:
    found = list(solvers.solvers.cases(only="n500_s0|chain", time_limit=60.0, gaps=True))
    assert [case.what["target_gap"] for case in found] == [5e-4, 4e-3]


@pytest.mark.parametrize(
    ("only", "folder", "message"),
    [("nothing", "", "no instance matches only='nothing'"), ("(", "", "'(' is no regular expression"),
     ("", "nowhere", "no folder 'nowhere'; REMAT_INSTANCES")],
)  # fmt: skip
def test_a_mistake_is_one_line(only: str, folder: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_INSTANCES", folder)
    with pytest.raises(InvalidInput) as caught:
        next(solvers.solvers.cases(only=only))
    assert str(caught.value).startswith(message)


def test_published_files_that_are_absent_are_named() -> None:
    for cases, part in ((dtr.dtr.cases, "dtr"), (rivals.rivals.cases, "layered")):
        with pytest.raises(InvalidInput, match=f"set REMAT_INSTANCES to the folder that holds {part}/"):
            next(cases())


def test_records_of_a_folder_become_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(n=4, name="tiny")
    (tmp_path / "p100").mkdir()
    save_graph(graph, tmp_path / "p100" / "tiny.json")
    record = {"instance": "p100/tiny", "budget_bytes": 1 << 20, "budget_gib": 0.5, "cost_ns": 9, "solve_s": 3.0}
    (tmp_path / "records.json").write_text(json.dumps([record | {"status": "optimal"}]))
    monkeypatch.setenv("REMAT_INSTANCES", str(tmp_path))
    (instance,) = solvers.chosen("p100")
    assert (instance.name, instance.budget) == ("p100/tiny", "0.5 GiB")
    assert (instance.record["record_cost"], instance.record["record_proven"]) == (9, True)
    assert measure_solve.graph_of(instance.source) == graph == load_graph(tmp_path / "p100" / "tiny.json")


def check_certificates(instances: Any) -> int:
    """Number of the committed certificates that hold for their instances and bounds of rows."""
    rows = [row for row in Table("solvers").rows() if row["time_limit_s"] == 60]
    certified = {(row["instance"], row["budget"], row["scope"]): row["certified_bound"] for row in rows}
    found = 0
    for each in instances:
        file = BOUNDS / f"{each.certificate_name}.json.gz"
        if file.exists():
            bound = verify_bound(each.graph, file, budget=each.budget_bytes, scope=each.scope)
            assert bound >= certified[each.name, each.budget, each.scope]
            found += 1
    return found


@pytest.mark.long
def test_committed_certificates_hold() -> None:
    assert check_certificates(each for each in solver_cases.large() if len(each.graph) <= 500) == 6


@pytest.mark.slow
def test_all_committed_certificates_hold(instances: Path) -> None:
    held = check_certificates(solver_cases.instances(instances))
    assert held == len(list(BOUNDS.iterdir())) > 40


def test_growth_is_drawn_with_a_row_for_a_strategy_that_does_not_apply() -> None:
    cases = solvers.growth.cases(layered=[30], chains=[20], strategies=["search", "griewank"], time_limit=1.0)
    rows = [measured(case) for case in cases]
    assert {("SKIPPED", None)} < {(row["status"], row["cost"]) for row in rows}
    text = solvers.growth_page(rows).text
    assert "| layered | search | 30 | " in text
    assert "no plan" in text


@pytest.mark.long
def test_dtr_is_solved_with_each_heuristic_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph.from_nodes("chain", [[], [0], [1], [2], [1, 3], [0, 4]], [4, 4, 4, 4, 4, 4], [1] * 6, loss=3)
    (tmp_path / "dtr").mkdir()
    monkeypatch.setenv("REMAT_INSTANCES", str(tmp_path))
    monkeypatch.setattr(dtr, "load_dtr_log", lambda _: DtrLog(graph, 20))
    monkeypatch.setattr(measure_solve, "graph_of", lambda _: graph)
    cases = [case for case in dtr.dtr.cases(networks=["U-Net"], time_limit=2.0) if case.what["published_gb"] == 6]
    assert {case.what["budget_bytes"] for case in cases} == {14}
    rows = [measured(case) for case in cases]
    assert dtr.networks_of(rows[:-1]) == {}  # a budget is shown when all of its solves are there
    (found,) = dtr.networks_of(rows)["U-Net"]["rows"]
    assert set(found["online"]) == set(dtr.HEURISTICS)
    assert 1 <= found["bound"] <= found["offline"] <= found["online"]["exact"]
    drawing = dtr.page(rows)
    assert "| U-Net | 0.71 | 1.141 | 1." in drawing.text
    assert drawing.figures["dtr"].axes[0].has_data()
