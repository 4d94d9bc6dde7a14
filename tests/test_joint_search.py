"""Storage and implementations, searched together: its own count against the simulator, optima, published records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from brute_force import optimum, random_step, with_implementations

import remat
from remat import Graph, Plan, simulate
from remat.frontends.monet import load_costs
from remat.search.joint import EXACT_COST, EXACT_EXCESS, JointSearch, anneal_jointly, prepare, refresh

pytestmark = pytest.mark.usefixtures("warm_search")
GIB = 2**30


def plans_of(graph: Graph, budget: int, moves: int = 3_000) -> list[Plan]:
    """Each better plan; none where it cannot search."""
    prepared = prepare(graph)
    found: list[Plan] = []
    if prepared is not None:
        anneal_jointly(prepared, budget, 1, found.append, lambda: False, seconds=60.0, moves=moves)
    return found


def cases(n: int) -> list[Graph]:
    rng = np.random.default_rng(7)
    kinds = ({}, {"multi_output": 0.4}, {"workspace": 3})
    return [with_implementations(random_step(rng, int(rng.integers(4, 14)), **kinds[i % 3]), rng) for i in range(n)]


def test_each_plan_can_run_costs_less_than_the_one_before_and_fits() -> None:
    searched = 0
    for graph in cases(120):
        least, most = graph.largest_working_set()[0], sum(value.bytes for value in graph.values) + graph.fixed_bytes
        budget = (least + most) // 2
        traces = [simulate(graph, plan) for plan in plans_of(graph, budget)]
        searched += bool(traces)
        costs = [trace.cost for trace in traces]
        assert costs == sorted(set(costs), reverse=True)
        assert all(trace.peak_bytes <= budget for trace in traces)
    assert searched > 30


def test_small_graphs_are_solved_where_only_forward_operations_repeat() -> None:
    equal = below = 0
    for graph in (g for g in cases(120) if len(g) <= 7):
        for budget in range(graph.largest_working_set()[0], graph.largest_working_set()[0] + 6, 2):
            best, plans = optimum(graph, budget, "staged"), plans_of(graph, budget, 2_000)
            if best is not None and plans:
                cost = simulate(graph, plans[-1]).cost
                equal += cost == best
                below += cost < best and plans[-1].scope == "staged"
    assert below == 0
    assert equal > 20


def with_siblings(rng: np.random.Generator) -> Graph:
    """A step whose forward operations have up to two outputs, each read in the backward pass, at times by another."""
    graph = random_step(rng, 14, multi_output=0.8)
    forward = graph.operations[:7]
    backward = [
        replace(op, inputs=tuple(sorted({*op.inputs, *rng.choice([v for other in forward for v in other.outputs], 2)})))
        for op in graph.operations[7:]
    ]
    return with_implementations(replace(graph, operations=(*forward, *backward)), rng)


def test_what_it_counts_while_it_moves_is_what_a_count_from_the_genes_gives() -> None:
    counted, rng = 0, np.random.default_rng(3)
    for graph in (*cases(60), *(with_siblings(rng) for _ in range(120))):
        prepared, least = prepare(graph), graph.largest_working_set()[0]
        if prepared is None:
            continue
        for budget in (least, least + 4):
            search = JointSearch(prepared, budget, 0)
            search.run(0.3, 1_000)
            moved = [each.copy() for each in (search.state.exact_cost, search.state.exact_excess, search.state.total)]
            refresh(prepared.instance, search.state, search.budget)
            again = (search.state.exact_cost, search.state.exact_excess, search.state.total)
            assert all(np.array_equal(x, y) for x, y in zip(moved, again, strict=True))
            counted += bool(search.state.runs_at.any())
    assert counted > 50


def test_runs_with_a_work_limit_repeat() -> None:
    graph = next(g for g in cases(40) if prepare(g) is not None and len(g) > 10)
    budget = graph.largest_working_set()[0] + 6
    first, second = ([plan.calls for plan in plans_of(graph, budget)] for _ in range(2))
    assert first == second


def test_it_goes_on_from_its_own_plans_at_their_cost_and_from_any_other() -> None:
    loaded = 0
    for graph in cases(60):
        prepared, budget = prepare(graph), graph.largest_working_set()[0] + 6
        if prepared is None:
            continue
        for plan in plans_of(graph, budget)[-1:]:
            search = JointSearch(prepared, budget, 0)
            search.load(plan)
            loaded += search.state.reals[EXACT_EXCESS] == 0
            assert search.state.reals[EXACT_COST] >= simulate(graph, search.plan()).cost - 0.5
            assert search.best == simulate(graph, plan).cost or search.state.reals[EXACT_EXCESS] > 0
        other = remat.solve(graph, budget, strategy="chen_sqrtn", isolate=False).plan
        if other is not None:
            JointSearch(prepared, budget, 0).load(other)
    assert loaded > 15


def test_graphs_that_it_cannot_express_are_left_to_others() -> None:
    chain = Graph.from_nodes("chain", [[], [0]], [1, 1], [1, 1], loss=0)
    assert prepare(chain) is None  # nothing to choose
    graph = with_implementations(random_step(np.random.default_rng(1), 8, once=1.0), np.random.default_rng(1))
    assert prepare(graph) is None


@pytest.mark.parametrize(("gib", "milliseconds"), [(10, 1324.00), (7, 1438.66), (5.5, 1540.23)])
def test_vgg16_reaches_the_published_optimum(gib: float, milliseconds: float, instances: Path) -> None:
    graph = load_costs(instances / "monet" / "costs_vgg16.json.gz")
    plan = plans_of(graph, int(gib * GIB), 600_000)[-1]
    assert simulate(graph, plan).cost == pytest.approx(milliseconds * 1e6, rel=5e-4)


def test_the_portfolio_uses_it(instances: Path) -> None:
    graph = load_costs(instances / "monet" / "costs_vgg16.json.gz")
    solution = remat.solve(graph, 10 * GIB, strategy="portfolio", time_limit_s=20, threads=2)
    assert solution.stats["joint_moves"] > 0
    assert solution.cost <= 1330e6
