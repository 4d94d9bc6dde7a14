"""Griewank and Walther's binomial schedule for reversing a chain of equal steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import comb


def reachable(checkpoints: int, repeats: int) -> int:
    """beta(c, r): the most steps that c checkpoints can reverse when no step is advanced more than r times."""
    return comb(checkpoints + repeats, checkpoints) if repeats >= 0 else 0


def repetitions(steps: int, checkpoints: int) -> int:
    """The r with beta(c, r - 1) < steps <= beta(c, r)."""
    return next(r for r in count() if reachable(checkpoints, r) >= steps)


def advances(steps: int, checkpoints: int) -> int:
    """t(l, c) = r l - beta(c + 1, r - 1): the fewest forward steps that reverse a chain of l (their eq. 2).

    The start state is one of the c checkpoints. The run of a step while it is reversed is not counted.
    """
    r = repetitions(steps, checkpoints)
    return r * steps - reachable(checkpoints + 1, r - 1)


def split(steps: int, checkpoints: int) -> int:
    """Number of steps to the next checkpoint: the middle of the optimal range.

    The minimisers of ``t(l, c) = min over k of k + t(l - k, c - 1) + t(k, c)`` form an interval, for which Griewank
    and Walther give a closed form. The schedule is therefore not unique; the middle (the upper one of two)
    reproduces the cost published for VGG19.
    """
    r = repetitions(steps, checkpoints)
    low = max(1, reachable(checkpoints, r - 2), steps - reachable(checkpoints - 1, r))
    high = min(reachable(checkpoints, r - 1), steps - reachable(checkpoints - 1, r - 1))
    return low + (high - low + 1) // 2


def schedule(start: int, end: int, checkpoints: int) -> Iterator[tuple[int, int]]:
    """Checkpoints stored while steps ``start + 1 .. end`` are reversed from state `start`, which is held.

    Yields (state, last): `state` is stored on the sweep that first reverses step `last`.
    """
    todo = [(start, end, checkpoints)]
    while todo:
        low, high, c = todo.pop()
        if high - low > 1 and c > 1:
            middle = low + split(high - low, c)
            yield middle, high
            todo += [(low, middle, c), (middle, high, c - 1)]
