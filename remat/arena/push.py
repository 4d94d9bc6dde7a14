"""Compiled: a local search below a level, in which a buffer that has no place pushes others out of theirs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from remat.randomness import below, uniform

LATE = 1 << 62  # key of an empty row behind all others
BLUR = 0.3  # of the weights of places, so that equal ones are not always taken in order
PATIENCE = 4000  # moves without progress, at least, after which the search goes back to its best
SPREAD = 0x03F79D71B4CB0A89  # a de Bruijn sequence: the highest 6 bits of 2**i times it differ for each i
BIT = np.zeros(64, dtype=np.int64)  # i, by these bits
for _i in range(64):
    BIT[(SPREAD << _i) % 2**64 >> 58] = _i


class Buffers(NamedTuple):
    """Buffers that get places.

    Attributes:
        low, high, size: [n] sections [low, high) in which each buffer is live, ascending; and its size, above 0.
        first: [sections + 1], members: the buffers live in each section.
        begins: [sections + 1] how many buffers begin in earlier sections.
    """

    low: np.ndarray
    high: np.ndarray
    size: np.ndarray
    first: np.ndarray
    members: np.ndarray
    begins: np.ndarray


class Rows(NamedTuple):
    """Buffers with a place, by bottom (0) and by top (1), see `fill`; and what is read of those near one of them.

    Attributes:
        keys, who: [2, rows]; row: [n, 2] the rows of each buffer; bits: of rows, see `mark`.
        near, ids, weights: [2, n] see `take_out`.
    """

    keys: np.ndarray
    who: np.ndarray
    row: np.ndarray
    bits: np.ndarray
    near: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


@njit(cache=True, nogil=True)
def fill(keys, who, row, offsets, extra):
    """Write the buffers with a place to every other row, by key (offset + extra); the rows between them are empty.

    `row` has the row of each buffer, -1 without a place.
    """
    placed = np.nonzero(offsets >= 0)[0]
    of = offsets[placed] + extra[placed]
    keys[:], who[:], row[:] = LATE, -1, -1
    for i, j in enumerate(np.argsort(of)):
        keys[2 * i], keys[2 * i + 1], who[2 * i], row[placed[j]] = of[j], of[j], placed[j], 2 * i


@njit(cache=True, nogil=True)
def insert(keys, who, row, key, b):
    """Write a buffer into the nearest empty row; those between it and the buffer's place in the order move by one."""
    j = np.searchsorted(keys, key, side="right")
    left, right = j - 1, j
    while True:
        if right < len(keys) and who[right] < 0:
            for i in range(right, j, -1):
                keys[i], who[i] = keys[i - 1], who[i - 1]
                row[who[i]] = i
            break
        if left >= 0 and who[left] < 0:
            j -= 1
            for i in range(left, j):
                keys[i], who[i] = keys[i + 1], who[i + 1]
                row[who[i]] = i
            break
        left, right = left - 1, right + 1
    keys[j], who[j], row[b] = key, b, j


@njit(cache=True, nogil=True)
def mark(bits, row, buffers):
    """Set the bits of both rows of each buffer that has a place."""
    for o in buffers:
        if row[o, 0] >= 0:
            bits[0, row[o, 0] >> 6] |= np.uint64(1) << np.uint64(row[o, 0] & 63)
            bits[1, row[o, 1] >> 6] |= np.uint64(1) << np.uint64(row[o, 1] & 63)


@njit(cache=True, nogil=True)
def take_out(bits, keys, who, weight, found, ids, weights):
    """Write keys, buffers and weights of the rows whose bits are set, in order, and clear the bits; their number."""
    n = 0
    for word in range(len(bits)):
        left = bits[word]
        while left:
            lowest = left & (~left + np.uint64(1))
            i = 64 * word + BIT[(lowest * np.uint64(SPREAD)) >> np.uint64(58)]
            found[n], ids[n], weights[n] = keys[i], who[i], weight[who[i]]
            n += 1
            left ^= lowest
        bits[word] = 0
    return n


@njit(cache=True, nogil=True)
def lightest_place(bytes, level, n, bottoms, tops, under, over, random):
    """The offset at which the buffers in the way weigh least; -1 if there is none below the level.

    Offsets are the bottom of the block and the top of each other buffer, then the level and the bottom of each, less
    its own size. In the way are those that begin below its end and end above its beginning; both only rise.

    Args:
        bottoms, under: [n] bottoms of the others, ascending, and their weights; tops, over: the same of tops.
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
                in_way += under[next_low]
                next_low += 1
            while next_top < n and tops[next_top] <= x:
                in_way -= over[next_top]
                next_top += 1
            if in_way < best:
                cost = in_way * (1.0 + BLUR * uniform(random))
                if cost < best:
                    best, at = cost, x
    return at


@njit(cache=True, nogil=True)
def rows_for(n):
    """Empty rows for n buffers."""
    return Rows(
        np.empty((2, 2 * n), np.int64), np.empty((2, 2 * n), np.int64), np.empty((n, 2), np.int64),
        np.zeros((2, n // 32 + 1), np.uint64), np.empty((2, n), np.int64), np.empty((2, n), np.int64), np.empty((2, n)),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def write_rows(rows, offsets, size):
    """Write all buffers that have a place."""
    fill(rows.keys[0], rows.who[0], rows.row[:, 0], offsets, np.zeros_like(size))
    fill(rows.keys[1], rows.who[1], rows.row[:, 1], offsets, size)


@njit(cache=True, nogil=True)
def look_around(x, rows, weight, b):
    """Write the placed buffers that are live with another one, by bottom and by top; their number."""
    mark(rows.bits, rows.row, x.members[x.first[x.low[b]] : x.first[x.low[b] + 1]])  # live when it begins
    mark(rows.bits, rows.row, np.arange(x.begins[x.low[b] + 1], x.begins[x.high[b]]))  # that begin later
    n = 0
    for i in range(2):
        n = take_out(rows.bits[i], rows.keys[i], rows.who[i], weight, rows.near[i], rows.ids[i], rows.weights[i])
    return n


@njit(cache=True, nogil=True)
def largest_of_three(buffers, n, size, random):
    """The place of one of the first n buffers: the largest of three."""
    chosen = below(random, n)
    for _ in range(2):
        i = below(random, n)
        if size[buffers[i]] > size[buffers[chosen]]:
            chosen = i
    return chosen


@njit(cache=True, nogil=True)
def push(n_moves, level, offsets, x, weight, growth, random, best, progress):
    """Place buffers below `level`, each where those in its way weigh least; these are pushed out.

    Returns whether all buffers have places.

    Each buffer that is pushed out becomes heavier, so that the search leaves the places that it has tried. After a
    while without progress it goes back to its best. Weights stay, so that it leaves that in another direction.

    Args:
        n_moves: at most.
        offsets: [n] -1 for buffers without a place; changed.
        x: the buffers.
        weight: [n] float64, of each buffer; changed.
        growth: [n] float64, what a weight grows by.
        random: [1] uint64.
        best: [n] the offsets at which the first weights of buffers without a place have the smallest sum; changed.
        progress: [2] float64, this sum, and moves since; changed.
    """
    size, rows = x.size, rows_for(len(x.size))
    homeless, n_homeless, missing = np.empty(len(size), np.int64), -1, 0.0
    for _ in range(n_moves):
        if n_homeless < 0:
            write_rows(rows, offsets, size)
            without = np.nonzero(offsets < 0)[0]
            n_homeless, missing = len(without), growth[without].sum()
            homeless[:n_homeless] = without
            if missing < progress[0]:
                progress[0] = missing
                best[:] = offsets
        if n_homeless == 0:
            break
        chosen = largest_of_three(homeless, n_homeless, size, random)
        b = homeless[chosen]
        n_near, near, weights = look_around(x, rows, weight, b), rows.near, rows.weights
        at = lightest_place(size[b], level, n_near, near[0], near[1], weights[0], weights[1], random)
        if at < 0:  # larger than the level
            break
        n_homeless -= 1
        homeless[chosen] = homeless[n_homeless]
        missing -= growth[b]
        for i in range(n_near):
            o = rows.ids[0, i]
            if near[0, i] < at + size[b] and near[0, i] + size[o] > at:
                rows.who[0, rows.row[o, 0]] = rows.who[1, rows.row[o, 1]] = offsets[o] = rows.row[o, 0] = -1
                homeless[n_homeless] = o
                n_homeless += 1
                missing += growth[o]
                weight[o] += growth[o]
        offsets[b] = at
        insert(rows.keys[0], rows.who[0], rows.row[:, 0], at, b)
        insert(rows.keys[1], rows.who[1], rows.row[:, 1], at + size[b], b)
        progress[1] += 1
        if missing < progress[0]:
            progress[0], progress[1] = missing, 0
            best[:] = offsets
        elif progress[1] % max(PATIENCE, len(size)) == 0:
            offsets[:] = best
            n_homeless = -1
    return n_homeless == 0
