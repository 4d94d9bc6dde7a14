"""Repeated blocks of a training graph: equal runs of forward operations, each with its run of backward operations.

Transformers repeat one block, and extraction gives every copy the same operations in the same order. So a repeat is a
period: operation i equals operation i + p over a long range. Equal means the same kind, cost, workspace and output
sizes, and the same inputs as seen from the operation itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat.graph import Graph

LEAST_BLOCKS = 4  # fewer repeats are not worth a search of their own
LEAST_SHARE = 0.5  # of the forward operations that the blocks must cover


@dataclass(frozen=True, slots=True)
class Repeats:
    """Blocks that repeat: block k is ``n_forward`` operations from ``forward + k * n_forward``.

    Its backward operations are ``n_backward`` from ``backward - k * n_backward``: the last block comes first.
    """

    forward: int
    n_forward: int
    backward: int
    n_backward: int
    n_blocks: int

    def forward_of(self, block: int) -> range:
        """Forward operations of a block."""
        first = self.forward + block * self.n_forward
        return range(first, first + self.n_forward)

    def backward_of(self, block: int) -> range:
        """Backward operations of a block."""
        first = self.backward - block * self.n_backward
        return range(first, first + self.n_backward)


def find_repeats(graph: Graph) -> Repeats | None:
    """The blocks that repeat in the graph's order; None if none do, or the backward pass does not mirror them.

    It looks at periods of the forward pass: the one that covers most of it, the shortest among equals. Blocks begin
    where the fewest bytes cross.
    """
    n_forward = sum(not op.is_backward for op in graph.operations)
    if any(op.is_backward for op in graph.operations[:n_forward]):
        return None
    labels = _labels(graph, n_forward)
    found = _longest(labels[:n_forward])
    if found is None:
        return None
    first, period, length = found
    first += _cheapest_cut(graph, first, period, length)
    n_blocks = (found[0] + length - first) // period
    if n_blocks < LEAST_BLOCKS or n_blocks * period < LEAST_SHARE * n_forward:
        return None
    return _with_backward(graph, labels, first, period, n_blocks, n_forward)


def _labels(graph: Graph, n_forward: int) -> np.ndarray:
    """[N] equal numbers for equal operations.

    An input of the same pass counts by its distance, if that is small; others by what makes them.
    """
    known: dict[tuple[object, ...], int] = {}

    def number(*key: object) -> int:
        return known.setdefault(key, len(known))

    labels = np.zeros(len(graph), dtype=np.int64)
    for k, op in enumerate(graph.operations):
        sizes = tuple((graph.values[v].bytes, graph.values[v].keep) for v in op.outputs)
        labels[k] = number(op.kind, op.workspace_bytes, op.run_once, op.is_backward, len(op.inputs), sizes)
    return labels


def _longest(labels: np.ndarray) -> tuple[int, int, int] | None:
    """(first, period, length) of the range with a period that covers the most; None if nothing repeats."""
    best: tuple[int, int, int, int] | None = None
    n = len(labels)
    for period in range(1, n // LEAST_BLOCKS + 1):
        same = np.concatenate([[False], labels[period:] == labels[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        if not len(edges):
            continue
        begins, ends = edges[::2], edges[1::2]
        at = int(np.argmax(ends - begins))
        length = int(ends[at] - begins[at]) + period
        if length >= LEAST_BLOCKS * period and (best is None or length > best[0] + period):
            best = length, int(begins[at]), period, length
    return None if best is None else best[1:]


def _cheapest_cut(graph: Graph, first: int, period: int, length: int) -> int:
    """Offset below the period at which the fewest bytes that were made after `first` are read by later operations."""
    middle = first + (length // period // 2) * period  # away from both ends
    crossing = np.zeros(2 * period + 1, dtype=np.int64)
    start = middle - period
    for k in range(start, middle + period):
        for v in graph.operations[k].outputs:
            last = max((u for u in graph.users[v] if not graph.operations[u].is_backward), default=k)
            crossing[k - start + 1 : max(k, min(last, middle + period - 1)) - start + 1] += graph.values[v].bytes
    offsets = crossing[period : 2 * period]
    return int(np.argmin(offsets))


def _with_backward(
    graph: Graph, labels: np.ndarray, first: int, period: int, n_blocks: int, n_forward: int
) -> Repeats | None:
    """The repeats, if the backward pass has a block for each block of the forward pass, from the last to the first."""
    block_of = np.full(len(graph.values), -1)
    for k in range(first, first + n_blocks * period):
        for v in graph.operations[k].outputs:
            block_of[v] = (k - first) // period
    inner = np.array([
        b >= 0 and all(graph.operations[u].is_backward or (u - first) // period == b for u in graph.users[v])
        for v, b in enumerate(block_of.tolist())
    ])  # fmt: skip
    begins = np.full(n_blocks, -1)
    for k in range(n_forward, len(graph)):
        for v in graph.operations[k].inputs:
            if inner[v] and begins[block_of[v]] < 0:
                begins[block_of[v]] = k
    steps = begins[:-1] - begins[1:]
    if begins.min() < 0 or steps.min() <= 0 or (steps != steps[0]).any():
        return None
    n_backward, last = int(steps[0]), int(begins[-1])
    end = int(begins[0]) + n_backward
    if end > len(graph):
        return None
    blocks = labels[last:end].reshape(n_blocks, n_backward)
    same = (blocks[1:-1] == blocks[1]).all()
    return Repeats(first, period, int(begins[0]), n_backward, n_blocks) if same else None
