"""Needless repeats go, needed ones stay."""

from __future__ import annotations

import remat
from remat.search.choices import drop_unread_repeats
from remat.solvers._polish import drop_needless_repeats

# A chain 0 -> 1 -> 2 whose last operation reads 0 again; 4 bytes each, unit costs.
GRAPH = remat.Graph.from_nodes("skip", [[], [0], [1], [0, 2]], [4, 4, 4, 4], [1, 1, 1, 1])
REPEATING = remat.Plan.from_order(GRAPH, [0, 1, 2, 0, 3])
FOREVER = float("inf")


def test_needless_repeats_are_dropped_and_needed_ones_stay() -> None:
    # Holding 0 throughout: 0, 1, 2 are resident while 2 runs, 12 bytes; so are 0, 2, 3 while 3 runs.
    plan = drop_needless_repeats(GRAPH, REPEATING, 12, FOREVER)
    assert plan.order.tolist() == [0, 1, 2, 3]
    assert drop_needless_repeats(GRAPH, REPEATING, 12, 0.0) is REPEATING  # at the deadline
    wide = remat.Graph.from_nodes("wide", [[], [0], [1], [2], [0, 3]], [4, 4, 6, 4, 1], [1] * 5)
    repeating = remat.Plan.from_order(wide, [0, 1, 2, 3, 0, 4])
    # With 0 held, 0, 1, 2 take 14 bytes while 2 runs; without it 10.
    assert drop_needless_repeats(wide, repeating, 13, FOREVER).order.tolist() == [0, 1, 2, 3, 0, 4]
    assert drop_needless_repeats(wide, repeating, 14, FOREVER).order.tolist() == [0, 1, 2, 3, 4]
    calls = [(k, "") for k in (0, 1, 2, 0, 1, 0, 3)]  # the second 1, and the second 0 that it reads, are read by nobody
    assert [k for k, _ in drop_unread_repeats(GRAPH, calls)] == [0, 1, 2, 0, 3]
