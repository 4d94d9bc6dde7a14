"""Compiled annealing over topological orders; each move puts one operation elsewhere between its neighbours.

An order runs every operation once and frees each value at its last use. Moving an operation from
one place to another changes the memory only at the places in between, so only these are measured again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from remat.arrays import GraphArrays
from remat.randomness import uniform

FOREVER = 1 << 40  # place of the last use of a value that is kept


class Memory(NamedTuple):
    """Memory of an order of N operations with V values.

    Attributes:
        last: [V] place of the last use of each value, `FOREVER` if kept.
        running, after: [N] bytes held while the operation at each place runs, and after it.
    """

    last: np.ndarray
    running: np.ndarray
    after: np.ndarray


@njit(cache=True, nogil=True)
def measure(graph: GraphArrays, order: np.ndarray) -> Memory:
    """The memory of an order."""
    n, n_values = len(order), len(graph.size_bytes)
    memory = Memory(np.zeros(n_values, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64))
    memory.last[graph.keep] = FOREVER
    _remeasure(graph, order, memory, 0, n - 1)
    return memory


@njit(cache=True, nogil=True)
def _remeasure(graph: GraphArrays, order: np.ndarray, memory: Memory, low: int, high: int) -> None:
    """Measure places low..high of `order` again; no other place may have changed."""
    last = memory.last
    for p in range(low, high + 1):
        k = order[p]
        for e in range(graph.in_start[k], graph.in_start[k + 1]):
            if last[graph.in_ids[e]] <= high:
                last[graph.in_ids[e]] = p  # places ascend, so the last one remains
    held = memory.after[low - 1] if low > 0 else 0
    for p in range(low, high + 1):
        k = order[p]
        dead = 0
        for e in range(graph.out_start[k], graph.out_start[k + 1]):
            v = graph.out_ids[e]
            held += graph.size_bytes[v]
            if graph.use_start[v] == graph.use_start[v + 1] and last[v] < FOREVER:
                dead += graph.size_bytes[v]
        memory.running[p] = held + graph.workspace_bytes[k]
        for e in range(graph.in_start[k], graph.in_start[k + 1]):
            v = graph.in_ids[e]
            if last[v] == p:
                dead += graph.size_bytes[v]
        held -= dead
        memory.after[p] = held


@njit(cache=True, nogil=True)
def anneal(
    graph: GraphArrays, order: np.ndarray, best: np.ndarray, target: int, floor: int, moves: int, hot: float,
    cold: float, random: np.ndarray,
) -> None:  # fmt: skip
    """Anneal `order` in place; write the best order seen (least peak, then least excess) to `best`.

    The energy is the sum over the places of the bytes above `target`. When it reaches 0 the target
    falls below the peak, but not below `floor`.
    """
    n = len(order)
    place = np.empty(n, np.int64)
    for p in range(n):
        place[order[p]] = p
    memory = measure(graph, order)
    running = memory.running
    best[:] = order
    best_peak = running.max()
    goal = max(floor, min(target, best_peak - 1))
    energy, beyond = _above(running, goal, floor, 0, n - 1)
    best_excess = beyond
    temperature = hot
    cooling = math.exp(math.log(cold / hot) / max(moves, 1))
    for _ in range(moves):
        temperature *= cooling
        if beyond == 0:
            break
        p, q = _random_move(graph, order, place, running, goal, random)
        if q == p:
            continue
        first, final = min(p, q), max(p, q)
        old, old_beyond = _above(running, goal, floor, first, final)
        _move(order, place, p, q)
        _remeasure(graph, order, memory, first, final)
        new, new_beyond = _above(running, goal, floor, first, final)
        if new > old and new - old > -temperature * math.log(1.0 - uniform(random)):
            _move(order, place, q, p)
            _remeasure(graph, order, memory, first, final)
            continue
        energy += new - old
        beyond += new_beyond - old_beyond
        if energy <= 0:
            peak = running.max()
            if peak < best_peak or (peak == best_peak and beyond < best_excess):
                best_peak, best_excess = peak, beyond
                best[:] = order
            goal = max(floor, best_peak - 1)
            energy, beyond = _above(running, goal, floor, 0, n - 1)


@njit(cache=True, nogil=True, inline="always")  # a call would pass too many arrays
def _random_move(
    graph: GraphArrays, order: np.ndarray, place: np.ndarray, running: np.ndarray, goal: int, random: np.ndarray
) -> tuple[int, int]:
    """(place of an operation, another place that its neighbours allow); the same place twice if there is none."""
    n = len(order)
    p = int(uniform(random) * n)
    if uniform(random) < 0.5:
        for _ in range(8):
            if running[p] > goal:
                break
            p = int(uniform(random) * n)
    k = order[p]
    low, high = 0, n - 1
    for e in range(graph.in_start[k], graph.in_start[k + 1]):
        low = max(low, int(place[graph.producer[graph.in_ids[e]]]) + 1)
    for e in range(graph.out_start[k], graph.out_start[k + 1]):
        v = graph.out_ids[e]
        for g in range(graph.use_start[v], graph.use_start[v + 1]):
            high = min(high, int(place[graph.use_ids[g]]) - 1)
    if low == high:
        return p, p
    # Long moves are rare, because they cost more time and are accepted less often.
    reach = int(math.exp(uniform(random) * math.log(n + 1.0)))
    q = p + reach if uniform(random) < 0.5 else p - reach
    if uniform(random) < 0.1:
        q = low if q < p else high
    return p, min(max(q, low), high)


@njit(cache=True, nogil=True)
def _above(running: np.ndarray, goal: int, floor: int, first: int, final: int) -> tuple[int, int]:
    """Sums over the places first..final of the bytes above `goal` and above `floor`."""
    above_goal, above_floor = 0, 0
    for p in range(first, final + 1):
        above_goal += max(running[p] - goal, 0)
        above_floor += max(running[p] - floor, 0)
    return above_goal, above_floor


@njit(cache=True, nogil=True)
def _move(order: np.ndarray, place: np.ndarray, p: int, q: int) -> None:
    """Move the operation at place p to place q; those in between move up by one place."""
    k = order[p]
    step = 1 if q > p else -1
    i = p
    while i != q:
        order[i] = order[i + step]
        place[order[i]] = i
        i += step
    order[q] = k
    place[k] = q
