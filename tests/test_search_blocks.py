"""Repeated blocks of a graph, and the plan that chains plans of one block."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from brute_force import KINDS, random_graph
from helpers import step_of

from remat.arrays import GraphArrays
from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.search.chain import BlockPlans, Chain, Option, chain_plan
from remat.search.greedy import greedy_eviction
from remat.search.repeats import find_repeats, with_blocks
from remat.search.timeline import Sizes, Timeline
from remat.simulator import plain_peak, simulate


def test_blocks_are_found() -> None:
    graph = step_of(6)
    found = find_repeats(graph)
    assert (found.n_forward, found.n_backward, found.n_blocks) == (4, 5, 6)
    assert [graph.operations[found.forward_of(k).start].kind for k in range(6)] == ["forward_0"] * 6
    kinds = [[graph.operations[i].kind for i in found.backward_of(k)] for k in range(6)]
    assert kinds == [kinds[0]] * 6
    read = {v for i in found.backward_of(2) for v in graph.operations[i].inputs}
    made = {v for i in found.forward_of(2) for v in graph.operations[i].outputs}
    assert made <= read  # its own values


@pytest.mark.parametrize("n_blocks", [6, 11])
def test_further_blocks_make_the_deeper_step(n_blocks: int) -> None:
    graph, deep = step_of(6), step_of(n_blocks)
    made, copied, moved = with_blocks(graph, find_repeats(graph), n_blocks)
    assert [(op.kind, op.inputs, op.outputs, op.cost) for op in made.operations] == [
        (op.kind, op.inputs, op.outputs, op.cost) for op in deep.operations
    ]
    assert [(value.bytes, value.keep) for value in made.values] == [(value.bytes, value.keep) for value in deep.values]
    assert len(copied) == len(moved) == len(deep.values)
    assert max(moved) == n_blocks - 6


def test_a_timeline_of_any_order_holds_what_the_simulator_counts() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        graph = random_graph(rng, 10, **KINDS[seed % len(KINDS)]).default()
        repeatable = [k for k, op in enumerate(graph.operations) if not op.run_once]
        again = [[k for k in repeatable if k < end and rng.random() < 0.2] for end in range(len(graph))]
        order = np.array([k for end in range(len(graph)) for k in (*again[end], end)])
        trace = simulate(graph, Plan.from_order(graph, order.tolist()))
        timeline, sizes = Timeline.of(GraphArrays.of(graph), order), Sizes(graph)
        assert (timeline.running_bytes(sizes).tolist(), timeline.cost(sizes)) == (
            trace.running_bytes.tolist(), trace.cost,
        )  # fmt: skip


def test_plans_of_a_block_serve_other_sizes() -> None:
    small, large = step_of(5), step_of(5, weights=9)
    plans, own = BlockPlans.of(small), BlockPlans.of(large)
    resized = plans.at(large)
    for budget_bytes in (round(0.6 * plain_peak(large)), round(0.8 * plain_peak(large)), plain_peak(large)):
        costs = []
        for each in (resized, own):
            plan = each.within(budget_bytes)
            trace = simulate(large, plan)
            assert trace.peak_bytes <= budget_bytes
            costs.append(trace.cost)
        assert costs[0] == costs[1]
    least = resized.least()
    assert resized.within(int(least.running_bytes(Sizes(large)).max())) is not None
    assert plans.at(step_of(6)) is None


def test_a_last_block_with_fewer_gradients_leaves_the_others() -> None:
    """An LSTM's last cell has fewer, because no later one reads its state."""
    whole = step_of(9)
    k = find_repeats(whole).backward_of(8)[-1]  # the gradient of its weights, which nothing reads
    (v,) = whole.operations[k].outputs

    def shifted(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(u - (u > v) for u in values)

    operations = [replace(op, inputs=shifted(op.inputs), outputs=shifted(op.outputs)) for op in whole.operations]
    operations, values = operations[:k] + operations[k + 1 :], whole.values[:v] + whole.values[v + 1 :]
    found = find_repeats(replace(whole, operations=tuple(operations), values=values))
    assert (found.n_blocks, found.n_backward) == (8, 5)
    assert (found.forward, found.backward) == (find_repeats(whole).forward, find_repeats(whole).backward - 1)


def rows_of(options: Sequence[Sequence[Option]], n_blocks: int, first: int = 0) -> Iterator[tuple[Option, ...]]:
    """Every row of options for these blocks; those of a group begin at a multiple of its size."""
    if first == n_blocks:
        yield ()
    for option in itertools.chain(*options):
        if option.n_blocks <= n_blocks - first and first % option.n_blocks == 0:
            yield from ((option, *rest) for rest in rows_of(options, n_blocks, first + option.n_blocks))


def test_groups_of_all_sizes_cost_the_least_of_all_choices() -> None:
    graph = step_of(7)
    chain = Chain(graph, find_repeats(graph), 3)
    no_limit = {"seed": 0, "threads": 1, "deadline": float("inf")}
    turn = chain.turn.option(range(len(chain.turn.own)))
    options = list[list[Option]]()
    for group in chain.groups:
        every = sorted(group.options(**no_limit), key=lambda option: option.cost)
        options.append([every[0], every[len(every) // 2]])
    found = []  # (sizes of the groups, peak, cost) of every plan
    for row in rows_of(options, 7):
        trace = simulate(graph, Plan.from_order(graph, chain.order(row, turn)[0]))
        found.append(({option.n_blocks for option in row}, trace.peak_bytes, trace.cost))
    for share in (0.85, 0.8):
        budget_bytes = round(share * plain_peak(graph))
        trace = simulate(graph, BlockPlans(chain, options, [turn]).within(budget_bytes))
        assert trace.peak_bytes <= budget_bytes
        assert trace.cost == min(cost for _, peak, cost in found if peak <= budget_bytes)
        assert trace.cost < min(cost for sizes, peak, cost in found if peak <= budget_bytes and len(sizes) == 1)


def test_segments_hold_what_follows_them_and_run_forward_again() -> None:
    graph = step_of(8)
    chain = Chain(graph, find_repeats(graph), 3)
    (block, turn), plain = (chain.groups[0], chain.turn), range(len(chain.groups[0].own))
    options = [group.segments([block.option(plain)])[0] for group in chain.groups]
    outputs_of_last = graph.operations[chain.repeats.forward_of(7).stop - 1].outputs
    forward = sum(graph.operations[k].cost for k in chain.repeats.forward_of(3))
    for n_blocks, option in zip((1, 2, 4), options, strict=True):
        assert option.held == sum(graph.values[v].bytes for v in outputs_of_last)
        last = graph.operations[chain.repeats.forward_of(3).stop - 1].cost  # the output of the last block is not read
        assert option.cost == n_blocks * block.own.total_cost + n_blocks * forward - last
        n = 8 // n_blocks
        order, _ = chain.order([option] * n, turn.option(range(len(turn.own))))
        assert simulate(graph, Plan.from_order(graph, order)).cost == graph.total_cost + 8 * forward - n * last


def test_few_blocks_and_a_graph_without_a_backward_pass_have_no_repeats() -> None:
    n = 40
    chain = Graph.from_nodes("chain", [[i - 1] if i else [] for i in range(n)], [1] * n, [1] * n)
    assert [find_repeats(graph) for graph in (chain, step_of(1), step_of(2), step_of(3))] == [None] * 4


@pytest.mark.parametrize("change", ["size", "inputs"])
def test_a_block_that_differs_ends_the_repeats(change: str) -> None:
    graph = step_of(9)
    operations, values = list(graph.operations), list(graph.values)
    at = [k for k, op in enumerate(operations) if op.kind == "forward_2"][2]  # in the third block
    if change == "size":
        values[at] = replace(values[at], bytes=values[at].bytes + 1)
    else:
        operations[at] = replace(operations[at], inputs=(operations[at].inputs[0] - 1,))
    found = find_repeats(replace(graph, operations=tuple(operations), values=tuple(values)))
    assert 3 < found.n_blocks < 9
    assert all(at not in found.forward_of(k) for k in range(found.n_blocks))


def test_the_chain_is_the_cheapest_of_all_choices() -> None:
    graph = step_of(4)
    plans = BlockPlans.of(graph)
    singles, pairs = plans.options
    assert len(singles) > 3
    assert len(pairs) > 1
    traces = (
        simulate(graph, Plan.from_order(graph, plans.chain.order(row, turn)[0]))
        for row, turn in itertools.product(rows_of(plans.options, 4), plans.turns)
    )
    found = [(trace.peak_bytes, trace.cost) for trace in traces]
    for share in (0.9, 0.75, 0.6, 0.5, 0.4):
        budget_bytes = round(share * plain_peak(graph))
        costs = [cost for peak, cost in found if peak <= budget_bytes]
        plan = chain_plan(graph, budget_bytes)
        assert (plan is None) == (not costs)
        if plan is not None:
            assert plan.scope is Scope.STAGED
            trace = simulate(graph, plan)
            assert trace.peak_bytes <= budget_bytes
            assert trace.cost == min(costs)


def test_a_large_graph_costs_less_than_by_greedy_eviction() -> None:
    graph = step_of(30, n_forward=12)
    budget_bytes = round(0.55 * plain_peak(graph))
    plan, greedy = chain_plan(graph, budget_bytes, threads=2), greedy_eviction(graph, budget_bytes)
    assert simulate(graph, plan).peak_bytes <= budget_bytes
    assert simulate(graph, plan).cost < simulate(graph, greedy).cost


def test_no_time_gives_the_plain_plan_segments_or_none() -> None:
    graph = step_of(8)
    plan = chain_plan(graph, plain_peak(graph), deadline=0.0)
    assert simulate(graph, plan).cost == graph.total_cost
    segments = chain_plan(graph, plain_peak(graph) // 2, deadline=0.0)
    assert simulate(graph, segments).peak_bytes <= plain_peak(graph) // 2
    assert chain_plan(graph, round(0.4 * plain_peak(graph)), deadline=0.0) is None
