"""Orders of computation that no solver would choose, for what executes plans."""

from __future__ import annotations

import numpy as np

import remat


def random_order(graph: remat.Graph, rng: np.random.Generator, drop: float) -> list[int]:
    """Operations in their order; before each, values are dropped at random, and made again where they are read."""
    order: list[int] = []
    resident: set[int] = set()

    def compute(k: int) -> None:
        for v in graph.operations[k].inputs:
            if v not in resident:
                compute(graph.producer[v])
        order.append(k)
        resident.update(graph.operations[k].outputs)

    for k in range(len(graph)):
        compute(k)
        for v in sorted(resident):
            op, value = graph.operations[graph.producer[v]], graph.values[v]
            if value.bytes and not value.keep and not op.run_once and rng.random() < drop:
                resident.discard(v)
    return order
