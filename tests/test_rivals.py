"""Rival baselines: Rotor against brute force, DTR and XLA against their rules, checkpoints around blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from brute_force import random_graph
from helpers import step_of

from baselines._persistent import Schedules, Stages
from baselines._program_points import walk
from remat import Plan, simulate, solve
from remat.errors import InvalidInput
from remat.frontends import synthetic
from remat.graph import Graph
from remat.search.online import NAMES, run_online
from remat.simulator import plain_peak

Pass = tuple[str, int]


def chain(seed: int, n: int) -> Stages:
    random = np.random.default_rng(seed)

    def sizes(low: int, high: int, length: int = n) -> np.ndarray:
        return random.integers(low, high, length)

    inputs, saved = sizes(1, 4), sizes(2, 6)
    inputs[0] = 0
    kept = np.concatenate([np.cumsum(sizes(0, 2)[::-1])[::-1], [0]])
    return Stages(sizes(1, 9), sizes(1, 9), inputs, saved, sizes(1, 3, n + 1), kept, saved + sizes(0, 3),
                  sizes(1, 6), saved + sizes(1, 4))  # fmt: skip


def schedules(s: int, t: int) -> Iterator[list[Pass]]:
    """Every persistent schedule of the stages s .. t."""
    rest = schedules(s + 1, t) if s < t else [[]]
    yield from ([("save", s), *inner, ("return", s)] for inner in rest)
    for k in range(s + 1, t + 1):
        for right, left in itertools.product(schedules(k, t), list(schedules(s, k - 1))):
            yield [("check", s), *(("run", j) for j in range(s + 1, k)), *right, *left]


def replayed(stages: Stages, passes: list[Pass]) -> tuple[float, int]:
    """(cost, most slots) of a schedule: what each pass finds, needs and leaves, counted one by one."""
    n = len(stages.forward)
    saved, checkpoints, returned = set[int](), set[int](), n  # stages; those whose input is there; the last returned
    cost, most = 0.0, 0
    for kind, k in passes:
        if kind in ("check", "save") and k and k - 1 not in saved:
            checkpoints.add(k)  # its input stays until it has returned
        held = sum(int(stages.saved[j]) for j in saved) + sum(int(stages.inputs[j]) for j in checkpoints)
        if kind == "return":
            saved.discard(k)
            held -= int(stages.saved[k])
            most = max(most, held + int(stages.kept[k + 1]) + int(stages.returning[k]))
            checkpoints.discard(k)
            returned, cost = k, cost + float(stages.backward[k])
            continue
        cost += float(stages.forward[k])
        moving = int(stages.inputs[k]) if kind == "run" else 0  # it goes when the stage has run
        need = int(stages.saving[k]) if kind == "save" else int(stages.running[k])
        most = max(most, held + moving + int(stages.gradients[returned]) + int(stages.kept[returned]) + need)
        if kind == "save":
            saved.add(k)
    return cost, most


@pytest.mark.parametrize("seed", range(6))
def test_rotor_is_the_cheapest_persistent_schedule(seed: int) -> None:
    stages = chain(seed, 4 + seed % 2)
    known = [replayed(stages, passes) for passes in schedules(0, len(stages.forward) - 1)]
    for slots in range(1, max(most for _, most in known) + 1):
        fitting = [cost for cost, most in known if most <= slots]
        found = Schedules(stages, slots).within(slots)
        assert (found is None) == (not fitting), slots
        if found is not None:
            cost, most = replayed(stages, [(kind, k) for kind, k, _ in found])
            assert most <= slots
            assert cost == min(fitting), slots


def test_an_online_run_evicts_by_its_rule() -> None:
    """Three values of which two fit beside the fourth: the cheap one goes, and comes back when it is read."""
    graph = Graph.from_nodes("evict", [[], [], [], [0, 2], [1, 3]], [4, 4, 4, 4, 1], [9, 1, 9, 9, 1], keep=[4])
    assert run_online(graph, 12, "local", 0, 100).order.tolist() == [0, 1, 2, 3, 1, 4]
    assert run_online(graph, 16, "local", 0, 100).order.tolist() == [0, 1, 2, 3, 4]
    assert run_online(graph, 11, "local", 0, 100).failed_at == 3


@pytest.mark.parametrize("heuristic", NAMES)
def test_online_runs_keep_their_budget(heuristic: str) -> None:
    """`simulate` refuses the second run of an operation that runs once, or of one that reads what is gone."""
    random = [
        random_graph(np.random.default_rng(seed), 9, multi_output=0.3, workspace=2, keep=0.1, once=0.3)
        for seed in range(16)
    ]
    made = 0
    for graph in (step_of(8), *random):
        for share in (1.0, 0.8, 0.6):
            budget = round(share * plain_peak(graph))
            run = run_online(graph, budget, heuristic, 0, 20 * len(graph))
            if run.failed_at < 0:
                made += 1
                trace = simulate(graph, Plan.from_order(graph, run.order.tolist()))
                assert trace.peak_bytes <= budget
                assert share < 1 or trace.cost == graph.total_cost
            else:
                assert share < 1
    assert made > 20


def test_checkpoints_around_blocks() -> None:
    graph = step_of(8)
    found = {name: solve(graph, round(0.9 * plain_peak(graph)), name) for name in ("full", "every_n")}
    order = found["full"].plan.order.tolist()
    forward = [k for k, op in enumerate(graph.operations) if op.kind.startswith("forward")]
    repeated = {(k - forward[0]) // 4 for k in forward if order.count(k) == 2}
    assert repeated == set(range(7))  # all but the block at the turn, which stays
    assert found["full"].overhead > found["every_n"].overhead > 0


MOST_BYTES = Graph.from_nodes(
    "most bytes", [(), (), (0, 1), (), (2, 3), (0, 1, 4)], [5, 3, 1, 6, 1, 1], [100] + [1] * 5
)
UNREAD = Graph.from_nodes("unread", [(), (), (1,), (0, 2)], [4, 4, 1, 1], [100, 1, 1, 1])
BLOCK = Graph.from_nodes("block", [(), (0,), (1,), (), (3,), (2, 4)], [4, 4, 4, 8, 1, 1], [1] * 6)


@pytest.mark.parametrize(
    ("graph", "room", "block_size", "moves_first", "order"),
    [
        # It frees most bytes, whatever their time.
        (MOST_BYTES, 16, 32, False, [0, 1, 2, 3, 4, 5]),
        (MOST_BYTES, 14, 32, False, [0, 1, 2, 3, 4, 0, 5]),
        (MOST_BYTES, 10, 32, False, [0, 1, 2, 3, 4, 0, 1, 5]),
        # It moves what nobody has read.
        (UNREAD, 8, 32, True, [1, 2, 0, 3]),
        (UNREAD, 8, 32, False, [0, 1, 2, 0, 3]),
        # It repeats a block where no single run helps; of a smaller one, the input would have to stay instead.
        *((BLOCK, 11, size, False, None) for size in (1, 2, 3)),
        (BLOCK, 11, 4, False, [0, 1, 2, 3, 4, 0, 1, 2, 5]),
    ],
)
def test_xlas_rules_by_hand(
    graph: Graph, room: int, block_size: int, moves_first: bool, order: list[int] | None
) -> None:
    assert walk(graph, room, block_size, 10, moves_first, lambda: True) == order


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rotor", {"slots": 0}, "slots must be an integer from 1"),
        ("xla_greedy", {"block_size": "a"}, "block_size must be a positive integer, not 'a'"),
        ("dtr", {"heuristic": "exakt"}, "unknown heuristic 'exakt'"),
        ("fastsa", {"order": "x"}, "unknown order 'x'"),
        ("moccasin", {"most_runs": 0}, "most_runs must be a positive integer"),
        ("lp_rounding_random", {"epsilon": 1.5}, "epsilon"),
        ("lp_rounding_random", {"improve": "yes"}, "improve"),
        ("lp_rounding_random", {"relaxation": "tight"}, "relaxation"),
        ("checkmate_milp", {"solver": "gurobbi"}, "did you mean gurobi"),
        ("checkmate_milp", {"formulation": "tight"}, "unknown formulation"),
        ("checkmate_milp", {"mip_gap": "small"}, "mip_gap"),
        ("checkmate_milp", {"max_nonzeros": 0}, "max_nonzeros"),
        ("checkmate_milp", {"solvr": "highs"}, "did you mean solver"),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_runs(name: str, options: dict[str, Any], message: str) -> None:
    graph = synthetic.chain(n=4)
    with pytest.raises(InvalidInput, match=message):
        solve(graph, plain_peak(graph), name, **options)
