"""FastSA: the segment tree against the simulator, plans against exhaustive search, orders and scopes."""

from __future__ import annotations

import time

import numpy as np
import pytest
from brute_force import random_step
from helpers import step_of

from remat import Plan, Scope, Status, simulate, solve
from remat.graph import Graph
from remat.search.exhaustive import exhaustive
from remat.search.sequence import FIXED, FREE, STAGED, Sequencer
from remat.simulator import plain_peak

SCOPES = {STAGED: Scope.STAGED, FIXED: Scope.FIXED_ORDER, FREE: Scope.FREE}


def running_bytes(sequencer: Sequencer) -> list[int]:
    """Bytes in the segment tree at each slot that computes something."""
    state, found = sequencer.state, []
    for p in np.flatnonzero(state.slots >= 0).tolist():
        node = p + len(state.slots)
        held = int(state.most[node])
        while node := node // 2:
            held += int(state.added[node])
        found.append(held)
    return found


@pytest.mark.parametrize("rule", SCOPES)
def test_the_segment_tree_counts_as_the_simulator(rule: int) -> None:
    rng = np.random.default_rng(rule)
    for seed in range(12):
        graph = random_step(rng, int(rng.integers(3, 30)), multi_output=0.4, workspace=2, keep=0.3, once=0.2)
        sequencer = Sequencer(graph, round(0.7 * plain_peak(graph)), rule, seed)
        for _ in range(30):
            sequencer.anneal(10, 5.0, 1.0, 1 << 60)
            plan = Plan.from_order(graph, sequencer.order)
            trace = simulate(graph, plan)
            assert running_bytes(sequencer) == (trace.running_bytes - graph.fixed_bytes).tolist()
            assert (sequencer.peak, sequencer.cost) == (trace.peak_bytes - graph.fixed_bytes, trace.cost)
            assert SCOPES[rule].contains(plan.scope)
        again = Sequencer(graph, 0, rule, seed)
        again.load(sequencer.order)
        assert (again.peak, again.cost, again.order) == (sequencer.peak, sequencer.cost, sequencer.order)


@pytest.mark.parametrize("scope", Scope)
def test_small_graphs_are_solved_to_the_optimum(scope: Scope) -> None:
    order = {"order": "free"} if scope is Scope.FREE else {}
    rng, repeated = np.random.default_rng(5), 0
    for seed in range(8):
        graph = random_step(rng, 8, min_bytes=1, min_cost=1, workspace=1)
        for share in (0.9, 0.75):
            budget = round(share * plain_peak(graph))
            best = exhaustive(graph, budget, scope).plan
            found = solve(graph, budget, "fastsa", scope=str(scope), seed=seed, isolate=False, **order)
            assert (found.plan is None) == (best is None)
            if best is not None:
                assert found.cost == simulate(graph, best).cost
                repeated += found.cost > graph.total_cost
    assert repeated


@pytest.mark.parametrize("scope", Scope)
def test_a_step_of_blocks_fits_its_budget_in_the_order_of_the_graph(scope: Scope) -> None:
    graph = step_of(8)
    budget = round(0.6 * plain_peak(graph))
    found = solve(graph, budget, "fastsa", scope=str(scope), isolate=False)
    assert found.peak_bytes <= budget
    assert list(dict.fromkeys(found.plan.order.tolist())) == list(range(len(graph)))


def test_a_free_order_needs_the_free_scope() -> None:
    """A graph that fits without repeats in another order only."""
    graph = Graph.from_nodes("order", [[], [], [0], [1], [2, 3]], [4, 4, 1, 1, 1], [3, 3, 1, 1, 1])
    assert solve(graph, 8, "fastsa", scope="free", isolate=False).cost == 12
    free = solve(graph, 6, "fastsa", scope="free", order="free", isolate=False)
    assert (free.cost, free.peak_bytes) == (9, 6)
    skipped = solve(graph, 8, "fastsa", order="free", isolate=False)
    assert skipped.status is Status.SKIPPED
    assert "scope=free" in skipped.message


def test_a_run_ends_in_time() -> None:
    graph = step_of(60)
    began = time.monotonic()
    in_time = solve(graph, round(0.6 * plain_peak(graph)), "fastsa", time_limit_s=1, isolate=False)
    assert time.monotonic() - began < 3
    assert in_time.stats["moves"] > 0


def test_a_plan_that_repeats_too_often_is_not_loaded() -> None:
    graph = Graph.from_nodes("chain", [[], [0], [1]], [4, 5, 6], [1, 2, 3])
    sequencer = Sequencer(graph, 9, FIXED, 0)
    assert not sequencer.load([0] * 70 + [1, 2])
    assert sequencer.order == [0, 1, 2]


def test_only_sequences_cheaper_than_the_known_one_count() -> None:
    graph = random_step(np.random.default_rng(4), 12, min_bytes=1, min_cost=1)
    budget = round(0.8 * plain_peak(graph))
    best = exhaustive(graph, budget, Scope.STAGED).plan
    optimum = simulate(graph, best).cost
    assert optimum > graph.total_cost

    def cooled(known: int) -> list[list[int]]:
        seen: list[list[int]] = []
        sequencer = Sequencer(graph, budget, STAGED, 1)
        found = sequencer.cool(60_000, 1.0, time.monotonic() + 60, lambda: False, known=known, on_better=seen.append)
        assert found.order == (seen[-1] if seen else [])
        return seen

    assert cooled(optimum) == []
    costs = [simulate(graph, Plan.from_order(graph, order)).cost for order in cooled(optimum + 1)]
    assert costs == [optimum]
