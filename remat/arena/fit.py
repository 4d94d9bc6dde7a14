"""Compiled: place buffers one after another, each in a gap between those that were placed before."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def fit(order, lower, upper, size, best, offsets):
    """Place all buffers in `order`, each in the lowest gap that it fits in, or the tightest; the bytes that they need.

    Args:
        order: [n] the buffers.
        best: take the tightest gap.
        offsets: [n] written.
    """
    n = len(order)
    # The buffers placed so far, by offset.
    begins, ends, bottoms, tops = (
        np.empty(n, np.int64),
        np.empty(n, np.int64),
        np.empty(n, np.int64),
        np.empty(n, np.int64),
    )
    most = 0
    for n_placed in range(n):
        b = order[n_placed]
        low, high, bytes = lower[b], upper[b], size[b]
        at, found, slack = 0, -1, np.int64(1) << 62
        for j in range(n_placed):
            if begins[j] < high and low < ends[j]:
                gap = bottoms[j] - at - bytes
                if 0 <= gap < slack:
                    found, slack = at, gap
                    if not best:
                        break
                at = max(at, tops[j])
        if found < 0:
            found = at
        offsets[b] = found
        most = max(most, found + bytes)
        j = np.searchsorted(bottoms[:n_placed], found, side="right")
        for i in range(n_placed, j, -1):
            begins[i], ends[i], bottoms[i], tops[i] = begins[i - 1], ends[i - 1], bottoms[i - 1], tops[i - 1]
        begins[j], ends[j], bottoms[j], tops[j] = low, high, found, found + bytes
    return most
