"""Offline greedy eviction, compiled: a first plan in milliseconds. All its plans are staged."""

from __future__ import annotations

import numpy as np
from numba import njit

from remat.arrays import GraphArrays

LONGEST = 64  # computations per operation, on average, beyond which the greedy is going round in circles
MOST_LOOKS = 30_000_000  # at resident values, about half a second; on some wide graphs evictions cascade


@njit(cache=True, nogil=True)
def _evict(
    in_start: np.ndarray,
    in_ids: np.ndarray,
    out_start: np.ndarray,
    out_ids: np.ndarray,
    use_start: np.ndarray,
    use_ids: np.ndarray,
    producer: np.ndarray,
    size: np.ndarray,
    workspace: np.ndarray,
    pinned: np.ndarray,
    weight: np.ndarray,
    budget: int,
    longest: int,
    most_looks: int,
) -> np.ndarray:
    """[C] computations, or an empty array if the greedy gets stuck."""
    n, n_values = len(workspace), len(size)
    nothing = np.empty(0, np.int32)
    order = np.empty(2 * n + 16, np.int32)
    length, held, n_resident = 0, 0, 0
    resident = np.empty(n_values, np.int32)  # the first n_resident of them
    place = np.full(n_values, -1, np.int32)  # of a value in `resident`
    needed = np.empty(n + 1, np.int32)
    stack = np.empty(n + 1, np.int32)
    wanted = np.full(n, -1, np.int32)  # stage in which an operation was last wanted
    last_read = np.full(n_values, -1, np.int64)  # stage * n + the last operation that reads it there
    reads = np.full(n_values, -1, np.int64)
    scores = np.empty(n_values, np.float64)
    victims = np.empty(n_values, np.int32)
    step, looks = 0, 0
    for stage in range(n):
        count, depth = 0, 1
        stack[0] = stage
        wanted[stage] = stage
        while depth > 0:
            depth -= 1
            k = stack[depth]
            needed[count] = k
            count += 1
            for e in range(in_start[k], in_start[k + 1]):
                v = in_ids[e]
                p = producer[v]
                last_read[v] = max(last_read[v], stage * n + k)
                if place[v] < 0 and wanted[p] != stage:
                    wanted[p] = stage
                    stack[depth] = p
                    depth += 1
        needed[:count].sort()
        if length + count > longest:
            return nothing
        if length + count > len(order):
            longer = np.empty(2 * (length + count), np.int32)
            longer[:length] = order[:length]
            order = longer
        for i in range(count):
            k = needed[i]
            step += 1
            born, fresh = 0, 0
            for e in range(out_start[k], out_start[k + 1]):
                born += size[out_ids[e]]
                if place[out_ids[e]] < 0:
                    fresh += size[out_ids[e]]
            room = budget - born - workspace[k]
            if held > room:
                for e in range(in_start[k], in_start[k + 1]):
                    reads[in_ids[e]] = step
                n_victims = 0
                looks += 8 * n_resident
                if looks > most_looks:
                    return nothing
                for j in range(n_resident):
                    v = resident[j]
                    if reads[v] == step or pinned[v] or size[v] == 0 or last_read[v] >= stage * n + k:
                        continue
                    # Distance to the next use in a later stage; users are ascending.
                    low, high = use_start[v], use_start[v + 1]
                    while low < high:
                        middle = (low + high) // 2
                        if use_ids[middle] > stage:
                            high = middle
                        else:
                            low = middle + 1
                    distance = float(use_ids[low] - stage) if low < use_start[v + 1] else 1e18
                    scores[n_victims] = weight[v] / (size[v] * distance)
                    victims[n_victims] = v
                    n_victims += 1
                ranks = np.argsort(scores[:n_victims])
                at = 0
                while held > room and at < n_victims:
                    v = victims[ranks[at]]
                    at += 1
                    n_resident -= 1
                    moved = resident[n_resident]
                    resident[place[v]] = moved
                    place[moved] = place[v]
                    place[v] = -1
                    held -= size[v]
                if held > room:
                    return nothing
                fresh = 0  # an output may have been evicted just now
                for e in range(out_start[k], out_start[k + 1]):
                    if place[out_ids[e]] < 0:
                        fresh += size[out_ids[e]]
            order[length] = k
            length += 1
            held += fresh
            for e in range(out_start[k], out_start[k + 1]):
                v = out_ids[e]
                if place[v] < 0:
                    place[v] = n_resident
                    resident[n_resident] = v
                    n_resident += 1
    return order[:length]


def evict(arrays: GraphArrays, variable_bytes: int, cost_power: float = 0.5) -> np.ndarray | None:
    """Computations of a staged plan within `variable_bytes` (fixed bytes excluded), or None.

    Runs the operations in order, recomputes what is missing, and makes room by evicting the lowest
    ``cost**cost_power / (bytes * distance to next use)``, as in GreedyDual caching and DTR (Kirisame
    et al., ICLR 2021), but with the future known.
    """
    weight = np.maximum(arrays.cost, 1).astype(np.float64)[arrays.producer] ** cost_power
    order = _evict(
        arrays.in_start, arrays.in_ids, arrays.out_start, arrays.out_ids, arrays.use_start, arrays.use_ids,
        arrays.producer, arrays.size_bytes, arrays.workspace_bytes,
        arrays.keep | arrays.run_once[arrays.producer], weight,
        max(variable_bytes, -1), LONGEST * len(arrays.cost) + 1000, MOST_LOOKS,
    )  # fmt: skip
    return order if len(order) else None
