"""XLA's walk over a sequence of operations: where memory exceeds the limit, it moves or repeats earlier ones, compiled.

A *run* is one computation of an operation in the sequence; runs 0 .. N - 1 are the graph's operations, repeats follow.
A *copy* is a value as one run makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np

from remat import Graph
from remat.arrays import GraphArrays

MOST = 4  # runs for each operation, on average
WALKING, ENDED, STUCK = range(3)
CHUNK = 20  # choices between two looks at the clock
CURRENT, LEAST, MOST_RUNS, FIRST_EFFORT, LATER_EFFORT, USED, N_RUNS, N_READS, N_COPIES, STAMP = range(10)


class _State(NamedTuple):
    """The sequence so far. Runs have arrays [R], copies [C]."""

    slots: np.ndarray  # [users of values] which of the user's inputs the value is
    stays: np.ndarray  # [N] may not run again, or makes a value that the step keeps
    operation: np.ndarray  # [R]
    before: np.ndarray  # [R + 1] the neighbours in the sequence; the last place is both of its ends
    after: np.ndarray
    same: np.ndarray  # [R] an earlier run of the operation, or -1
    newest: np.ndarray  # [N] the latest run of each operation
    placed: np.ndarray  # [R] the walk has reached it
    denied: np.ndarray  # [R] may not be moved again
    moved: np.ndarray  # [R] it replaces a run that nobody reads
    first_read: np.ndarray  # [R] start in `reads`
    first_copy: np.ndarray  # [R]
    reads: np.ndarray  # the copies that a run reads, in the order of its operation's inputs
    run: np.ndarray  # [C] which makes the copy
    value: np.ndarray  # [C]
    to_come: np.ndarray  # [C] reads that the walk has not finished
    been: np.ndarray  # [C] reads by runs that the walk has reached
    mark: np.ndarray  # [R] scratch: stamps
    at: np.ndarray  # the walk's own numbers, see the constants


def walk(
    graph: Graph, room: int, block_size: int, block_factor: int, moves_first: bool, keep_on: Callable[[], bool]
) -> list[int] | None:
    """The operations in a sequence that keeps within `room` bytes by XLA's count; None if it finds none.

    Args:
        block_size, block_factor: see `xla_greedy`.
        moves_first: whether an operation may run later than in the graph, if no run of it has been read.
        keep_on: asked now and then; the walk is given up when it says no.
    """
    net = GraphArrays.of(graph)
    state = _start(graph, net, MOST * len(graph))
    status = WALKING
    while status == WALKING:
        if not keep_on():
            return None
        status = advance(net, state, room, block_size, block_factor, moves_first)
    return _sequence(graph, state, moves_first) if status == ENDED else None


def _start(graph: Graph, net: GraphArrays, most: int) -> _State:
    """The graph's own sequence; the walk has not begun."""
    n, n_values = len(graph), len(graph.values)

    def none(length: int) -> np.ndarray:
        return np.full(length, -1, dtype=np.int64)

    def no(length: int, dtype: Any = np.bool_) -> np.ndarray:
        return np.zeros(length, dtype=dtype)

    widest = max((len(op.inputs) + len(op.outputs) for op in graph.operations), default=0)
    n_reads, n_copies = MOST * len(net.in_ids) + widest, MOST * n_values + widest
    slots = [graph.operations[u].inputs.index(v) for v, readers in enumerate(graph.users) for u in readers]
    stays = [op.run_once or any(graph.values[v].keep for v in op.outputs) for op in graph.operations]
    state = _State(
        np.array(slots, dtype=np.int64), np.array(stays),
        none(most), none(most + 1), none(most + 1), none(most), np.arange(n), no(most), no(most), no(most), none(most),
        none(most), none(n_reads), none(n_copies), none(n_copies), no(n_copies, np.int64), no(n_copies, np.int64),
        no(most, np.int64), no(10, np.int64),
    )  # fmt: skip
    sequence = [*range(n), most]
    state.operation[:n], state.first_read[:n] = np.arange(n), net.in_start[:-1]
    state.first_copy[:n] = net.out_start[:-1]
    state.before[sequence], state.after[[most, *range(n)]] = [most, *range(n)], sequence
    copy_of = np.empty(n_values, dtype=np.int64)
    copy_of[net.out_ids] = np.arange(n_values)
    state.reads[: len(net.in_ids)] = copy_of[net.in_ids]
    state.run[:n_values] = np.repeat(np.arange(n), np.diff(net.out_start))
    state.value[:n_values] = net.out_ids
    state.to_come[:n_values] = np.diff(net.use_start)[net.out_ids]
    state.to_come[:n_values] += np.array([graph.values[v].keep for v in net.out_ids], dtype=np.int64)
    state.at[[CURRENT, LEAST, MOST_RUNS, N_RUNS]] = most, 1, 1, n
    state.at[[N_READS, N_COPIES]] = len(net.in_ids), n_values
    return state


def _sequence(graph: Graph, state: _State, moves_first: bool) -> list[int]:
    """The operations of the sequence, without runs that nobody reads."""
    order: list[int] = []
    wanted, seen = set[int](), set[int]()
    end = len(state.operation)
    run = int(state.before[end])
    while run != end:
        op = graph.operations[k := int(state.operation[run])]
        copies = range(int(state.first_copy[run]), int(state.first_copy[run]) + len(op.outputs))
        is_first = run < len(graph) and not (moves_first and k in seen)
        if is_first or not wanted.isdisjoint(copies):
            order.append(k)
            seen.add(k)
            start = int(state.first_read[run])
            wanted.update(state.reads[start : start + len(op.inputs)].tolist())
        run = int(state.before[run])
    return order[::-1]


@numba.njit(cache=True)
def advance(net: Any, state: Any, room: int, block_size: int, factor: int, moves_first: bool) -> int:
    """Go on until the end, or where nothing helps, or for `CHUNK` choices."""
    at, end = state.at, len(state.operation)
    choices = 0
    while True:
        run = at[CURRENT]
        while run != end and at[USED] + net.workspace_bytes[state.operation[run]] > room:
            if choices == CHUNK:
                return WALKING
            choices += 1
            start, length, effort = _best_block(net, state, room, moves_first)
            first_phase = at[LEAST] == 1 and at[LATER_EFFORT] == 0
            at[FIRST_EFFORT if first_phase else LATER_EFFORT] += effort
            if length and not _repeat(net, state, start, length):
                return STUCK
            at[LEAST], at[MOST_RUNS] = (1, 1) if length else (at[MOST_RUNS] + 1, 2 * at[MOST_RUNS])
            is_over = at[USED] + net.workspace_bytes[state.operation[run]] > room
            if is_over and (at[MOST_RUNS] > block_size or at[LATER_EFFORT] > factor * at[FIRST_EFFORT]):
                return STUCK
        if run != end:
            _finish(net, state, run)
        at[CURRENT] = run = state.after[run]
        if run == end:
            return ENDED
        at[LEAST], at[MOST_RUNS], at[FIRST_EFFORT], at[LATER_EFFORT] = 1, 1, 0, 0
        _begin(net, state, run)


@numba.njit(cache=True)
def _begin(net: Any, state: Any, run: int) -> None:
    k = state.operation[run]
    state.placed[run] = True
    for j in range(net.out_start[k + 1] - net.out_start[k]):
        state.at[USED] += net.size_bytes[state.value[state.first_copy[run] + j]]
    for j in range(net.in_start[k + 1] - net.in_start[k]):
        state.been[state.reads[state.first_read[run] + j]] += 1


@numba.njit(cache=True)
def _finish(net: Any, state: Any, run: int) -> None:
    """Free what nobody reads any more."""
    k = state.operation[run]
    for j in range(net.in_start[k + 1] - net.in_start[k]):
        copy = state.reads[state.first_read[run] + j]
        state.to_come[copy] -= 1
        if not state.to_come[copy]:
            state.at[USED] -= net.size_bytes[state.value[copy]]
    for j in range(net.out_start[k + 1] - net.out_start[k]):
        copy = state.first_copy[run] + j
        if not state.to_come[copy]:
            state.at[USED] -= net.size_bytes[state.value[copy]]


@numba.njit(cache=True)
def _best_block(net: Any, state: Any, room: int, moves_first: bool) -> tuple[int, int, int]:
    """(first run, length, number of blocks looked at) of the block with the least cost; length 0 if none helps."""
    at, end = state.at, len(state.operation)
    best, least_cost, length, effort = -1, 0, 0, 0
    start = state.after[end]
    while start != end:
        at[STAMP] += 1
        run, size, saved, is_move = start, 0, 0, True
        while size < at[MOST_RUNS] and run not in (end, at[CURRENT]) and not state.denied[run]:
            bytes_saved = _saved(net, state, run)
            if bytes_saved == _NEVER:
                break
            saved += bytes_saved
            is_move &= (moves_first or run >= len(net.workspace_bytes)) and not _is_read(net, state, run)
            state.mark[run] = at[STAMP]
            size += 1
            if size >= at[LEAST]:
                effort += 1
                if saved > 0:
                    cost = 0 if is_move else room // saved
                    if best < 0 or cost < least_cost:
                        best, least_cost, length = start, cost, size
            run = state.after[run]
        if start == at[CURRENT]:
            break
        start = state.after[start]
    return best, length, effort


_NEVER = np.iinfo(np.int64).min


@numba.njit(cache=True)
def _saved(net: Any, state: Any, run: int) -> int:
    """Bytes that go if the run is repeated later, less those that have to stay for it; `_NEVER` if it may not be."""
    k, current = state.operation[run], state.at[CURRENT]
    if state.stays[k]:
        return _NEVER
    saved = 0
    now = state.operation[current]
    for j in range(net.out_start[k + 1] - net.out_start[k]):
        copy = state.first_copy[run] + j
        for i in range(net.in_start[now + 1] - net.in_start[now]):
            if state.reads[state.first_read[current] + i] == copy:
                return _NEVER
        if state.to_come[copy]:
            saved += net.size_bytes[state.value[copy]]
    for j in range(net.in_start[k + 1] - net.in_start[k]):
        copy = state.reads[state.first_read[run] + j]
        if not state.to_come[copy] and state.mark[state.run[copy]] != state.at[STAMP]:
            saved -= net.size_bytes[state.value[copy]]
    return saved


@numba.njit(cache=True)
def _is_read(net: Any, state: Any, run: int) -> bool:
    k = state.operation[run]
    reads = 0
    for j in range(net.out_start[k + 1] - net.out_start[k]):
        reads += state.been[state.first_copy[run] + j]
    return reads > 0


@numba.njit(cache=True)
def _repeat(net: Any, state: Any, start: int, length: int) -> bool:
    """Repeat a block for all reads to come, the last run first; False if there is no place for more runs."""
    run = start
    for _ in range(length - 1):
        run = state.after[run]
    for _ in range(length):
        earlier = state.before[run]
        k, wanted = state.operation[run], False
        for j in range(net.out_start[k + 1] - net.out_start[k]):
            wanted |= state.to_come[state.first_copy[run] + j] > 0
        if wanted:
            n_reads = state.at[N_READS] + net.in_start[k + 1] - net.in_start[k]
            n_copies = state.at[N_COPIES] + net.out_start[k + 1] - net.out_start[k]
            is_full = state.at[N_RUNS] == len(state.operation)
            if is_full or n_reads > len(state.reads) or n_copies > len(state.run):
                return False
            _repeat_one(net, state, run)
        run = earlier
    return True


@numba.njit(cache=True)
def _repeat_one(net: Any, state: Any, run: int) -> None:
    at, k = state.at, state.operation[run]
    new = at[N_RUNS]
    at[N_RUNS] += 1
    at[STAMP] += 1
    state.operation[new] = k
    state.first_read[new], state.first_copy[new] = at[N_READS], at[N_COPIES]
    for j in range(net.in_start[k + 1] - net.in_start[k]):
        copy = state.reads[state.first_read[run] + j]
        state.reads[at[N_READS]] = copy
        at[N_READS] += 1
        if not state.to_come[copy]:
            at[USED] += net.size_bytes[state.value[copy]]
        state.to_come[copy] += 1
        _each_read(net, state, copy, -1)  # before these, so that no input stays longer for the new run
    for j in range(net.out_start[k + 1] - net.out_start[k]):
        copy, made = state.first_copy[run] + j, at[N_COPIES]
        at[N_COPIES] += 1
        state.run[made], state.value[made] = new, state.value[copy]
        state.to_come[made] = state.to_come[copy]
        if state.to_come[copy]:
            at[USED] -= net.size_bytes[state.value[copy]]
        state.to_come[copy] = 0
        _each_read(net, state, copy, made)
    state.same[new], state.newest[k] = state.newest[k], new
    place = state.after[at[CURRENT]]
    while state.mark[place] != at[STAMP]:
        place = state.after[place]
    state.before[new], state.after[new] = state.before[place], place
    state.after[state.before[place]] = new
    state.before[place] = new
    if not _is_read(net, state, run):
        state.denied[new] = state.moved[run]
        state.moved[new] = True


@numba.njit(cache=True)
def _each_read(net: Any, state: Any, copy: int, instead: int) -> None:
    """Mark the runs to come that read a copy, and let them read another one instead, if given."""
    v = state.value[copy]
    for j in range(net.use_start[v], net.use_start[v + 1]):
        run = state.newest[net.use_ids[j]]
        while run >= 0:
            slot = state.first_read[run] + state.slots[j]
            if not state.placed[run] and state.reads[slot] == copy:
                state.mark[run] = state.at[STAMP]
                if instead >= 0:
                    state.reads[slot] = instead
            run = state.same[run]
