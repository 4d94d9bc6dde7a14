"""Search for what to recompute and what to copy to the host, together: annealing over repeats and copies.

A staged plan says which operations run again before each first computation. Between two touches of a value (it is made
or read) it is held, or it is away: it was copied to the host when it was made, is freed after the first touch and
fetched before the second one. These genes and a margin, by which copies from the host begin early, determine a plan
with its times: `decode` issues each copy as late as it can without making the computations wait, and earlier by the
margin, where memory is free up to its use.

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
from remat.search.randomness import below, random_state, uniform
from remat.units import MAX_BYTES

# Entries of the clock: when each stream is free; values that wait to be freed, and their bytes; steps written.
TIME, OUT, IN, WAITING, WAITING_BYTES, STEPS = range(N_CLOCK := 6)
# Of what `decode` finds: computations, gaps, makespan, most bytes above the budget or the host's memory, their sum.
RUNS, GAPS, MAKESPAN, MOST_EXCESS, EXCESS = range(N_FOUND := 5)
HOT, WARM, COLD = 5e-4, 1e-4, 2e-6  # temperatures, as shares of the cost of running everything once
PRICE = 2.0  # of all bytes that can be saved, in costs of running everything once
SUM_SHARE = 0.05  # weight of the sum of the excess, beside its most
ROOM = 6  # computations and gaps for each operation
MOST_TOGGLES, MOST_DEPTH = 64, 12
SINCE = 4096
NO_STEPS = np.zeros((0, 2), np.int64)


class Instance(NamedTuple):
    """Arrays of a graph with N operations and V values; lists of lists are (starts, entries).

    Operation N is the end, which reads what is kept.

    Attributes:
        cost, workspace: [N + 1]; size: [V] bytes; producer: [V]; once: [N] whether it must run once.
        out_ns, in_ns: [V] how long its copies last.
        stays: [V] whether it cannot be away, see `is_held_outside`.
    """

    in_start: np.ndarray
    in_ids: np.ndarray
    out_start: np.ndarray
    out_ids: np.ndarray
    cost: np.ndarray
    workspace: np.ndarray
    size: np.ndarray
    producer: np.ndarray
    once: np.ndarray
    out_ns: np.ndarray
    in_ns: np.ndarray
    stays: np.ndarray


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
    """A decoded plan: L computations, position L is the end.

    Attributes:
        run, stage: [L + 1] operation and stage of each; begins: [L + 1] when each begins if none waits.
        own: [L + 1] bytes that each needs for itself; held, coming: [L + 1] bytes in use, without and of values
            that were fetched early; on_host: [L + 1].
        gap_from, gap_to, gap_value, gap_away: places where a value is not touched for a while.
        fetched, n_fetched: gaps in which it is away, in the order of their ends; latest: when its copy must begin.
        from_head, from_next: those that begin at a position; out_head, out_next: values copied out at a position.
        arrives: [L + 1] when what came for a computation has arrived.
        last, birth, out_done, last_fetch: [V] last touch, last time it was made, when it is on the host, last gap away.
        waiting: values that are freed when they are on the host.
        found: see `RUNS`.
    """

    run: np.ndarray
    stage: np.ndarray
    begins: np.ndarray
    own: np.ndarray
    held: np.ndarray
    coming: np.ndarray
    on_host: np.ndarray
    gap_from: np.ndarray
    gap_to: np.ndarray
    gap_value: np.ndarray
    gap_away: np.ndarray
    fetched: np.ndarray
    latest: np.ndarray
    from_head: np.ndarray
    from_next: np.ndarray
    out_head: np.ndarray
    out_next: np.ndarray
    arrives: np.ndarray
    last: np.ndarray
    birth: np.ndarray
    out_done: np.ndarray
    last_fetch: np.ndarray
    waiting: np.ndarray
    clock: np.ndarray
    found: np.ndarray


@njit(cache=True, nogil=True)
def sequence(x: Instance, genes: Genes, work: Work) -> int:
    """The computations in their order; returns how many."""
    run, stage, begins, repeats, cost = work.run, work.stage, work.begins, genes.repeats, x.cost
    n, n_repeats, q, k = len(x.once), genes.numbers[0], 0, 0
    begins[0] = 0
    for t in range(n + 1):  # stage N has the end alone
        while k < n_repeats and repeats[k] < (t + 1) * n:
            run[q], stage[q] = repeats[k] - t * n, t
            begins[q + 1] = begins[q] + cost[run[q]]
            q, k = q + 1, k + 1
        run[q], stage[q] = t, t
        begins[q + 1] = begins[q] + cost[t]
        q += 1
    for p in range(q):
        work.held[p] = work.coming[p] = work.on_host[p] = work.arrives[p] = 0
        work.from_head[p] = work.out_head[p] = -1
    return q - 1


@njit(cache=True, nogil=True)
def lay_out(x: Instance, genes: Genes, work: Work, n_runs: int, fixed: int) -> int:
    """Gaps, and bytes at each position without values that were fetched early; returns the number of gaps."""
    in_start, in_ids, out_start, out_ids, size = x.in_start, x.in_ids, x.out_start, x.out_ids, x.size
    stage, held, own, last, birth, away = work.stage, work.held, work.own, work.last, work.birth, genes.away
    gap_from, gap_to, gap_value, gap_away = work.gap_from, work.gap_to, work.gap_value, work.gap_away
    n_gaps = 0
    for v in range(len(size)):
        last[v] = work.last_fetch[v] = work.out_done[v] = -1
    for q in range(n_runs + 1):
        i = work.run[q]
        own[q] = x.workspace[i]
        for e in range(in_start[i], in_start[i + 1]):
            v = in_ids[e]
            own[q] += size[v]
            start, last[v] = last[v], q
            if q - start < 2 or size[v] == 0 or n_gaps == len(gap_to):
                continue
            is_away = away[stage[q], v] and stage[start] < stage[q] and not x.stays[v]
            gap_from[n_gaps], gap_to[n_gaps], gap_value[n_gaps], gap_away[n_gaps] = start, q, v, is_away
            if is_away:
                note_away(work, n_gaps, int(v), int(start), int(size[v]))
            else:  # `held` has differences so far
                held[start + 1] += size[v]
                held[q] -= size[v]
            n_gaps += 0 if x.stays[v] else 1
        for e in range(out_start[i], out_start[i + 1]):
            v = out_ids[e]
            own[q] += size[v]
            last[v] = birth[v] = q
    for v in range(len(size)):
        if work.last_fetch[v] >= 0 and gap_to[work.last_fetch[v]] < n_runs:
            work.on_host[gap_to[work.last_fetch[v]]] -= size[v]
    across = on_host = 0
    for q in range(n_runs + 1):
        across += held[q]
        on_host += work.on_host[q]
        held[q], work.on_host[q] = fixed + own[q] + across, on_host
    return n_gaps


@njit(cache=True, nogil=True)
def note_away(work: Work, j: int, v: int, start: int, size: int) -> None:
    """Gap `j`, in which a value is away: it is copied to the host where it was made before its first one."""
    work.from_next[j], work.from_head[start] = work.from_head[start], j
    if work.last_fetch[v] < 0:
        birth = work.birth[v]
        work.out_next[v], work.out_head[birth] = work.out_head[birth], v
        work.on_host[birth] += size
    work.last_fetch[v] = j


@njit(cache=True, nogil=True)
def plan_fetches(x: Instance, work: Work, n_runs: int, n_gaps: int) -> int:
    """Gaps in which a value is away, and when their copies must begin if no computation waits; returns how many."""
    n = 0
    for j in range(n_gaps):
        if work.gap_away[j]:
            work.fetched[n] = j
            n += 1
    end = work.begins[n_runs]
    for k in range(n - 1, -1, -1):
        j = work.fetched[k]
        end = min(end, work.begins[work.gap_to[j]]) - x.in_ns[work.gap_value[j]]
        work.latest[j] = end
    return n


@njit(cache=True, nogil=True)
def write(steps: np.ndarray, work: Work, kind: int, i: int) -> None:
    """Write a step, if there is room; a search has none."""
    if work.clock[STEPS] < len(steps):
        steps[work.clock[STEPS], 0], steps[work.clock[STEPS], 1] = kind, i
        work.clock[STEPS] += 1


@njit(cache=True, nogil=True)
def free_waiting(x: Instance, work: Work, k: int, steps: np.ndarray) -> None:
    """Free a value that waits for its copy to the host; the computations wait, too."""
    clock, v = work.clock, work.waiting[k]
    clock[TIME] = max(clock[TIME], work.out_done[v])
    clock[WAITING] -= 1
    clock[WAITING_BYTES] -= x.size[v]
    work.waiting[k] = work.waiting[clock[WAITING]]
    if len(steps) > 0:
        write(steps, work, FREE, v)


@njit(cache=True, nogil=True)
def make_room(x: Instance, work: Work, q: int, budget: int, steps: np.ndarray) -> int:
    """Free what is on the host, and wait for copies as long as memory is short; returns the bytes above the budget."""
    clock = work.clock
    while True:
        k = 0
        while k < clock[WAITING]:
            if work.out_done[work.waiting[k]] <= clock[TIME]:
                free_waiting(x, work, k, steps)
            else:
                k += 1
        excess = work.held[q] + work.coming[q] + clock[WAITING_BYTES] - budget
        if excess <= 0 or clock[WAITING] == 0:
            return excess
        first = 0
        for k in range(1, clock[WAITING]):
            if work.out_done[work.waiting[k]] < work.out_done[work.waiting[first]]:
                first = k
        free_waiting(x, work, first, steps)


@njit(cache=True, nogil=True)
def room_until(work: Work, q: int, to: int, size: int, budget: int) -> int:
    """The first position from `q` on without room for so many bytes; `to` if there is room up to it."""
    if work.held[q] + work.coming[q] + work.clock[WAITING_BYTES] + size > budget:
        return q
    for p in range(q + 1, to):
        if work.held[p] + work.coming[p] + size > budget:
            return p
    return to


@njit(cache=True, nogil=True)
def fetch(
    x: Instance, work: Work, q: int, k: int, n: int, cost: int, late_by: int, blocked: int, budget: int,
    steps: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """Issue copies from the host before the computation at `q`, from the k-th of `n` on.

    Args:
        cost: of the computation; late_by: how much later than at best it begins, less the margin.
        blocked: up to where there was no room before.

    Returns:
        The next copy, and `blocked`.
    """
    clock = work.clock
    while k < n:
        j = work.fetched[k]
        v, to = int(work.gap_value[j]), int(work.gap_to[j])
        now = clock[TIME]
        if to > q:
            is_early = now + cost < work.latest[j] + late_by or (clock[IN] > now and clock[IN] >= now + cost)
            is_there = work.gap_from[j] >= q or work.out_done[v] > now
            if is_early or is_there or q <= blocked:
                break
            blocked = room_until(work, q, to, int(x.size[v]), budget)
            if blocked < to:
                break
            for p in range(q, to):
                work.coming[p] += x.size[v]
        for p in range(clock[WAITING]):
            if work.waiting[p] == v:
                free_waiting(x, work, p, steps)
                break
        clock[IN] = max(clock[IN], clock[TIME], work.out_done[v]) + x.in_ns[v]
        work.arrives[to] = max(work.arrives[to], clock[IN])
        if len(steps) > 0:
            write(steps, work, PREFETCH, v)
        k, blocked = k + 1, -1
    return k, blocked


@njit(cache=True, nogil=True)
def copy_out(x: Instance, work: Work, q: int, steps: np.ndarray) -> None:
    """After the computation at `q`: copies to the host, and frees of what is away from now on."""
    clock, v = work.clock, int(work.out_head[q])
    while v >= 0:
        clock[OUT] = work.out_done[v] = max(clock[OUT], clock[TIME]) + x.out_ns[v]
        if len(steps) > 0:
            write(steps, work, OFFLOAD, v)
        v = int(work.out_next[v])
    j = work.from_head[q]
    while j >= 0:
        v = int(work.gap_value[j])
        if work.out_done[v] > clock[TIME]:
            work.waiting[clock[WAITING]] = v
            clock[WAITING] += 1
            clock[WAITING_BYTES] += x.size[v]
        elif len(steps) > 0:
            write(steps, work, FREE, v)
        j = work.from_next[j]


@njit(cache=True, nogil=True)
def decode(
    x: Instance, genes: Genes, work: Work, fixed: int, budget: int, host: int, steps: np.ndarray, enough: float
) -> None:  # fmt: skip
    """The plan of genes: its times and what is above the limits, in ``work.found``; its steps, if there is room.

    It ends as soon as the makespan is certainly above `enough`, and finds such a makespan then, and nothing else.

    Calls with many arrays cost more than what they do here; therefore few are made.
    """
    n_runs = sequence(x, genes, work)
    end, found = work.begins[n_runs], work.found
    if end > enough:
        found[MAKESPAN] = end
        return
    n_gaps = lay_out(x, genes, work, n_runs, fixed)
    n = plan_fetches(x, work, n_runs, n_gaps)
    clock, held, coming, on_host, begins, run = work.clock, work.held, work.coming, work.on_host, work.begins, work.run
    fetched, gap_to, latest, arrives = work.fetched, work.gap_to, work.latest, work.arrives
    k, blocked, most, total, margin, writes = 0, -1, 0, 0, genes.numbers[1], len(steps) > 0
    clock[:] = 0
    for q in range(n_runs + 1):
        cost = int(x.cost[run[q]])
        excess = held[q] + coming[q] - budget
        if clock[WAITING] > 0:
            excess = make_room(x, work, q, budget, steps)
        excess = max(excess, on_host[q] - host)
        if excess > 0:
            most, total = max(most, excess), total + excess
        late_by = clock[TIME] - begins[q] - margin
        if k < n and (gap_to[fetched[k]] <= q or clock[TIME] + cost >= latest[fetched[k]] + late_by):
            k, blocked = fetch(x, work, q, k, n, cost, late_by, blocked, budget, steps)
        clock[TIME] = max(clock[TIME], arrives[q]) + cost
        if writes:
            write(steps, work, COMPUTE, int(run[q]))
        if work.out_head[q] >= 0 or work.from_head[q] >= 0:
            copy_out(x, work, q, steps)
        if clock[TIME] + end - begins[q + 1] > enough:
            found[MAKESPAN] = clock[TIME] + end - begins[q + 1]
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
    n_runs = work.found[RUNS]
    q, seen = below(random, n_runs), 0
    if work.found[MOST_EXCESS] > 0 and uniform(random) < 0.6:
        for p in range(n_runs):
            if work.held[p] + work.coming[p] > budget:
                seen += 1
                q = p if uniform(random) * seen < 1.0 else q
    picked, total = -1, 0.0
    for j in range(work.found[GAPS]):
        if work.gap_from[j] < q < work.gap_to[j]:
            total += x.size[work.gap_value[j]]
            if uniform(random) * total < x.size[work.gap_value[j]]:
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
    n, v, t = len(x.once), int(work.gap_value[j]), int(work.stage[work.gap_to[j]])
    i = int(x.producer[v])
    may_repeat = repeats and i < t < n and not x.once[i]
    if work.gap_away[j]:
        toggle(genes, toggles, t, v)
        if may_repeat and uniform(random) < 0.5:
            insert(genes, t, i, n)
    elif copies and (uniform(random) < 0.5 or not may_repeat):
        if work.stage[work.gap_from[j]] < t and not genes.away[t, v]:
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
    x: Instance, genes: Genes, best: Genes, old: np.ndarray, since: np.ndarray, works: tuple[Work, Work],
    limits: tuple[int, int, int], rules: tuple[bool, bool], price: float, hot: float, cold: float, moves: int,
    least: float, random: np.ndarray,
) -> float:  # fmt: skip
    """Moves from one temperature to another, in ns; `best` gets the best genes within the limits.

    Args:
        old: room for the repeats of the genes; since: places at which `away` may differ from that of `best`.
        works: working space; limits: fixed bytes, budget, the host's bytes; rules: whether to repeat, and to copy.
        least: makespan of `best`, or infinite.

    Returns:
        The makespan of `best`.
    """
    work, other = works
    fixed, budget, host = limits
    repeats, copies = rules
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
    return Instance(
        *inputs, *outputs, _integers([*(op.cost for op in operations), 0]),
        _integers([*(op.workspace_bytes for op in operations), 0]), _integers([v.bytes for v in values]),
        _integers(graph.producer), np.array([op.run_once for op in operations], np.bool_),
        _integers([link.out_ns(v.bytes) for v in values]), _integers([link.in_ns(v.bytes) for v in values]),
        np.array([is_held_outside(graph, v) for v in range(len(values))], np.bool_),
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

    def __init__(self, graph: Graph, budget_bytes: int, link: Link, seed: int, plain_peak_bytes: int):
        self.graph, self.link, self.seed, self.x = graph, link, seed, instance_of(graph, link)
        self.total = max(1, graph.total_cost)
        host = MAX_BYTES if link.host_bytes is None else link.host_bytes
        self.limits = graph.fixed_bytes, budget_bytes, host
        self.price = PRICE * self.total / max(1, plain_peak_bytes - graph.fixed_bytes)
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
        while not done():
            decode(x, self.genes, work, *self.limits, NO_STEPS, np.inf)
            n_runs, n_gaps = work.found[:2]
            over = work.held[:n_runs] - self.limits[1]
            q = int(over.argmax())
            start, to, value = work.gap_from[:n_gaps], work.gap_to[:n_gaps], work.gap_value[:n_gaps]
            stage = work.stage
            fits = (start < q) & (to > q) & ~work.gap_away[:n_gaps] & (stage[start] < stage[to])
            if over[q] <= 0 or not fits.any():
                return
            gaps = np.nonzero(fits)[0]
            spans = (work.begins[to[gaps]] - work.begins[start[gaps]]) * np.minimum(x.size[value[gaps]], 2.0 * over[q])
            j = gaps[spans.argmax()]
            self.genes.away[stage[to[j]], value[j]] = True
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
        """Moves from one temperature to another, which are shares of the cost of running everything once."""
        self.least = anneal(
            self.x, self.genes, self.best, self.old, self.since, self.works, self.limits, (repeats, copies), self.price,
            hot * self.total, cold * self.total, moves, self.least, self.random,
        )  # fmt: skip

    def plan(self, genes: Genes | None = None) -> Plan:
        """The best plan, or that of other genes."""
        steps, work = np.zeros((8 * len(self.works[0].run), 2), np.int64), self.works[0]
        decode(self.x, self.best if genes is None else genes, work, *self.limits, steps, np.inf)
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
    search = OffloadSearch(graph, 6, Link(10**9, 10**9), 0, 8)
    search.offload_greedily(lambda: True)
    search.run(HOT, COLD, 10)


def _genes(x: Instance) -> Genes:
    n = len(x.once)
    return Genes(np.zeros(4 * n + 8, np.int64), np.zeros((n + 1, len(x.size)), np.bool_), np.zeros(2, np.int64))


def _work(x: Instance) -> Work:
    n_runs, n_gaps, n_values = ROOM * len(x.cost) + 16, ROOM * (len(x.in_ids) + len(x.size)) + 16, len(x.size)
    lengths = dict.fromkeys(Work._fields, n_runs)
    lengths |= dict.fromkeys((f for f in Work._fields if f.startswith("gap_")), n_gaps)
    lengths |= dict.fromkeys(("fetched", "latest", "from_next"), n_gaps)
    lengths |= dict.fromkeys(("out_next", "last", "birth", "out_done", "last_fetch", "waiting"), n_values)
    lengths |= {"clock": N_CLOCK, "found": N_FOUND}
    types = {"gap_away": np.bool_}
    return Work(*(np.zeros(length, types.get(name, np.int64)) for name, length in lengths.items()))
