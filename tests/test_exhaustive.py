"""The exact search on small graphs against the brute force of the tests."""

from __future__ import annotations

import numpy as np
import pytest
from brute_force import KINDS, SCOPES, least_budget, optimum, random_graph, replay_plan

from remat import simulate
from remat.plan import Scope
from remat.search.exhaustive import exhaustive


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_brute_force(kind: dict[str, float], scope: str):
    rng = np.random.default_rng(KINDS.index(kind))
    decided = {"plan": 0, "none": 0}
    for trial in range(16):
        graph = random_graph(rng, 1 + trial % 6, min_bytes=trial % 3 // 2, **kind)
        low = graph.largest_working_set()[0]
        for budget in range(max(low - 1, 0), low + 3):
            truth = optimum(graph, budget, scope)
            found = exhaustive(graph, budget, scope)
            assert found.is_decided
            assert found.infeasible == (truth is None)
            if found.plan is not None:
                trace = simulate(graph, found.plan)
                assert trace.cost == truth == found.bound
                assert trace.peak_bytes <= budget
                assert Scope(scope).contains(found.plan.scope)
                assert replay_plan(graph, found.plan).cost == truth
                decided["plan"] += 1
            else:
                decided["none"] += 1
                assert found.next_bytes is None or budget < found.next_bytes
    assert min(decided.values()) > 10


@pytest.mark.parametrize("scope", SCOPES)
def test_refused_bytes_bound_the_minimum_and_a_search_that_is_stopped_the_optimum(scope: str):
    rng = np.random.default_rng(7)
    told = stopped = 0
    for trial in range(12):
        graph = random_graph(rng, 5, **KINDS[trial % len(KINDS)])
        least = least_budget(graph, scope)
        for budget in range(graph.fixed_bytes, least):
            found = exhaustive(graph, budget, scope, any_plan=True)
            assert found.infeasible
            assert found.next_bytes is None or budget < found.next_bytes <= least
            told += found.next_bytes is not None
        assert exhaustive(graph, least, scope, any_plan=True).plan is not None
        for limit in (0, 3, 6):
            found = exhaustive(graph, least, scope, max_states=limit)
            assert graph.total_cost <= found.bound <= optimum(graph, least, scope)
            stopped += not found.is_decided
    assert told
    assert stopped > 12
