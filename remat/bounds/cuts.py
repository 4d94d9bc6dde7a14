"""Knapsack cuts: stronger forms of a stage's memory row, valid for whole values.

The row "Sum of M[v] S[t+1,v] <= room" of a stage is a knapsack. Fractional S may fill it exactly; whole
values cannot. A cut "Sum of a[v] S[t+1,v] <= right" with small integers a holds if no set of values
within the room weighs more than `right`. A dynamic program over the weight decides this exactly
(`is_valid`, which also checks the certificate), so the method that finds cuts need not be trusted. It tries
extended covers (Balas 1975) and the row rounded down (Chvatal-Gomory).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

MOST = 64  # largest right side; the check takes as many steps for each value
LEAST_VIOLATION = 1e-3
PER_ROW = 3  # cuts taken from one memory row, the most violated ones
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
