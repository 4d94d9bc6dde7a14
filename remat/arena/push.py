"""Compiled: a local search below a level, in which a buffer that has no place pushes others out of theirs."""

from __future__ import annotations

import numpy as np
from numba import njit

from remat.randomness import uniform

LATE, NEVER = 1 << 62, -(1 << 62)  # key of an empty row behind all others, end of a life that never was
BLUR = 0.1  # of the weights of places, so that equal ones are not always taken in order


@njit(cache=True, nogil=True)
def fill(table, offsets, extra, lower, upper):
    """Write a row (key, begin, end, buffer) for each buffer with a place, by key (offset + extra); then empty rows."""
    placed = np.nonzero(offsets >= 0)[0]
    keys = offsets[placed] + extra[placed]
    table[0], table[1], table[2], table[3] = LATE, 0, NEVER, -1
    for i, j in enumerate(np.argsort(keys)):
        b = placed[j]
        table[0, i], table[1, i], table[2, i], table[3, i] = keys[j], lower[b], upper[b], b


@njit(cache=True, nogil=True)
def insert(table, key, begin, end, b):
    """Write a buffer into the nearest empty row; those between it and the buffer's place in the order move by one."""
    n = table.shape[1]
    j = np.searchsorted(table[0], key, side="right")
    left, right = j - 1, j
    while True:
        if right < n and table[3, right] < 0:
            for i in range(right, j, -1):
                for column in range(4):
                    table[column, i] = table[column, i - 1]
            break
        if left >= 0 and table[3, left] < 0:
            j -= 1
            for i in range(left, j):
                for column in range(4):
                    table[column, i] = table[column, i + 1]
            break
        left, right = left - 1, right + 1
    table[0, j], table[1, j], table[2, j], table[3, j] = key, begin, end, b


@njit(cache=True, nogil=True)
def remove(table, key, b):
    """Empty a buffer's row."""
    j = np.searchsorted(table[0], key, side="left")
    while table[3, j] != b:
        j += 1
    table[2, j], table[3, j] = NEVER, -1


@njit(cache=True, nogil=True)
def live(table, begin, end, keys, ids):
    """Write keys and buffers of a table that are live in [begin, end); their number."""
    found = 0
    for i in range(table.shape[1]):
        keys[found], ids[found] = table[0, i], table[3, i]
        found += (table[1, i] < end) & (begin < table[2, i])
    return found


@njit(cache=True, nogil=True)
def lightest_place(bytes, level, n, bottoms, tops, under, over, weight, random):
    """The offset at which the buffers in the way weigh least; -1 if there is none below the level.

    Offsets are the bottom of the block and the top of each other buffer, then the level and the bottom of each, less
    its own size. In the way are those that begin below its end and end above its beginning; both only rise.

    Args:
        bottoms, under: [n] bottoms of the others, ascending, and whose they are; tops, over: the same of tops.
    """
    best, at = np.inf, -1
    for turn in range(2):
        in_way, next_low, next_top = 0.0, 0, 0
        for i in range(n + 1):
            x = (0 if i == 0 else tops[i - 1]) if turn == 0 else (level if i == n else bottoms[i]) - bytes
            if x < 0:
                continue
            if x + bytes > level:
                break
            while next_low < n and bottoms[next_low] < x + bytes:
                in_way += weight[under[next_low]]
                next_low += 1
            while next_top < n and tops[next_top] <= x:
                in_way -= weight[over[next_top]]
                next_top += 1
            cost = in_way * (1.0 + BLUR * uniform(random))
            if cost < best:
                best, at = cost, x
    return at


@njit(cache=True, nogil=True)
def push(level, n_moves, lower, upper, size, weight, growth, offsets, homeless, n_homeless, random):
    """Place up to `n_moves` buffers below `level`, each where those in its way weigh least; these are pushed out.

    Each buffer that is pushed out becomes heavier, so that the search leaves the places that it has tried.

    Args:
        lower, upper, size: [n] when each buffer is live, and its size, which is above 0.
        weight: [n] float64, of each buffer; changed.
        growth: [n] float64, what a weight grows by.
        offsets: [n] changed; -1 for buffers without a place.
        homeless: [n] the buffers without a place, in its first entries; n_homeless: [1] how many; both changed.
        random: [1] uint64.
    """
    n = len(size)
    low, high = np.empty((4, n), np.int64), np.empty((4, n), np.int64)  # buffers with a place by bottom, and by top
    fill(low, offsets, np.zeros_like(size), lower, upper)
    fill(high, offsets, size, lower, upper)
    bottoms, under = np.empty(n, np.int64), np.empty(n, np.int64)
    tops, over = np.empty(n, np.int64), np.empty(n, np.int64)
    for _ in range(n_moves):
        if n_homeless[0] == 0:
            return
        chosen = int(uniform(random) * n_homeless[0])
        for _ in range(2):  # the largest of three
            i = int(uniform(random) * n_homeless[0])
            if size[homeless[i]] > size[homeless[chosen]]:
                chosen = i
        b = homeless[chosen]
        near = live(low, lower[b], upper[b], bottoms, under)
        live(high, lower[b], upper[b], tops, over)
        at = lightest_place(size[b], level, near, bottoms, tops, under, over, weight, random)
        if at < 0:  # larger than the level
            return
        n_homeless[0] -= 1
        homeless[chosen] = homeless[n_homeless[0]]
        end = at + size[b]
        for i in range(near):
            o = under[i]
            if bottoms[i] < end and bottoms[i] + size[o] > at:
                remove(low, offsets[o], o)
                remove(high, offsets[o] + size[o], o)
                offsets[o] = -1
                homeless[n_homeless[0]] = o
                n_homeless[0] += 1
                weight[o] += growth[o]
        offsets[b] = at
        insert(low, at, lower[b], upper[b], b)
        insert(high, end, lower[b], upper[b], b)
