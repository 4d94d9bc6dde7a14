"""A graph as flat arrays, for compiled code and matrix builders.

Lists of variable length are compressed: row i holds ``ids[start[i]:start[i + 1]]``, ascending.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from remat.graph import Graph

LARGEST_SUM = 1 << 61


class GraphArrays(NamedTuple):
    """N operations, V values, E (value, user) pairs; without the fixed bytes.

    Attributes:
        in_start: [N + 1] int32, in_ids: [E] int32, values read by each operation.
        out_start: [N + 1] int32, out_ids: [V] int32, values produced by each operation.
        use_start: [V + 1] int32, use_ids: [E] int32, operations that read each value.
        producer: [V] int32.
        size_bytes: [V] int64.
        cost: [N] int64.
        workspace_bytes: [N] int64.
        keep: [V] bool, must be resident at the end.
        run_once: [N] bool, must not be recomputed.
    """

    in_start: np.ndarray
    in_ids: np.ndarray
    out_start: np.ndarray
    out_ids: np.ndarray
    use_start: np.ndarray
    use_ids: np.ndarray
    producer: np.ndarray
    size_bytes: np.ndarray
    cost: np.ndarray
    workspace_bytes: np.ndarray
    keep: np.ndarray
    run_once: np.ndarray

    @classmethod
    def of(cls, graph: Graph) -> GraphArrays:
        """The arrays of `graph`; linear in its size."""
        in_start, in_ids = _compress(op.inputs for op in graph.operations)
        out_start, out_ids = _compress(op.outputs for op in graph.operations)
        use_start, use_ids = _compress(graph.users)
        return cls(
            in_start, in_ids, out_start, out_ids, use_start, use_ids,
            producer=np.array(graph.producer, dtype=np.int32),
            size_bytes=graph.value_bytes,
            cost=graph.costs,
            workspace_bytes=np.array([op.workspace_bytes for op in graph.operations], dtype=np.int64),
            keep=np.array([value.keep for value in graph.values], dtype=np.bool_),
            run_once=np.array([op.run_once for op in graph.operations], dtype=np.bool_),
        )  # fmt: skip

    def in_units(self, unit: int, cost_unit: int) -> GraphArrays:
        """The same with sizes in `unit` bytes, rounded up, so that a plan that fits really fits, and rounded costs.

        Costs are rounded down, so that a plan without repeats reaches the cost of running everything once.
        """
        return self._replace(
            size_bytes=-(-self.size_bytes // unit), workspace_bytes=-(-self.workspace_bytes // unit),
            cost=self.cost // cost_unit,
        )  # fmt: skip


def least_unit(total: int, times: int = 1) -> int:
    """The least power of two with which so many times `total` fit 64 bits."""
    unit = 1
    while total // unit * times >= LARGEST_SUM:
        unit *= 2
    return unit


def _compress(rows: Iterable[Iterable[int]]) -> tuple[np.ndarray, np.ndarray]:
    lists = [tuple(row) for row in rows]
    start = np.zeros(len(lists) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in lists], out=start[1:])
    ids = np.fromiter((i for row in lists for i in row), dtype=np.int32, count=int(start[-1]))
    return start, ids
