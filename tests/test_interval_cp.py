"""The interval program against exhaustive optima, and what it may claim."""

from __future__ import annotations

import numpy as np
import pytest
from brute_force import KINDS, optimum, random_graph
from helpers import DIAMOND, run_python

from remat import Graph, Plan, Status, simulate, solve_sweep


def here(graph, budget, strategy="interval_cp", **options):
    options = {"time_limit_s": 5, "threads": 1, "work_limit": 1} | options
    return solve_sweep(graph, [budget], strategy, isolate=False, **options)[0]


def test_optimum_is_the_exhaustive_one():
    rng = np.random.default_rng(5)
    proven = 0
    for kind in (KINDS[0], KINDS[-1]) * 15:
        graph = random_graph(rng, int(rng.integers(5, 8)), min_cost=1, **kind)
        least = graph.largest_working_set()[0]
        for budget in (least, least + 1):
            expected = optimum(graph, budget, "staged")
            solution = here(graph, budget)
            if expected is None:
                assert solution.plan is None
                assert solution.status in (Status.INFEASIBLE, Status.NO_PLAN)
                continue
            assert solution.cost == expected, solution.message
            assert solution.bound <= expected
            proven += solution.status is Status.OPTIMAL
            assert simulate(graph, solution.plan).peak_bytes <= budget
    assert proven > 20


@pytest.mark.parametrize("most_runs", [2, 8])
def test_two_phases_reach_the_optimum_of_their_limit_on_runs(most_runs):
    rng = np.random.default_rng(6)
    proven = 0
    for _ in range(8):
        graph = random_graph(rng, int(rng.integers(5, 8)), min_cost=1, **KINDS[-1])
        budget = graph.largest_working_set()[0] + 1
        expected = optimum(graph, budget, "staged")
        solution = here(graph, budget, "moccasin", most_runs=most_runs)
        if solution.plan is None:
            assert solution.stats["first_phase_above_bytes"] > 0
            assert expected is None or most_runs == 2
            assert (solution.status is Status.INFEASIBLE) <= (expected is None)
            continue
        assert solution.bound <= expected <= solution.cost
        assert simulate(graph, solution.plan).computations.max() <= most_runs
        assert solution.cost == expected or most_runs == 2
        proven += solution.status is Status.OPTIMAL
    assert proven


def test_the_published_method_starts_from_the_graph_alone():
    graph = Graph.from_nodes("chain", [[], [0], [1], [2], [1, 3], [0, 4]], [3] * 6, [1] * 6)
    plain = Plan.from_order(graph, range(6))
    peak = simulate(graph, plain).peak_bytes
    assert here(graph, peak, "moccasin").plan.steps == plain.steps
    found = here(graph, peak - 3, "moccasin")
    assert found.cost == optimum(graph, peak - 3, "staged") > graph.total_cost
    better = here(graph, peak - 3, "interval_cp").plan
    assert here(graph, peak - 3, "moccasin", warm_start=better).plan.steps == found.plan.steps


def test_nothing_is_claimed_for_a_wider_scope():
    assert here(DIAMOND, 6).status is not Status.OPTIMAL
    assert here(DIAMOND, 6, scope="free").status in (Status.NO_PLAN, Status.TIMEOUT)


def test_dear_operations_do_not_overflow():
    graph = Graph.from_nodes("dear", [[], [0], [1], [0, 2]], [2, 1, 1, 2], [10**15, 1, 10**15, 1])
    for budget in (5, 6):
        expected = optimum(graph, budget, "staged")
        assert here(graph, budget).cost == expected


@pytest.mark.slow
def test_works_beside_tensorflow_imported_first():
    """OR-tools crashes in a process that has run TensorFlow before: there it gets a process of its own."""
    script = """
import tensorflow as tf
tf.function(lambda x: tf.nn.relu(x @ x))(tf.ones((4, 4)))
import remat
from remat.frontends.synthetic import chain
graph = chain(n=12)
budget = graph.largest_working_set()[0] + 4096
solution = remat.solve_sweep(graph, [budget], "interval_cp", isolate=False, time_limit_s=10)[0]
print(solution.status, solution.plan is not None, solution.message)
"""
    assert run_python(script).split()[1] == "True"
