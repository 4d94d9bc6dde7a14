"""The benchmark: solves what is missing, keeps its rows, and its page shows them in a browser."""

from __future__ import annotations

import base64
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import open_page

import remat
from analysis.leaderboard import leaderboard, payload
from analysis.memory import timeline
from experiments import cli, engine
from experiments.benchmark import POINTS, measure
from experiments.config import register
from experiments.registry import Case
from experiments.store import Table
from remat import solvers
from remat.frontends import synthetic
from remat.search.greedy import greedy_eviction
from remat.simulator import plain_peak

STRATEGIES = "strategies=[checkpoint_all,griewank,checkmate_milp]"

KEPT = "experiments.store.KEPT_FOLDER"  # the committed rows, which take seconds to draw


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rows of a small benchmark."""
    where = tmp_path_factory.mktemp("benchmark")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(sys, "argv", ["run.py"])
        patch.setattr(KEPT, where / "results")
        register()
        assert run(STRATEGIES) == 0
    return where


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder, which is the current one."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(KEPT, folder / "results")
    return folder


def run(*arguments: str) -> int:
    limits = ("time_limit=5", "benchmark.long_time_limit=8", "seeds=1")
    return cli.main(["experiment=benchmark", "benchmark=quick", *limits, *arguments])


def rows_of(name: str) -> list[dict[str, Any]]:
    """Rows of the small benchmark, in the working folder."""
    return [row for row in Table("benchmark").rows() if (row["benchmark"], row["instance"]) == ("quick", name)]


def test_every_problem_has_a_row_of_every_strategy(here: Path) -> None:
    rows = rows_of("skip_d6")
    asked = {(row["strategy"], row["budget_bytes"], row["time_limit_s"]) for row in rows}
    assert len([each for each in asked if each[2] == 5]) == 3 * 2
    # With the longer limit only what may use it is solved.
    assert {name for name, _, limit in asked if limit == 8} == {"checkmate_milp"}
    assert {row["family"] for row in rows_of("chain_n12")} == {"chain"}
    assert all({"solver", "threads", "cpu", "date", "git_commit", "seed"} <= row.keys() for row in rows)
    assert {row["load"] is None for row in rows} == {False}


@pytest.fixture
def listed(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases of a run, which ends before it measures or draws."""
    found = list[Case]()

    def missing(_: Table, cases: Iterable[Case]) -> None:
        found.extend(cases)
        raise remat.InvalidInput("listed")

    monkeypatch.setattr(Table, "missing", missing)
    return found


def test_cases_are_shuffled_and_what_may_use_its_time_has_three_seeds(listed: list[Case]) -> None:
    def cases() -> list[tuple[Any, ...]]:
        listed.clear()
        assert run("strategies=[chen_sqrtn,search]", "seeds=3") == 1
        return [tuple(case.what[key] for key in ("instance", "strategy", "time_limit_s", "seed")) for case in listed]

    found, names = cases(), ("chain_n12", "skip_d6", "layered_n30")
    expected = {(name, "search", 5.0, seed) for name in names for seed in range(3)}
    expected |= {("skip_d6", "search", 8.0, seed) for seed in range(3)}
    expected |= {(name, "chen_sqrtn", 5.0, 0) for name in names}
    assert sorted(found) == sorted(expected)
    assert found != sorted(found)
    assert {case.what["instance"] for case in listed if case.what.get("held_out")} == {"skip_d6"}
    assert cases() == found


def test_rows_are_what_the_solvers_return(here: Path) -> None:
    graph, found = synthetic.chain(n=12, varied=True), rows_of("chain_n12")
    for row in found:
        solution = remat.solve(graph, row["budget_bytes"], row["strategy"], time_limit_s=20, isolate=False)
        assert (solution.cost, str(solution.status)) == (row["cost"], row["status"])
        if solution.cost is not None:
            levels = base64.b64decode(row["memory"])
            assert len(levels) == POINTS
            assert max(levels) == round(255 * row["peak_bytes"] / row["plain_peak_bytes"])
    assert any(row["cost"] for row in found)


def test_the_highest_memory_of_each_part_by_hand() -> None:
    graph = synthetic.chain(n=5, varied=True)
    trace = remat.simulate(graph, greedy_eviction(graph, remat.min_budget(graph).bytes + 20))
    line, n = timeline(graph, trace), 37
    runs = [*zip(line.held_bytes, itertools.pairwise(line.edges), strict=True)]
    parts = itertools.pairwise(np.linspace(0, line.edges[-1], n + 1))
    expected = [max(held for held, (a, b) in runs if a < end and b > start) for start, end in parts]
    assert line.highest(n) == expected


def test_nothing_is_solved_twice_until_a_setting_or_the_version_changes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = len(rows_of("chain_n12"))
    capsys.readouterr()
    assert run(STRATEGIES, "networks=[chain_n12]") == 0
    assert "0 cases measured now, 3 taken" in capsys.readouterr().out
    assert run("strategies=[checkpoint_all]", "networks=[chain_n12]", "accounting=published") == 0
    assert len(rows_of("chain_n12")) == before + 2
    monkeypatch.setattr(solvers, "VERSION", solvers.VERSION + 1)
    assert run("strategies=[checkmate_milp]", "networks=[chain_n12]") == 0
    assert capsys.readouterr().out.count("1 cases measured now") == 2
    assert len(rows_of("chain_n12")) == before + 2  # new rows take the place of old ones


def test_a_failed_budget_costs_no_other_budget_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine.solve_isolated

    def failing(context: Any, *asked: Any, **how: Any) -> remat.Solution:
        if context.problem.budget_bytes < plain_peak(context.problem.graph):
            raise remat.RematError("the solver broke")
        return real(context, *asked, **how)

    monkeypatch.setattr(engine, "solve_isolated", failing)
    rows = measure(
        {"function": "chain", "n": 6}, [0.8, 1.0, 0.9], "search", {}, 3.0, "staged", "exact", seed=0, threads=1,
        work_limit=None, deterministic=False, target_gap=1e-4,
    )  # fmt: skip
    assert next(rows)["share"] == 1.0
    with pytest.raises(remat.RematError, match=r"^share 0\.8: .*the solver broke.*; share 0\.9: "):
        next(rows)


@pytest.mark.usefixtures("listed")
def test_what_is_absent_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("REMAT_INSTANCES", raising=False)
    assert run(STRATEGIES, "networks=[skip_d6]", "benchmark.instances.skip_d6.graph=no/such.json",
               "benchmark.instances.skip_d6.model=null") == 1  # fmt: skip
    assert "left out: skip_d6: published files are absent" in capsys.readouterr().out
    assert run("networks=[skip_d7]") == 1
    assert "unknown instance 'skip_d7'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("benchmark.shares=[2]", "benchmark.shares must be numbers above 0 and at most 1, not [2.0]"),
        ("benchmark.name=../x", "benchmark.name must be a word"),
        ("benchmark.instances.skip_d6.family=???", "benchmark.instances.skip_d6.family is missing"),
        ("benchmark.instances.skip_d6.graph=x.json", "skip_d6 needs a graph or a model, and not both"),
        ("benchmark.instances.skip_d6.model=skipp", "unknown model 'skipp'; did you mean skip"),
    ],
)  # fmt: skip
def test_a_wrong_benchmark_is_one_line(
    override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(override) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs" / "benchmark").exists()


def test_the_data_of_the_page(here: Path) -> None:
    mine = [row for name in ("chain_n12", "skip_d6", "layered_n30") for row in rows_of(name)]
    shown = leaderboard([row for row in mine if row["accounting"] == "exact"])
    data = payload(shown.rows, shown.families)
    assert {entrant["name"] for entrant in data["entrants"]} == {"checkmate_milp", "checkpoint_all", "griewank"}
    solves = [dict(zip(data["columns"], solve, strict=True)) for solve in data["solves"]]
    for solve in solves:
        assert [step[1] for step in solve["steps"]][-1:] == ([] if solve["cost"] is None else [solve["cost"]])
        if solve["cost"] is not None:
            problem = data["problems"][solve["problem"]]
            assert problem["bound"] <= problem["best"] <= solve["cost"]
    assert not shown.refuted


def test_the_page_in_a_browser(here: Path, browser: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    assert run(STRATEGIES) == 0
    open_page(browser, (here / "runs" / "benchmark" / "page.html").resolve())

    def count(selector: str) -> int:
        return browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)

    for plot in ("profiles", "anytime", "bounds"):
        assert count(f"#{plot} svg.main-svg"), plot
        assert count(f"#{plot} .trace"), plot
    assert count("#ranking tbody tr") == 3
    assert count("#cells tbody tr") == 6
    assert "checkmate" in browser.find_element(By.CSS_SELECTOR, "#ranking tbody tr").text.lower()
    Select(browser.find_element(By.ID, "family")).select_by_value("layered")
    assert count("#cells tbody tr") == 2
    Select(browser.find_element(By.ID, "family")).select_by_value("")
    Select(browser.find_element(By.ID, "limit")).select_by_value("8")
    assert count("#cells tbody tr") == 2  # of the only graph with the longer limit
    Select(browser.find_element(By.ID, "limit")).select_by_value("5")
    Select(browser.find_element(By.ID, "within")).select_by_visible_text("0.1")
    Select(browser.find_element(By.ID, "instance")).select_by_value("skip_d6")
    assert not browser.find_element(By.ID, "solve").is_displayed()
    browser.execute_script("document.querySelector('#cells td[style] button').click()")
    assert browser.find_element(By.ID, "solve").is_displayed()
    assert count("#memory .trace") >= 2
    assert "overhead" in browser.find_element(By.ID, "facts").text
    saved = browser.execute_script(
        "let kept; const old = URL.createObjectURL; URL.createObjectURL = (blob) => { kept = blob; return old(blob); };"
        "HTMLAnchorElement.prototype.click = () => {}; document.getElementById('csv').click(); return kept.text();"
    )
    assert saved.splitlines()[0].startswith("graph,family,scope,budget_bytes")
    assert len(saved.splitlines()) == 1 + 3 * 6
    assert browser.get_log("browser") == []
    assert json.loads(browser.execute_script("return document.getElementById('data').textContent"))["problems"]
