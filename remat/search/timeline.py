"""What a plan holds, at any size of its step: when each value is made and freed is found once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from remat.arrays import GraphArrays
from remat.errors import InvalidPlan
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


def _rows(start: np.ndarray, ids: np.ndarray, order: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids of the rows of a compressed list that `order` names, one after the other; the entry of `at` for each)."""
    lengths = (start[1:] - start[:-1])[order]
    begins = np.cumsum(lengths) - lengths
    inside = np.arange(int(lengths.sum())) - np.repeat(begins, lengths)
    return ids[np.repeat(start[:-1][order], lengths) + inside].astype(np.int64), np.repeat(at, lengths)


class Sizes:
    """Bytes and costs of a step at one size, as arrays."""

    def __init__(self, graph: Graph):
        self.fixed_bytes = graph.fixed_bytes
        self.values = np.array([value.bytes for value in graph.values], dtype=np.int64)
        self.workspaces = np.array([op.workspace_bytes for op in graph.operations], dtype=np.int64)
        self.costs = np.array([op.cost for op in graph.operations], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The computations of a plan without other implementations, and when it makes and frees values.

    Attributes:
        order: [C] operation.
        made, freed: [2, n] the computation before which bytes change, and the value. A value that is made again was
            freed before.
    """

    order: np.ndarray
    made: np.ndarray
    freed: np.ndarray

    @classmethod
    def of(cls, arrays: GraphArrays, order: np.ndarray) -> Timeline:
        """Of `Plan.from_order`, without making the plan.

        Raises:
            InvalidPlan: a computation reads what was not computed.
        """
        at = np.arange(len(order))
        read, read_at = _rows(arrays.in_start, arrays.in_ids, order, at)
        made, made_at = _rows(arrays.out_start, arrays.out_ids, order, at)
        values, when = np.concatenate([read, made]), np.concatenate([read_at, made_at])
        is_read = np.arange(len(values)) < len(read)
        by_value = np.lexsort((when, values))  # no operation reads what it makes
        values, when, is_read = values[by_value], when[by_value], is_read[by_value]
        is_first = np.concatenate([[True], values[1:] != values[:-1]])
        if (is_first & is_read).any():
            raise InvalidPlan("an order reads a value before it is made")
        is_last = np.concatenate([is_first[1:], [True]])
        stays = np.where(is_last, arrays.keep[values], np.concatenate([is_read[1:], [False]]))
        freed = np.array([when[~stays] + 1, values[~stays]])
        return cls(order, np.array([made_at, made]), freed)

    def running_bytes(self, sizes: Sizes) -> np.ndarray:
        """[C] bytes held while each computation runs, as `simulate` counts them."""
        n = len(self.order)
        held = np.zeros(n + 1, dtype=np.int64)
        np.add.at(held, self.made[0], sizes.values[self.made[1]])
        np.subtract.at(held, self.freed[0], sizes.values[self.freed[1]])
        return held.cumsum()[:n] + sizes.workspaces[self.order] + sizes.fixed_bytes

    def cost(self, sizes: Sizes) -> int:
        """Of all computations."""
        return int(sizes.costs[self.order].sum())
