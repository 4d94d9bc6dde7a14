"""Graphs: validation, derived properties, hashing, the smallest budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from brute_force import random_graph, random_step, with_implementations

from remat import Graph, InvalidGraph, Operation, Value, simulate
from remat.search.greedy import greedy_eviction


def ops(*rows):
    return tuple(Operation(f"op{i}", "", inputs, outputs) for i, (inputs, outputs) in enumerate(rows))


def values(n):
    return tuple(Value(f"v{i}", 1) for i in range(n))


@pytest.mark.parametrize(
    ("operations", "n_values", "words"),
    [
        (ops(((1,), (0,)), ((), (1,))), 2, "topological order"),
        (ops(((0,), (0,))), 1, "topological order"),
        (ops(((), (0,)), ((5,), (1,))), 2, "reads value 5, which does not exist"),
        (ops(((), (0, 3))), 1, "produces value 3, which does not exist"),
        (ops(((), (0,)), ((), (0,))), 1, "two producers"),
        (ops(((), (0,))), 2, "value 1 .* no producer"),
        (ops(((), (0,)), ((0, 0), (1,))), 2, "lists an input twice"),
        (ops(((-1,), (0,))), 1, "does not exist"),
    ],
)
def test_malformed_graphs_are_refused(operations, n_values, words):
    with pytest.raises(InvalidGraph, match=words):
        Graph("g", operations, values(n_values))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"bytes": [-1]}, "bytes of value 0 .* negative"),
        ({"bytes": [1.5]}, "must be an integer"),
        ({"bytes": [True]}, "must be an integer"),
        ({"costs": [-3]}, "cost of operation 0"),
        ({"costs": [2**61]}, "beyond the limit"),
        ({"workspace_bytes": [-1]}, "workspace_bytes"),
        ({"fixed_bytes": -1}, "fixed_bytes"),
        ({"loss": 4}, "loss is 4"),
        ({"deps": [[]] * 3, "bytes": [2**59] * 3, "costs": [1] * 3}, "total bytes"),
    ],
)
def test_impossible_numbers_are_refused(field, words):
    with pytest.raises(InvalidGraph, match=words):
        Graph.from_nodes(**{"name": "g", "deps": [[]], "bytes": [1], "costs": [1]} | field)


def test_a_resized_graph_is_that_graph_made_anew() -> None:
    rng = np.random.default_rng(5)
    for graph in (with_implementations(random_step(rng, 8), rng), random_graph(rng, 9, keep=0.3)):
        graph.sha256()  # is kept, and must not be taken over
        operations = tuple(replace(op, cost=op.cost + 3, workspace_bytes=7) for op in graph.operations)
        values = tuple(replace(value, bytes=2 * value.bytes) for value in graph.values)
        anew = replace(graph, operations=operations, values=values, fixed_bytes=11, cost_unit="flop")
        resized = graph.resized(operations, values, 11, "flop")
        assert resized == anew
        assert resized.sha256() == anew.sha256() != graph.sha256()
        assert (resized.producer, resized.users, resized.n_extra) == (anew.producer, anew.users, anew.n_extra)
        with pytest.raises(InvalidGraph, match="must not be negative"):
            graph.resized(fixed_bytes=-1)


def test_numpy_integers_become_plain_ones():
    sizes, costs = np.array([200, 100, 50], dtype=np.uint8), np.array([2**30] * 3, dtype=np.int32)
    graph = Graph.from_nodes("g", [[], [0], np.array([0, 1])], sizes, costs, fixed_bytes=np.int16(7))
    plain = Graph.from_nodes("g", [[], [0], [0, 1]], [200, 100, 50], [2**30] * 3, fixed_bytes=7)
    assert graph == plain
    assert graph.sha256() == plain.sha256()
    assert graph.total_cost == 3 * 2**30
    assert type(graph.values[0].bytes) is type(graph.operations[2].inputs[0]) is type(graph.fixed_bytes) is int
    assert graph.largest_working_set() == plain.largest_working_set()


def test_derived_properties_by_hand():
    graph = Graph(
        "g",
        (
            Operation("a", "", (), (0, 1), 3, 5),
            Operation("b", "", (0,), (2,), 4),
            Operation("c", "", (0, 1, 2), (3,), 5),
        ),
        (Value("w", 10), Value("x", 20), Value("y", 40), Value("z", 80)),
        fixed_bytes=1000,
    )
    assert graph.producer == (0, 0, 1, 2)
    assert graph.users == ((1, 2), (2,), (2,), ())
    assert (graph.n_edges, graph.total_cost, len(graph)) == (4, 12, 3)
    assert [graph.working_set_bytes(k) for k in range(3)] == [1035, 1050, 1150]
    assert graph.largest_working_set() == (1150, 2)
    assert graph.predecessors(2) == (0, 1)
    assert not graph.is_single_output
    assert graph.with_costs([1, 1, 1], "flop").total_cost == 3


def test_hash_follows_what_matters_only():
    base = {"name": "g", "deps": [[], [0]], "bytes": [1, 2], "costs": [3, 4]}
    sha = Graph.from_nodes(**base).sha256()
    assert Graph.from_nodes(**base | {"name": "h", "names": ["a", "b"], "source": "x"}).sha256() == sha
    as_arrays = base | {"bytes": np.array([1, 2]), "costs": np.array([3, 4])}
    assert Graph.from_nodes(**as_arrays).sha256() == sha
    for change in ({"bytes": [1, 3]}, {"costs": [3, 5]}, {"deps": [[], []]}, {"keep": [1]}, {"fixed_bytes": 1},
                   {"workspace_bytes": [0, 1]}, {"cost_unit": "flop"}):  # fmt: skip
        assert Graph.from_nodes(**base | change).sha256() != sha


def test_greedy_eviction_keeps_its_promise():
    rng = np.random.default_rng(2)
    made = 0
    for _ in range(60):
        graph = random_graph(rng, 12, multi_output=0.2, workspace=2, keep=0.1, once=0.1)
        needed = graph.largest_working_set()[0]
        for budget in range(needed, needed + 8):
            plan = greedy_eviction(graph, budget)
            if plan is not None:
                made += 1
                assert simulate(graph, plan).peak_bytes <= budget
                assert str(plan.scope) == "staged"
    assert made > 200
