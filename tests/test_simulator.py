"""The judge against hand-computed cases and against a slow replay written from the definitions."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from brute_force import Rejected, replay, small_graphs, step_lists
from helpers import refused
from hypothesis import given, settings

from remat import Graph, InvalidPlan, Operation, Plan, Value, simulate
from remat.plan import COMPUTE, FREE


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_agrees_with_the_slow_replay(data):
    graph = data.draw(small_graphs())
    steps = data.draw(step_lists(graph))
    try:
        expected, offending = replay(graph, steps), None
    except Rejected as rejected:
        expected, offending = None, rejected.args[0]
    if expected is None:
        with pytest.raises(InvalidPlan) as caught:
            simulate(graph, Plan.from_steps(graph, steps))
        # A step that names nothing is found first, wherever it stands.
        assert caught.value.step == offending or "does not exist" in str(caught.value)
        return
    trace = simulate(graph, Plan.from_steps(graph, steps))
    assert (trace.cost, trace.peak_bytes, trace.final_bytes) == (
        expected.cost, expected.peak_bytes, expected.final_bytes
    )  # fmt: skip


def test_timeline_by_hand():
    graph = Graph.from_nodes(
        "g", [[], [0], [0, 1]], [10, 20, 40], [1, 2, 4], workspace_bytes=[0, 5, 7], fixed_bytes=100
    )
    trace = simulate(graph, Plan.from_steps(graph, [(0, 0), (0, 1), (1, 0), (0, 0), (0, 2), (1, 1), (1, 0), (1, 2)]))
    assert trace.order.tolist() == [0, 1, 0, 2]
    assert trace.running_bytes.tolist() == [110, 135, 130, 177]
    assert trace.resident_bytes.tolist() == [110, 130, 130, 170]
    assert trace.end_cost.tolist() == [1, 3, 4, 8]
    assert trace.computations.tolist() == [2, 1, 1]
    assert (trace.cost, trace.peak_bytes, trace.peak_computation, trace.final_bytes) == (8, 177, 3, 100)


def test_both_copies_of_a_second_output_count_while_it_runs():
    graph = Graph(
        "g",
        (Operation("a", "", (), (0, 1), 1), Operation("b", "", (0,), (2,), 1), Operation("c", "", (0, 1), (3,), 1)),
        (Value("x", 8), Value("y", 4), Value("z", 1), Value("w", 1)),
    )
    steps = [(COMPUTE, 0), (COMPUTE, 1), (FREE, 0), (COMPUTE, 0), (COMPUTE, 2)]
    trace = simulate(graph, Plan.from_steps(graph, steps))
    assert trace.running_bytes.tolist() == [12, 13, 5 + 12, 14]
    assert trace.resident_bytes.tolist() == [12, 13, 13, 14]


def test_invalid_plans_name_the_step_and_the_reason():
    chain = Graph.from_nodes("chain", [[], [0], [1]], [1, 1, 1], [1, 1, 1], keep=[2])
    operations = (Operation("a", "", (), (0,), 1, run_once=True), Operation("b", "", (0,), (1,), 1))
    once = Graph("once", operations, (Value("x", 1), Value("y", 1)))
    for graph, steps, step, words in [
        (chain, [(0, 0), (1, 0), (0, 1)], 2, r"operation 1 .* input 0 .* not resident"),
        (chain, [(0, 0), (0, 0)], 1, "still resident"), (chain, [(0, 0), (1, 1)], 1, r"frees value 1 .* not resident"),
        (chain, [(0, 0), (1, 7)], 1, "does not exist"), (chain, [(0, 0), (0, 1)], None, "never computes operation 2"),
        (chain, [(0, 0), (0, 1), (0, 2), (1, 2)], None, "must be kept"),
        (once, [(0, 0), (0, 1), (1, 0), (0, 0)], None, "exactly once"),
    ]:  # fmt: skip
        with refused(words, InvalidPlan) as caught:
            simulate(graph, Plan.from_steps(graph, steps))
        assert caught.value.step == step
        assert step is None or f"step {step}:" in str(caught.value)
    other = Graph.from_nodes("chain", [[], [0], [1]], [1, 1, 2], [1, 1, 1], keep=[2])
    with refused("another graph", InvalidPlan):
        simulate(chain, Plan.from_order(other, range(3)))


def test_sizes_beyond_32_bits_are_exact():
    graph = Graph.from_nodes("g", [[], [0]], [2**55 + 1, 2**55 + 3], [2**55 + 1, 1], fixed_bytes=2**50)
    trace = simulate(graph, Plan.from_order(graph, [0, 1]))
    assert (trace.peak_bytes, trace.cost) == (2**56 + 4 + 2**50, 2**55 + 2)
