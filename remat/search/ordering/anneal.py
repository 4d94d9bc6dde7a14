"""Topological orders with a low peak: annealing from each of several constructed orders; seeded, anytime."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from remat.arrays import GraphArrays
from remat.graph import Graph
from remat.randomness import random_state
from remat.search.ordering import kernel
from remat.search.ordering.construct import constructive_orders

FIRST_ROUND = 50_000  # moves from each start; doubled after every pass over the starts
CHUNK = 20_000  # moves between two looks at the clock
HOT, COLD = 1.0, 0.002  # temperatures in mean value sizes
COUNT = 4  # orders returned
WORK_LIMIT = 20_000_000  # moves, when neither a deadline nor a limit is given


@dataclass(frozen=True, slots=True)
class Order:
    """A topological order of all operations, each run once.

    Attributes:
        operations: [N].
        peak_bytes: with frees at last use, fixed bytes included.
        excess_bytes: sum over the operations of the bytes held above the budget.
    """

    operations: tuple[int, ...]
    peak_bytes: int
    excess_bytes: int


def anneal_orders(
    graph: Graph,
    budget_bytes: int = 0,
    seed: int = 0,
    deadline: float = float("inf"),
    work_limit: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Order]:
    """The `COUNT` best distinct orders found, best first: least peak down to the budget, then least excess.

    Args:
        budget_bytes: fixed bytes included; a peak below it is no better. The default asks for the least peak.
        deadline: of `time.monotonic()`.
        work_limit: moves; with it and no deadline, runs repeat exactly.
    """
    arrays = GraphArrays.of(graph)
    floor = max(budget_bytes, graph.largest_working_set()[0]) - graph.fixed_bytes
    found: dict[tuple[int, ...], Order] = {}

    def add(operations: np.ndarray) -> Order:
        order = _measure(graph, arrays, operations, budget_bytes)
        found[order.operations] = order
        return order

    def best() -> list[Order]:  # all peaks within the budget are equal
        return sorted(found.values(), key=lambda o: (max(o.peak_bytes, budget_bytes), o.excess_bytes, o.operations))

    for operations in constructive_orders(graph):
        add(np.array(operations, dtype=np.int64))
    if len(graph) < 2:
        return best()
    random = random_state(seed)
    mean = max(1.0, float(arrays.size_bytes.mean()) if len(arrays.size_bytes) else 1.0)
    most = WORK_LIMIT if deadline == float("inf") else 1 << 62
    moves, left = FIRST_ROUND, most if work_limit is None else work_limit

    def goes_on() -> bool:
        return left > 0 and time.monotonic() < deadline and not should_stop()

    while goes_on():
        for start in best()[:COUNT]:
            order, out = np.array(start.operations, dtype=np.int64), np.empty(len(graph), dtype=np.int64)
            done, hot = 0, HOT * mean
            while done < moves and goes_on():
                n = min(CHUNK, moves - done, left)
                cold = HOT * mean * (COLD / HOT) ** ((done + n) / moves)
                target = best()[0].peak_bytes - graph.fixed_bytes - 1
                kernel.anneal(arrays, order, out, target, max(floor, 0), n, hot, cold, random)
                hot, done, left = cold, done + n, left - n
                order_out = add(out)
                if order_out.excess_bytes == 0:
                    return best()[:COUNT]
            add(order)
        found = {order.operations: order for order in best()[: 4 * COUNT]}
        moves *= 2
    return best()[:COUNT]


def _measure(graph: Graph, arrays: GraphArrays, operations: np.ndarray, budget_bytes: int) -> Order:
    if not len(operations):
        return Order((), graph.fixed_bytes, 0)
    running = kernel.measure(arrays, operations).running
    above = np.maximum(running - (budget_bytes - graph.fixed_bytes), 0)
    return Order(tuple(operations.tolist()), graph.fixed_bytes + int(running.max()), int(above.sum()))
