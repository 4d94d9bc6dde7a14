"""Restricted MILPs: exact where nothing is left out, never a claim, and better plans where there are any."""

from __future__ import annotations

import time

import numpy as np
import pytest
from brute_force import KINDS, optimum, random_graph
from helpers import context_of

from remat import Graph, Plan
from remat.frontends.synthetic import skip
from remat.plan import Scope
from remat.simulator import plain_peak
from remat.solvers._milp_restricted import Refiner, repeats_of, repeats_worth_trying
from remat.solvers._milp_trimmed import solve_trimmed


def all_repeats(graph: Graph) -> set[tuple[int, int]]:
    return {(t, k) for t in range(len(graph)) for k in range(t)}


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]])
def test_with_all_repeats_it_is_the_whole_problem(kind):
    rng = np.random.default_rng(11)
    solved = 0
    for _ in range(40):
        graph = random_graph(rng, int(rng.integers(5, 9)), min_cost=1, **kind)
        budget = graph.largest_working_set()[0] + int(rng.integers(0, 3))
        problem = context_of(graph, budget, seconds=20)
        outcome = solve_trimmed(problem, 0.0, repeats=all_repeats(graph))
        expected = optimum(graph, budget, "staged")
        assert bool(outcome.candidates) == (expected is not None)
        assert outcome.bound is None
        assert not outcome.infeasible
        assert problem.incumbent.bound == graph.total_cost
        if expected is not None:
            assert problem.incumbent.cost == expected
            solved += 1
    assert solved >= 20


def test_repeats_of_a_plan():
    assert repeats_of(None, np.array([0, 1, 0, 2, 0, 1, 3])) == {(2, 0), (3, 0), (3, 1)}


def test_what_is_worth_trying_follows_a_stretch_of_short_memory():
    # a -> b -> c -> d, and d reads a again: between them everything together exceeds the budget.
    graph = Graph.from_nodes("loop", [[], [0], [1], [2, 0]], [4] * 4, [1] * 4)
    assert repeats_worth_trying(graph, 100, 3) == set()
    assert repeats_worth_trying(graph, 11, 3) == {(3, 0)}
    # with an input of its own before a, that one too at depth 2
    longer = Graph.from_nodes("longer", [[], [0], [1], [2], [3, 1]], [4] * 5, [1] * 5)
    assert repeats_worth_trying(longer, 11, 1) == {(4, 1)}
    assert repeats_worth_trying(longer, 11, 2) == {(4, 1), (4, 0)}


def test_refining_ends_at_the_best_plan_of_its_models_and_claims_nothing():
    graph = skip(depth=3, varied=True, seed=4)
    peak = plain_peak(graph)
    budget = (graph.largest_working_set()[0] + peak) // 2
    problem = context_of(graph, budget, seconds=20)
    exact = context_of(graph, budget, seconds=20)
    solve_trimmed(exact, 0.0)
    refiner = Refiner(problem)
    refiner.run(time.monotonic() + 20, 1, lambda: False)
    assert refiner.solves >= 3
    assert problem.incumbent.bound == graph.total_cost
    assert exact.incumbent.cost <= problem.incumbent.cost <= 1.05 * exact.incumbent.cost


def test_refining_leaves_plans_of_other_scopes_alone():
    graph = skip(depth=2)
    problem = context_of(graph, 1 << 40, scope=Scope.FREE, seconds=3)
    order = [*range(len(graph))]
    problem.offer(Plan.from_order(graph, order, 1 << 40), "test")
    Refiner(problem).run(time.monotonic() + 1, 1, lambda: True)
    assert problem.incumbent.plan.order.tolist() == order
