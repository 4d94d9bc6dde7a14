"""Plans that a search found are used again, for the same question only, and after the simulator has judged them."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import remat
from remat.execution import PlanOptions, planning
from remat.execution.planning import find_plan
from remat.files import sealed
from remat.frontends import synthetic
from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import plain_peak
from remat.solution import Ending

SEARCH_S = 5.0


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The budgets of searches; each is a short one that ended by itself after a second."""
    budgets, solve = list[int](), planning.solve

    def short(graph: Graph, budget: int, *args: Any, **options: Any) -> Any:
        budgets.append(budget)
        return replace(solve(graph, budget, "griewank"), wall_s=1.0, gap=0.004)

    monkeypatch.setattr(planning, "solve", short)
    return budgets


def question(tmp_path: Path) -> tuple[Graph, int, PlanOptions]:
    graph = synthetic.chain(n=12)
    return graph, plain_peak(graph) * 6 // 10, PlanOptions(time_limit_s=SEARCH_S, cache_folder=tmp_path, threads=1)


def test_a_plan_is_searched_once(tmp_path: Path, searches: list[int]) -> None:
    graph, budget, options = question(tmp_path)
    first = find_plan(graph, budget, options)
    again = find_plan(synthetic.chain(n=12), budget, options.within(99.0))
    assert searches == [budget]
    assert first.plan is not None
    assert again.plan is not None
    assert again.plan.order.tolist() == first.plan.order.tolist()
    trace = remat.simulate(graph, again.plan)
    assert (trace.cost, trace.peak_bytes) == (again.cost, again.peak_bytes)
    assert again.overhead == first.overhead
    assert trace.peak_bytes <= budget


def test_another_question_is_searched(tmp_path: Path, searches: list[int]) -> None:
    graph, budget, options = question(tmp_path)
    questions = [
        (graph, budget, options), (graph, budget + 1, options),
        (graph.with_costs([op.cost + 1 for op in graph.operations], graph.cost_unit), budget, options),
        (graph.with_workspaces([1] * len(graph)), budget, options),
    ]  # fmt: skip
    changed = ({"seed": 1}, {"scope": "staged"}, {"target_gap": 0.5}, {"strategy": "search"})
    questions += [(graph, budget, replace(options, **changes)) for changes in changed]
    for asked in questions:
        find_plan(*asked)
    assert len(searches) == len(questions)


@pytest.mark.parametrize(
    ("found", "limit_s", "used_s", "n_searches"),
    [
        ({}, 1.05, 1.2, 2),  # the clock ended it
        ({"ended": Ending.INTERRUPTED}, SEARCH_S, 1.2, 2),
        ({"gap": 0.03}, SEARCH_S, 0.3, 2),  # a wide gap on a busy machine
        ({"gap": 0.03}, SEARCH_S, 1.2, 1),
    ],
)
def test_a_plan_is_kept_only_if_another_search_would_find_no_better(
    tmp_path: Path, searches: list[int], monkeypatch: pytest.MonkeyPatch,
    found: dict[str, Any], limit_s: float, used_s: float, n_searches: int,
) -> None:  # fmt: skip
    graph, budget, options = question(tmp_path)
    solve, clock = planning.solve, itertools.count(0.0, used_s)
    monkeypatch.setattr(planning, "solve", lambda *a, **k: replace(solve(*a, **k), **found))
    monkeypatch.setattr(planning.time, "process_time", lambda: next(clock))
    for _ in range(2):
        find_plan(graph, budget, options.within(limit_s))
    assert len(searches) == n_searches


def test_a_cheaper_known_plan_is_the_start_of_a_search(tmp_path: Path, searches: list[int]) -> None:
    graph, budget, options = question(tmp_path)
    find_plan(graph, budget, options)
    (path,) = tmp_path.glob("*.plan.json")
    dear = remat.solve(graph, budget, "chen_greedy").plan
    assert dear is not None
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(sealed({**{k: kept[k] for k in ("format", "graph_sha256")}, "plan": dear.document()})))
    cheap = remat.solve(graph, budget, "griewank").plan
    assert cheap is not None
    assert remat.simulate(graph, cheap).cost < remat.simulate(graph, dear).cost
    find_plan(graph, budget, options, known=[cheap])
    assert len(searches) == 2


def test_a_wrong_file_is_not_used(tmp_path: Path, searches: list[int]) -> None:
    graph, budget, options = question(tmp_path)
    find_plan(graph, budget, options)
    (path,) = tmp_path.glob("*.plan.json")
    text = path.read_text()
    kept = {name: json.loads(text)[name] for name in ("format", "graph_sha256", "plan")}
    once = Plan.from_order(graph, range(len(graph))).document()
    for damaged, is_said in (
        (text[: len(text) // 2], True),
        (text.replace('"compute"', '"free"', 1), True),
        (json.dumps(sealed(kept | {"plan": once})), False),  # beyond the budget
        (json.dumps(sealed(kept | {"graph_sha256": "0"})), False),  # of another graph
    ):
        path.write_text(damaged)
        searches.clear()
        with pytest.warns(UserWarning, match="searching again") if is_said else contextlib.nullcontext():
            found = find_plan(graph, budget, options)
        assert len(searches) == 1
        assert found.plan is not None
        assert remat.simulate(graph, found.plan).peak_bytes <= budget


def test_a_folder_that_takes_no_files(tmp_path: Path, searches: list[int]) -> None:
    graph, budget, options = question(tmp_path / "file")
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not kept"):
        found = find_plan(graph, budget, options)
    assert found.plan is not None
    assert len(searches) == 1
