"""Knapsack cuts: stronger forms of a stage's memory row, valid for whole values.

The row "Sum of M[v] S[t+1,v] <= room" of a stage is a knapsack. Fractional S may fill it exactly; whole
values cannot. A cut "Sum of a[v] S[t+1,v] <= right" with small integers a holds if no set of values
within the room weighs more than `right`. A dynamic program over the weight decides this exactly
(`is_valid`, which also checks the certificate), so the method that finds cuts need not be trusted. It tries
extended covers (Balas 1975) and the row rounded down (Chvatal-Gomory).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import scipy.sparse as sp

MOST = 64  # largest right side; the check takes as many steps for each value
LEAST_VIOLATION = 1e-3
PER_ROW = 3  # cuts taken from one memory row, the most violated ones
FULL = 0.9  # share of a row's room that is filled where cuts are sought
DIVISORS = range(1, 12)


def is_valid(sizes: Sequence[int], weights: Sequence[int], room: int, right: int) -> bool:
    """Whether every subset of `sizes` (bytes) that fits `room` has a total weight of at most `right`.

    Exact: it computes the least bytes of a subset for each weight up to right + 1, which means "that or more".
    """
    goal = right + 1
    least: list[int | None] = [0] + [None] * goal
    for size, weight in zip(sizes, weights, strict=True):
        for total in range(goal, -1, -1):
            held = least[total]
            if held is None:
                continue
            into = min(goal, total + weight)
            known = least[into]
            if known is None or held + size < known:
                least[into] = held + size
    over = least[goal]
    return over is None or over > room


def cuts_of_rows(
    matrix: sp.csr_array, row_lower: np.ndarray, rows: np.ndarray, x: np.ndarray
) -> Iterator[tuple[int, list[tuple[int, int]], int]]:  # fmt: skip
    """Cuts that `x` [n] violates: (row, columns and weights, right).

    Args:
        matrix, row_lower: rows ``-(bytes x) >= -room`` among others.
        rows: which rows these are.
    """
    for row in rows.tolist():
        lo, hi = matrix.indptr[row : row + 2]
        columns, sizes = matrix.indices[lo:hi], -np.asarray(matrix.data[lo:hi], dtype=np.int64)
        room, at = -int(row_lower[row]), x[columns]
        if room < 0 or float(at @ sizes) < FULL * room:
            continue
        for weights, right in knapsack_cuts(at, sizes, room):
            inside = np.nonzero(weights)[0]
            yield row, list(zip(columns[inside].tolist(), weights[inside].tolist(), strict=True)), right


def knapsack_cuts(x: np.ndarray, sizes: np.ndarray, room: int) -> list[tuple[np.ndarray, int]]:
    """Cuts of one row that `x` violates, the most violated first: (weights [items] int64, right).

    Args:
        x, sizes: [items] fractional values and positive int64 sizes.
    """
    found = []
    for weights, right in _candidates(x, sizes, room):
        violation = float(weights @ x) - right
        if violation > LEAST_VIOLATION and 0 <= right <= MOST and weights.max() <= right + 1:
            found.append((violation / float(np.linalg.norm(weights)), weights, right))
    found.sort(key=lambda cut: -cut[0])
    good = []
    for _, weights, right in found[: 2 * PER_ROW]:
        inside = weights > 0
        if is_valid(sizes[inside].tolist(), weights[inside].tolist(), room, right):
            good.append((weights, right))
    return good[:PER_ROW]


def _candidates(x: np.ndarray, sizes: np.ndarray, room: int) -> Iterator[tuple[np.ndarray, int]]:
    for divisor in sorted({*sizes.tolist(), *(room // q + 1 for q in DIVISORS)}):
        yield np.minimum(sizes // divisor, room // divisor + 1), room // divisor
    for key in ((1 - x) / sizes, 1 - x, -sizes * x):
        order = np.argsort(key, kind="stable")
        total = np.cumsum(sizes[order])
        last = int(np.searchsorted(total, room, side="right"))
        if last == len(order):
            return
        cover, weight = order[: last + 1].tolist(), int(total[last])
        for j in sorted(cover, key=lambda j: x[j]):
            if weight - sizes[j] > room:
                cover.remove(j)
                weight -= int(sizes[j])
        heaviest = np.cumsum(np.sort(sizes[cover])[::-1])
        weights = np.searchsorted(heaviest, sizes, side="right").astype(np.int64)
        weights[cover] = 1
        yield np.minimum(weights, len(cover)), len(cover) - 1
