"""The trimmed staged model: every plan is a point of it, its optimum is the exhaustive one."""

from __future__ import annotations

import numpy as np
import pytest
from brute_force import KINDS, random_graph

from remat import Plan, Scope, simulate
from remat.programs.staged import build_staged_model, last_stages
from remat.search.anneal import minimise_cost


def plans(graph, budgets):
    """Staged plans without needless repeats."""
    for budget in budgets:
        best = minimise_cost(graph, budget, work_limit=20_000, seed=budget)
        plan = Plan.from_order(graph, best.order.tolist())
        assert plan.scope is Scope.STAGED
        yield plan


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[-1]])
def test_every_plan_is_a_point_of_the_relaxation(kind):
    rng = np.random.default_rng(1)
    repeats = 0
    for _ in range(40):
        graph = random_graph(rng, 8, min_cost=1, **kind)
        peak = simulate(graph, Plan.from_order(graph, range(8))).peak_bytes
        for plan in plans(graph, range(graph.largest_working_set()[0], peak + 1)):
            trace = simulate(graph, plan)
            model = build_staged_model(graph, trace.peak_bytes, memory="stage_end")
            assert not model.infeasible
            R_TN, S_TV = plan.matrices(graph)
            x = np.zeros(model.shape[1], dtype=np.int64)
            for (t, k), column in model.R_column.items():
                x[column] = R_TN[t, k]
            for (t, v), column in model.S_column.items():
                x[column] = S_TV[t, v]
            # Nothing of the plan is lost to the trimming ...
            assert x[list(model.R_column.values())].sum() == (trace.computations - 1).sum()
            assert model.cost_constant + model.cost @ x == trace.cost
            # ... and every row holds.
            short = model.matrix @ x < model.row_lower
            assert not short.any(), (model.row_kind[short], model.row_key[short])
            repeats += int(R_TN.sum()) - 8
    assert repeats > 50


def test_the_last_use_is_that_of_a_repeated_user():
    # 1 reads 0 and is read by 3; so 0 may be needed as late as 3, for a second run of 1.
    graph = random_graph(np.random.default_rng(0), 1)
    graph = type(graph).from_nodes("late", [[], [0], [1], [1, 2]], [1] * 4, [1] * 4)
    last_run, last_held = last_stages(graph, [True] * 4)
    assert last_run == [3, 3, 3, 3]
    assert last_held == [3, 3, 3, 3]
