"""Compiled annealing of a sequence of computations, whose peak a segment tree keeps up to date.

The sequence has more slots than computations, so that one can be put anywhere without moving the others. Each copy of
a value is held from the slot that makes it to the last slot that reads it. A segment tree adds bytes to a range of
slots and knows the most bytes of any slot, so that a computation is put or taken in logarithmic time. The method is
FastSA (Imanishi et al., NeurIPS 2023), with moves and temperatures of our own.
"""

from __future__ import annotations

import math
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numba.experimental import structref

from remat.arrays import GraphArrays, least_unit
from remat.graph import Graph
from remat.randomness import below, random_state, uniform
from remat.search.kernel import StateType, last_use, next_use

STAGED, FIXED, FREE = range(3)  # which sequences are allowed: the scopes
COST, BUDGET, RULE, LOG_TOP, N_SEVERAL, FAILED = range(6)  # places in `Sequencer.scalar`
MOST_PLACES = 64  # of one operation
SPARSE = 4  # slots per computation, at least
LOG_ROOM = 2000  # changes of one move
TRIES = 16  # random values looked at for one that is held at a slot
# The price of a byte above the budget follows the share of moves that begin above it.
PRICE_WINDOW, MANY_OVER, FEW_OVER, STEP = 256, 0.8, 0.5, 1.1
PRICE_RANGE = 1e4  # most of the price over the first one, and of that over the least
TAKE, SHIFT = 0.3, 0.3  # shares of the moves; the rest puts computations
AT_PEAK, AT_USE = 0.6, 0.6  # shares of computations put for the sake of the peak, and right before the use
COLD = 0.003  # the last temperature, in mean costs of an operation
CHUNK = 1000  # moves between two looks at the clock
NOTHING = 1 << 62  # cost before there is a sequence that fits
_compiled: Any = njit(cache=True, nogil=True)


# A sequence in L slots (a power of two), the last one always empty; arrays only. The graph's come first.
#     slots: [L] int32, operation or -1.
#     runs: [N, MOST_PLACES] int32, slots of each operation, ascending; n_runs: [N].
#     several, several_at: [N] operations with more than one slot, and where each is in that list (-1).
#     most, added: [2 L] int64, the segment tree: most bytes below each node, and what was added to all below it.
#     log: [LOG_ROOM, 3] the changes of a move: operation, slot, whether it was put.
#     scalar: int64; random: [1] uint64, the generator's state.
#     best: [L] int32, the cheapest sequence that fits.
State = namedtuple(
    "State",
    (
        *GraphArrays._fields, "slots", "runs", "n_runs", "several", "several_at", "most", "added", "log", "scalar",
        "random", "best",
    ),
)  # fmt: skip


class _ByReference:
    """`State` inside compiled code, which builds it from the tuple; never built in Python."""


structref.define_constructor(_ByReference, StateType, list(State._fields))


@dataclass(frozen=True, slots=True)
class Cooled:
    """What a cooling has found.

    Attributes:
        order: computations of the cheapest sequence that fits and costs less than what was known; [] if there is none.
        moves: tried.
        is_cut: whether the clock ended it.
    """

    order: list[int]
    moves: int
    is_cut: bool


class Sequencer:
    """A sequence of computations under annealing.

    Attributes:
        unit, cost_unit: bytes and cost that count as one, because sums have to fit 64 bits.
        price: of a unit of bytes above the budget, in units of cost; at first that of the excess of the first sequence
            is the cost of the whole graph.
    """

    def __init__(self, graph: Graph, budget_bytes: int, rule: int, seed: int) -> None:
        arrays = GraphArrays.of(graph)
        self.unit = least_unit(sum(arrays.size_bytes.tolist()) + sum(arrays.workspace_bytes.tolist()))
        self.cost_unit = least_unit(MOST_PLACES * graph.total_cost)
        self.net = arrays.in_units(self.unit, self.cost_unit)
        self.rule, self.budget = rule, max(0, budget_bytes - graph.fixed_bytes) // self.unit
        self.total = max(1.0, float(self.net.cost.sum()))
        self.random = random_state(seed)
        self.load(range(len(graph)))
        self.price = self.first_price = self.total / max(1, self.peak - self.budget)

    def load(self, order: Sequence[int] | np.ndarray) -> bool:
        """Start from these computations, spread over the slots; False if one repeats too often."""
        n, computations = len(self.net.cost), np.array(order, dtype=np.int32)
        if np.bincount(computations, minlength=n).max(initial=0) >= MOST_PLACES:
            return False
        length = 1 << max(4, (SPARSE * len(computations)).bit_length())
        scalar = np.zeros(6, dtype=np.int64)
        scalar[[BUDGET, RULE]] = self.budget, self.rule
        self.state = State(
            *self.net, np.full(length, -1, dtype=np.int32), np.zeros((n, MOST_PLACES), dtype=np.int32),
            np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64),
            np.zeros(2 * length, dtype=np.int64), np.zeros(2 * length, dtype=np.int64),
            np.zeros((LOG_ROOM, 3), dtype=np.int64), scalar, self.random, np.full(length, -1, dtype=np.int32),
        )  # fmt: skip
        at = (np.arange(len(computations)) + 0.5) * ((length - 1) / max(1, len(computations)))
        self.state.slots[at.astype(np.int64)] = computations
        _build(self.state)
        return True

    @property
    def fits(self) -> bool:
        """Whether the sequence is within the budget."""
        return self.peak <= self.budget

    @property
    def least_cost(self) -> int:
        """Of any sequence, in units of cost."""
        return int(self.net.cost.sum())

    @property
    def order(self) -> list[int]:
        """Computations of the sequence."""
        return self.state.slots[self.state.slots >= 0].tolist()

    @property
    def peak(self) -> int:
        """Most units of bytes of any slot."""
        return int(self.state.most[1])

    @property
    def cost(self) -> int:
        """In units of cost."""
        return int(self.state.scalar[COST])

    def cool(
        self, moves: int, hot: float, deadline: float, should_stop: Callable[[], bool], *, is_counted: bool = False,
        known: int = NOTHING, on_better: Callable[[list[int]], None] = lambda order: None,
    ) -> Cooled:  # fmt: skip
        """Anneal from `hot` to `COLD`, in mean costs of an operation.

        Args:
            moves: at most. The temperature follows them or the time, whichever is further on.
            deadline: of `time.monotonic()`.
            should_stop: called between chunks of moves.
            is_counted: the temperature follows the moves alone, so that a run repeats.
            known: only sequences cheaper than this count.
            on_better: called with the computations of better sequences, between chunks of moves.
        """
        known = known if known == NOTHING else known // self.cost_unit
        began, heat, best, done = time.monotonic(), COLD / hot, list[int](), 0
        while done < moves and known > self.least_cost and not should_stop():
            share = (time.monotonic() - began) / max(deadline - began, 1e-9)
            if share >= 1:
                return Cooled(best, done, True)
            progress = done / moves if is_counted else max(done / moves, share)
            chunk = min(CHUNK, moves - done)
            temperature = hot * heat**progress
            known, better = self.anneal(chunk, temperature, temperature * heat ** (chunk / moves), known)
            done += chunk
            if better:
                best = better
                on_better(best)
        return Cooled(best, done, False)

    def anneal(self, moves: int, hot: float, cold: float, known: int) -> tuple[int, list[int]]:
        """Try moves from one temperature to another, both in mean costs of an operation.

        Returns:
            (cost, computations) of the cheapest sequence met that fits, if it is cheaper than `known`; else
            ``(known, [])``
        """
        mean = self.total / max(1, len(self.net.cost))
        cost, self.price = anneal(self.state, moves, hot * mean, cold * mean, self.price, self.first_price, known)
        return cost, self.state.best[self.state.best >= 0].tolist() if cost < known else []


# ---- the segment tree -----------------------------------------------------------------------------


@_compiled
def _add(most: np.ndarray, added: np.ndarray, low: int, high: int, size: int) -> None:
    """Add bytes to the slots low..high."""
    if low > high or size == 0:
        return
    a, b = low + len(most) // 2, high + len(most) // 2 + 1
    left, right = a >> 1, (b - 1) >> 1
    while a < b:
        if a & 1:
            most[a] += size
            added[a] += size
            a += 1
        if b & 1:
            b -= 1
            most[b] += size
            added[b] += size
        a >>= 1
        b >>= 1
    while left != right:
        most[left] = max(most[2 * left], most[2 * left + 1]) + added[left]
        most[right] = max(most[2 * right], most[2 * right + 1]) + added[right]
        left >>= 1
        right >>= 1
    while left:
        most[left] = max(most[2 * left], most[2 * left + 1]) + added[left]
        left >>= 1


@_compiled
def _peak_slot(most: np.ndarray) -> int:
    """The first slot with the most bytes."""
    i = 1
    while i < len(most) // 2:
        i = 2 * i if most[2 * i] >= most[2 * i + 1] else 2 * i + 1
    return i - len(most) // 2


@_compiled
def _build(state: State) -> None:
    """Places, cost and tree of the computations in the slots."""
    s: State = _ByReference(*state)  # type: ignore[assignment]
    length = len(s.slots)
    for p in range(length):
        k = s.slots[p]
        if k >= 0:
            s.runs[k, s.n_runs[k]] = p
            s.n_runs[k] += 1
            s.scalar[COST] += s.cost[k]
            s.most[length + p] += s.workspace_bytes[k]
    bytes_from = np.zeros(length + 1, dtype=np.int64)
    for k in range(len(s.cost)):
        _note_several(s, k)
        for e in range(s.out_start[k], s.out_start[k + 1]):
            v = s.out_ids[e]
            for j in range(s.n_runs[k]):
                p, after = s.runs[k, j], _place(s, k, j + 1)
                bytes_from[p] += s.size_bytes[v]
                bytes_from[_end(s, v, p, after) + 1] -= s.size_bytes[v]
    held = 0
    for p in range(length):
        held += bytes_from[p]
        s.most[length + p] += held
    for i in range(length - 1, 0, -1):
        s.most[i] = max(s.most[2 * i], s.most[2 * i + 1])


# ---- looking things up ----------------------------------------------------------------------------


@_compiled
def _place(s: State, k: int, j: int) -> int:
    """The j-th place of an operation; beyond them -1 and L."""
    if j < 0:
        return -1
    return s.runs[k, j] if j < s.n_runs[k] else len(s.slots)


@_compiled
def _count_before(s: State, k: int, p: int) -> int:
    """Number of places of an operation before slot p."""
    j = s.n_runs[k]
    while j > 0 and s.runs[k, j - 1] >= p:
        j -= 1
    return j


@_compiled
def _end(s: State, v: int, made: int, after: int) -> int:
    """The last slot that holds the copy of a value made in a slot; the next copy is made in slot `after`."""
    if s.keep[v] and after == len(s.slots):
        return after - 1
    return last_use(s, v, made, after)


@_compiled
def _gap(s: State, k: int, p: int) -> int:
    """A random empty slot before slot p, next to it, where operation k may be put; -1 if there is none.

    In a staged sequence the repeats between two first computations ascend.
    """
    is_staged = s.scalar[RULE] == STAGED
    right = p
    while is_staged and right < len(s.slots):
        other = s.slots[right]
        if other == k:
            return -1
        if other > k:  # a first computation is one of them
            break
        right += 1
        p = right if other >= 0 else p
    right, left = p, p - 1
    while left >= 0:
        other = s.slots[left]
        if other >= 0:
            if not is_staged or other < k or s.runs[other, 0] == left:
                break
            if other == k:
                return -1
            right = left
        left -= 1
    empty = right - left - 1
    return left + 1 + below(s.random, empty) if empty > 0 else -1


# ---- changes --------------------------------------------------------------------------------------


@_compiled
def _note_several(s: State, k: int) -> None:
    """Bring the list of operations with several places up to date."""
    at = s.several_at[k]
    if s.n_runs[k] > 1 and at < 0:
        s.several[s.scalar[N_SEVERAL]] = k
        s.several_at[k] = s.scalar[N_SEVERAL]
        s.scalar[N_SEVERAL] += 1
    elif s.n_runs[k] <= 1 and at >= 0:
        s.scalar[N_SEVERAL] -= 1
        last = s.several[s.scalar[N_SEVERAL]]
        s.several[at] = last
        s.several_at[last] = at
        s.several_at[k] = -1


@_compiled
def _put(s: State, k: int, p: int) -> None:
    """Compute operation k in the empty slot p, before which each of its inputs was made."""
    j = _count_before(s, k, p)
    before, after = _place(s, k, j - 1), _place(s, k, j)
    for e in range(s.out_start[k], s.out_start[k + 1]):
        v, size = s.out_ids[e], s.size_bytes[s.out_ids[e]]
        if before >= 0 and _end(s, v, before, after) > p:
            _add(s.most, s.added, last_use(s, v, before, p) + 1, p - 1, -size)
        else:
            _add(s.most, s.added, p, p, size)
    _read(s, k, p, 1)
    for i in range(s.n_runs[k], j, -1):
        s.runs[k, i] = s.runs[k, i - 1]
    s.runs[k, j] = p
    s.n_runs[k] += 1
    s.slots[p] = k
    s.scalar[COST] += s.cost[k]
    _note_several(s, k)


@_compiled
def _take(s: State, k: int, p: int) -> None:
    """Undo the computation of operation k in slot p; another copy serves those who read its outputs."""
    j = _count_before(s, k, p)
    before, after = _place(s, k, j - 1), _place(s, k, j + 1)
    for i in range(j, s.n_runs[k] - 1):
        s.runs[k, i] = s.runs[k, i + 1]
    s.n_runs[k] -= 1
    s.slots[p] = -1
    s.scalar[COST] -= s.cost[k]
    for e in range(s.out_start[k], s.out_start[k + 1]):
        v, size = s.out_ids[e], s.size_bytes[s.out_ids[e]]
        if before >= 0 and _end(s, v, p, after) > p:
            _add(s.most, s.added, last_use(s, v, before, p) + 1, p - 1, size)
        else:
            _add(s.most, s.added, p, p, -size)
    _read(s, k, p, -1)
    _note_several(s, k)


@_compiled
def _read(s: State, k: int, p: int, sign: int) -> None:
    """Hold the inputs of operation k to slot p, and its workspace there; or no longer. Slot p itself does not count."""
    for e in range(s.in_start[k], s.in_start[k + 1]):
        v = s.in_ids[e]
        j = _count_before(s, s.producer[v], p)
        made, after = _place(s, s.producer[v], j - 1), _place(s, s.producer[v], j)
        _add(s.most, s.added, _end(s, v, made, after) + 1, p, sign * s.size_bytes[v])
    _add(s.most, s.added, p, p, sign * s.workspace_bytes[k])


@_compiled
def _change(s: State, k: int, p: int, is_put: bool) -> bool:
    """Put or take a computation and log it; False if there is no room for it."""
    if s.scalar[LOG_TOP] == LOG_ROOM or (is_put and s.n_runs[k] == MOST_PLACES):
        return False
    if is_put:
        _put(s, k, p)
    else:
        _take(s, k, p)
    top = s.scalar[LOG_TOP]
    s.log[top, 0], s.log[top, 1], s.log[top, 2] = k, p, is_put
    s.scalar[LOG_TOP] += 1
    return True


@_compiled
def _undo(s: State) -> None:
    """Take back the move."""
    for i in range(s.scalar[LOG_TOP] - 1, -1, -1):
        if s.log[i, 2]:
            _take(s, s.log[i, 0], s.log[i, 1])
        else:
            _put(s, s.log[i, 0], s.log[i, 1])


# ---- moves ----------------------------------------------------------------------------------------


@_compiled
def _recompute(s: State) -> bool:
    """Free a value that is held at a slot and not read there, and compute it again before it is read."""
    p = _peak_slot(s.most) if uniform(s.random) < AT_PEAK else below(s.random, len(s.slots) - 1)
    for _ in range(TRIES):
        v = below(s.random, len(s.size_bytes))
        k = s.producer[v]
        if s.run_once[k] or s.size_bytes[v] == 0:
            continue
        j = _count_before(s, k, p)
        made, after = _place(s, k, j - 1), _place(s, k, j)
        if made < 0 or after == p or _end(s, v, made, after) <= p or last_use(s, v, made, p + 1) == p:
            continue
        use = min(next_use(s, v, p, after), len(s.slots) - 1)
        if s.scalar[RULE] == STAGED:
            use = min(use, s.runs[len(s.cost) - 1, 0])
        if use <= p + 1:
            return False
        at = _gap(s, k, use if uniform(s.random) < AT_USE else p + 2 + below(s.random, use - p - 1))
        return at > p and _change(s, k, at, True) and _follow(s, below(s.random, 3) / 2)
    return False


@_compiled
def _follow(s: State, share: float) -> bool:
    """Compute this share of the inputs again that would otherwise be held for a computation of this move."""
    i = 0
    while i < s.scalar[LOG_TOP]:
        k, p = s.log[i, 0], s.log[i, 1]
        i += 1
        for e in range(s.in_start[k], s.in_start[k + 1]):
            v, maker = s.in_ids[e], s.producer[s.in_ids[e]]
            if uniform(s.random) >= share or s.run_once[maker] or s.size_bytes[v] == 0:
                continue
            j = _count_before(s, maker, p)
            made, after = _place(s, maker, j - 1), _place(s, maker, j)
            if _end(s, v, made, after) > p:
                continue
            at = _gap(s, maker, p)
            if at > last_use(s, v, made, p) and not _change(s, maker, at, True):
                return False
    return True


@_compiled
def _drop(s: State) -> bool:
    """Take a computation that is not the only one of its operation, and those that only it has needed."""
    if s.scalar[N_SEVERAL] == 0:
        return False
    k = s.several[below(s.random, int(s.scalar[N_SEVERAL]))]
    first = 0 if s.scalar[RULE] == FREE else 1
    j = first + below(s.random, int(s.n_runs[k]) - first)
    if j == 0 and not _is_unread(s, k, 0):
        return False
    if not _change(s, k, s.runs[k, j], False):
        return False
    i = 0
    while i < s.scalar[LOG_TOP]:
        k, p = s.log[i, 0], s.log[i, 1]
        i += 1
        for e in range(s.in_start[k], s.in_start[k + 1]):
            maker = s.producer[s.in_ids[e]]
            j = _count_before(s, maker, p) - 1
            if j > 0 and _is_unread(s, maker, j) and not _change(s, maker, s.runs[maker, j], False):
                return False
    return True


@_compiled
def _is_unread(s: State, k: int, j: int) -> bool:
    """Whether nothing reads the outputs of the j-th computation of operation k."""
    p, after, unread = s.runs[k, j], _place(s, k, j + 1), True
    for e in range(s.out_start[k], s.out_start[k + 1]):
        unread = unread and _end(s, s.out_ids[e], p, after) == p
    return unread


@_compiled
def _shift(s: State) -> bool:
    """Put a computation elsewhere: a repeat, or in a free order any of them within its dependencies."""
    is_free = s.scalar[RULE] == FREE
    if is_free and uniform(s.random) < 0.5:
        k, j = below(s.random, len(s.cost)), 0
    elif s.scalar[N_SEVERAL]:
        k = s.several[below(s.random, int(s.scalar[N_SEVERAL]))]
        j = 1 + below(s.random, int(s.n_runs[k]) - 1)
    else:
        return False
    p, low, high = s.runs[k, j], _place(s, k, j - 1), _place(s, k, j + 1)
    if j == 0:
        high = min(high, len(s.slots) - 1)
        for e in range(s.in_start[k], s.in_start[k + 1]):
            low = max(low, s.runs[s.producer[s.in_ids[e]], 0])
        for e in range(s.out_start[k], s.out_start[k + 1]):
            high = next_use(s, s.out_ids[e], p, high)
    elif s.scalar[RULE] == STAGED:
        high = min(high, s.runs[len(s.cost) - 1, 0])
    high = min(high, len(s.slots) - 1)
    if high - low < 2:
        return False
    at = _gap(s, k, low + 2 + below(s.random, high - low - 1))
    return at > low and _change(s, k, at, True) and _change(s, k, p, False)


@_compiled
def anneal(
    state: State,
    moves: int,
    hot: float,
    cold: float,
    price: float,
    first_price: float,
    known: int,
) -> tuple[int, float]:
    """(cost of the cheapest sequence that fits and is left in `best`, or `known`; the price reached)."""
    s: State = _ByReference(*state)  # type: ignore[assignment]
    cost, peak, over = s.scalar[COST], s.most[1], 0
    least_price, most_price = first_price / PRICE_RANGE, first_price * PRICE_RANGE
    for move in range(moves):
        excess = max(0, peak - s.scalar[BUDGET])
        over += excess > 0
        if move % PRICE_WINDOW == PRICE_WINDOW - 1:
            price *= STEP if over > MANY_OVER * PRICE_WINDOW else 1 / STEP if over < FEW_OVER * PRICE_WINDOW else 1.0
            price = min(max(price, least_price), most_price)
            over = 0
        s.scalar[LOG_TOP] = 0
        which = uniform(s.random)
        if which < TAKE:
            done = _drop(s)
        elif which < TAKE + SHIFT:
            done = _shift(s)
        else:
            done = _recompute(s)
        now = max(0, s.most[1] - s.scalar[BUDGET])
        worse = (s.scalar[COST] - cost) + price * (now - excess)
        temperature = hot * (cold / hot) ** (move / moves)
        if not done or (worse > 0 and uniform(s.random) >= math.exp(-worse / temperature)):
            _undo(s)
            continue
        cost, peak = s.scalar[COST], s.most[1]
        if now == 0 and cost < known:
            known = cost
            s.best[:] = s.slots
    return known, price
