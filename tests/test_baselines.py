"""The classic baselines against hand-computed chains, published values and each other."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from brute_force import random_step, training_chain
from helpers import context_of

import remat
from baselines._forward import Forward
from remat.frontends.synthetic import layered
from remat.graph import Graph, Operation, Value
from remat.registry import get_strategy
from remat.simulator import plain_peak

CHECKPOINTING = (
    "checkpoint_all_ap", "checkpoint_last", "chen_sqrtn", "chen_greedy", "ap_sqrtn", "ap_greedy", "griewank"
)  # fmt: skip
ALL = ("checkpoint_all", *CHECKPOINTING)


def mirrored(
    deps: list[list[int]], sizes: list[int], costs: list[int], loss_bytes: int = 0, fixed_bytes: int = 0
) -> Graph:
    """Forward layers, their loss, mirrored gradients: grad(i) reads out(i), its users and their gradients."""
    n = len(deps)
    users = [[j for j, dep in enumerate(deps) if i in dep] for i in range(n)]
    back = [[i, *users[i], *(2 * n - u for u in users[i]), *([] if users[i] else [n])] for i in reversed(range(n))]
    return Graph.from_nodes(
        "mirrored", [*deps, [n - 1], *back], [*sizes, loss_bytes, *reversed(sizes)],
        [*costs, 0, *(2 * c for c in reversed(costs))], backward=[False] * (n + 1) + [True] * n, loss=n,
        fixed_bytes=fixed_bytes,
    )  # fmt: skip


def in_a_chain(n: int) -> list[list[int]]:
    return [[i - 1] if i else [] for i in range(n)]


def unit_chain(n: int) -> Graph:
    """n layers of one byte; forward costs 1, gradient 2, the loss nothing."""
    return mirrored(in_a_chain(n), [1] * n, [1] * n)


def vgg19() -> Graph:
    """VGG19, batch 1, 224x224: bytes of each layer's output (float32) and multiply-adds, by hand."""
    found, side, width = list[tuple[int, int]](), 224, 3  # values and multiply-adds
    for repeats, filters in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
        for _ in range(repeats):
            found.append((side * side * filters, side * side * filters * 9 * width))
            width = filters
        side //= 2
        found.append((side * side * width, 0))
    width *= side * side
    found.append((width, 0))
    for units in (4096, 4096, 1000):
        found.append((units, width * units))
        width = units
    return mirrored(in_a_chain(len(found)), [4 * n for n, _ in found], [macs for _, macs in found], loss_bytes=4)


def only(graph: Graph, strategy: str, accounting: str = "exact") -> tuple[int, int]:
    """(cost, peak) of a strategy with one plan."""
    (member,) = remat.family(graph, strategy, accounting=accounting)
    return member.cost, member.peak_bytes


def counts(graph: Graph, member: remat.Member) -> list[int]:
    return remat.simulate(graph, member.plan).computations.tolist()


# Chains of unit layers, by hand. f0..f7 are outputs, g0..g7 gradients, one byte each; the loss weighs nothing. One
# forward and one backward cost 8 + 16 = 24.


@pytest.mark.parametrize(
    ("strategy", "n", "cost_and_peak"),
    [
        # Articulation points f1..f7 (the ends separate nothing), k = 2: f2, f4, f6. Rebuilt: f5, f3, then f0 and f1;
        # f7 is there. g7: f2 f4 f6 f7 g7 = 5; g6: + g6 = 6; f5 is rebuilt: g5 needs f2 f4 f5 f6 g6 g5 = 6.
        ("ap_sqrtn", 8, (28, 6)),
        # All but f0, which is rebuilt for g0 (g0 reads f0, f1 and g1): one computation more. g6 needs f1..f7, g7, g6.
        ("checkpoint_all_ap", 8, (25, 9)),
        # g3 reads f3 and the loss: f0..f3 are rebuilt (4). g2 reads f2, f3: 4; g1: 3; g0: f0, f1: 2. 13 more than
        # 4 + 8. Largest at g2: f2, f3, g3, g2 = 4.
        ("checkpoint_last", 4, (25, 4)),
    ],
)
def test_cost_and_peak_on_a_unit_chain(strategy: str, n: int, cost_and_peak: tuple[int, int]) -> None:
    assert only(unit_chain(n), strategy) == cost_and_peak


def test_greedy_on_a_unit_chain() -> None:
    # sqrt(n)'s peak is 6, so factor 0.5 is b = 3: a checkpoint when more than 3 bytes have come together: f3, f7.
    # f4..f6 are rebuilt for g6, f0..f2 for g2. Factor 0 keeps everything; 2.95 (17 bytes) keeps nothing, and the one
    # segment is still there when the backward begins: both cost no more than 24.
    members = {m.parameters["factor"]: m for m in remat.family(unit_chain(8), "chen_greedy")}
    assert len(members) == 60
    assert members[0.5].parameters["segment_bytes"] == 3
    assert counts(unit_chain(8), members[0.5])[:9] == [2, 2, 2, 1, 2, 2, 2, 1, 1]
    # g7: f3 f7 g7 = 3; f4..f6 are rebuilt: g6 needs f3..f7, g7, g6 = 7.
    assert (members[0.5].cost, members[0.5].peak_bytes) == (30, 7)
    assert members[0.0].cost == members[2.95].cost == 24


@cache
def fewest_advances(steps: int, checkpoints: int) -> int:
    """Griewank and Walther's recursion: over all places of the next checkpoint."""
    if steps <= 1 or checkpoints == 1:
        return steps * (steps - 1) // 2
    return min(
        k + fewest_advances(steps - k, checkpoints - 1) + fewest_advances(k, checkpoints) for k in range(1, steps)
    )


@pytest.mark.parametrize("n", [2, 3, 5, 9, 16, 23])
def test_griewank_costs_the_binomial_minimum(n: int) -> None:
    # As in their model, the gradients of n steps read the step's input only, and are free.
    deps = in_a_chain(n) + [[s - 1] * (s > 0) + [2 * n - 2 - s] * (s < n - 1) for s in reversed(range(n))]
    graph = Graph.from_nodes(
        "inputs", deps, [1] * 2 * n, [1] * n + [0] * n, backward=[False] * n + [True] * n, loss=n - 1
    )
    for member in remat.family(graph, "griewank"):
        snapshots = member.parameters["snapshots"]
        # All advances, and the last step's own run; the start state (the input) is one of the checkpoints.
        assert member.cost == fewest_advances(n, snapshots + 1) + 1
        # The snapshots, one or two values being computed and two gradients, and no more.
        assert member.peak_bytes <= snapshots + 4


# Published values (docs: decision 6).


def test_vgg19_matches_the_published_small_case() -> None:
    graph = vgg19()
    assert only(graph, "checkpoint_all", "published") == (58_896_187_392, 81_723_300)
    assert only(graph, "checkpoint_all") == (58_896_187_392, 66_633_728)
    assert only(graph, "chen_sqrtn", "published") == (72_512_667_648, 69_447_584)
    assert only(graph, "chen_sqrtn") == (72_512_667_648, 54_591_488)
    (five,) = [m for m in remat.family(graph, "griewank", accounting="published") if m.parameters["slots"] == 5]
    assert (five.cost, five.peak_bytes) == (108_266_881_024, 51_380_224)


# Structure.


def test_articulation_points_by_brute_force() -> None:
    assert Forward.of(unit_chain(8)).articulation_points() == list(range(1, 8))
    rng, found = random.Random(3), 0
    for _ in range(200):
        n = rng.randint(3, 9)
        deps = [sorted(rng.sample(range(i), min(i, rng.choice((1, 1, 2))))) for i in range(n)]
        graph = mirrored(deps, [1] * n, [1] * n)
        edges = [(u, v) for v, dep in enumerate([*deps, [n - 1]]) for u in dep]
        expected = []
        for gone in range(1, n):
            reached, before = {n}, set[int]()
            while reached != before:
                before = set(reached)
                reached |= {k for edge in edges if before & {*edge} for k in edge} - {gone}
            if 0 not in reached:
                expected.append(gone)
        if any(0 in dep for dep in deps):
            assert Forward.of(graph).articulation_points() == expected
            found += len(expected)
    assert found > 100


def test_fixed_bytes_do_not_move_greedys_sweep() -> None:
    plain, fixed = (mirrored(in_a_chain(12), [2] * 12, [1] * 12, fixed_bytes=f) for f in (0, 1000))
    for a, b in zip(remat.family(plain, "chen_greedy"), remat.family(fixed, "chen_greedy"), strict=True):
        assert (a.cost, a.peak_bytes + 1000) == (b.cost, b.peak_bytes)


def test_skip_connections_may_be_held_or_rebuilt() -> None:
    # f0 is read by f5 across the checkpoints f1, f3 and f5 (7 operations, k = 2): rebuilt in the forward pass too, or
    # held until f5 has read it.
    graph = mirrored([[], [0], [1], [2], [3], [4, 0]], [1] * 6, [1] * 6)
    rebuilt, held = remat.family(graph, "chen_sqrtn")
    assert (rebuilt.parameters["skips"], held.parameters["skips"]) == ("rebuilt", "held")
    assert rebuilt.plan.order.tolist()[:8] == [0, 1, 2, 3, 4, 0, 5, 6]
    assert held.plan.order.tolist()[:7] == [0, 1, 2, 3, 4, 5, 6]
    assert held.cost < rebuilt.cost


def test_state_updates_run_once_and_what_they_read_is_held() -> None:
    # A batch norm's statistics (value 2) are read by an update at the end; the layer must not be rebuilt for it.
    operations = (
        Operation("conv", "", (), (0,), 5), Operation("norm", "", (0,), (1, 2), 5),
        Operation("relu", "", (1,), (3,), 1), Operation("loss", "", (3,), (4,), 0),
        Operation("relu_grad", "", (3, 4), (5,), 1, 0, True),
        Operation("norm_grad", "", (0, 2, 5), (6,), 9, 0, True), Operation("update", "", (2,), (7,), 1, 0, False, True),
    )  # fmt: skip
    values = tuple(Value(str(v), size, v == 7) for v, size in enumerate((100, 100, 1, 100, 0, 100, 100, 1)))
    graph = Graph("norm", operations, values, loss=3)
    for strategy in ALL:
        for member in remat.family(graph, strategy):
            done = counts(graph, member)
            assert done[6] == 1
            assert done[4:6] == [1, 1]
    (member,) = remat.family(graph, "checkpoint_last")
    assert counts(graph, member)[1] <= 2  # for the relu's gradient, not for the update


@pytest.mark.parametrize("accounting", ["exact", "published"])
def test_random_graphs_get_valid_staged_plans(accounting: str) -> None:
    applied = dict.fromkeys(ALL, 0)
    rng = np.random.default_rng(0)
    for _ in range(60):
        kinds = {"multi_output": 0.2, "workspace": 3, "keep": 0.1, "once": 0.12}
        graph = random_step(rng, int(rng.integers(3, 24)), max_bytes=9, max_cost=9, **kinds)
        operations = (replace(op, is_backward=op.is_backward ^ (rng.random() < 0.05)) for op in graph.operations)
        graph = replace(graph, operations=tuple(operations), loss=graph.loss if rng.random() < 0.8 else None)
        for strategy in ALL:
            try:
                members = remat.family(graph, strategy, accounting=accounting)  # raises for an invalid plan
            except remat.Skip:
                continue
            applied[strategy] += 1
            for member in members:
                assert member.plan.scope == "staged"
                for k, times in enumerate(counts(graph, member)):
                    op = graph.operations[k]
                    assert times == 1 or not (op.is_backward or op.run_once)
    assert applied["chen_sqrtn"] == 60
    assert min(applied.values()) >= 15


def test_rotor_tries_no_limit_after_its_time() -> None:
    graph = training_chain(8)
    rotor, budget = get_strategy("rotor"), plain_peak(graph)
    assert rotor(context_of(graph, budget), {})
    assert not rotor(context_of(graph, budget, seconds=0.0), {})


LADDER = Graph.from_nodes("ladder", [[], [0], [0, 1], [1, 2], [2, 3], [0, 4]], [1] * 6, [1] * 6,
                          backward=[False] * 5 + [True], loss=4)  # fmt: skip
# A forward operation reads what a backward one made.
BACK_AND_FORTH = Graph.from_nodes("back and forth", [[], [0], [1], [2]], [1] * 4, [1] * 4,
                                  backward=[True, False, False, False], loss=3)  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "graph", "word"),
    [
        *((name, layered(n=20), "backward") for name in ("chen_sqrtn", "griewank", "hierarchical")),
        # Every layer reads two before it: no single one separates the input from the loss.
        *((name, LADDER, "articulation") for name in ("checkpoint_all_ap", "ap_sqrtn", "ap_greedy", "griewank")),
        *((name, BACK_AND_FORTH, "a forward operation reads") for name in ("hierarchical", "rotor")),
    ],
)
def test_graphs_that_a_baseline_cannot_split_are_skipped(strategy: str, graph: Graph, word: str) -> None:
    solution = remat.solve(graph, "1TiB", strategy)
    assert solution.status is remat.Status.SKIPPED
    assert word in solution.message
