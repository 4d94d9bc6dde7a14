"""Plans: frees at last use, scopes, matrices, files."""

from __future__ import annotations

import itertools
import json

import hypothesis.strategies as st
import numpy as np
import pytest
from brute_force import Rejected, replay, scope_by_definition, small_graphs, step_lists
from helpers import DIAMOND, refused
from hypothesis import given, settings

from remat import Graph, InvalidPlan, Plan, Scope, simulate
from remat.plan import COMPUTE, FREE, frees_held_to_end, scope_of_order


def bytes_by_liveness(graph: Graph, order: list[int]) -> list[int]:
    """Memory while each computation runs, if a copy lives exactly from its making to its last reading."""
    needed_at = []
    for now, running in enumerate(order):
        held = graph.fixed_bytes + graph.operations[running].workspace_bytes
        for v, value in enumerate(graph.values):
            makings = [at for at, k in enumerate(order) if v in graph.operations[k].outputs]
            for making, following in itertools.pairwise([*makings, len(order)]):
                readings = [at for at in range(making + 1, following) if v in graph.operations[order[at]].inputs]
                end = max([making, *readings])
                if value.keep and following == len(order):
                    end = len(order)
                held += value.bytes if making <= now <= end else 0
        needed_at.append(held)
    return needed_at


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_frees_at_last_use_hold_exactly_what_is_live(data):
    graph = data.draw(small_graphs())
    steps = data.draw(step_lists(graph))
    try:
        replay(graph, steps)
    except Rejected:
        return
    order = [i for kind, i in steps if kind == COMPUTE]
    trace = simulate(graph, Plan.from_order(graph, order))
    assert trace.running_bytes.tolist() == bytes_by_liveness(graph, order)
    assert trace.peak_bytes <= replay(graph, steps).peak_bytes  # no other frees do better


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_scope_follows_the_definition(n):
    seen = set()
    for length in range(n, 7):
        for order in itertools.product(range(n), repeat=length):
            if len(set(order)) == n:
                scope = str(scope_of_order(order, n))
                assert scope == scope_by_definition(order, n), order
                seen.add(scope)
    assert len(seen) == min(n + 1, 3)  # one operation leaves no other order
    table = [[wide.contains(narrow) for narrow in Scope] for wide in Scope]
    assert table == [[True, False, False], [True, True, False], [True, True, True]]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_matrices_and_back(data):
    graph = data.draw(small_graphs())
    n = len(graph)
    R_TN = np.zeros((n, n), dtype=bool)
    for t in range(n):
        R_TN[t, : t + 1] = data.draw(st.lists(st.booleans(), min_size=t + 1, max_size=t + 1))
        R_TN[t, t] = True
    plan = Plan.from_matrices(graph, R_TN)
    assert plan.scope is Scope.STAGED
    again, S_TV = plan.matrices(graph)
    assert (again == R_TN).all()
    if not S_TV[0].any():
        # S says what is held between stages; frees within them follow from it.
        rebuilt = Plan.from_matrices(graph, R_TN, S_TV)
        assert (rebuilt.order == plan.order).all()
        assert (rebuilt.matrices(graph)[1] == S_TV).all()


CHAIN = Graph.from_nodes("chain", [[], [0], [1], [2]], [4, 2, 1, 1], [1] * 4)


def held_between_stages(*entries):
    S_TV = np.zeros((4, 4), dtype=bool)
    S_TV[[1, 2, 3], [0, 1, 2]] = True  # what a chain needs
    for t, v in entries:
        S_TV[t, v] = True
    return S_TV


def test_what_S_holds_and_what_is_held_to_the_end_stays_resident():
    last_use = Plan.from_matrices(CHAIN, np.eye(4))
    assert simulate(CHAIN, last_use).running_bytes.tolist() == [4, 6, 3, 2]
    held = Plan.from_matrices(CHAIN, np.eye(4), held_between_stages((2, 0), (3, 0)))
    assert simulate(CHAIN, held).running_bytes.tolist() == [4, 6, 7, 2]
    steps = frees_held_to_end(DIAMOND, range(5), held=[0, 3])
    assert sorted(v for kind, v in steps if kind == FREE) == [1, 2, 4]
    assert simulate(DIAMOND, Plan.from_steps(DIAMOND, steps)).final_bytes == 4


@pytest.mark.parametrize(
    ("graph", "R", "S", "words"),
    [
        (CHAIN, np.eye(4), held_between_stages((0, 1)), "stage 0"),  # what is not there
        (CHAIN, np.eye(4), held_between_stages((1, 2)), "not resident"),
        (CHAIN, np.eye(4), held_between_stages((3, 0)), "stage 3"),
        (CHAIN, [[1, 0], [1]], None, "R is no matrix"),  # rows of unequal lengths
        (CHAIN, np.eye(4), [[0], [0, 1]], "S is no matrix"),
        *((DIAMOND, R, None, "shape") for R in (np.eye(4), np.ones(3), np.ones((2, 2, 2)))),
    ],
)
def test_matrices_of_no_plan_are_refused(graph, R, S, words):
    with refused(words, InvalidPlan):
        Plan.from_matrices(graph, R, S)


def test_a_saved_plan_comes_back(tmp_path):
    plan = Plan.from_order(DIAMOND, [0, 1, 2, 3, 2, 0, 4], budget_bytes=6)
    path = tmp_path / "deep" / "plan.json"
    plan.save(path)
    document = json.loads(path.read_text())
    assert (document["format"], document["scope"]) == ("remat-plan/1", "fixed_order")
    assert document["steps"][:3] == [["compute", 0], ["compute", 1], ["free", 0]]
    again = Plan.load(path, DIAMOND)
    assert (again.steps, again.budget_bytes) == (plan.steps, 6)
    assert list(path.parent.iterdir()) == [path]  # nothing half-written stays
    with refused("was made for graph", InvalidPlan):
        Plan.load(path, CHAIN)
