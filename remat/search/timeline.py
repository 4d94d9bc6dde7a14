"""What a plan holds, at any size of its step: when each value is made and freed is found once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from remat.graph import Graph
from remat.plan import COMPUTE, FREE, PREFETCH, Plan


def replayed(graph: Graph, plan: Plan) -> Iterator[tuple[int, list[int], list[int]]]:
    """The steps of a plan: (operation, values that it makes, values that it makes again while they are held).

    A free is (-1, [], [value]), a copy from the host (-1, [value], []); copies to the host change nothing here. What is
    made again is held twice while the operation runs, as `simulate` counts.
    """
    held = set[int]()
    for kind, i in zip(plan.kinds.tolist(), plan.ids.tolist(), strict=True):
        if kind == FREE:
            held.discard(i)
            yield -1, [], [i]
        elif kind == PREFETCH:
            held.add(i)
            yield -1, [i], []
        elif kind == COMPUTE:
            outputs = graph.operations[i].outputs
            new, again = [v for v in outputs if v not in held], [v for v in outputs if v in held]
            held.update(new)
            yield i, new, again


class Sizes:
    """Bytes and costs of a step at one size, as arrays."""

    def __init__(self, graph: Graph):
        self.fixed_bytes = graph.fixed_bytes
        self.values = np.array([value.bytes for value in graph.values], dtype=np.int64)
        self.workspaces = np.array([op.workspace_bytes for op in graph.operations], dtype=np.int64)
        self.costs = np.array([op.cost for op in graph.operations], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The computations of a valid plan without other implementations, and when it makes and frees values.

    Attributes:
        order: [C] operation.
        made, freed: [2, n] the computation before which bytes change, and the value.
        again: [2, n] computations that make a value while it is held; both copies count meanwhile.
    """

    order: np.ndarray
    made: np.ndarray
    freed: np.ndarray
    again: np.ndarray

    @classmethod
    def of(cls, graph: Graph, plan: Plan) -> Timeline:
        """Of a plan for this graph."""
        made, freed, again = list[tuple[int, int]](), list[tuple[int, int]](), list[tuple[int, int]]()
        at = 0
        for k, new, others in replayed(graph, plan):
            made += [(at, v) for v in new]
            if k < 0:
                freed += [(at, v) for v in others]
                continue
            again += [(at, v) for v in others]
            at += 1
        return cls(plan.order, *(np.array(pairs, dtype=np.int64).reshape(-1, 2).T for pairs in (made, freed, again)))

    def running_bytes(self, sizes: Sizes) -> np.ndarray:
        """[C] bytes held while each computation runs, as `simulate` counts them."""
        n = len(self.order)
        held = np.zeros(n + 1, dtype=np.int64)
        np.add.at(held, self.made[0], sizes.values[self.made[1]])
        np.subtract.at(held, self.freed[0], sizes.values[self.freed[1]])
        running = held.cumsum()[:n] + sizes.workspaces[self.order]
        np.add.at(running, self.again[0], sizes.values[self.again[1]])
        return running + sizes.fixed_bytes

    def cost(self, sizes: Sizes) -> int:
        """Of all computations."""
        return int(sizes.costs[self.order].sum())
