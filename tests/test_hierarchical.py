"""The hierarchical baseline: options of parts against the simulator, schedules with options against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from brute_force import training_chain
from helpers import step_of

from baselines._chain import Chain
from baselines._forward import Forward
from baselines._hierarchy import Option, Part, Solver
from baselines._persistent import Schedules, Stages
from remat import Plan, Scope, simulate, solve
from remat.frontends.synthetic import skip
from remat.graph import Graph
from remat.search.choices import drop_unread_repeats
from remat.search.online import in_stages
from remat.simulator import plain_peak


def whole(graph: Graph) -> Part:
    forward = Forward.of(graph)
    return Part(forward, forward.region, [k for k in range(len(graph)) if k not in forward.region])


def replayed(part: Part, option: Option) -> tuple[int, int, int]:
    """(bytes between the passes, most in the forward pass, most in the backward pass) by the simulator."""
    n = len(part.forward)
    order = [*part.forward, *(part.operations[k] for k in option.backward)]
    trace = simulate(part.whole.graph, Plan.from_order(part.whole.graph, order))
    op = part.whole.graph.operations[order[n]]
    made = sum(part.whole.graph.values[v].bytes for v in op.outputs)
    between = int(trace.running_bytes[n]) - op.workspace_bytes - made
    return between, int(trace.running_bytes[:n].max()), int(trace.running_bytes[n:].max())


@pytest.mark.parametrize("graph", [training_chain(6), skip(depth=2, varied=True), step_of(1, 6)])
def test_an_option_of_the_whole_graph_counts_as_the_simulator(graph: Graph) -> None:
    part, fixed = whole(graph), graph.fixed_bytes
    for size in range(3):
        for dropped in itertools.combinations(part.may_drop, size):
            option = part.option(frozenset(dropped))
            between, forward, backward = replayed(part, option)
            assert (option.saved, option.saving, option.returning) == (
                between - fixed, forward - fixed, backward - fixed,
            )  # fmt: skip
            assert option.cost == sum(graph.operations[part.operations[k]].cost for k in option.backward)


def test_equal_parts_are_solved_once_and_large_ones_in_halves() -> None:
    graph = step_of(30)
    forward, chain = Forward.of(graph), Chain.of(graph, 1000)
    parts = [Part(forward, *passes) for passes in zip(chain.forward, chain.backward, strict=True)]
    solver = Solver(lambda _: False)
    options = [solver.options(part) for part in parts]
    assert solver.solved < 8 < len(parts)
    assert max(map(len, options)) > 2
    assert solver.levels == 1
    solver.options(whole(graph))
    assert solver.levels > 3
    none = Solver(lambda _: True)
    assert len(none.options(whole(graph))) == 1  # the time is over: all is saved


def test_a_second_way_to_save_is_taken_where_it_is_cheaper() -> None:
    """One stage twice: it saves 4 slots, or 1 slot at a higher cost of the backward pass."""
    backward = np.array([[2.0, 3.0], [2.0, 3.0]])
    saved = np.array([[4, 1], [4, 1]])
    zeros = np.zeros(3, dtype=np.int64)
    stages = Stages(np.array([5, 5]), backward, np.array([0, 1]), saved, zeros, zeros, saved, np.array([1, 1]), saved)
    schedules = Schedules(stages, 8)
    ways = {m: [way for kind, _, way in schedules.within(m) or [] if kind == "save"] for m in range(9)}
    assert ways[8] == [0, 0]
    assert ways[5] in ([0, 1], [1, 0])
    assert ways[2] == [1, 1]
    assert schedules.within(0) is None


def test_repeats_are_put_in_stages_and_dropped_if_unread() -> None:
    assert in_stages([0, 1, 2, 1, 0, 1, 3, 2, 0]) == [0, 1, 2, 0, 1, 3, 0, 2]
    graph = Graph.from_nodes("unread", [[], [0], [1], [2]], [1] * 4, [1] * 4)
    calls = [(k, "") for k in (0, 1, 0, 2, 0, 1, 3)]
    assert [k for k, _ in drop_unread_repeats(graph, calls)] == [0, 1, 2, 3]


@pytest.mark.parametrize("scope", Scope)
def test_budgets_of_a_step_are_met_and_cost_less_than_without_options(scope: Scope) -> None:
    graph = step_of(12)
    budget = round(0.6 * plain_peak(graph))
    found, rival = (solve(graph, budget, name, scope=str(scope), isolate=False) for name in ("hierarchical", "rotor"))
    assert found.peak_bytes <= budget
    assert rival.cost is None or found.cost <= rival.cost
