"""Repeated blocks of a training graph: equal runs of forward operations, each with its run of backward operations.

Transformers repeat one block, and extraction gives every copy the same operations in the same order. So a repeat is a
period: operation i equals operation i + p over a long range. Equal means the same kind, workspace, sizes of outputs and
number of inputs. Whether the blocks can follow one plan, the simulator decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from remat.graph import Graph

LEAST_BLOCKS = 4  # fewer repeats are not worth a search of their own
LEAST_GROUPS = 8  # of neighbours that are planned together
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

    def n_groups(self, operations: int) -> int:
        """Number of sizes of groups: 1, 2, 4, ... neighbours, up to four times as many as have so many operations.

        Instead of a size with fewer than `LEAST_GROUPS` groups, the largest with so many counts. A block that has so
        many operations itself is in no group: the answer is 1.
        """
        i = 0
        while 2**i * (self.n_forward + self.n_backward) < operations and self.n_blocks >= 2 ** (i + 1) * LEAST_GROUPS:
            i += 1
        return i + 3 if i else 1


def find_repeats(graph: Graph, least: int = LEAST_BLOCKS) -> Repeats | None:
    """The blocks that repeat in the graph's order; None if none do, or the backward pass does not mirror them.

    It looks at periods of the forward pass: the one that covers most of it, the shortest among equals. Blocks begin
    where the fewest bytes cross.

    Args:
        least: number of blocks.
    """
    n_forward = sum(not op.is_backward for op in graph.operations)
    if any(op.is_backward for op in graph.operations[:n_forward]):
        return None
    labels = _labels(graph)
    longest = _longest(labels[:n_forward], least)
    if longest is None:
        return None
    first, period, length = longest
    first += _cheapest_cut(graph, first, period, length)
    n_blocks = (longest[0] + length - first) // period
    if n_blocks < least or n_blocks * period < LEAST_SHARE * n_forward:
        return None
    found = _with_backward(graph, labels, first, period, n_blocks, n_forward)
    return None if found is None or found.n_blocks < least else found


def _labels(graph: Graph) -> np.ndarray:
    """[N] equal numbers for equal operations. Costs do not count, because measured ones differ."""
    known: dict[tuple[object, ...], int] = {}
    labels = []
    for op in graph.operations:
        sizes = tuple((graph.values[v].bytes, graph.values[v].keep) for v in op.outputs)
        key = op.kind, op.workspace_bytes, op.run_once, op.is_backward, len(op.inputs), sizes
        labels.append(known.setdefault(key, len(known)))
    return np.array(labels, dtype=np.int64)


def _longest(labels: np.ndarray, least: int) -> tuple[int, int, int] | None:
    """(first, period, length) of the range with a period that covers the most; None if nothing repeats."""
    best: tuple[int, int, int, int] | None = None
    n = len(labels)
    for period in range(1, n // least + 1):
        same = np.concatenate([[False], labels[period:] == labels[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        if not len(edges):
            continue
        begins, ends = edges[::2], edges[1::2]
        at = int(np.argmax(ends - begins))
        length = int(ends[at] - begins[at]) + period
        if length >= least * period and (best is None or length > best[0] + period):
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
    n_backward = int(steps[n_blocks // 2 - 1])
    is_alike = (steps == n_backward) & (begins[1:] >= 0)
    low, high = _run_around(is_alike, n_blocks // 2 - 1)  # blocks at the ends may differ
    if n_backward <= 0 or low == high:
        return None
    if int(begins[low]) + n_backward > len(graph):  # what is frozen before the blocks spares the first one a gradient
        low += 1
    found = Repeats(first + low * period, period, int(begins[low]), n_backward, high - low + 1)
    return _equal_ones(graph, labels, found)


def _run_around(is_alike: np.ndarray, at: int) -> tuple[int, int]:
    """(first, end) of the run of True that holds a place; an empty run if it is False there."""
    others = np.flatnonzero(~is_alike)
    if not is_alike[at]:
        return at, at
    return int(others[others < at].max(initial=-1)) + 1, int(others[others > at].min(initial=len(is_alike)))


def _equal_ones(graph: Graph, labels: np.ndarray, found: Repeats) -> Repeats:
    """The longest run of blocks that equal the middle one, inputs from inside the block included."""
    forms = [_form(graph, labels, [*found.forward_of(k), *found.backward_of(k)]) for k in range(found.n_blocks)]
    middle = found.n_blocks // 2
    first = last = middle
    while first > 0 and forms[first - 1] == forms[middle]:
        first -= 1
    while last + 1 < found.n_blocks and forms[last + 1] == forms[middle]:
        last += 1
    return Repeats(
        found.forward_of(first).start,
        found.n_forward,
        found.backward_of(first).start,
        found.n_backward,
        last + 1 - first,
    )


def are_equal(graph: Graph, repeats: Repeats) -> bool:
    """Whether these are equal blocks of a graph, where they are of a graph with the same operations of other sizes."""
    labels, blocks = _labels(graph), range(repeats.n_blocks)
    return all(
        len({labels[place(k).start : place(k).stop].tobytes() for k in blocks}) == 1
        for place in (repeats.forward_of, repeats.backward_of)
    )


def _form(graph: Graph, labels: np.ndarray, inside: list[int]) -> list[tuple[object, ...]]:
    """[operation of a block] its label, and where in the block its inputs are made."""
    made = [v for k in inside for v in graph.operations[k].outputs]
    place = {v: i for i, v in enumerate(made)}
    return [(int(labels[k]), *sorted(place[v] for v in graph.operations[k].inputs if v in place)) for k in inside]


def with_blocks(graph: Graph, repeats: Repeats, n_blocks: int) -> tuple[Graph, list[int], list[int]]:
    """The step with more blocks: copies of the middle block follow it, in both passes.

    What a copy reads from another block, it reads from the block at the same distance. Fixed bytes do not change.

    Returns:
        (graph, [value] the value of `graph` that it is a copy of, [value] number of blocks by which it moved)
    """
    middle, more = repeats.n_blocks // 2, n_blocks - repeats.n_blocks
    block_of = _blocks_of(graph, repeats)
    moves = [*_moved(repeats, middle, more, len(graph))]
    made: dict[tuple[int, int], int] = {}  # (value of `graph`, blocks it moved) -> value
    copied, moved = list[int](), list[int]()
    for k, move in moves:
        for v in graph.operations[k].outputs:
            made[v, move] = len(copied)
            copied.append(v)
            moved.append(move)

    def read(v: int, reader: int, move: int) -> int:
        block, own = block_of[graph.producer[v]], block_of[reader]
        if block is None:
            return made[v, 0]
        if own is None:
            return made[v, more if block > middle else 0]
        at = own + move + (block - own)  # of all blocks
        # Equal blocks: the value of this place in the block that stands there.
        source = at if at <= middle else middle if at <= middle + more else at - more
        same = graph.producer[v] + _distance(repeats, graph.producer[v], block, source)
        there = graph.operations[same].outputs[graph.operations[graph.producer[v]].outputs.index(v)]
        return made[there, at - source]

    operations = tuple(
        replace(
            graph.operations[k],
            name=graph.operations[k].name + (f"_{move}" if move > 0 and block_of[k] == middle else ""),
            inputs=tuple(sorted(read(v, k, move) for v in graph.operations[k].inputs)),
            outputs=tuple(made[v, move] for v in graph.operations[k].outputs),
        )
        for k, move in moves
    )
    values = tuple(graph.values[v] for v in copied)
    loss = None if graph.loss is None else moves.index((graph.loss, 0))
    return replace(graph, operations=operations, values=values, loss=loss), copied, moved


def _blocks_of(graph: Graph, repeats: Repeats) -> list[int | None]:
    """[N] the block of each operation."""
    blocks: list[int | None] = [None] * len(graph)
    for b in range(repeats.n_blocks):
        for k in (*repeats.forward_of(b), *repeats.backward_of(b)):
            blocks[k] = b
    return blocks


def _moved(repeats: Repeats, middle: int, more: int, n: int) -> Iterator[tuple[int, int]]:
    """(operation, blocks by which it moves) in the order of the step with `more` blocks after the middle one."""
    forward, backward = repeats.forward_of(middle), repeats.backward_of(middle)
    last, first = repeats.forward_of(repeats.n_blocks - 1).stop, repeats.backward_of(repeats.n_blocks - 1).start
    yield from ((k, 0) for k in range(forward.stop))
    yield from ((k, j) for j in range(1, more + 1) for k in forward)
    yield from ((k, more) for k in range(forward.stop, last))
    yield from ((k, 0) for k in range(last, first))
    yield from ((k, more) for k in range(first, backward.start))
    yield from ((k, j) for j in reversed(range(1, more + 1)) for k in backward)
    yield from ((k, 0) for k in range(backward.start, n))


def _distance(repeats: Repeats, k: int, block: int, other: int) -> int:
    """From operation `k` of a block to that of the same place in another block."""
    is_forward = k in repeats.forward_of(block)
    return (other - block) * (repeats.n_forward if is_forward else -repeats.n_backward)
