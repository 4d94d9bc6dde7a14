"""A run that evicts values online, as Dynamic Tensor Rematerialization does (Kirisame et al., ICLR 2021), compiled.

The baseline `dtr` is this run. The search starts from it where it is cheaper than greedy eviction, which happens where
evictions cascade: the run counts the cost of what is evicted around a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np

from remat.arrays import GraphArrays
from remat.graph import Graph
from remat.plan import Plan

EXACT, UNION, LOCAL, LRU, SIZE, RANDOM = range(6)
MOST_COMPUTATIONS = 5  # for each operation, of a run to start from
CHUNK = 16  # operations of the program in one call of compiled code, which nothing can interrupt
NAMES = {"exact": EXACT, "union_find": UNION, "local": LOCAL, "lru": LRU, "size": SIZE, "random": RANDOM}


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """What the run did.

    Attributes:
        order: [computations] operations, in the order in which they ran.
        failed_at: the operation for which memory could not be found, or at which it was stopped; -1 if the run ended.
        is_stopped: `should_stop` has ended it.
    """

    order: np.ndarray
    failed_at: int
    is_stopped: bool = False


class _State(NamedTuple):
    last: np.ndarray  # [V] the operation after which the program frees the value; -1 if it keeps it
    stays: np.ndarray  # [N] what it makes may not be evicted: it runs once, or what it needs is gone for ever
    resident: np.ndarray  # [V]
    known: np.ndarray  # [V] it was computed once: evicted, if it is not resident
    dead: np.ndarray  # [V] the program has freed it
    pins: np.ndarray  # [V] operations that wait for it
    accessed: np.ndarray  # [V] time
    node: np.ndarray  # [V] of an evicted value, in the union-find of evictions
    parent: np.ndarray  # [evictions]
    set_cost: np.ndarray  # [evictions] of the set with this root
    stamp: np.ndarray  # [N] the last search that met the operation
    todo: np.ndarray  # [V] scratch
    used: np.ndarray  # [1] bytes
    searches: np.ndarray  # [1]
    nodes: np.ndarray  # [1] used
    order: np.ndarray  # [most] computations
    stack: np.ndarray  # [N + 1] scratch


def run_online(
    graph: Graph, budget_bytes: int, heuristic: str, seed: int, most: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> OnlineRun:  # fmt: skip
    """Run the graph's operations in order within a budget; what is missing is computed again.

    The program frees a value after its last use; what is computed again for another operation is freed after that. A
    value to keep is there at the end.

    Args:
        heuristic: one of `NAMES`.
        most: computations, at which the run is given up.
        should_stop: is asked after each few operations.
    """
    n, v = len(graph), len(graph.values)
    last = [
        -1 if value.keep else max(users, default=p)
        for value, users, p in zip(graph.values, graph.users, graph.producer, strict=True)
    ]
    net = GraphArrays.of(graph)
    evictions = most * max((len(op.outputs) for op in graph.operations), default=0) + v

    def zeros(length: int, dtype: Any = np.int64) -> np.ndarray:
        return np.zeros(length, dtype=dtype)

    state = _State(
        np.array(last), net.run_once.copy(),
        zeros(v, np.bool_), zeros(v, np.bool_), zeros(v, np.bool_), zeros(v), zeros(v, np.float64), zeros(v),
        np.arange(evictions), zeros(evictions, np.float64), zeros(n), zeros(v + 1), zeros(1), zeros(1), zeros(1),
        zeros(most), zeros(n + 1),
    )  # fmt: skip
    room, order, done, clock = budget_bytes - graph.fixed_bytes, state.order, 0, 1.0
    for at in range(0, n + v, CHUNK):
        if should_stop():
            return OnlineRun(order[:done], min(at, n - 1), is_stopped=True)
        span = at, min(at + CHUNK, n + v)
        done, clock, failed_at = evict_online(net, state, room, NAMES[heuristic], seed, span, done, clock)
        if failed_at >= 0:
            return OnlineRun(order[:done], failed_at)
    return OnlineRun(order[:done], -1)


def online_plan(graph: Graph, budget_bytes: int, should_stop: Callable[[], bool] = lambda: False) -> Plan | None:
    """The run's plan in stages, which may need more than the budget; None if the run repeats too much or is stopped."""
    run = run_online(graph, budget_bytes, "exact", 0, MOST_COMPUTATIONS * len(graph), should_stop)
    return None if run.failed_at >= 0 else Plan.from_order(graph, in_stages(run.order.tolist()), budget_bytes)


def in_stages(order: Sequence[int]) -> list[int]:
    """The order with what runs again between two first runs sorted, each operation once: a staged one."""
    staged: list[int] = []
    again, seen = set[int](), set[int]()
    for k in order:
        if k in seen:
            again.add(k)
            continue
        seen.add(k)
        staged += [*sorted(again), k]
        again.clear()
    return staged + sorted(again)


@numba.njit(cache=True, nogil=True)
def evict_online(
    net: Any, state: Any, room: int, heuristic: int, seed: int, span: tuple[int, int], done: int, clock: float
) -> tuple[int, float, int]:  # fmt: skip
    """Go on with a run whose first `done` computations are there, and whose time is `clock`.

    Args:
        span: (first, end): of the program's operations, then of the values that it keeps.

    Returns:
        (done, clock, operation for which memory could not be found or -1).
    """
    n_operations, order, stack = len(net.cost), state.order, state.stack
    if span[0] == 0:
        np.random.seed(seed)  # noqa: NPY002 - compiled code has this generator
    for at in range(span[0], span[1]):
        top = at if at < n_operations else net.producer[at - n_operations]
        if at >= n_operations:
            v = at - n_operations
            if state.last[v] >= 0:
                continue
            state.pins[v] += 1
            if state.resident[v]:
                continue
        stack[0], depth = top, 1
        _pin_inputs(net, state, top)
        while depth:
            k = stack[depth - 1]
            missing = _missing(net, state, k)
            if missing >= 0:
                if state.stays[missing] and missing != at:
                    return done, clock, k
                stack[depth] = missing
                depth += 1
                _pin_inputs(net, state, missing)
                continue
            if done == len(order) or not _make_room(net, state, k, room, heuristic, clock):
                return done, clock, k
            order[done] = k
            done += 1
            clock += net.cost[k]
            _compute(net, state, k, clock)
            depth -= 1
            _release(net, state, k, at == k, clock)
    return done, clock, -1


@numba.njit(cache=True)
def _pin_inputs(net: Any, state: Any, k: int) -> None:
    for j in range(net.in_start[k], net.in_start[k + 1]):
        state.pins[net.in_ids[j]] += 1


@numba.njit(cache=True)
def _missing(net: Any, state: Any, k: int) -> int:
    """The operation that makes an input which is not resident; -1 if all are."""
    for j in range(net.in_start[k], net.in_start[k + 1]):
        if not state.resident[net.in_ids[j]]:
            return net.producer[net.in_ids[j]]
    return -1


@numba.njit(cache=True)
def _make_room(net: Any, state: Any, k: int, room: int, heuristic: int, clock: float) -> bool:
    """Evict until operation k fits; whether it does."""
    need = net.workspace_bytes[k]
    for j in range(net.out_start[k], net.out_start[k + 1]):
        if not state.resident[net.out_ids[j]]:
            need += net.size_bytes[net.out_ids[j]]
    while state.used[0] + need > room:
        least, chosen = np.inf, -1
        for v in range(len(net.size_bytes)):
            p = net.producer[v]
            if state.resident[v] and not state.pins[v] and net.size_bytes[v] and not state.stays[p] and p != k:
                h = _worth(net, state, v, heuristic, clock)
                if h < least:
                    least, chosen = h, v
        if chosen < 0:
            return False
        _drop(net, state, chosen)
    return True


@numba.njit(cache=True)
def _worth(net: Any, state: Any, v: int, heuristic: int, clock: float) -> float:
    """What the heuristic holds against evicting a value."""
    if heuristic == RANDOM:
        return np.random.random()  # noqa: NPY002
    if heuristic == LRU:
        return state.accessed[v]
    if heuristic == SIZE:
        return -net.size_bytes[v]
    cost = float(net.cost[net.producer[v]])
    if heuristic == EXACT:
        cost += _evicted_around(net, state, v)
    elif heuristic == UNION:
        cost += _sets_around(net, state, v)
    return cost / (net.size_bytes[v] * (clock - state.accessed[v] + 1e-9))


@numba.njit(cache=True)
def _evicted_around(net: Any, state: Any, v: int) -> float:
    """Cost of the operations of evicted ancestors and descendants, through evicted values only."""
    state.searches[0] += 1
    search, cost = state.searches[0], 0.0
    state.stamp[net.producer[v]] = search
    for up in (True, False):
        state.todo[0], length = v, 1
        while length:
            length -= 1
            x = state.todo[length]
            if up:
                p = net.producer[x]
                for j in range(net.in_start[p], net.in_start[p + 1]):
                    y = net.in_ids[j]
                    if not state.resident[y] and state.stamp[net.producer[y]] != search:
                        state.stamp[net.producer[y]] = search
                        cost += net.cost[net.producer[y]]
                        state.todo[length] = y
                        length += 1
            else:
                for j in range(net.use_start[x], net.use_start[x + 1]):
                    u = net.use_ids[j]
                    for i in range(net.out_start[u], net.out_start[u + 1]):
                        y = net.out_ids[i]
                        if state.known[y] and not state.resident[y] and state.stamp[u] != search:
                            state.stamp[u] = search
                            cost += net.cost[u]
                            state.todo[length] = y
                            length += 1
    return cost


@numba.njit(cache=True)
def _neighbours(net: Any, state: Any, v: int) -> int:
    """Evicted values next to a value, into `todo`; returns how many."""
    length, p = 0, net.producer[v]
    for j in range(net.in_start[p], net.in_start[p + 1]):
        if not state.resident[net.in_ids[j]]:
            state.todo[length] = net.in_ids[j]
            length += 1
    for j in range(net.use_start[v], net.use_start[v + 1]):
        u = net.use_ids[j]
        for i in range(net.out_start[u], net.out_start[u + 1]):
            y = net.out_ids[i]
            if state.known[y] and not state.resident[y] and length < len(state.todo):
                state.todo[length] = y
                length += 1
    return length


@numba.njit(cache=True)
def _root(state: Any, v: int) -> int:
    at = state.node[v]
    while state.parent[at] != at:
        state.parent[at] = state.parent[state.parent[at]]
        at = state.parent[at]
    return at


@numba.njit(cache=True)
def _sets_around(net: Any, state: Any, v: int) -> float:
    """Cost of the sets of evicted values next to a value."""
    cost, length = 0.0, _neighbours(net, state, v)
    for i in range(length):
        root = _root(state, state.todo[i])
        seen = False
        for j in range(i):
            seen |= _root(state, state.todo[j]) == root
        if not seen:
            cost += state.set_cost[root]
    return cost


@numba.njit(cache=True)
def _join(net: Any, state: Any, v: int) -> None:
    """Make one set of a value that is evicted now and the evicted ones next to it."""
    state.node[v] = state.nodes[0]
    state.nodes[0] += 1
    state.set_cost[state.node[v]] = net.cost[net.producer[v]]
    for i in range(_neighbours(net, state, v)):
        root, own = _root(state, state.todo[i]), _root(state, v)
        if root != own:
            state.parent[root] = own
            state.set_cost[own] += state.set_cost[root]


@numba.njit(cache=True)
def _compute(net: Any, state: Any, k: int, clock: float) -> None:
    for j in range(net.out_start[k], net.out_start[k + 1]):
        v = net.out_ids[j]
        if not state.resident[v]:
            state.resident[v] = True
            state.used[0] += net.size_bytes[v]
            if state.known[v]:  # a set is never split; its cost becomes smaller
                state.set_cost[_root(state, v)] -= net.cost[k]
        state.known[v] = True
        state.accessed[v] = clock


@numba.njit(cache=True)
def _release(net: Any, state: Any, k: int, is_program: bool, clock: float) -> None:
    """Let go of an operation's inputs, and of what the program frees after it."""
    for j in range(net.in_start[k], net.in_start[k + 1]):
        state.pins[net.in_ids[j]] -= 1
        state.accessed[net.in_ids[j]] = clock
        _free(net, state, net.in_ids[j], k, is_program)
    for j in range(net.out_start[k], net.out_start[k + 1]):
        _free(net, state, net.out_ids[j], k, is_program)


@numba.njit(cache=True)
def _free(net: Any, state: Any, v: int, k: int, is_program: bool) -> None:
    state.dead[v] |= is_program and state.last[v] == k
    may_go = state.dead[v] and not state.pins[v] and state.resident[v]
    if may_go and (not state.stays[net.producer[v]] or _is_unneeded(net, state, v)):
        _drop(net, state, v)


@numba.njit(cache=True)
def _is_unneeded(net: Any, state: Any, v: int) -> bool:
    """Whether what was made from a value that cannot be made again is there; if so, it must not be evicted any more."""
    for mark in (False, True):
        for j in range(net.use_start[v], net.use_start[v + 1]):
            u = net.use_ids[j]
            for i in range(net.out_start[u], net.out_start[u + 1]):
                y = net.out_ids[i]
                if state.dead[y]:
                    continue
                if not state.resident[y]:
                    return False
                state.stays[u] |= mark
    return True


@numba.njit(cache=True)
def _drop(net: Any, state: Any, v: int) -> None:
    state.resident[v] = False
    state.used[0] -= net.size_bytes[v]
    _join(net, state, v)
