"""A few dozen of the random graphs that `make fuzz` tries by the thousand, and cases that it found."""

from __future__ import annotations

import numpy as np
import pytest
import random_graphs
from brute_force import random_step, with_implementations

from remat import Graph, Plan, simulate


@pytest.mark.parametrize("seed", range(24))
def test_random_graphs_against_brute_force(seed: int) -> None:
    assert random_graphs.check(seed) == "ok"


def step_of(seed: int, most: int, joint: bool = False) -> tuple[Graph, int]:
    """A random step of up to `most` operations, and a budget between its largest working set and its peak."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(most // 2, most + 1))
    graph = random_step(rng, n, min_bytes=1, max_bytes=9, min_cost=1, max_cost=9, workspace=2)
    graph = with_implementations(graph, rng) if joint else graph
    peak, low = simulate(graph, Plan.from_order(graph, range(n))).peak_bytes, graph.largest_working_set()[0]
    return graph, low + int((peak - low) * rng.choice([0.2, 0.4, 0.6]))


@pytest.mark.parametrize(
    ("strategy", "scope", "seed", "most", "joint"),
    [
        ("portfolio", "free", 22, 24, False),  # the bound of A* was that of the moment: 182 and 170
        ("portfolio", "fixed_order", 22, 24, False),
        ("portfolio", "staged", 12, 30, False),  # A* found a plan or not
        ("portfolio", "staged", 1, 12, True),
        ("portfolio", "free", 1, 12, True),
        ("interval_cp", "staged", 3, 16, False),
        ("lp_rounding", "staged", 3, 30, False),
    ],
)
def test_deterministic_runs_do_not_hear_the_clock(strategy: str, scope: str, seed: int, most: int, joint: bool) -> None:
    graph, budget = step_of(seed, most, joint)
    assert len(random_graphs.repeated(graph, budget, strategy, scope, seed, time_limit_s=4.0)) <= 1
