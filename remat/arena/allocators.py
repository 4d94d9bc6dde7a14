"""A simulation of PyTorch's caching allocator for CUDA: what it needs for buffers that are allocated in a given order.

The rules are those of PyTorch 2.13's defaults, as documented, with one stream. They were not compared with a card.
Sizes are rounded up to 512 B. Segments of 2 MiB serve requests of up to 1 MiB. Segments of 20 MiB serve larger ones,
and from 10 MiB on a request has a segment of its own size, rounded up to 2 MiB. The smallest free block that is large
enough serves a request. Its rest becomes a free block if it has 512 B (small requests) or more than 1 MiB (large ones).
Free neighbours in a segment merge. At the limit, segments without a block in use go back to the driver, and the request
is tried once more.

With expandable segments, each of the two pools has one segment that grows by pages of 2 MiB or 20 MiB. Every rest of
512 B becomes a free block. Pages without a block in use go back to the driver, and are mapped again where memory is
needed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remat.arena.intervals import events_of, load_of
from remat.arena.placing import checked_buffers

MIB = 1 << 20
ROUNDING = 512
SMALL = MIB  # largest request that the pool of small blocks serves
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT, OWN_ROUNDING = 10 * MIB, 2 * MIB  # from here on a request has a segment of its own size
ENDLESS = 1 << 62
STEPS = 3
PRECISION = 2000  # the smallest limit is known to a part in so many of the load


class OutOfMemory(Exception):
    """A request does not fit below the limit, with everything cached given back."""


@dataclass(eq=False, slots=True)
class Block:
    """Bytes [start, start + size) of a segment; in use, free, or without memory behind them (`is_mapped`)."""

    start: int
    size: int
    is_small: bool
    is_free: bool = True
    is_mapped: bool = True
    before: Block | None = None
    after: Block | None = None


class SimulatedAllocator:
    """Native segments: each is one request to the driver.

    Attributes:
        reserved_bytes: that the driver has given.
        limit: of `reserved_bytes`, in bytes.
    """

    def __init__(self, limit: int = ENDLESS):
        self.limit, self.reserved_bytes, self.end = limit, 0, 0
        # [small or not] free blocks, by size, then address
        self.pools: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, n_bytes: int) -> Block:
        """A block of at least so many bytes; raises `OutOfMemory`."""
        size = max(ROUNDING, -(-n_bytes // ROUNDING) * ROUNDING)
        is_small = size <= SMALL
        pool = self.pools[is_small]
        at = bisect_left(pool, (size,))
        if at < len(pool):
            block = pool.pop(at)[2]
        else:
            block = self.grown(size, is_small)
            if block is None:
                self.give_back()
                block = self.grown(size, is_small)
            if block is None:
                raise OutOfMemory
        if self.is_split(block.size - size, is_small):
            self.enter(self.cut(block, size))
        block.is_free = False
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with free neighbours."""
        block.is_free = True
        self.enter(self.merged(block))

    def is_split(self, rest: int, is_small: bool) -> bool:
        return rest >= ROUNDING if is_small else rest > SMALL

    def grown(self, size: int, is_small: bool) -> Block | None:
        """A block of a new segment, out of its pool; None if the limit does not allow it."""
        segment = LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // OWN_ROUNDING) * OWN_ROUNDING
        segment = SMALL_SEGMENT if is_small else segment
        if self.reserved_bytes + segment > self.limit:
            return None
        self.reserved_bytes += segment
        self.end += segment
        return Block(self.end - segment, segment, is_small)

    def give_back(self) -> None:
        """Give segments without a block in use to the driver."""
        for pool in self.pools.values():
            whole = [block for _, _, block in pool if block.before is None and block.after is None]
            self.reserved_bytes -= sum(block.size for block in whole)
            for block in whole:
                self.leave(block)

    def cut(self, block: Block, size: int) -> Block:
        """Shorten a block to `size`; its rest, which is in no pool."""
        rest = Block(block.start + size, block.size - size, block.is_small, True, block.is_mapped, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        return rest

    def merged(self, block: Block) -> Block:
        """The block with the neighbours that are alike, which leave their pool."""
        for first, second in ((block.before, block), (block, block.after)):
            other = first if second is block else second
            if first is None or second is None or other is None:
                continue
            if not other.is_free or other.is_mapped != block.is_mapped:
                continue
            self.leave(other)
            block.start, block.size = first.start, first.size + second.size
            block.before, block.after = first.before, second.after
            if block.before is not None:
                block.before.after = block
            if block.after is not None:
                block.after.before = block
        return block

    def enter(self, block: Block) -> None:
        insort(self.pools[block.is_small], (block.size, block.start, block))

    def leave(self, block: Block) -> None:
        pool = self.pools[block.is_small]
        del pool[bisect_left(pool, (block.size, block.start))]


class SimulatedExpandable(SimulatedAllocator):
    """Expandable segments: one for each pool, without an end to its addresses."""

    def __init__(self, limit: int = ENDLESS):
        super().__init__(limit)
        # [small or not] blocks without memory, by address; the last one has no end
        self.holes = {is_small: [(0, Block(0, ENDLESS, is_small, is_mapped=False))] for is_small in (True, False)}

    def is_split(self, rest: int, is_small: bool) -> bool:
        return rest >= ROUNDING

    def enter(self, block: Block) -> None:
        if block.is_mapped:
            super().enter(block)
        else:
            insort(self.holes[block.is_small], (block.start, block))

    def leave(self, block: Block) -> None:
        if block.is_mapped:
            super().leave(block)
        else:
            holes = self.holes[block.is_small]
            del holes[bisect_left(holes, (block.start,))]

    def grown(self, size: int, is_small: bool) -> Block | None:
        """The first free addresses that suffice, with memory behind all of them."""
        block = next(b for _, hole in self.holes[is_small] for b in _starts(hole) if _room(b) >= size)
        while not block.is_mapped or block.size < size:
            hole = block if not block.is_mapped else block.after
            assert hole is not None  # there is room
            missing = size if hole is block else size - block.size
            mapped = self.map(hole, min(missing, hole.size))
            if mapped is None:
                return None
            block = mapped
        self.leave(block)
        return block

    def map(self, hole: Block, size: int) -> Block | None:
        """Put memory behind the first `size` bytes of a hole, in whole pages; None if the limit does not allow it."""
        page = SMALL_SEGMENT if hole.is_small else LARGE_SEGMENT
        n_bytes = -(-size // page) * page
        if self.reserved_bytes + n_bytes > self.limit:
            return None
        self.reserved_bytes += n_bytes
        self.leave(hole)
        if n_bytes < hole.size:
            self.enter(self.cut(hole, n_bytes))
        hole.is_mapped = True
        block = self.merged(hole)
        self.enter(block)
        return block

    def give_back(self) -> None:
        """Take the memory from all pages in which nothing is in use."""
        for is_small, page in ((True, SMALL_SEGMENT), (False, LARGE_SEGMENT)):
            for _, _, block in list(self.pools[is_small]):
                first, last = -(-block.start // page) * page, (block.start + block.size) // page * page
                if first >= last:
                    continue
                self.leave(block)
                self.reserved_bytes -= last - first
                unmapped = block
                if first > block.start:
                    unmapped = self.cut(block, first - block.start)
                    self.enter(block)
                if unmapped.size > last - first:
                    self.enter(self.cut(unmapped, last - first))
                unmapped.is_mapped = False
                self.enter(self.merged(unmapped))


def _starts(hole: Block) -> Iterator[Block]:
    """Where a run of free addresses with this hole may begin."""
    if hole.before is not None and hole.before.is_free:
        yield hole.before
    yield hole


def _room(block: Block) -> int:
    """Bytes of free addresses from this block on."""
    room, at = 0, block
    while at is not None and at.is_free:
        room, at = room + at.size, at.after
    return room


@dataclass(frozen=True, slots=True)
class SimulatedNeed:
    """What the simulated allocator needs.

    Attributes:
        reserved_bytes: after three steps without a limit.
        limit_bytes: the smallest limit that three steps survive, found by bisection to a 2,000th of the load. Bisection
            takes every larger limit to survive, too.
    """

    reserved_bytes: int
    limit_bytes: int


def simulate_allocator(
    lower: Any, upper: Any, size: Any, *, is_expandable: bool = False, steps: int = STEPS
) -> SimulatedNeed:
    """Simulate PyTorch's caching allocator for steps that allocate and free these buffers.

    A buffer is live in [lower, upper). What ends at a time is freed before what begins then is allocated, in the
    buffers' order. What lives to the end of a step is freed before the next one.

    Args:
        lower, upper, size: [n] integers, bytes.
        is_expandable: as with ``expandable_segments:True``.

    Raises:
        InvalidInput: as `remat.arena.place`.
    """
    kind = SimulatedExpandable if is_expandable else SimulatedAllocator
    lower, upper, size = checked_buffers(lower, upper, size)
    has_bytes = size > 0
    lower, upper, size = lower[has_bytes], upper[has_bytes], size[has_bytes]
    events = _events(lower, upper, size)
    free_of_limits = kind()
    _run(free_of_limits, events, steps)
    low, high = load_of(lower, upper, size), free_of_limits.reserved_bytes
    most = max(ROUNDING, low // PRECISION)
    low -= 1
    while high - low > most:
        middle = (low + high) // 2
        try:
            _run(kind(middle), events, steps)
            high = middle
        except OutOfMemory:
            low = middle
    return SimulatedNeed(free_of_limits.reserved_bytes, high)


def _events(lower: np.ndarray, upper: np.ndarray, size: np.ndarray) -> list[tuple[int, int]]:
    """(buffer, bytes to allocate, or 0 to free it), in order."""
    order = events_of(lower, upper)
    return list(zip((order % len(size)).tolist(), np.concatenate([0 * size, size])[order].tolist(), strict=True))


def _run(allocator: SimulatedAllocator, events: Sequence[tuple[int, int]], steps: int) -> None:
    """Follow the events; raises `OutOfMemory`."""
    for _ in range(steps):
        blocks = dict[int, Block]()
        for buffer, size in events:
            if size:
                blocks[buffer] = allocator.allocate(size)
            else:
                allocator.free(blocks.pop(buffer))
