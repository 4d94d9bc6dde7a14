"""Compiled: place buffers one after another, each in a gap between those that were placed before it."""

from __future__ import annotations

import numpy as np
from numba import njit

from remat.randomness import uniform


@njit(cache=True, nogil=True)
def fit(order, lower, upper, size, is_tight, level, offsets):
    """Place the buffers in `order` below `level`, each in a gap that it fits in; the bytes that they need.

    Args:
        order: [at most n] the buffers.
        is_tight: take the tightest gap, not the lowest.
        offsets: [n] written for the buffers in `order`; -1 if there is no gap.
    """
    n = len(order)
    # The buffers placed so far, by offset.
    begins, ends = np.empty(n, np.int64), np.empty(n, np.int64)
    bottoms, tops = np.empty(n, np.int64), np.empty(n, np.int64)
    most, n_placed = 0, 0
    for b in order:
        low, high, bytes = lower[b], upper[b], size[b]
        at, found, slack = 0, -1, np.int64(1) << 62
        for j in range(n_placed + 1):
            is_last = j == n_placed
            if is_last or (begins[j] < high and low < ends[j]):
                room = (level if is_last else bottoms[j]) - at - bytes
                if room >= 0 and (found < 0 or (room < slack and not is_last)):
                    found, slack = at, room
                    if not is_tight:
                        break
                if not is_last:
                    at = max(at, tops[j])
        offsets[b] = found
        if found < 0:
            continue
        most = max(most, found + bytes)
        j = np.searchsorted(bottoms[:n_placed], found, side="right")
        for i in range(n_placed, j, -1):
            begins[i], ends[i], bottoms[i], tops[i] = begins[i - 1], ends[i - 1], bottoms[i - 1], tops[i - 1]
        begins[j], ends[j], bottoms[j], tops[j] = low, high, found, found + bytes
        n_placed += 1
    return most


@njit(cache=True, nogil=True)
def sweep(order, lower, upper, size, ceiling, near, noise, random, offsets):
    """Place the buffers in the order of their beginnings, each beside one that ends as late, or a little later.

    A neighbour that ends earlier leaves a gap that only grows again when the new buffer ends; one that ends much later
    could have had a neighbour that fits it better. A gap of just the right size is always taken.

    Args:
        order: [at most n] the buffers, by beginning.
        ceiling: [n] where each buffer must end at the latest, not rising with its end.
        near: what a neighbour's later end counts, beside an earlier one.
        noise: share of the buffers that take any gap.
        random: [1] uint64.
        offsets: [n] written for the buffers in `order`; -1 if there is no gap.
    """
    live, n_live, last = np.empty(len(order) + 1, np.int64), 0, upper.max()
    for b in order:
        n = 0
        for i in range(n_live):
            if upper[live[i]] > lower[b]:
                live[n] = live[i]
                n += 1
        n_live, best, offsets[b], place = n, np.inf, -1, -1
        is_noisy = uniform(random) < noise
        for i in range(n_live + 1):
            bottom = offsets[live[i - 1]] + size[live[i - 1]] if i else 0
            top = min(ceiling[b], offsets[live[i]]) if i < n_live else ceiling[b]
            if top - bottom < size[b]:
                continue
            for is_top in range(2):
                end = last
                if is_top and top < ceiling[b]:
                    end = upper[live[i]]
                elif not is_top and i:
                    end = upper[live[i - 1]]
                cost = float(upper[b] - end) if end < upper[b] else near * (end - upper[b])
                if is_noisy:
                    cost *= uniform(random)
                elif top - bottom == size[b]:
                    cost = 0.0
                if cost < best:
                    best, offsets[b], place = cost, top - size[b] if is_top else bottom, i
        if place >= 0:
            for i in range(n_live, place, -1):
                live[i] = live[i - 1]
            live[place] = b
            n_live += 1
