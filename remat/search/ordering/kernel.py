"""Compiled annealing over topological orders: one operation at a time moves within its window.

An order runs every operation once and frees each value at its last use. Moving an operation from
one place to another changes the memory only at the places in between, so a move is measured in the
time of that window.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

FOREVER = 1 << 40  # place of the last use of a value that is kept


@njit(cache=True, nogil=True)
def _random(state: np.ndarray) -> float:
    """Uniform in [0, 1), by xorshift64* (Vigna, 2016)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) / 9007199254740992.0


@njit(cache=True, nogil=True)
def profile(
    in_start: np.ndarray, in_ids: np.ndarray, out_start: np.ndarray, out_ids: np.ndarray, use_start: np.ndarray,
    size: np.ndarray, workspace: np.ndarray,
    order: np.ndarray, last: np.ndarray, running: np.ndarray, after: np.ndarray, low: int, high: int,
) -> None:  # fmt: skip
    """Measure places low..high of `order` again: `last` of what is read there, `running`, `after`.

    Nothing outside may have changed. `last[v]` is the place of the last use of v, `FOREVER` if kept.
    """
    for p in range(low, high + 1):
        k = order[p]
        for e in range(in_start[k], in_start[k + 1]):
            if last[in_ids[e]] <= high:
                last[in_ids[e]] = p  # places ascend, so the last one stays
    held = after[low - 1] if low > 0 else 0
    for p in range(low, high + 1):
        k = order[p]
        dead = 0
        for e in range(out_start[k], out_start[k + 1]):
            v = out_ids[e]
            held += size[v]
            if use_start[v] == use_start[v + 1] and last[v] < FOREVER:
                dead += size[v]
        running[p] = held + workspace[k]
        for e in range(in_start[k], in_start[k + 1]):
            v = in_ids[e]
            if last[v] == p:
                dead += size[v]
        held -= dead
        after[p] = held


@njit(cache=True, nogil=True)
def anneal(
    in_start: np.ndarray, in_ids: np.ndarray, out_start: np.ndarray, out_ids: np.ndarray, use_start: np.ndarray,
    use_ids: np.ndarray, producer: np.ndarray, size: np.ndarray, workspace: np.ndarray, keep: np.ndarray,
    order: np.ndarray, best: np.ndarray, target: int, floor: int, moves: int, hot: float, cold: float,
    random: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """Anneal `order` in place; the best order seen (least peak, then least excess) goes to `best`.

    The energy is the sum over the places of the bytes above `target`. When it reaches 0 the target
    falls below the peak, but not below `floor`.

    Returns:
        (bytes above `floor` of the best order's peak, sum over the places of its bytes above `floor`).
    """
    n, n_values = len(order), len(size)
    place = np.empty(n, np.int64)
    last = np.zeros(n_values, np.int64)
    running = np.zeros(n, np.int64)
    after = np.zeros(n, np.int64)
    saved = np.empty(n, np.int64)
    for p in range(n):
        place[order[p]] = p
    for v in range(n_values):
        last[v] = FOREVER if keep[v] else 0
    profile(in_start, in_ids, out_start, out_ids, use_start, size, workspace, order, last, running, after, 0, n - 1)
    best[:] = order
    best_peak = running.max()
    best_excess = np.maximum(running - floor, 0).sum()
    goal = max(floor, min(target, best_peak - 1))
    energy = np.maximum(running - goal, 0).sum()
    beyond = best_excess
    temperature = hot
    cooling = math.exp(math.log(cold / hot) / max(moves, 1))
    for _ in range(moves):
        temperature *= cooling
        if beyond == 0:
            break
        p = int(_random(random) * n)
        if _random(random) < 0.5:
            for _ in range(8):
                if running[p] > goal:
                    break
                p = int(_random(random) * n)
        k = order[p]
        low, high = 0, n - 1
        for e in range(in_start[k], in_start[k + 1]):
            low = max(low, int(place[producer[in_ids[e]]]) + 1)
        for e in range(out_start[k], out_start[k + 1]):
            v = out_ids[e]
            for g in range(use_start[v], use_start[v + 1]):
                high = min(high, int(place[use_ids[g]]) - 1)
        if low == high:
            continue
        # Long moves are rare ones: they cost more and are taken less.
        reach = int(math.exp(_random(random) * math.log(n + 1.0)))
        q = p + reach if _random(random) < 0.5 else p - reach
        if _random(random) < 0.1:
            q = low if q < p else high
        q = min(max(q, low), high)
        if q == p:
            continue
        first, final = min(p, q), max(p, q)
        old, old_beyond = 0, 0
        for i in range(first, final + 1):
            saved[i] = running[i]
            old += max(running[i] - goal, 0)
            old_beyond += max(running[i] - floor, 0)
        _move(order, place, p, q)
        profile(in_start, in_ids, out_start, out_ids, use_start, size, workspace, order, last, running, after,
                first, final)  # fmt: skip
        new, new_beyond = 0, 0
        for i in range(first, final + 1):
            new += max(running[i] - goal, 0)
            new_beyond += max(running[i] - floor, 0)
        if new > old and new - old > -temperature * math.log(1.0 - _random(random)):
            _move(order, place, q, p)
            profile(in_start, in_ids, out_start, out_ids, use_start, size, workspace, order, last, running, after,
                    first, final)  # fmt: skip
            continue
        energy += new - old
        beyond += new_beyond - old_beyond
        if energy <= 0:
            peak = running.max()
            if peak < best_peak or (peak == best_peak and beyond < best_excess):
                best_peak, best_excess = peak, beyond
                best[:] = order
            goal = max(floor, best_peak - 1)
            energy = np.maximum(running - goal, 0).sum()
    return max(0, best_peak - floor), best_excess


@njit(cache=True, nogil=True)
def _move(order: np.ndarray, place: np.ndarray, p: int, q: int) -> None:
    k = order[p]
    step = 1 if q > p else -1
    i = p
    while i != q:
        order[i] = order[i + step]
        place[order[i]] = i
        i += step
    order[q] = k
    place[k] = q
