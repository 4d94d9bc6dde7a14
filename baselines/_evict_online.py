"""A run that evicts values online, as Dynamic Tensor Rematerialization does, compiled."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from remat import Graph

EXACT, UNION, LOCAL, LRU, SIZE, RANDOM = range(6)
NAMES = {"exact": EXACT, "union_find": UNION, "local": LOCAL, "lru": LRU, "size": SIZE, "random": RANDOM}


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """What the run did.

    Attributes:
        order: [computations] operations, in the order in which they ran.
        failed_at: the operation for which memory could not be found; -1 if the run ended.
    """

    order: np.ndarray
    failed_at: int


def run_online(graph: Graph, budget_bytes: int, heuristic: str, seed: int, most: int) -> OnlineRun:
    """Run the graph's operations in order within a budget; what is missing is computed again.

    The program frees a value after its last use; only what is computed again can bring it back, for as long as it is
    read. A value to keep is there at the end.

    Args:
        heuristic: one of `NAMES`.
        most: computations, at which the run is given up.
    """
    inputs, input_starts = _csr([op.inputs for op in graph.operations])
    outputs, output_starts = _csr([op.outputs for op in graph.operations])
    users, user_starts = _csr(graph.users)
    last = np.array([max(read, default=p) for read, p in zip(graph.users, graph.producer, strict=True)])
    keep = np.array([value.keep for value in graph.values])
    stays = np.array([graph.operations[p].run_once for p in graph.producer])
    order, failed_at = _run(
        inputs, input_starts, outputs, output_starts, users, user_starts,
        np.array([op.cost for op in graph.operations], dtype=np.float64),
        np.array([op.workspace_bytes for op in graph.operations]), np.array([value.bytes for value in graph.values]),
        np.array(graph.producer), last, keep, stays, budget_bytes - graph.fixed_bytes, NAMES[heuristic], seed, most,
    )  # fmt: skip
    return OnlineRun(order, failed_at)


def _csr(rows) -> tuple[np.ndarray, np.ndarray]:
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    return np.array([x for row in rows for x in row], dtype=np.int64), starts


@numba.njit(cache=True)
def _find(parent, x):
    while parent[x] != x:
        parent[x] = parent[parent[x]]
        x = parent[x]
    return x


@numba.njit(cache=True)
def _run(inputs, input_starts, outputs, output_starts, users, user_starts, cost, workspace, size, producer, last, keep,
         stays, room, heuristic, seed, most):  # fmt: skip
    n_ops, n_values = len(cost), len(size)
    np.random.seed(seed)
    resident = np.zeros(n_values, dtype=np.bool_)
    known = np.zeros(n_values, dtype=np.bool_)  # was computed once: evicted if not resident
    dead = np.zeros(n_values, dtype=np.bool_)  # freed by the program
    pins = np.zeros(n_values, dtype=np.int64)
    accessed = np.zeros(n_values)
    parent = np.arange(n_values)  # union-find of evicted values
    of_set = np.zeros(n_values)  # cost of each set
    stamp = np.zeros(n_ops, dtype=np.int64)
    stamps = 0
    todo = np.empty(n_values + 1, dtype=np.int64)
    stack = np.empty(n_ops + 1, dtype=np.int64)
    order = np.empty(most, dtype=np.int64)
    done, used, clock = 0, 0, 1.0
    for program in range(n_ops + n_values):  # after the operations: values to keep
        if program < n_ops:
            stack[0] = program
        else:
            v = program - n_ops
            if not keep[v]:
                continue
            pins[v] += 1
            if resident[v]:
                continue
            stack[0] = producer[v]
        depth = 1
        for j in range(input_starts[stack[0]], input_starts[stack[0] + 1]):
            pins[inputs[j]] += 1
        while depth:
            k = stack[depth - 1]
            missing = -1
            for j in range(input_starts[k], input_starts[k + 1]):
                if not resident[inputs[j]]:
                    missing = producer[inputs[j]]
                    break
            if missing >= 0:
                stack[depth] = missing
                depth += 1
                for j in range(input_starts[missing], input_starts[missing + 1]):
                    pins[inputs[j]] += 1
                continue
            need = workspace[k]
            for j in range(output_starts[k], output_starts[k + 1]):
                if not resident[outputs[j]]:
                    need += size[outputs[j]]
            while used + need > room:
                worst, chosen = np.inf, -1
                for v in range(n_values):
                    if not resident[v] or pins[v] or stays[v] or size[v] == 0 or producer[v] == k:
                        continue
                    h = 0.0
                    if heuristic == RANDOM:
                        h = np.random.random()
                    elif heuristic == LRU:
                        h = accessed[v]
                    elif heuristic == SIZE:
                        h = -size[v]
                    else:
                        around = cost[producer[v]]
                        if heuristic == EXACT:
                            stamps += 1
                            stamp[producer[v]] = stamps
                            for forward in (False, True):
                                todo[0], length = v, 1
                                while length:
                                    length -= 1
                                    x = todo[length]
                                    if forward:
                                        for j in range(user_starts[x], user_starts[x + 1]):
                                            u = users[j]
                                            for i in range(output_starts[u], output_starts[u + 1]):
                                                y = outputs[i]
                                                if known[y] and not resident[y] and stamp[u] != stamps:
                                                    stamp[u] = stamps
                                                    around += cost[u]
                                                    todo[length] = y
                                                    length += 1
                                    else:
                                        p = producer[x]
                                        for j in range(input_starts[p], input_starts[p + 1]):
                                            y = inputs[j]
                                            if not resident[y] and stamp[producer[y]] != stamps:
                                                stamp[producer[y]] = stamps
                                                around += cost[producer[y]]
                                                todo[length] = y
                                                length += 1
                        elif heuristic == UNION:
                            stamps += 1
                            p = producer[v]
                            for j in range(input_starts[p], input_starts[p + 1]):
                                y = inputs[j]
                                if not resident[y]:
                                    root = _find(parent, y)
                                    if stamp[producer[root]] != stamps:
                                        stamp[producer[root]] = stamps
                                        around += of_set[root]
                            for j in range(user_starts[v], user_starts[v + 1]):
                                u = users[j]
                                for i in range(output_starts[u], output_starts[u + 1]):
                                    y = outputs[i]
                                    if known[y] and not resident[y]:
                                        root = _find(parent, y)
                                        if stamp[producer[root]] != stamps:
                                            stamp[producer[root]] = stamps
                                            around += of_set[root]
                        h = around / (size[v] * (clock - accessed[v] + 1e-9))
                    if h < worst:
                        worst, chosen = h, v
                if chosen < 0:
                    return order[:done], k
                resident[chosen] = False
                used -= size[chosen]
                if heuristic == UNION:
                    _join(chosen, parent, of_set, cost, producer, inputs, input_starts, outputs, output_starts, users,
                          user_starts, known, resident)  # fmt: skip
            if done == most:
                return order[:done], k
            order[done] = k
            done += 1
            clock += cost[k]
            for j in range(output_starts[k], output_starts[k + 1]):
                v = outputs[j]
                if not resident[v]:
                    resident[v] = True
                    used += size[v]
                    if known[v] and heuristic == UNION:  # a set cannot be split: its cost becomes smaller
                        of_set[_find(parent, v)] -= cost[k]
                        parent[v] = v
                known[v] = True
                accessed[v] = clock
            depth -= 1
            for j in range(input_starts[k], input_starts[k + 1]):
                v = inputs[j]
                pins[v] -= 1
                accessed[v] = clock
                if program < n_ops and depth == 0 and last[v] == k and not keep[v]:
                    dead[v] = True
                if dead[v] and pins[v] == 0 and resident[v]:
                    resident[v] = False
                    used -= size[v]
            for j in range(output_starts[k], output_starts[k + 1]):
                v = outputs[j]
                if depth == 0 and last[v] == k and not keep[v]:
                    dead[v] = True
                if dead[v] and pins[v] == 0 and resident[v]:
                    resident[v] = False
                    used -= size[v]
    return order[:done], -1
