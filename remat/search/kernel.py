"""Compiled moves on retention intervals: each keeps the plan consistent and can be undone exactly.

Three moves change a staged plan. *drop* frees a value between two of its uses and computes it again at the later
one. *fill* holds a value over such a gap and removes the repeat. *shift* moves a repeat to an earlier stage. Each
move completes its consequences: it computes missing ancestors, removes repeats that nothing needs any more and ends
intervals at their last use. Only the stages that it touches are replayed; in between, memory changes by the value's
bytes.

This is one file on purpose: the cache of compiled code checks only the file of a function. It would not notice that
a constant changed in another file. After a change of `GraphArrays`, and of `last_use` or `next_use`, which
`remat.search.sequence` uses too, empty the cache.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np
from numba import njit, types
from numba.experimental import structref

from remat.arrays import GraphArrays
from remat.randomness import below, uniform

# Places in `State.scalar`.
(
    ARENA_TOP, LOG_TOP, COST, EXCESS, BUDGET, STAMP, N_QUEUE, N_SEEDS, ABORT, SNAPSHOT,
    START_COST, START_EXCESS, SEEKING, WINDOW_MOVES, WINDOW_OVER, WINDOW_EXCESS,
) = range(16)  # fmt: skip
N_SCALARS = 16
# Places in `State.real`: how much worse the move may be, the price of a byte above the budget, and
# how much further a move may follow a chain of repeats before it is given up.
ALLOWED, PRICE, SLACK = range(3)
N_REALS = 3
# The price follows the share of moves that begin above the budget; it does not rise while the excess falls fast.
PRICE_WINDOW, MANY_OVER, FEW_OVER, FAST = 256, 0.85, 0.7, 0.05
FEW_MISSING = 2  # up to this many absent inputs of the repeat, a drop is always tried
LARGE = 1000  # operations; in larger graphs fewer long moves are followed to their end
FOLLOW_ALL = 0.2  # share of moves that are followed to their end, because some pay only there


# Arrays only, so that compiled code can take it whole; N operations (and stages), V values. The graph's come first.
#     intervals: [V, 2 C] int32, pairs (a, b), ascending; n_intervals: [V].
#     runs: [N, C] int32, stages in which an operation runs, ascending; n_runs: [N].
#     list_start, list_length, list_room: [N], place of a stage's operations in `arena`.
#     through: [N] int64, bytes resident both when the stage starts and when it ends.
#     peak: [N] int64, most bytes held in the stage; stage_cost: [N] int64.
#     log: the state before the move, for undoing it.
#     queue, queued: stages to bring up to date; seeds: pairs (stage, operation) that must run.
#     random: [1] uint64, the generator's state.
#     scalar: [N_SCALARS] int64; real: [N_REALS] float64.
#     order: the best plan's computations; the others are working space.
State = namedtuple(
    "State",
    (
        *GraphArrays._fields, "intervals", "n_intervals", "runs", "n_runs", "list_start", "list_length", "list_room",
        "arena", "through", "peak", "stage_cost", "log", "queue", "queued", "seeds", "random", "scalar", "real",
        "order", "scratch_stack", "scratch_list", "mark_op", "mark_value", "last_use", "residence", "logged_value",
        "logged_op",
    ),
)  # fmt: skip


@structref.register
class StateType(types.StructRef):
    """Numba's type of a state that is passed by reference, because a tuple of arrays is copied at every call."""

    def preprocess_fields(self, fields: Any) -> Any:
        return tuple((name, types.unliteral(kind)) for name, kind in fields)


class ByReference:
    """`State` inside compiled code, which builds it from the tuple; never built in Python."""


structref.define_constructor(ByReference, StateType, list(State._fields))


NOT_RESIDENT, THROUGH, ENDS_HERE = 0, 1, 2
LOG_VALUE, LOG_OP, LOG_LIST, LOG_RANGE, LOG_STAGE = 0, 1, 2, 3, 4
_compiled: Any = njit(cache=True, nogil=True)


# ---- looking things up ------------------------------------------------------------------------


@_compiled
def _covering(s: State, v: int, t: int) -> int:
    """Index of the interval that holds value v at the start of stage t, or -1."""
    for j in range(s.n_intervals[v]):
        if s.intervals[v, 2 * j] < t <= s.intervals[v, 2 * j + 1]:
            return j
    return -1


@_compiled
def _starting(s: State, v: int, t: int) -> int:
    """Index of the interval of v that starts in stage t, or -1."""
    for j in range(s.n_intervals[v]):
        if s.intervals[v, 2 * j] == t:
            return j
    return -1


@_compiled
def last_use(s: State, v: int, low: int, high: int) -> int:
    """Last stage (or slot) in (low, high) that reads v, or `low`."""
    found = low
    for e in range(s.use_start[v], s.use_start[v + 1]):
        u = s.use_ids[e]
        for j in range(s.n_runs[u] - 1, -1, -1):
            if s.runs[u, j] < high:
                found = max(found, s.runs[u, j])
                break
    return found


@_compiled
def next_use(s: State, v: int, low: int, high: int) -> int:
    """First stage (or slot) in (low, high) that reads v, or `high`."""
    found = high
    for e in range(s.use_start[v], s.use_start[v + 1]):
        u = s.use_ids[e]
        for j in range(s.n_runs[u]):
            if s.runs[u, j] > low:
                found = min(found, s.runs[u, j])
                break
    return found


@_compiled
def _computed_before(s: State, k: int, t: int) -> int:
    """Last stage before t in which operation k runs, or -1."""
    for j in range(s.n_runs[k] - 1, -1, -1):
        if s.runs[k, j] < t:
            return s.runs[k, j]
    return -1


@_compiled
def _is_computed(s: State, k: int, t: int) -> bool:
    found = False
    for j in range(s.n_runs[k]):  # compiled code knows no any()
        found = found or s.runs[k, j] == t
    return found


@_compiled
def _is_read(s: State, v: int, t: int) -> bool:
    found = False
    for e in range(s.use_start[v], s.use_start[v + 1]):
        found = found or _is_computed(s, s.use_ids[e], t)
    return found


@_compiled
def _is_needed(s: State, v: int, t: int) -> bool:
    """Whether stage t reads v or v is held from there on."""
    return _starting(s, v, t) >= 0 or _is_read(s, v, t)


# ---- the log -----------------------------------------------------------------------------------


@_compiled
def _log_room(s: State, n: int) -> bool:
    """Whether n numbers and two more fit into the log; if not, the move is given up."""
    if s.scalar[LOG_TOP] + n + 2 > len(s.log):
        s.scalar[ABORT] = 1
        return False
    return True


@_compiled
def _row(s: State, kind: int, i: int) -> np.ndarray:
    """The numbers that an entry of this kind saves, and beyond them."""
    if kind == LOG_VALUE:
        return s.intervals[i]
    if kind == LOG_OP:
        return s.runs[i]
    return s.arena[s.list_start[i] :]


@_compiled
def _log_row(s: State, kind: int, i: int, n: int) -> bool:
    if not _log_room(s, n + 2):
        return False
    row, top = _row(s, kind, i), s.scalar[LOG_TOP]
    for j in range(n):
        s.log[top + j] = row[j]
    s.log[top + n], s.log[top + n + 1], s.log[top + n + 2] = i, n, kind
    s.scalar[LOG_TOP] = top + n + 3
    return True


@_compiled
def _log_value(s: State, v: int) -> bool:
    if s.logged_value[v] == s.scalar[SNAPSHOT]:
        return True
    s.logged_value[v] = s.scalar[SNAPSHOT]
    return _log_row(s, LOG_VALUE, v, 2 * s.n_intervals[v])


@_compiled
def _log_op(s: State, k: int) -> bool:
    if s.logged_op[k] == s.scalar[SNAPSHOT]:
        return True
    s.logged_op[k] = s.scalar[SNAPSHOT]
    return _log_row(s, LOG_OP, k, s.n_runs[k])


@_compiled
def _log_stage(s: State, t: int) -> bool:
    if not _log_room(s, 5):
        return False
    top = s.scalar[LOG_TOP]
    s.log[top], s.log[top + 1], s.log[top + 2] = s.through[t], s.peak[t], s.stage_cost[t]
    s.log[top + 3], s.log[top + 4] = t, LOG_STAGE
    s.scalar[LOG_TOP] = top + 5
    return True


@_compiled
def _set_list(s: State, t: int, items: np.ndarray, n: int) -> bool:
    if n > s.list_room[t]:
        room = n + n // 2 + 4
        if s.scalar[ARENA_TOP] + room > len(s.arena):
            s.scalar[ABORT] = 1
            return False
        s.list_start[t], s.list_room[t] = s.scalar[ARENA_TOP], room
        s.scalar[ARENA_TOP] += room
    for j in range(n):
        s.arena[s.list_start[t] + j] = items[j]
    s.list_length[t] = n
    return True


@_compiled
def _undo(s: State) -> None:
    """Undo the move."""
    top = s.scalar[LOG_TOP]
    while top > 0:
        kind = s.log[top - 1]
        if kind == LOG_STAGE:
            t = s.log[top - 2]
            s.through[t], s.peak[t], s.stage_cost[t] = s.log[top - 5], s.log[top - 4], s.log[top - 3]
            top -= 5
        elif kind == LOG_RANGE:
            delta = s.log[top - 2]
            for t in range(s.log[top - 4], s.log[top - 3]):
                s.through[t] -= delta
                s.peak[t] -= delta
            top -= 4
        else:
            n, i = s.log[top - 2], s.log[top - 3]
            top -= n + 3
            row = _row(s, kind, i)  # a stage's old list fits, because its room never shrinks
            for j in range(n):
                row[j] = s.log[top + j]
            if kind == LOG_VALUE:
                s.n_intervals[i] = n // 2
            elif kind == LOG_OP:
                s.n_runs[i] = n
            else:
                s.list_length[i] = n
    s.scalar[COST], s.scalar[EXCESS] = s.scalar[START_COST], s.scalar[START_EXCESS]
    for i in range(s.scalar[N_QUEUE]):
        s.queued[s.queue[i]] = False
    s.scalar[N_QUEUE] = 0


# ---- elementary changes ------------------------------------------------------------------------


@_compiled
def _touch(s: State, t: int) -> None:
    """Queue stage t, so that `_settle` brings it up to date."""
    if t < len(s.peak) and not s.queued[t]:
        s.queued[t] = True
        s.queue[s.scalar[N_QUEUE]] = t
        s.scalar[N_QUEUE] += 1


@_compiled
def _seed(s: State, t: int, k: int) -> None:
    """Make operation k run in stage t when the stage is next brought up to date."""
    if s.scalar[N_SEEDS] >= len(s.seeds):
        s.scalar[ABORT] = 1
        return
    s.seeds[s.scalar[N_SEEDS], 0] = t
    s.seeds[s.scalar[N_SEEDS], 1] = k
    s.scalar[N_SEEDS] += 1


@_compiled
def _shift_range(s: State, first: int, last: int, delta: int) -> bool:
    """Add `delta` to the bytes resident throughout stages first .. last - 1."""
    last = min(last, len(s.peak))
    if delta == 0 or first >= last:
        return True
    if not _log_room(s, 4):
        return False
    top = s.scalar[LOG_TOP]
    s.log[top], s.log[top + 1], s.log[top + 2], s.log[top + 3] = first, last, delta, LOG_RANGE
    s.scalar[LOG_TOP] = top + 4
    budget, change = s.scalar[BUDGET], 0
    for t in range(first, last):
        s.through[t] += delta
        before = s.peak[t]
        s.peak[t] = before + delta
        change += max(before + delta - budget, 0) - max(before - budget, 0)
    s.scalar[EXCESS] += change
    return True


@_compiled
def _remove_interval(s: State, v: int, j: int) -> None:
    for i in range(2 * j, 2 * s.n_intervals[v] - 2):
        s.intervals[v, i] = s.intervals[v, i + 2]
    s.n_intervals[v] -= 1


@_compiled
def _insert_interval(s: State, v: int, a: int, b: int) -> bool:
    n = s.n_intervals[v]
    if 2 * n + 2 > s.intervals.shape[1]:
        s.scalar[ABORT] = 1
        return False
    j = 2 * n
    while j > 0 and s.intervals[v, j - 2] > a:
        s.intervals[v, j], s.intervals[v, j + 1] = s.intervals[v, j - 2], s.intervals[v, j - 1]
        j -= 2
    s.intervals[v, j], s.intervals[v, j + 1] = a, b
    s.n_intervals[v] = n + 1
    return True


@_compiled
def _insert_computed(s: State, k: int, t: int) -> bool:
    n = s.n_runs[k]
    if n == s.runs.shape[1] or not _log_op(s, k):
        s.scalar[ABORT] = 1
        return False
    j = n
    while j > 0 and s.runs[k, j - 1] > t:
        s.runs[k, j] = s.runs[k, j - 1]
        j -= 1
    s.runs[k, j] = t
    s.n_runs[k] = n + 1
    return True


@_compiled
def _remove_computed(s: State, k: int, t: int) -> bool:
    if not _log_op(s, k):
        return False
    n, j = s.n_runs[k], 0
    while s.runs[k, j] != t:
        j += 1
    for i in range(j, n - 1):
        s.runs[k, i] = s.runs[k, i + 1]
    s.n_runs[k] = n - 1
    return True


@_compiled
def _trim(s: State, v: int, t: int) -> bool:
    """End the interval of v that ends in stage t, where v is no longer used, at its last use."""
    j = _covering(s, v, t)
    if j < 0 or s.intervals[v, 2 * j + 1] != t:
        return True
    if not _log_value(s, v):
        return False
    a = s.intervals[v, 2 * j]
    last = last_use(s, v, a, t)
    if last == a:
        _remove_interval(s, v, j)
    else:
        s.intervals[v, 2 * j + 1] = last
    if not _shift_range(s, last + 1 if last == a else last, t, -s.size_bytes[v]):
        return False
    _touch(s, last)
    return True


# ---- a stage -----------------------------------------------------------------------------------


@_compiled
def _push_if_held(s: State, k: int, t: int, depth: int) -> int:
    """Push operation k if stage t must compute it because an output is held from there on; the depth of the stack."""
    if s.mark_op[k] != s.scalar[STAMP]:
        for e in range(s.out_start[k], s.out_start[k + 1]):
            if _starting(s, s.out_ids[e], t) >= 0:
                s.mark_op[k] = s.scalar[STAMP]
                s.scratch_stack[depth] = k
                return depth + 1
    return depth


@_compiled
def _closure(s: State, t: int) -> int:
    """Write the operations that stage t must compute, ascending, to `scratch_list`; return how many, or -1.

    Afterwards exactly these are marked with the current stamp.
    """
    s.scalar[STAMP] += 1
    stamp, n, depth = s.scalar[STAMP], 0, 1
    s.scratch_stack[0] = t
    s.mark_op[t] = stamp
    for i in range(s.list_length[t]):
        depth = _push_if_held(s, s.arena[s.list_start[t] + i], t, depth)
    for i in range(s.scalar[N_SEEDS]):
        if s.seeds[i, 0] == t:
            depth = _push_if_held(s, s.seeds[i, 1], t, depth)
    # Most moves that repeat a long chain are given up before its end.
    limit = (
        s.real[SLACK]
        + s.real[ALLOWED]
        + s.real[PRICE] * (s.scalar[START_EXCESS] - s.scalar[EXCESS] + max(s.peak[t] - s.scalar[BUDGET], 0))
        + s.scalar[START_COST]
        - s.scalar[COST]
        + s.stage_cost[t]
    )
    cost = 0
    while depth > 0:
        depth -= 1
        k = s.scratch_stack[depth]
        cost += s.cost[k]
        if (s.run_once[k] and k != t) or cost > limit:
            return -1
        s.scratch_list[n] = k
        n += 1
        for e in range(s.in_start[k], s.in_start[k + 1]):
            v = s.in_ids[e]
            p = s.producer[v]
            if s.mark_op[p] != stamp and _covering(s, v, t) < 0:
                s.mark_op[p] = stamp
                s.scratch_stack[depth] = p
                depth += 1
    if n > 24:
        s.scratch_list[:n].sort()
        return n
    for i in range(1, n):
        k, j = s.scratch_list[i], i
        while j > 0 and s.scratch_list[j - 1] > k:
            s.scratch_list[j] = s.scratch_list[j - 1]
            j -= 1
        s.scratch_list[j] = k
    return n


@_compiled
def _profile(s: State, t: int) -> None:
    """Replay stage t for its peak and cost."""
    s.scalar[STAMP] += 1
    stamp = s.scalar[STAMP]
    first, n = s.list_start[t], s.list_length[t]
    held = s.through[t]
    for i in range(n):
        k = s.arena[first + i]
        for side in range(2):
            start, ids = (s.in_start, s.in_ids) if side == 0 else (s.out_start, s.out_ids)
            for e in range(start[k], start[k + 1]):
                v = ids[e]
                if s.mark_value[v] != stamp:
                    s.mark_value[v] = stamp
                    j = _covering(s, v, t)
                    if j < 0:
                        s.residence[v] = NOT_RESIDENT
                    elif s.intervals[v, 2 * j + 1] == t:
                        s.residence[v] = ENDS_HERE
                        held += s.size_bytes[v]
                    else:
                        s.residence[v] = THROUGH
                s.last_use[v] = i
    peak, cost = held, 0
    for i in range(n):
        k = s.arena[first + i]
        during = held + s.workspace_bytes[k]
        for e in range(s.out_start[k], s.out_start[k + 1]):
            v = s.out_ids[e]
            during += s.size_bytes[v]  # a second copy counts while the operation runs
            if s.residence[v] == NOT_RESIDENT and (s.last_use[v] > i or _starting(s, v, t) >= 0):
                held += s.size_bytes[v]
            elif s.residence[v] == ENDS_HERE and s.last_use[v] == i:
                held -= s.size_bytes[v]
        peak = max(peak, during)
        cost += s.cost[k]
        for e in range(s.in_start[k], s.in_start[k + 1]):
            v = s.in_ids[e]
            if (
                s.last_use[v] == i
                and s.residence[v] != THROUGH
                and (s.residence[v] == ENDS_HERE or _starting(s, v, t) < 0)
            ):
                held -= s.size_bytes[v]
    budget = s.scalar[BUDGET]
    s.scalar[EXCESS] += max(peak - budget, 0) - max(s.peak[t] - budget, 0)
    s.scalar[COST] += cost - s.stage_cost[t]
    s.peak[t], s.stage_cost[t] = peak, cost


@_compiled
def _is_list(s: State, t: int, n: int) -> bool:
    """Whether stage t computes the first n operations of `scratch_list` already."""
    same, i = n == s.list_length[t], 0
    while same and i < n:  # compiled code knows no all()
        same = s.arena[s.list_start[t] + i] == s.scratch_list[i]
        i += 1
    return same


@_compiled
def _replace_list(s: State, t: int, n: int) -> bool:
    """Let stage t compute the first n operations of `scratch_list`, which are marked, and end intervals there."""
    stamp, first, n_old = s.scalar[STAMP], s.list_start[t], s.list_length[t]
    if not _log_row(s, LOG_LIST, t, n_old):
        return False
    for i in range(n_old):
        k = s.arena[first + i]
        if s.mark_op[k] != stamp and not _remove_computed(s, k, t):
            return False
    for i in range(n):
        k = s.scratch_list[i]
        if not _is_computed(s, k, t) and not _insert_computed(s, k, t):
            return False
    for i in range(n_old):
        k = s.arena[first + i]
        if s.mark_op[k] != stamp:
            for e in range(s.in_start[k], s.in_start[k + 1]):
                v = s.in_ids[e]
                if not _is_read(s, v, t) and not _trim(s, v, t):
                    return False
    return _set_list(s, t, s.scratch_list, n)


@_compiled
def _update(s: State, t: int) -> bool:
    """Bring stage t up to date: its operations, the intervals that end there, its memory."""
    n = _closure(s, t)
    if n < 0:
        s.scalar[ABORT] = 1
        return False
    if not _log_stage(s, t):
        return False
    if not _is_list(s, t, n) and not _replace_list(s, t, n):
        return False
    _profile(s, t)
    return True


@_compiled
def _settle(s: State) -> bool:
    """Bring every touched stage up to date; False if the move must be given up."""
    while s.scalar[N_QUEUE] > 0:
        s.scalar[N_QUEUE] -= 1
        t = s.queue[s.scalar[N_QUEUE]]
        s.queued[t] = False
        if s.scalar[ABORT] or not _update(s, t):
            return False
    s.scalar[N_SEEDS] = 0
    return s.scalar[ABORT] == 0


# ---- moves -------------------------------------------------------------------------------------


@_compiled
def _drop(s: State, v: int, t: int) -> bool:
    """Stop holding v around the start of stage t; False if the move must be given up."""
    j, p = _covering(s, v, t), s.producer[v]
    if j < 0 or s.run_once[p]:
        return False
    a, b = s.intervals[v, 2 * j], s.intervals[v, 2 * j + 1]
    left, right = last_use(s, v, a, t), next_use(s, v, t - 1, b)
    if right >= len(s.peak):
        return False  # kept to the end
    # Where p runs in between already, for another of its outputs, v is resident again from there on.
    again = _computed_before(s, p, right + 1)
    if again <= left:
        again = right
        missing = 0
        for e in range(s.in_start[p], s.in_start[p + 1]):
            missing += _covering(s, s.in_ids[e], right) < 0
        if missing > FEW_MISSING and uniform(s.random) * missing > FEW_MISSING:
            return False  # to bring back many inputs rarely pays, and finding out is much work
    if not _log_value(s, v):
        return False
    if left > a:
        s.intervals[v, 2 * j + 1] = left
    else:
        _remove_interval(s, v, j)
    if again < b:
        if not _insert_interval(s, v, again, b):
            return False
        _seed(s, again, p)
    first = left if left > a else left + 1
    last = again + 1 if again < b else again
    if not _shift_range(s, first, last, -s.size_bytes[v]):
        return False
    if not _is_computed(s, p, again) and not _hold_ancestors(s, p, again):
        return False
    _touch(s, again)
    _touch(s, left)  # settled first, because its savings raise the limit of the other stage
    return _settle(s)


@_compiled
def _remove_start(s: State, v: int, t: int) -> Any:
    """Remove the interval of v that starts in stage t; (its end, the first stage that it covers), (t, t) if none."""
    j = _starting(s, v, t)
    if j < 0:
        return t, t
    end = s.intervals[v, 2 * j + 1]
    _remove_interval(s, v, j)
    return end, t + 1


@_compiled
def _hold(s: State, v: int, t: int) -> bool:
    """Hold value v from the last run of its producer before stage t to the start of t."""
    before = _computed_before(s, s.producer[v], t)
    if before < 0 or not _log_value(s, v):
        return False
    end, covered = _remove_start(s, v, t)
    previous = -1  # the last interval before t, if it reaches that run
    for j in range(s.n_intervals[v]):
        if before <= s.intervals[v, 2 * j + 1] < t:
            previous = j
    if previous >= 0:
        first = old_end = s.intervals[v, 2 * previous + 1]
        s.intervals[v, 2 * previous + 1] = end
    else:
        if not _insert_interval(s, v, before, end):
            return False
        first, old_end = before + 1, before
    if not _shift_range(s, first, covered, s.size_bytes[v]):
        return False
    _touch(s, old_end)
    return True


@_compiled
def _fill(s: State, k: int, t: int) -> int:
    """Hold the outputs of operation k from its run before stage t, so that t need not repeat it.

    Returns the stage of that run, or -1.
    """
    before = _computed_before(s, k, t)
    if before < 0 or k == t:
        return -1
    for e in range(s.out_start[k], s.out_start[k + 1]):
        v = s.out_ids[e]
        if _covering(s, v, t) < 0 and _is_needed(s, v, t) and not _hold(s, v, t):
            return -1
    _touch(s, t)
    return before if _settle(s) else -1


@_compiled
def _hold_ancestors(s: State, k: int, t: int) -> bool:
    """Hold some absent ancestors of k, at random, before k is computed again in stage t."""
    s.scratch_stack[0] = k
    depth, followed = 1, 0
    while depth > 0:
        depth -= 1
        k = s.scratch_stack[depth]
        for e in range(s.in_start[k], s.in_start[k + 1]):
            v = s.in_ids[e]
            if _covering(s, v, t) >= 0 or _is_computed(s, s.producer[v], t):
                continue
            if uniform(s.random) < 0.5 or followed == 16 or s.run_once[s.producer[v]]:
                if not _hold(s, v, t):
                    return False
                # On large graphs long ranges are most of the work, so stop once the move cannot be accepted.
                more = s.real[PRICE] * float(s.scalar[EXCESS] - s.scalar[START_EXCESS])
                if more > s.real[ALLOWED] + s.real[SLACK]:
                    return False
            else:
                s.scratch_stack[depth] = s.producer[v]
                depth += 1
                followed += 1
    return True


@_compiled
def _shift(s: State, k: int, t: int) -> bool:
    """Repeat k before stage t, where one of its inputs was used last, and hold its outputs from there."""
    if k == t or s.in_start[k] == s.in_start[k + 1] or s.run_once[k]:
        return False
    before = _computed_before(s, k, t)
    u = s.in_ids[s.in_start[k] + below(s.random, s.in_start[k + 1] - s.in_start[k])]
    earlier = last_use(s, u, before, t)
    if earlier <= before or earlier < k:
        return False
    _seed(s, earlier, k)
    for e in range(s.out_start[k], s.out_start[k + 1]):
        v = s.out_ids[e]
        if _covering(s, v, t) >= 0:
            continue
        if _covering(s, v, earlier) >= 0:
            return False
        if not _is_needed(s, v, t):
            continue
        if not _log_value(s, v):
            return False
        end, covered = _remove_start(s, v, t)
        if not _insert_interval(s, v, earlier, end):
            return False
        if not _shift_range(s, earlier + 1, covered, s.size_bytes[v]):
            return False
    _touch(s, earlier)
    _touch(s, t)
    return _settle(s)


@_compiled
def _random_repeat(s: State) -> Any:
    """A random (operation, stage) that repeats, or (-1, -1) if 200 draws find none."""
    n = len(s.peak)
    for _ in range(200):
        t = below(s.random, n)
        length = s.list_length[t]
        if length > 1:
            k = s.arena[s.list_start[t] + below(s.random, length - 1)]  # the last one is t itself
            return k, t
    return -1, -1


@_compiled
def _random_held(s: State, t: int) -> Any:
    """A random value held at the start of stage t, or -1.

    Where values live long, a value produced earlier is probably held; where they live short, an input of
    one of the next operations is.
    """
    n = len(s.peak)
    for attempt in range(40):
        if attempt < 12:
            v = s.out_ids[below(s.random, s.out_start[t])] if s.out_start[t] > 0 else -1
        else:
            u = t + below(s.random, min(n - t, 2 << (attempt // 3 - 3)))
            degree = s.in_start[u + 1] - s.in_start[u]
            v = s.in_ids[s.in_start[u] + below(s.random, degree)] if degree > 0 else -1
        if v >= 0 and s.size_bytes[v] > 0 and _covering(s, v, t) >= 0:
            return v
    return -1


@_compiled
def _tight_stage(s: State) -> int:
    """A random stage, above the budget if a few draws find one."""
    n = len(s.peak)
    t = 1 + below(s.random, n - 1)
    for _ in range(8):
        if s.peak[t] > s.scalar[BUDGET]:
            break
        t = 1 + below(s.random, n - 1)
    return t


@_compiled
def _propose(s: State) -> bool:
    """Apply one random move; False if there was none or it must be undone."""
    kind = uniform(s.random)
    n = len(s.peak)
    if n < 2:
        return False
    if kind < (0.85 if s.scalar[SEEKING] else 0.5):
        t = _tight_stage(s) if s.scalar[EXCESS] > 0 else 1 + below(s.random, n - 1)
        v = _random_held(s, t)
        return v >= 0 and _drop(s, v, t)
    k, t = _random_repeat(s)
    if k < 0:
        return False
    if kind > 0.93:
        return _shift(s, k, t)
    start = _fill(s, k, t)
    if start < 0:
        return False
    if kind > 0.78 and t > start + 1:
        # Make room for it: drop another value where this one is held now.
        at = start + 1 + below(s.random, t - start)
        v = _random_held(s, at)
        if v >= 0 and s.producer[v] != k and not _drop(s, v, at):
            return s.scalar[ABORT] == 0 and s.scalar[N_QUEUE] == 0
    return True


@_compiled
def _compact(s: State) -> None:
    """Close the holes between the lists of the stages."""
    old = s.arena[: s.scalar[ARENA_TOP]].copy()
    top = 0
    for t in range(len(s.peak)):
        n = s.list_length[t]
        for i in range(n):  # faster than slices, which are short
            s.arena[top + i] = old[s.list_start[t] + i]
        s.list_start[t], s.list_room[t] = top, n
        top += n
    s.scalar[ARENA_TOP] = top


@_compiled
def _save_order(s: State) -> int:
    """Write the computations of the current plan to `order`, which is as long as `arena`; return how many."""
    at = 0
    for t in range(len(s.peak)):
        for i in range(s.list_length[t]):
            s.order[at] = s.arena[s.list_start[t] + i]
            at += 1
    return at


@_compiled
def load_order(state: State, order: np.ndarray) -> bool:
    """Set the state to a staged plan given by its computations; False if it lacks room for the plan."""
    s: State = ByReference(*state)  # type: ignore[assignment]
    n = len(s.peak)
    s.n_intervals[:] = 0
    s.n_runs[:] = 0
    s.through[:] = 0
    s.peak[:] = 0
    s.stage_cost[:] = 0
    s.list_length[:] = 0
    s.list_room[:] = 0
    for i in (ARENA_TOP, LOG_TOP, COST, EXCESS, N_QUEUE, N_SEEDS, ABORT):
        s.scalar[i] = 0
    s.scalar[SNAPSHOT] += 1
    if len(order) > len(s.arena):
        return False
    # Birth and last use of each value's current copy; -1: none.
    birth = np.full(len(s.size_bytes), -1, dtype=np.int32)
    last = np.full(len(s.size_bytes), -1, dtype=np.int32)
    stage, at = 0, 0
    for i in range(len(order)):
        k = order[i]
        s.arena[i] = k
        if s.n_runs[k] == s.runs.shape[1]:
            return False
        s.runs[k, s.n_runs[k]] = stage
        s.n_runs[k] += 1
        for e in range(s.in_start[k], s.in_start[k + 1]):
            last[s.in_ids[e]] = stage
        for e in range(s.out_start[k], s.out_start[k + 1]):
            v = s.out_ids[e]
            if birth[v] >= 0 and last[v] > birth[v] and not _insert_interval(s, v, birth[v], last[v]):
                return False
            birth[v] = last[v] = stage
        if k == stage:
            s.list_start[stage] = at
            s.list_length[stage] = s.list_room[stage] = i + 1 - at
            at = i + 1
            stage += 1
    s.scalar[ARENA_TOP] = len(order)
    for v in range(len(s.size_bytes)):
        if s.keep[v]:
            last[v] = n
        if last[v] > birth[v] and not _insert_interval(s, v, birth[v], last[v]):
            return False
        for j in range(s.n_intervals[v]):
            s.through[s.intervals[v, 2 * j] + 1 : min(s.intervals[v, 2 * j + 1], n)] += s.size_bytes[v]
    for t in range(n):
        _profile(s, t)
    s.scalar[WINDOW_MOVES] = s.scalar[WINDOW_OVER] = 0
    s.scalar[WINDOW_EXCESS] = s.scalar[EXCESS]
    return True


@_compiled
def _adapted_price(s: State, price: float) -> float:
    """Count a move; at the end of a window change the price so that the search keeps crossing the budget."""
    window, excess = max(PRICE_WINDOW, len(s.peak) // 16), s.scalar[EXCESS]
    s.scalar[WINDOW_MOVES] += 1
    s.scalar[WINDOW_OVER] += excess > 0
    if s.scalar[WINDOW_MOVES] < window:
        return price
    over = s.scalar[WINDOW_OVER]
    if over < FEW_OVER * window:
        price *= 0.87
    elif over > MANY_OVER * window and excess > (1.0 - FAST) * s.scalar[WINDOW_EXCESS]:
        price *= 1.15
    s.scalar[WINDOW_MOVES] = s.scalar[WINDOW_OVER] = 0
    s.scalar[WINDOW_EXCESS] = excess
    return price


@_compiled
def _begin_move(s: State, temperature: float, price: float) -> None:
    """Empty the log and draw how much worse this move may be."""
    s.scalar[SNAPSHOT] += 1
    s.scalar[START_COST], s.scalar[START_EXCESS] = s.scalar[COST], s.scalar[EXCESS]
    s.real[SLACK] = math.inf if uniform(s.random) < FOLLOW_ALL * min(1.0, LARGE / len(s.peak)) else 0.0
    s.real[ALLOWED], s.real[PRICE] = -temperature * math.log(1.0 - uniform(s.random)), price
    s.scalar[LOG_TOP] = s.scalar[ABORT] = s.scalar[N_SEEDS] = 0


@_compiled
def _is_acceptable(s: State) -> bool:
    more_excess = float(s.scalar[EXCESS] - s.scalar[START_EXCESS])
    return float(s.scalar[COST] - s.scalar[START_COST]) + s.real[PRICE] * more_excess <= s.real[ALLOWED]


@_compiled
def anneal(
    state: State, moves: int, hot: float, cold: float, price: float, best_cost: int, best_excess: int
) -> tuple[int, int, int, float]:
    """Anneal for `moves` moves; the temperature falls geometrically from `hot` to `cold`.

    The energy is cost + price x (sum over stages of the bytes above the budget); the price adapts so
    that the search crosses the border of feasibility again and again. `State.order` gets the order with the least
    (excess, cost) seen.

    Returns:
        (best cost, best excess, length of `State.order` or 0 if nothing better was seen, price).
    """
    s: State = ByReference(*state)  # type: ignore[assignment]
    length, temperature = 0, hot
    cooling = math.exp(math.log(cold / hot) / max(moves, 1)) if hot > 0 else 1.0
    reserve = 4 * len(s.peak) + 1000
    for _ in range(moves):
        temperature *= cooling
        if s.scalar[ARENA_TOP] + reserve > len(s.arena):
            _compact(s)
        price = _adapted_price(s, price)
        _begin_move(s, temperature, price)
        s.scalar[SEEKING] = best_excess > 0  # no plan that fits yet
        if not _propose(s) or not _is_acceptable(s):
            _undo(s)
        elif s.scalar[EXCESS] == 0 and (best_excess > 0 or s.scalar[COST] < best_cost):
            best_cost, best_excess, length = s.scalar[COST], 0, _save_order(s)
    # A plan above the budget is saved only here, because on the way down every move improves it.
    if 0 < s.scalar[EXCESS] < best_excess:
        best_cost, best_excess, length = s.scalar[COST], s.scalar[EXCESS], _save_order(s)
    return best_cost, best_excess, length, price
