"""Orders of computation that no solver would choose, for what executes plans."""

from __future__ import annotations

import numpy as np

import remat


def random_order(graph: remat.Graph, rng: np.random.Generator, drop: float) -> list[int]:
    """Operations in their order; every value that may be made again is dropped after each operation with probability
    `drop`, and made again where it is read."""
    order: list[int] = []
    resident: set[int] = set()

    def compute(k: int) -> None:  # without recursion: what is missing may be a chain as long as the graph
        todo = [k]
        while todo:
            op = graph.operations[todo[-1]]
            missing = [graph.producer[v] for v in op.inputs if v not in resident]
            if missing:
                todo += missing
                continue
            k = todo.pop()
            if not op.outputs or not resident.issuperset(op.outputs):
                order.append(k)
                resident.update(op.outputs)

    for k in range(len(graph)):
        compute(k)
        again = [v for v in sorted(resident) if not graph.operations[graph.producer[v]].run_once]
        again = [v for v in again if graph.values[v].bytes and not graph.values[v].keep]
        resident -= {v for v in again if rng.random() < drop}
    return order
