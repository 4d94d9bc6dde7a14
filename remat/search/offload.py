"""Search for what to recompute and what to copy to the host, together: annealing over repeats and copies.

A staged plan says which operations run again before each first computation. Between two touches of a value (it is made
or read) it is held, or it is away: freed after the first touch, and fetched from the host before the second one. These
genes and a margin, by which copies from the host begin early, determine a plan with its times. `decode` issues a copy
to the host when the value is first away, or sooner if the stream would be idle; and each copy from the host as late as
it can without making the computations wait, and earlier by the margin, where memory is free up to its use.

This is one file on purpose: the cache of compiled code checks only the file of a function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from remat.graph import Graph, is_held_outside
from remat.link import Link
from remat.plan import COMPUTE, DROP, FREE, OFFLOAD, PREFETCH, Plan
from remat.randomness import below, random_state, uniform
from remat.simulator import plain_peak
from remat.units import MAX_BYTES

# Entries of the clock: when each stream is free; values that wait to be freed, their bytes, and when the first of them
# can be; values whose copy to the host is not issued yet; bytes on the host; steps written.
TIME, OUT, IN, WAITING, WAITING_BYTES, SOONEST, UNSENT, ON_HOST, STEPS = range(N_CLOCK := 9)
# Of what `decode` finds: computations, gaps, makespan, most bytes above the budget or the host's memory, their sum.
RUNS, GAPS, MAKESPAN, MOST_EXCESS, EXCESS = range(N_FOUND := 5)
# Rows. Of a value: bytes, and how long its copies last.
SIZE, OUT_NS, IN_NS, STAYS = range(4)
# Of a position: operation and stage, when it begins if none waits; bytes that it needs for itself, bytes in use without
# and of values that were fetched early, bytes that the host drops after it; when what came for it has arrived; its
# first gap of a value that is away, and its first value that is copied out.
RUN, STAGE, BEGINS, OWN, HELD, COMING, DROPS, ARRIVES, FROM_HEAD, OUT_HEAD = range(N_AT := 10)
# Of a gap: its positions and value, whether that is away, when its copy must begin, the next gap from there.
FROM, TO, VALUE, AWAY, LATEST, FROM_NEXT = range(N_GAP := 6)
# Of a value in a plan: last touch, last time it was made, where its first gap away begins, when it is on the host, last
# gap away, the next copied out.
LAST, BIRTH, FIRST_AWAY, OUT_DONE, LAST_FETCH, OUT_NEXT = range(N_OF := 6)
HOT, WARM, COLD = 0.25, 0.12, 0.015  # temperatures, in mean costs of an operation; more heat makes many small copies
PRICE = 2.0  # of all bytes that can be saved, in costs of running everything once
SUM_SHARE = 0.05  # weight of the sum of the excess, beside its most
ROOM = 6  # computations and gaps for each operation
MOST_TOGGLES, MOST_DEPTH = 64, 12
SINCE = 4096
INFINITE = 1 << 62
NO_STEPS = np.zeros((0, 2), np.int64)


class Instance(NamedTuple):
    """Arrays of a graph with N operations and V values; lists of lists are (starts, entries).

    Operation N is the end, which reads what is kept.

    Attributes:
        cost, workspace: [N + 1]; producer: [V]; once: [N] whether it must run once.
        value: [4, V] of each value its bytes, how long its copies last, and whether it is never away, see `SIZE`.
    """

    in_start: np.ndarray
    in_ids: np.ndarray
    out_start: np.ndarray
    out_ids: np.ndarray
    cost: np.ndarray
    workspace: np.ndarray
    producer: np.ndarray
    once: np.ndarray
    value: np.ndarray


class Genes(NamedTuple):
    """What annealing changes.

    Attributes:
        repeats: sorted, stage * N + operation; the first `numbers[0]` count.
        away: [N + 1, V] whether a value that is next touched in a stage is away before; stage N is the end.
        numbers: number of repeats, margin in ns.
    """

    repeats: np.ndarray
    away: np.ndarray
    numbers: np.ndarray


class Work(NamedTuple):
    """A decoded plan of L computations, position L is the end: few arrays with many rows, because arrays cost time.

    Attributes:
        at: [rows, L + 1] of each position, see `RUN`; gap: [rows, gaps] of each place where a value is not touched for
            a while, see `FROM`; of: [rows, V] of each value, see `LAST`.
        fetched: gaps in which a value is away, in the order of their ends.
        waiting: values that are freed when they are on the host; unsent: whose copy there is not issued yet.
        clock, found: see `TIME` and `RUNS`.
    """

    at: np.ndarray
    gap: np.ndarray
    of: np.ndarray
    fetched: np.ndarray
    waiting: np.ndarray
    unsent: np.ndarray
    clock: np.ndarray
    found: np.ndarray


class Room(NamedTuple):
    """Working space of `anneal`.

    Attributes:
        old: for the repeats of the genes; since: places at which `away` may differ from that of the best genes.
        now, other: the plan, and one that is tried.
    """

    old: np.ndarray
    since: np.ndarray
    now: Work
    other: Work


class Cooling(NamedTuple):
    """Price of a byte above the limits, first and last temperature in ns, number of moves."""

    price: float
    hot: float
    cold: float
    moves: int


@njit(cache=True, nogil=True)
def sequence(x: Instance, genes: Genes, at: np.ndarray) -> int:
    """The computations in their order; returns how many."""
    repeats, cost = genes.repeats, x.cost
    n, n_repeats, q, k = len(x.once), genes.numbers[0], 0, 0
    at[BEGINS, 0] = 0
    for t in range(n + 1):  # stage N has the end alone
        while k < n_repeats and repeats[k] < (t + 1) * n:
            at[RUN, q], at[STAGE, q] = repeats[k] - t * n, t
            at[BEGINS, q + 1] = at[BEGINS, q] + cost[at[RUN, q]]
            q, k = q + 1, k + 1
        at[RUN, q], at[STAGE, q] = t, t
        at[BEGINS, q + 1] = at[BEGINS, q] + cost[t]
        q += 1
    at[HELD, :q] = at[COMING, :q] = at[DROPS, :q] = at[ARRIVES, :q] = 0
    at[FROM_HEAD, :q] = at[OUT_HEAD, :q] = -1
    return q - 1


@njit(cache=True, nogil=True)
def lay_out(x: Instance, genes: Genes, work: Work, n_runs: int, fixed: int) -> int:
    """Gaps, and bytes at each position without values that were fetched early; returns the number of gaps."""
    in_start, in_ids, out_start, out_ids, value = x.in_start, x.in_ids, x.out_start, x.out_ids, x.value
    at, gap, of, away, workspace = work.at, work.gap, work.of, genes.away, x.workspace
    n_gaps, most_gaps = 0, gap.shape[1]
    of[LAST, :] = of[LAST_FETCH, :] = of[OUT_DONE, :] = -1
    for q in range(n_runs + 1):
        i = at[RUN, q]
        own = workspace[i]
        for e in range(in_start[i], in_start[i + 1]):
            v = in_ids[e]
            size, start = value[SIZE, v], of[LAST, v]
            own += size
            of[LAST, v] = q
            if q - start < 2 or size == 0 or n_gaps == most_gaps:
                continue
            is_away = away[at[STAGE, q], v] and at[STAGE, start] < at[STAGE, q] and value[STAYS, v] == 0
            gap[FROM, n_gaps], gap[TO, n_gaps], gap[VALUE, n_gaps], gap[AWAY, n_gaps] = start, q, v, is_away
            if is_away:
                note_away(at, gap, of, n_gaps, int(v), int(start))
            else:  # `HELD` has differences so far
                at[HELD, start + 1] += size
                at[HELD, q] -= size
            n_gaps += 1 - value[STAYS, v]
        for e in range(out_start[i], out_start[i + 1]):
            v = out_ids[e]
            own += value[SIZE, v]
            of[LAST, v] = of[BIRTH, v] = q
        at[OWN, q] = own
    for v in range(of.shape[1]):
        j = of[LAST_FETCH, v]
        if j >= 0 and gap[TO, j] < n_runs:
            at[DROPS, gap[TO, j]] += value[SIZE, v]
    across = 0
    for q in range(n_runs + 1):
        across += at[HELD, q]
        at[HELD, q] = fixed + at[OWN, q] + across
    return n_gaps


@njit(cache=True, nogil=True, inline="always")
def note_away(at: np.ndarray, gap: np.ndarray, of: np.ndarray, j: int, v: int, start: int) -> None:
    """Gap `j`, in which a value is away. Its copy to the host may begin where it was made before its first one."""
    gap[FROM_NEXT, j], at[FROM_HEAD, start] = at[FROM_HEAD, start], j
    if of[LAST_FETCH, v] < 0:
        birth = of[BIRTH, v]
        of[FIRST_AWAY, v], of[OUT_NEXT, v], at[OUT_HEAD, birth] = start, at[OUT_HEAD, birth], v
    of[LAST_FETCH, v] = j


@njit(cache=True, nogil=True)
def plan_fetches(x: Instance, work: Work, n_runs: int, n_gaps: int) -> int:
    """Gaps in which a value is away, and when their copies must begin if no computation waits; returns how many."""
    at, gap, fetched, value, n = work.at, work.gap, work.fetched, x.value, 0
    for j in range(n_gaps):
        if gap[AWAY, j]:
            fetched[n] = j
            n += 1
    end = at[BEGINS, n_runs]
    for k in range(n - 1, -1, -1):
        j = fetched[k]
        end = min(end, at[BEGINS, gap[TO, j]]) - value[IN_NS, gap[VALUE, j]]
        gap[LATEST, j] = end
    return n


@njit(cache=True, nogil=True, inline="always")
def write(steps: np.ndarray, clock: np.ndarray, kind: int, i: int) -> None:
    """Write a step, if there is room; a search has none."""
    if clock[STEPS] < len(steps):
        steps[clock[STEPS], 0], steps[clock[STEPS], 1] = kind, i
        clock[STEPS] += 1


@njit(cache=True, nogil=True, inline="always")
def free_waiting(
    value: np.ndarray, of: np.ndarray, waiting: np.ndarray, clock: np.ndarray, k: int, steps: np.ndarray
) -> None:  # fmt: skip
    """Free a value that waits for its copy to the host; the computations wait, too."""
    v = waiting[k]
    clock[TIME] = max(clock[TIME], of[OUT_DONE, v])
    clock[WAITING] -= 1
    clock[WAITING_BYTES] -= value[SIZE, v]
    waiting[k] = waiting[clock[WAITING]]
    write(steps, clock, FREE, v)


@njit(cache=True, nogil=True)
def make_room(x: Instance, work: Work, q: int, budget: int, steps: np.ndarray) -> int:
    """Free what is on the host, and wait for copies as long as memory is short; returns the bytes above the budget."""
    at, of, value, waiting, clock = work.at, work.of, x.value, work.waiting, work.clock
    while True:
        k, clock[SOONEST] = 0, INFINITE
        while k < clock[WAITING]:
            done = of[OUT_DONE, waiting[k]]
            if done <= clock[TIME]:
                free_waiting(value, of, waiting, clock, k, steps)
            else:
                k, clock[SOONEST] = k + 1, min(clock[SOONEST], done)
        excess = at[HELD, q] + at[COMING, q] + clock[WAITING_BYTES] - budget
        if excess <= 0 or clock[WAITING] == 0:
            return excess
        clock[TIME] = clock[SOONEST]


@njit(cache=True, nogil=True, inline="always")
def room_until(at: np.ndarray, q: int, to: int, size: int, waiting_bytes: int, budget: int) -> int:
    """The first position from `q` on without room for so many bytes; `to` if there is room up to it."""
    found = to
    if at[HELD, q] + at[COMING, q] + waiting_bytes + size > budget:
        found = q
    else:
        for p in range(q + 1, to):
            if at[HELD, p] + at[COMING, p] + size > budget:
                found = p
                break
    return found


@njit(cache=True, nogil=True, inline="always")
def is_due(clock: np.ndarray, cost: int, latest: int) -> bool:
    """Whether a copy from the host that must begin at `latest` is to be issued before a computation of this cost."""
    ends = clock[TIME] + cost
    return ends >= latest and (clock[IN] <= clock[TIME] or clock[IN] < ends)


@njit(cache=True, nogil=True)
def fetch(
    x: Instance, work: Work, q: int, k: int, n: int, late_by: int, blocked: int, budget: int, steps: np.ndarray
) -> tuple[int, int]:  # fmt: skip
    """Issue copies from the host before the computation at `q`, from the k-th of `n` on.

    Args:
        late_by: how much later than at best it begins, less the margin.
        blocked: up to where there was no room before.

    Returns:
        The next copy, and `blocked`.
    """
    at, gap, of, value, clock, waiting = work.at, work.gap, work.of, x.value, work.clock, work.waiting
    cost = at[BEGINS, q + 1] - at[BEGINS, q]
    while k < n:
        j = work.fetched[k]
        v, to = int(gap[VALUE, j]), int(gap[TO, j])
        if to > q:
            is_there = gap[FROM, j] >= q or of[OUT_DONE, v] > clock[TIME]
            if q <= blocked or is_there or not is_due(clock, cost, gap[LATEST, j] + late_by):
                break
            blocked = room_until(at, q, to, int(value[SIZE, v]), int(clock[WAITING_BYTES]), budget)
            if blocked < to:
                break
            for p in range(q, to):
                at[COMING, p] += value[SIZE, v]
        for p in range(clock[WAITING]):
            if waiting[p] == v:
                free_waiting(value, of, waiting, clock, p, steps)
                break
        clock[IN] = max(clock[IN], clock[TIME], of[OUT_DONE, v]) + value[IN_NS, v]
        at[ARRIVES, to] = max(at[ARRIVES, to], clock[IN])
        write(steps, clock, PREFETCH, v)
        k, blocked = k + 1, -1
    return k, blocked


@njit(cache=True, nogil=True, inline="always")
def next_fetch(work: Work, k: int, n: int) -> tuple[int, int, int, int]:
    """Of the k-th of `n` copies from the host: where its gap begins and ends, when it must begin, and its value."""
    found = INFINITE, INFINITE, INFINITE, 0
    if k < n:
        j, gap = work.fetched[k], work.gap
        found = int(gap[FROM, j]), int(gap[TO, j]), int(gap[LATEST, j]), int(gap[VALUE, j])
    return found


@njit(cache=True, nogil=True)
def send(x: Instance, work: Work, q: int, ends: int, steps: np.ndarray) -> None:
    """Issue copies to the host, in the order in which their values are first away.

    Those go that are away once the computation at `q` has ended, and others whose copies begin before `ends`.
    """
    of, clock, unsent = work.of, work.clock, work.unsent
    while clock[UNSENT] > 0:
        first = 0
        for k in range(1, clock[UNSENT]):
            if of[FIRST_AWAY, unsent[k]] < of[FIRST_AWAY, unsent[first]]:
                first = k
        v, begins = unsent[first], max(clock[OUT], clock[TIME])
        if of[FIRST_AWAY, v] > q and begins >= ends:
            break
        clock[UNSENT] -= 1
        unsent[first] = unsent[clock[UNSENT]]
        clock[OUT] = of[OUT_DONE, v] = begins + x.value[OUT_NS, v]
        clock[ON_HOST] += x.value[SIZE, v]
        write(steps, clock, OFFLOAD, v)


@njit(cache=True, nogil=True)
def copy_out(x: Instance, work: Work, q: int, steps: np.ndarray) -> None:
    """After the computation at `q`: copies to the host, and frees of what is away from now on."""
    at, gap, of, value, clock = work.at, work.gap, work.of, x.value, work.clock
    v = int(at[OUT_HEAD, q])
    while v >= 0:
        work.unsent[clock[UNSENT]] = v
        clock[UNSENT] += 1
        v = int(of[OUT_NEXT, v])
    send(x, work, q, 0, steps)
    j = at[FROM_HEAD, q]
    while j >= 0:
        v = int(gap[VALUE, j])
        if of[OUT_DONE, v] > clock[TIME]:
            work.waiting[clock[WAITING]] = v
            clock[WAITING] += 1
            clock[WAITING_BYTES] += value[SIZE, v]
            clock[SOONEST] = min(clock[SOONEST], of[OUT_DONE, v])
        else:
            write(steps, clock, FREE, v)
        j = gap[FROM_NEXT, j]


@njit(cache=True, nogil=True)
def decode(
    x: Instance, genes: Genes, work: Work, fixed: int, budget: int, host: int, steps: np.ndarray, enough: float
) -> None:  # fmt: skip
    """The plan of genes: its times and what is above the limits, in ``work.found``; its steps, if there is room.

    It ends as soon as the makespan is certainly above `enough`, and finds such a makespan then, and nothing else.
    """
    at, clock, found = work.at, work.clock, work.found
    n_runs = sequence(x, genes, at)
    end = at[BEGINS, n_runs]
    found[MOST_EXCESS] = 0
    if end > enough:
        found[MAKESPAN] = end
        return
    n_gaps = lay_out(x, genes, work, n_runs, fixed)
    n = plan_fetches(x, work, n_runs, n_gaps)
    k, blocked, most, total, margin, writes = 0, -1, 0, 0, genes.numbers[1], len(steps) > 0
    first, to, latest, v = next_fetch(work, 0, n)
    clock[:] = 0
    for q in range(n_runs + 1):
        cost = at[BEGINS, q + 1] - at[BEGINS, q]
        excess = at[HELD, q] + at[COMING, q] + clock[WAITING_BYTES] - budget
        if clock[WAITING] > 0 and (excess > 0 or clock[SOONEST] <= clock[TIME]):
            excess = make_room(x, work, q, budget, steps)
        late_by = clock[TIME] - at[BEGINS, q] - margin
        # `fetch` would find the same; a call takes longer than all else that is done for a computation.
        may_come = first < q and q > blocked and work.of[OUT_DONE, v] <= clock[TIME]
        if to <= q or (may_come and is_due(clock, cost, latest + late_by)):
            k, blocked = fetch(x, work, q, k, n, late_by, blocked, budget, steps)
            first, to, latest, v = next_fetch(work, k, n)
        ends = max(clock[TIME], at[ARRIVES, q]) + cost
        if clock[UNSENT] > 0 and clock[OUT] < ends:
            send(x, work, q - 1, ends, steps)
        excess = max(excess, clock[ON_HOST] - host)
        if excess > 0:
            most, total = max(most, excess), total + excess
        clock[TIME] = ends
        clock[ON_HOST] -= at[DROPS, q]
        if writes:
            write(steps, clock, COMPUTE, int(at[RUN, q]))
        if at[OUT_HEAD, q] >= 0 or at[FROM_HEAD, q] >= 0:
            copy_out(x, work, q, steps)
        if clock[TIME] + end - at[BEGINS, q + 1] > enough:
            found[MAKESPAN] = clock[TIME] + end - at[BEGINS, q + 1]
            return
    found[RUNS], found[GAPS], found[MAKESPAN] = n_runs, n_gaps, clock[TIME]
    found[MOST_EXCESS], found[EXCESS] = most, total


@njit(cache=True, nogil=True)
def insert(genes: Genes, t: int, i: int, n: int) -> bool:
    """Run operation `i` again in stage `t`; whether that is new and there is room."""
    keys, n_keys, key = genes.repeats, genes.numbers[0], t * n + i
    at = np.searchsorted(keys[:n_keys], key)
    if n_keys >= len(keys) or (at < n_keys and keys[at] == key):
        return False
    for p in range(n_keys, at, -1):
        keys[p] = keys[p - 1]
    keys[at] = key
    genes.numbers[0] += 1
    return True


@njit(cache=True, nogil=True)
def remove(genes: Genes, at: int) -> None:
    """Take out a repeat."""
    for p in range(at, genes.numbers[0] - 1):
        genes.repeats[p] = genes.repeats[p + 1]
    genes.numbers[0] -= 1


@njit(cache=True, nogil=True)
def toggle(genes: Genes, toggles: np.ndarray, t: int, v: int) -> None:
    """Change whether a value is away, and note it in `toggles`, whose first entry counts them."""
    if toggles[0, 0] < MOST_TOGGLES:
        toggles[0, 0] += 1
        toggles[toggles[0, 0], 0], toggles[toggles[0, 0], 1] = t, v
        genes.away[t, v] ^= True


@njit(cache=True, nogil=True)
def change_repeat(x: Instance, genes: Genes, toggles: np.ndarray, copies: bool, random: np.ndarray) -> None:
    """A repeat goes, moves to another stage, or a copy takes its place."""
    n = len(x.once)
    at = below(random, genes.numbers[0])
    t, i = genes.repeats[at] // n, genes.repeats[at] % n
    remove(genes, at)
    u = uniform(random)
    if u < 0.35:
        away = 1 + int(-3 * np.log(uniform(random) + 1e-9))
        other = t + away if uniform(random) < 0.5 else t - away
        if i < other < n:
            insert(genes, other, i, n)
    elif u < 0.65 and copies:
        for e in range(x.out_start[i], x.out_start[i + 1]):
            if not genes.away[t, x.out_ids[e]]:
                toggle(genes, toggles, t, x.out_ids[e])
    elif u < 0.75:
        while at < genes.numbers[0] and genes.repeats[at] // n == t and uniform(random) < 0.6:
            remove(genes, at)


@njit(cache=True, nogil=True)
def pick_gap(x: Instance, work: Work, budget: int, random: np.ndarray) -> int:
    """A gap over some position, often one above the budget, in proportion to its bytes; -1 without one."""
    at, gap, value, n_runs = work.at, work.gap, x.value, work.found[RUNS]
    q, seen = below(random, n_runs), 0
    if work.found[MOST_EXCESS] > 0 and uniform(random) < 0.6:
        for p in range(n_runs):
            if at[HELD, p] + at[COMING, p] > budget:
                seen += 1
                q = p if uniform(random) * seen < 1.0 else q
    picked, total = -1, 0.0
    for j in range(work.found[GAPS]):
        if gap[FROM, j] < q < gap[TO, j]:
            size = value[SIZE, gap[VALUE, j]]
            total += size
            if uniform(random) * total < size:
                picked = j
    return picked


@njit(cache=True, nogil=True)
def repeat_with_inputs(
    x: Instance, genes: Genes, toggles: np.ndarray, t: int, i: int, copies: bool, random: np.ndarray
) -> None:  # fmt: skip
    """Run an operation again in a stage; perhaps also what makes its inputs, or fetch these."""
    n, todo = len(x.once), np.empty(64, np.int64)
    todo[0], n_todo, depth = i, 1, 0
    while n_todo > 0:
        n_todo, depth = n_todo - 1, depth + 1
        k = todo[n_todo]
        insert(genes, t, k, n)
        for e in range(x.in_start[k], x.in_start[k + 1]):
            v, u = x.in_ids[e], uniform(random)
            made = x.producer[v]
            if u < 0.35 and made < t and n_todo < 60 and depth < MOST_DEPTH and not x.once[made]:
                todo[n_todo] = made
                n_todo += 1
            elif u < 0.5 and copies and not genes.away[t, v]:
                toggle(genes, toggles, t, v)


@njit(cache=True, nogil=True)
def change_gap(
    x: Instance, genes: Genes, work: Work, toggles: np.ndarray, budget: int, repeats: bool, copies: bool,
    random: np.ndarray,
) -> None:  # fmt: skip
    """A value is held instead of away, or away or made again instead of held."""
    j = pick_gap(x, work, budget, random)
    if j < 0:
        return
    at, gap = work.at, work.gap
    n, v, t = len(x.once), int(gap[VALUE, j]), int(at[STAGE, gap[TO, j]])
    i = int(x.producer[v])
    may_repeat = repeats and i < t < n and not x.once[i]
    if gap[AWAY, j]:
        toggle(genes, toggles, t, v)
        if may_repeat and uniform(random) < 0.5:
            insert(genes, t, i, n)
    elif copies and (uniform(random) < 0.5 or not may_repeat):
        if at[STAGE, gap[FROM, j]] < t and not genes.away[t, v]:
            toggle(genes, toggles, t, v)
    elif may_repeat:
        repeat_with_inputs(x, genes, toggles, t, i, copies, random)


@njit(cache=True, nogil=True)
def change_margin(genes: Genes, total: int, random: np.ndarray) -> None:
    """Copies from the host begin as late as possible, as early as possible, or between."""
    u = uniform(random)
    genes.numbers[1] = 0 if u < 0.2 else 4 * total if u < 0.4 else int(0.3 * total * uniform(random) ** 2)


@njit(cache=True, nogil=True)
def energy(work: Work, price: float) -> float:
    """Makespan and the price of what is above the limits, in ns."""
    found = work.found
    return found[MAKESPAN] + price * (found[MOST_EXCESS] + SUM_SHARE * found[EXCESS] / found[RUNS])


@njit(cache=True, nogil=True)
def take_over(best: Genes, genes: Genes, since: np.ndarray) -> None:
    """Make `best` equal to the genes, from which it differs by the toggles `since`."""
    best.repeats[: genes.numbers[0]] = genes.repeats[: genes.numbers[0]]
    best.numbers[:] = genes.numbers
    if since[0, 0] < len(since) - 1:
        for k in range(1, since[0, 0] + 1):
            best.away[since[k, 0], since[k, 1]] = genes.away[since[k, 0], since[k, 1]]
    else:
        best.away[:] = genes.away
    since[0, 0] = 0


@njit(cache=True, nogil=True)
def anneal(
    x: Instance, genes: Genes, best: Genes, room: Room, limits: tuple[int, int, int], rules: tuple[bool, bool],
    cooling: Cooling, least: float, random: np.ndarray,
) -> float:  # fmt: skip
    """Moves from one temperature to another, in ns; `best` gets the best genes within the limits.

    Args:
        limits: fixed bytes, budget, the host's bytes; rules: whether to repeat, and to copy.
        least: makespan of `best`, or infinite.

    Returns:
        The makespan of `best`.
    """
    old, since, work, other = room
    fixed, budget, host = limits
    repeats, copies = rules
    price, hot, cold, moves = cooling
    none, toggles = np.zeros((0, 2), np.int64), np.zeros((MOST_TOGGLES + 1, 2), np.int64)
    decode(x, genes, work, fixed, budget, host, none, np.inf)
    if work.found[MOST_EXCESS] <= 0 and work.found[MAKESPAN] < least:
        least = float(work.found[MAKESPAN])
        take_over(best, genes, since)
    now, total = energy(work, price), int(x.cost.sum())
    for move in range(moves):
        n_old, margin = genes.numbers[0], genes.numbers[1]
        old[:n_old] = genes.repeats[:n_old]
        toggles[0, 0] = 0
        for _ in range(1 if uniform(random) < 0.6 else 2):
            u = uniform(random)
            if u < 0.03 and copies:
                change_margin(genes, total, random)
            elif u < 0.3 and repeats and genes.numbers[0] > 0:
                change_repeat(x, genes, toggles, copies, random)
            else:
                change_gap(x, genes, work, toggles, budget, repeats, copies, random)
        enough = now - hot * (cold / hot) ** (move / moves) * np.log(uniform(random) + 1e-300)
        decode(x, genes, other, fixed, budget, host, none, enough)
        new = float(other.found[MAKESPAN])
        if new <= enough:
            new = energy(other, price)
        if new <= enough:
            now, work, other = new, other, work
            for k in range(1, toggles[0, 0] + 1):
                if since[0, 0] < len(since) - 1:
                    since[0, 0] += 1
                    since[since[0, 0]] = toggles[k]
            if work.found[MOST_EXCESS] <= 0 and work.found[MAKESPAN] < least:
                least = float(work.found[MAKESPAN])
                take_over(best, genes, since)
            continue
        for k in range(toggles[0, 0], 0, -1):
            genes.away[toggles[k, 0], toggles[k, 1]] ^= True
        genes.repeats[:n_old] = old[:n_old]
        genes.numbers[0], genes.numbers[1] = n_old, margin
    return least


def instance_of(graph: Graph, link: Link) -> Instance:
    """The arrays of a graph."""
    operations, values = graph.operations, graph.values
    kept = [v for v, value in enumerate(values) if value.keep]
    inputs, outputs = (
        _lists([*(op.inputs for op in operations), kept]),
        _lists([*(op.outputs for op in operations), ()]),
    )
    rows = [
        (v.bytes, link.out_ns(v.bytes), link.in_ns(v.bytes), is_held_outside(graph, i)) for i, v in enumerate(values)
    ]
    return Instance(
        *inputs, *outputs, _integers([*(op.cost for op in operations), 0]),
        _integers([*(op.workspace_bytes for op in operations), 0]), _integers(graph.producer),
        np.array([op.run_once for op in operations], np.bool_),
        np.array([_integers(row) for row in zip(*rows, strict=True)], np.int64).reshape(4, -1),
    )  # fmt: skip


def _integers(items: Sequence[int]) -> np.ndarray:
    return np.array(items, dtype=np.int64)


def _lists(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    return _integers([0, *itertools.accumulate(map(len, lists))]), _integers([*itertools.chain(*lists)])


class OffloadSearch:
    """Annealing on one graph within one budget and over one link; one thread.

    Attributes:
        seed: of its random choices.
        least: makespan of the best plan so far, in ns; infinite without one.
    """

    def __init__(self, graph: Graph, budget_bytes: int, link: Link, seed: int):
        self.graph, self.link, self.seed, self.x = graph, link, seed, instance_of(graph, link)
        self.total = max(1, graph.total_cost)
        host = MAX_BYTES if link.host_bytes is None else link.host_bytes
        self.limits = graph.fixed_bytes, budget_bytes, host
        self.price = PRICE * self.total / max(1, plain_peak(graph) - graph.fixed_bytes)
        self.works = _work(self.x), _work(self.x)
        self.genes, self.best = _genes(self.x), _genes(self.x)
        self.old, self.random = np.zeros_like(self.genes.repeats), random_state(seed)
        self.since = np.zeros((SINCE, 2), np.int64)
        self.clear()

    def clear(self) -> None:
        """Forget the best plan, and begin from the plan that holds everything."""
        self.genes.away[:] = False
        self.genes.numbers[:] = 0
        self.least = np.inf
        self.since[0, 0] = len(self.since)  # all of `away` may differ from the best

    def load(self, plan: Plan) -> None:
        """Begin from what a plan repeats and copies; the best plan is forgotten."""
        self.clear()
        n, stage, seen, fetched = len(self.graph), 0, set[int](), set[int]()
        for kind, i in zip(plan.kinds.tolist(), plan.ids.tolist(), strict=True):
            if kind == PREFETCH:
                fetched.add(i)
            elif kind == COMPUTE:
                read = fetched.intersection(self.graph.operations[i].inputs)
                self.genes.away[min(stage, n), list(read)] = True
                fetched -= read
                if i not in seen:
                    seen.add(i)
                    stage += 1
                elif stage < n:
                    insert(self.genes, stage, i, n)
        self.genes.away[n, list(fetched)] = True

    def begin_with(self, repeats: Sequence[int], away: Sequence[tuple[int, int]]) -> None:
        """Begin from repeats (sorted, stage * N + operation) and what is away before a stage; forget the best plan."""
        self.clear()
        n_repeats = min(len(repeats), len(self.genes.repeats))
        self.genes.repeats[:n_repeats] = repeats[:n_repeats]
        self.genes.numbers[0] = n_repeats
        for stage, v in away:
            self.genes.away[stage, v] = True

    def begin_from_best(self) -> None:
        """Go on from the best plan, if there is one."""
        if self.least < np.inf:
            _copy(self.best, self.genes)
            self.since[0, 0] = 0

    def take_best(self, other: OffloadSearch) -> None:
        """Take over the best plan of another search of the same problem."""
        if other is not self and other.least < self.least:
            _copy(other.best, self.best)
            self.least, self.since[0, 0] = other.least, len(self.since)

    def offload_greedily(self, done: Callable[[], bool]) -> None:
        """Send values away until the plan fits: over the fullest place, those with most bytes and time."""
        x, work = self.x, self.works[0]
        decode(x, self.genes, work, *self.limits, NO_STEPS, np.inf)
        n_runs, n_gaps = work.found[RUNS], work.found[GAPS]
        stage, begins, over = work.at[STAGE], work.at[BEGINS], work.at[HELD, :n_runs] - self.limits[1]
        start, to, value, away = work.gap[: AWAY + 1, :n_gaps]
        may_go = (away == 0) & (stage[start] < stage[to])
        size, span = x.value[SIZE, value], begins[to] - begins[start]
        while not done():
            q = int(over.argmax())
            gaps = np.nonzero((start < q) & (to > q) & may_go)[0]
            if over[q] <= 0 or not len(gaps):
                break
            j = gaps[(span[gaps] * np.minimum(size[gaps], 2.0 * over[q])).argmax()]
            self.genes.away[stage[to[j]], value[j]] = True
            may_go[j] = False
            over[start[j] + 1 : to[j]] -= size[j]
        self.since[0, 0] = len(self.since)

    def offload_all(self) -> None:
        """Send what the backward pass reads away after the forward pass, unless it runs again."""
        operations, genes = self.graph.operations, self.genes
        first = next((i for i, op in enumerate(operations) if op.is_backward), len(operations))
        genes.away[first:, [v for op in operations[:first] for v in op.outputs]] = True
        for key in genes.repeats[: genes.numbers[0]].tolist():
            stage, i = divmod(key, len(operations))
            genes.away[stage:, list(operations[i].outputs)] = False
        self.since[0, 0] = len(self.since)

    def run(self, hot: float, cold: float, moves: int, repeats: bool = True, copies: bool = True) -> None:
        """Moves from one temperature to another, in mean costs of an operation."""
        mean = self.total / len(self.graph)
        self.least = anneal(
            self.x, self.genes, self.best, Room(self.old, self.since, *self.works), self.limits, (repeats, copies),
            Cooling(self.price, hot * mean, cold * mean, moves), self.least, self.random,
        )  # fmt: skip

    def excess(self) -> int:
        """Bytes of the loaded plan above the budget, or above the host's memory; 0 if it fits."""
        decode(self.x, self.genes, self.works[0], *self.limits, NO_STEPS, np.inf)
        return int(self.works[0].found[MOST_EXCESS])

    def best_plan(self) -> Plan:
        """The best plan."""
        return self._plan_of(self.best)

    def plan(self) -> Plan:
        """The loaded plan."""
        return self._plan_of(self.genes)

    def _plan_of(self, genes: Genes) -> Plan:
        steps, work = np.zeros((8 * self.works[0].at.shape[1], 2), np.int64), self.works[0]
        decode(self.x, genes, work, *self.limits, steps, np.inf)
        made = _with_frees(self.graph, steps[: work.clock[STEPS]].tolist()[:-1])  # without the end
        return Plan.from_steps(self.graph, made, self.limits[1], self.link)


def _with_frees(graph: Graph, steps: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The steps with a free after the last use of what is not copied, and drops after the last use of what is."""
    needed = [value.keep for value in graph.values]  # what is on the device is needed later
    backwards = list[tuple[int, int]]()
    for kind, i in reversed(steps):
        if kind == COMPUTE:
            touched = dict.fromkeys((*graph.operations[i].inputs, *graph.operations[i].outputs))
            backwards += [(FREE, v) for v in touched if not needed[v]]
            for v in graph.operations[i].outputs:
                needed[v] = False
            for v in graph.operations[i].inputs:
                needed[v] = True
        elif kind != OFFLOAD:
            needed[i] = kind == FREE
        backwards.append((kind, i))
    last = {v: at for at, (kind, v) in enumerate(reversed(backwards)) if kind == PREFETCH}
    made = list[tuple[int, int]]()
    for at, (kind, i) in enumerate(reversed(backwards)):
        made.append((kind, i))
        if kind == COMPUTE:
            read = [v for v in graph.operations[i].inputs if last.get(v, at) < at]
            made += [(DROP, v) for v in read]
            for v in read:
                del last[v]
    return made


def _copy(source: Genes, target: Genes) -> None:
    for old, new in zip(source, target, strict=True):
        new[:] = old


def compile_offload() -> None:
    """Compile the search and keep it in the cache."""
    graph = Graph.from_nodes("compiled", [[], [0], [1], [0, 2]], [2, 2, 2, 2], [1, 1, 1, 1], cost_unit="ns")
    search = OffloadSearch(graph, 6, Link(10**9, 10**9), 0)
    search.offload_greedily(lambda: True)
    search.run(HOT, COLD, 10)


def _genes(x: Instance) -> Genes:
    n = len(x.once)
    return Genes(np.zeros(4 * n + 8, np.int64), np.zeros((n + 1, x.value.shape[1]), np.bool_), np.zeros(2, np.int64))


def _work(x: Instance) -> Work:
    n_values = x.value.shape[1]
    n_runs, n_gaps = ROOM * len(x.cost) + 16, ROOM * (len(x.in_ids) + n_values) + 16
    shapes = (N_AT, n_runs), (N_GAP, n_gaps), (N_OF, n_values), n_gaps, n_values, n_values, N_CLOCK, N_FOUND
    return Work(*(np.zeros(shape, np.int64) for shape in shapes))
