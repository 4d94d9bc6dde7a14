"""Two-phase rounding: the relaxation's own integral points, phase two, what fits."""

from __future__ import annotations

import numpy as np
import pytest
from brute_force import random_graph
from helpers import context_of

from remat import Plan, min_budget, simulate, solve, solve_sweep
from remat.frontends import synthetic
from remat.simulator import plain_peak
from remat.solvers._rounding import RELAXATIONS, cheapest_runs, relaxed_residency


def test_phase_two_gives_back_the_plan_that_made_S():
    rng = np.random.default_rng(0)
    repeats = 0
    for _ in range(60):
        graph = random_graph(rng, 8, min_bytes=1)
        for budget in range(graph.largest_working_set()[0], plain_peak(graph)):
            plan = solve_sweep(graph, [budget], "checkmate_milp", isolate=False, threads=1)[0].plan
            if plan is None:
                continue
            order = cheapest_runs(graph, plan.matrices(graph)[1].astype(bool))
            assert simulate(graph, Plan.from_order(graph, order)).cost <= simulate(graph, plan).cost
            repeats += len(order) > len(graph)
            break
    assert repeats > 3


def test_improvement_helps_and_the_share_that_fits_is_told():
    graph = synthetic.chain(n=12, varied=True)
    budget = int(0.6 * plain_peak(graph))
    plain, better = (solve(graph, budget, name, time_limit_s=20) for name in ("lp_rounding", "lp_rounding_search"))
    assert plain.stats["roundings"] == 9
    assert "improve_s" not in plain.stats  # the published method
    assert "improve_s" in better.stats
    assert better.cost <= plain.cost


def test_the_published_relaxation_rounds_to_plans_too():
    graph = synthetic.chain(n=24, varied=True)
    budget = int(0.7 * plain_peak(graph))
    best = solve(graph, budget, time_limit_s=10).cost
    found = solve(graph, budget, "lp_rounding", relaxation="published", time_limit_s=20)
    assert found.stats["roundings"] == 9
    assert found.peak_bytes <= budget
    assert found.cost >= best
    context = context_of(graph, budget)
    both = {name: relaxed_residency(context, 0.1, name, may_shrink=False)[0] for name in RELAXATIONS}
    for S_TV in both.values():
        assert S_TV.shape == (len(graph), len(graph.values))
        assert ((S_TV >= 0) & (S_TV <= 1)).all()
        assert not S_TV[np.arange(len(graph)), list(graph.producer)].any()  # nothing is there before it is made


@pytest.mark.parametrize("strategy", ["lp_rounding", "lp_rounding_random"])
def test_near_the_smallest_budget_epsilon_shrinks_only_beyond_the_paper(strategy):
    graph = synthetic.chain(n=20, varied=True, seed=2)
    budget = min_budget(graph).bytes * 1005 // 1000
    solution = solve_sweep(graph, [budget], strategy, isolate=False, time_limit_s=20, improve=True)[0]
    assert solution.peak_bytes <= budget
    assert "relaxed with" in solution.message
    published = solve_sweep(graph, [budget], strategy, isolate=False, time_limit_s=20)[0]
    assert published.plan is None
    assert "lower epsilon" in published.message
