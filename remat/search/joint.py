"""Search for what to store and which implementations to use, together: annealing over storage patterns.

A plan is a forward pass and, before each backward operation, the forward operations that run again for it. Two things
determine the rest: the values that are stored, and the implementation of each backward operation (MONeT, Shah et al.,
ICLR 2021, section 4). Given them, the operations between two backward operations are independent of the others: what
is missing runs again, an operation writes over its input where nobody needs that any more, and each takes the fastest
of its equal implementations that fits the memory that is left.

Each value has a gene: stored from the forward pass to its last use, or run again at its first use and then kept; a use
can be an exception, at which the value is run again. While it anneals, an implementation is priced by what it takes
above the budget, because a faster one pays only after several values are dropped; the exact one judges incumbents.

This is one file on purpose: the cache of compiled code checks only the file of a function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from remat.graph import Graph, Operation, Value
from remat.implementation import DEFAULT, Implementation
from remat.plan import Plan
from remat.randomness import below, random_state, uniform

MOST_REPEATS = 12  # of one value
COST, EXCESS, EXACT_COST, EXACT_EXCESS, PRICE, BEST = range(N_REALS := 6)
HOLDS, RUNS = 1, 2  # a stage to evaluate: only values that no run touches are held or not; or it runs otherwise
OVER, NEVER = 1e30, 1e15  # a price at which nothing above the budget pays; bytes above every budget
HOT, WARM, COLD = 1e-3, 1.5e-4, 4e-5  # temperatures, as shares of the least cost: first, first from a plan, last
# The least price of a byte, as a share of the least cost over the budget; the price at the beginning, over the least.
PRICE_FLOOR, FIRST_PRICE = 0.05, 4.0
# Shares of the flips that change one use of a value, and when it is run again before its first use; share of further
# flips that are not in the neighbourhood of the one before.
SHARE_AGAIN, SHARE_EARLY, SHARE_FAR = 0.05, 0.05, 0.3
MOVES_PER_VALUE = 2500  # enough to cool down once
FIRST_CHUNK, CHUNK_S, SEED_STEP = 500, 0.2, 1_000_003  # moves between two looks at the clock; their time


class Instance(NamedTuple):
    """Arrays of a graph; V values of the forward pass in the order they are made, F forward operations, T stages.

    Stage 0 is the forward pass, stage t ends with backward operation t. Lists of lists are (starts, entries).

    Attributes:
        size: [V] bytes; maker: [V] operation; extra: [V] whether only some implementations make it.
        outputs, first_extra: [F + 1] values of an operation begin there; its extra values begin there.
        inputs, readers: values that an operation reads; operations that read a value.
        last_reader: [V] the last of them, or the maker without any; dying: values whose last reader is an operation.
        base: [T] bytes held in a stage beside the values: fixed, gradients, kept.
        options: [T + 1] implementations of a backward operation with other inputs begin there.
        option_reads, option_bytes, option_pick: values that it reads, bytes of its outputs, its picks.
        kinds: [F + 1] kinds of an operation begin there: without an extra value, and one with each.
        plain_pick, over_pick: [kinds + 1] picks of a kind begin there; those that write over the input.
        pick_cost, pick_bytes: cost and workspace of equal implementations, from fast to lean.
        over: [F] the input that an operation may write over; -1 for none.
        uses: (starts, stage, option) backward operations that read a value.
        choosing: stages with several options; reads: [options] bit sets of the values read.
        weight: [V] sums of sizes, to draw values in proportion.
    """

    size: np.ndarray
    maker: np.ndarray
    extra: np.ndarray
    outputs: np.ndarray
    first_extra: np.ndarray
    in_start: np.ndarray
    in_ids: np.ndarray
    reader_start: np.ndarray
    reader_ids: np.ndarray
    last_reader: np.ndarray
    dying_start: np.ndarray
    dying_ids: np.ndarray
    base: np.ndarray
    options: np.ndarray
    read_start: np.ndarray
    read_ids: np.ndarray
    option_bytes: np.ndarray
    option_pick: np.ndarray
    kinds: np.ndarray
    plain_pick: np.ndarray
    over_pick: np.ndarray
    pick_cost: np.ndarray
    pick_bytes: np.ndarray
    over: np.ndarray
    use_start: np.ndarray
    use_stage: np.ndarray
    use_option: np.ndarray
    choosing: np.ndarray
    reads: np.ndarray
    weight: np.ndarray


class State(NamedTuple):
    """What annealing changes.

    Attributes:
        stored, early: [V] genes; early is the stage in which a value is run again before its first use, or 0.
        again: [V, T] exceptions; option: [T] chosen implementation of each backward operation.
        held: [V, T + 1] whether a value is there when a stage begins; bits: the same as bit sets; total: [T + 1] bytes.
        n_runs, runs: stages in which a value is run again.
        cost, excess: [T] priced; exact_cost, exact_excess: [T] with implementations that fit.
        fastest: [T, 3] of a stage with runs: its cost with the fastest implementations, the most bytes that these need
            beside those held when the stage begins, and whether it has no others.
        reals: [N_REALS] sums, the price of a byte, the cost of the best.
        best_*: genes of the best plan. random: the generator's state.
    """

    stored: np.ndarray
    early: np.ndarray
    again: np.ndarray
    option: np.ndarray
    held: np.ndarray
    bits: np.ndarray
    total: np.ndarray
    n_runs: np.ndarray
    runs: np.ndarray
    runs_at: np.ndarray
    cost: np.ndarray
    excess: np.ndarray
    exact_cost: np.ndarray
    exact_excess: np.ndarray
    fastest: np.ndarray
    reals: np.ndarray
    best_stored: np.ndarray
    best_early: np.ndarray
    best_again: np.ndarray
    best_option: np.ndarray
    random: np.ndarray


class Work(NamedTuple):
    """Working space of `stage`: V values, F operations.

    Attributes:
        left: [V] how often a value is still needed; counted for those in `seen` and `list`.
        wanted: [F] operations that are to run; runs, names: as `stage` says.
        n: values seen, operations wanted, the last of them.
    """

    left: np.ndarray
    seen: np.ndarray
    list: np.ndarray
    wanted: np.ndarray
    runs: np.ndarray
    names: np.ndarray
    n: np.ndarray


BIT = np.zeros(67, np.int64)
BIT[[pow(2, bit, 67) for bit in range(64)]] = range(64)  # [a power of two modulo 67] its exponent


@njit(cache=True)
def workspace(n_values, n_operations):
    """Working space of `stage`."""
    return Work(
        np.zeros(n_values, np.int64), np.zeros(n_values, np.bool_), np.zeros(n_values, np.int64),
        np.zeros(n_operations, np.bool_), np.zeros(n_operations, np.int64), np.zeros(n_operations + 1, np.int64),
        np.zeros(3, np.int64),
    )  # fmt: skip


@njit(cache=True, inline="always")
def pick(costs, scratch, first, end, slack, price, out):
    """The best of equal implementations: out[0..1] cost and excess priced, out[2..3] exact; returns the exact one."""
    if scratch[first] <= slack:  # the fastest
        out[0] = out[2] = costs[first]
        out[1] = out[3] = 0.0
        return first
    least = 1e300
    for p in range(first, end):
        over = max(0.0, scratch[p] - slack)
        if costs[p] + price * over < least:
            least = costs[p] + price * over
            out[0], out[1] = costs[p], over
    exact = first
    while exact < end - 1 and scratch[exact] > slack:
        exact += 1
    out[2] = costs[exact]
    out[3] = max(0.0, scratch[exact] - slack)
    return exact


@njit(cache=True, inline="always")
def quiet(held, option_bytes, costs, scratch, first, end, budget, price, out):
    """Cost and excess, as of `stage`, of a stage in which no operation runs again."""
    pick(costs, scratch, first, end, budget - held - option_bytes, price, out)
    out[1] = max(out[1], held - budget)
    out[3] = max(out[3], held - budget)


@njit(cache=True, inline="always")
def has(bits, v):
    """Whether a value is in a bit set."""
    return (bits[v >> 6] >> np.uint64(v & 63)) & np.uint64(1) != np.uint64(0)


@njit(cache=True, inline="always")
def see(v, state, t, reads, work):
    """Begin to count what a value is still needed for in a stage: its end, the backward operation."""
    if not work.seen[v]:
        work.seen[v] = True
        work.list[work.n[0]] = v
        work.n[0] += 1
        work.left[v] = has(state.bits[t + 1], v) + has(reads, v)


@njit(cache=True, inline="always")
def want(instance, state, t, v, work):
    """Let the maker of a value run in stage `t`, unless the value is there."""
    i = instance.maker[v]
    if not work.wanted[i] and not has(state.bits[t], v):
        work.wanted[i] = True
        work.n[1] += 1
        work.n[2] = max(work.n[2], i)


@njit(cache=True)
def runs_of(instance, state, t, reads, work):
    """The operations that run in stage `t` > 0, descending, into `work.runs`; returns their number."""
    work.n[:] = 0
    for w in range(reads.shape[0]):
        missing = (state.bits[t + 1, w] | reads[w]) & ~state.bits[t, w]
        while missing:
            low = missing & (~missing + np.uint64(1))
            missing ^= low
            want(instance, state, t, w * 64 + BIT[int(low % np.uint64(67))], work)
    n, i = 0, work.n[2]
    while n < work.n[1]:
        if work.wanted[i]:
            work.wanted[i] = False
            work.runs[n] = i
            n += 1
            for e in range(instance.in_start[i], instance.in_start[i + 1]):
                u = instance.in_ids[e]
                see(u, state, t, reads, work)
                work.left[u] += 1
                want(instance, state, t, u, work)
            for v in range(instance.outputs[i], instance.outputs[i + 1]):
                see(v, state, t, reads, work)
        i -= 1
    return n


@njit(cache=True, inline="always")
def add(out, picked):
    """Add the cost of a run, priced and exact; the excess of a stage is the largest of its runs."""
    out[0] += picked[0]
    out[1] = max(out[1], picked[1])
    out[2] += picked[2]
    out[3] = max(out[3], picked[3])


@njit(cache=True, inline="always")
def note(instance, fastest, first, end, held):
    """Add a run with its fastest implementation to the sums of a stage; `held`: bytes beside its workspace."""
    fastest[0] += instance.pick_cost[first]
    fastest[1] = max(fastest[1], held + instance.pick_bytes[first])
    if end > first + 1:
        fastest[2] = 0.0


@njit(cache=True)
def forward(instance, state, budget, price, names, out, picked):
    """Cost and excess of stage 0, the forward pass: out[0..1] priced, out[2..3] exact; what it picked, in `names`."""
    stored, mem = state.bits[1], instance.base[0]
    out[:] = 0.0
    for i in range(instance.over.shape[0]):
        over = instance.over[i]
        in_place = over >= 0 and instance.last_reader[over] == i and not has(stored, over)
        extra, making = 0, 0
        for v in range(instance.outputs[i], instance.first_extra[i]):
            making += instance.size[v]
        for v in range(instance.first_extra[i], instance.outputs[i + 1]):
            if has(stored, v):
                if extra > 0:  # no implementation makes two
                    out[1] = out[3] = NEVER
                extra = v - instance.first_extra[i] + 1
                making += instance.size[v]
        kind = instance.kinds[i] + extra
        p, e = instance.plain_pick[kind], instance.plain_pick[kind + 1]
        in_place = in_place and instance.over_pick[kind] < instance.over_pick[kind + 1]
        if in_place:
            making -= instance.size[over]
            p, e = instance.over_pick[kind], instance.over_pick[kind + 1]
        names[i] = pick(instance.pick_cost, instance.pick_bytes, p, e, budget - mem - making, price, picked)
        add(out, picked)
        mem += making
        for e in range(instance.dying_start[i], instance.dying_start[i + 1]):
            v = instance.dying_ids[e]
            if (
                not has(stored, v)
                and not (in_place and v == over)
                and (v < instance.first_extra[i] or instance.maker[v] < i)
            ):
                mem -= instance.size[v]


@njit(cache=True)
def stage(instance, state, t, budget, price, work, out, picked):
    """Cost and excess of a stage `t` > 0: out[0..1] priced, out[2..3] exact. Returns the number of runs.

    The operations that run are in `work.runs`, descending, what they picked in `work.names`, the backward one last.
    """
    o = instance.options[t] + state.option[t]
    n = runs_of(instance, state, t, instance.reads[o], work)
    left, fastest = work.left, state.fastest[t]
    at_first = mem = instance.base[t] + state.total[t]
    out[:] = 0.0
    fastest[0], fastest[1], fastest[2] = 0.0, -NEVER, 1.0
    for r in range(n - 1, -1, -1):
        i = work.runs[r]
        over = instance.over[i]
        in_place = over >= 0 and left[over] == 1
        extra = making = duplicate = 0
        for v in range(instance.outputs[i], instance.outputs[i + 1]):
            there = has(state.bits[t], v)
            if v < instance.first_extra[i]:
                making += instance.size[v]
                duplicate += instance.size[v] if there else 0
            elif left[v] > 0 and not there:
                if extra > 0:  # no implementation makes two
                    out[1] = out[3] = fastest[1] = NEVER
                    fastest[2] = 0.0
                extra = v - instance.first_extra[i] + 1
                making += instance.size[v]
        kind = instance.kinds[i] + extra
        p, e = instance.plain_pick[kind], instance.plain_pick[kind + 1]
        in_place = in_place and instance.over_pick[kind] < instance.over_pick[kind + 1]
        if in_place:
            making -= instance.size[over]
            p, e = instance.over_pick[kind], instance.over_pick[kind + 1]
        note(instance, fastest, p, e, mem + making - at_first)
        work.names[r] = pick(instance.pick_cost, instance.pick_bytes, p, e, budget - mem - making, price, picked)
        add(out, picked)
        mem += making - duplicate
        for e in range(instance.in_start[i], instance.in_start[i + 1]):
            u = instance.in_ids[e]
            left[u] -= 1
            if left[u] == 0 and not (in_place and u == over):
                mem -= instance.size[u]
        for v in range(instance.outputs[i], instance.first_extra[i]):
            if left[v] == 0:
                mem -= instance.size[v]
    p, e, making = instance.option_pick[o], instance.option_pick[o + 1], instance.option_bytes[o]
    note(instance, fastest, p, e, mem + making - at_first)
    work.names[n] = pick(instance.pick_cost, instance.pick_bytes, p, e, budget - mem - making, price, picked)
    add(out, picked)
    for j in range(work.n[0]):
        work.seen[work.list[j]] = False
    return n


@njit(cache=True, inline="always")
def shifted(instance, state, t, budget, out):
    """Cost and excess of a stage with runs that only holds more or less than before; False if it must run again."""
    fastest = state.fastest[t]
    over = instance.base[t] + state.total[t] + fastest[1] - budget
    out[0] = out[2] = fastest[0]
    out[1] = out[3] = max(0.0, over)
    return over <= 0 or fastest[2] > 0


@njit(cache=True, inline="always")
def column(instance, state, v, col, flags, found):
    """Where a value is there, col [T + 1], and the stages in which it is run again, in `found`; returns their number.

    It was kept since the use before, or is run again: at its first use or early, unless it is stored; at exceptions.
    """
    n_stages = state.option.shape[0]
    first, last = n_stages, -1
    for t in range(n_stages + 1):
        col[t] = False
        flags[t] = False
    for e in range(instance.use_start[v], instance.use_start[v + 1]):
        t = instance.use_stage[e]
        if state.option[t] == instance.use_option[e]:
            flags[t] = True
            first, last = min(first, t), max(last, t)
    for e in range(instance.reader_start[v], instance.reader_start[v + 1]):
        i = instance.reader_ids[e]
        for w in range(instance.outputs[i], instance.outputs[i + 1]):
            for j in range(state.n_runs[w]):
                t = state.runs[w, j]
                flags[t] = True
                first, last = min(first, t), max(last, t)
    if not state.stored[v] and 0 < state.early[v] < first and last >= 0:
        first = state.early[v]
        flags[first] = True
    n, before, fresh = 0, 0, not state.stored[v]
    for t in range(max(first, 1), last + 1):
        if not flags[t]:
            continue
        if (fresh or state.again[v, t]) and n < MOST_REPEATS:
            found[n] = t
            n += 1
        else:
            for s in range(before + 1, t + 1):
                col[s] = True
        fresh, before = False, t
    return n


@njit(cache=True, inline="always")
def set_column(instance, state, v, col, dirty):
    """Let a value be there where `col` says; marks the stages that this touches.

    A stage that a value now passes, or passes no longer, runs as before: what reads the value there, or makes it, was
    or is now another run, which marks the stage as well.
    """
    bit, n_stages, begins = np.uint64(1) << np.uint64(v & 63), dirty.shape[0], False
    for t in range(n_stages):  # from its beginning, t, to its end, t + 1
        ends = col[t + 1] != state.held[v, t + 1]
        if begins or ends:
            passes = begins and ends and col[t] == col[t + 1]
            dirty[t] = max(dirty[t], HOLDS if passes else RUNS)
        if ends:
            state.held[v, t + 1] = col[t + 1]
            state.bits[t + 1, v >> 6] ^= bit
            state.total[t + 1] += instance.size[v] if col[t + 1] else -instance.size[v]
        begins = ends


@njit(cache=True, inline="always")
def set_runs(state, v, n, found):
    """Let a value be run again in the stages that `found` begins with."""
    for j in range(state.n_runs[v]):
        state.runs_at[state.runs[v, j]] -= 1
    state.n_runs[v] = n
    for j in range(n):
        state.runs[v, j] = found[j]
        state.runs_at[found[j]] += 1


@njit(cache=True, inline="always")
def evaluate(instance, state, t, budget, price, work, out, picked):
    """Cost and excess of stage `t`, in `out`."""
    if t == 0:
        forward(instance, state, budget, price, work.names, out, picked)
    elif state.runs_at[t] > 0:
        stage(instance, state, t, budget, price, work, out, picked)
    else:
        o = instance.options[t] + state.option[t]
        quiet(
            instance.base[t] + state.total[t], instance.option_bytes[o], instance.pick_cost, instance.pick_bytes,
            instance.option_pick[o], instance.option_pick[o + 1], budget, price, out,
        )  # fmt: skip


@njit(cache=True)
def large(instance, random):
    """A value, drawn in proportion to its size."""
    return min(np.searchsorted(instance.weight, uniform(random) * instance.weight[-1]), instance.size.shape[0] - 1)


@njit(cache=True)
def neighbour(instance, state, v):
    """A value that the maker of `v` reads, or that a reader of `v` makes; `v` where there is none."""
    i = instance.maker[v]
    n_in = instance.in_start[i + 1] - instance.in_start[i]
    n_out = instance.reader_start[v + 1] - instance.reader_start[v]
    if n_in + n_out == 0:
        return v
    j = below(state.random, n_in + n_out)
    if j < n_in:
        return instance.in_ids[instance.in_start[i] + j]
    k = instance.reader_ids[instance.reader_start[v] + j - n_in]
    return instance.outputs[k] + below(state.random, instance.outputs[k + 1] - instance.outputs[k])


@njit(cache=True, inline="always")
def set_stored(state, v, value, touched, log, n):
    """Set a gene; returns the length of the log."""
    touched[v] = True
    if state.stored[v] != value:
        log[n, 0], log[n, 1] = v, -1
        n += 1
        state.stored[v] = value
    return n


@njit(cache=True)
def set_option(instance, state, t, new, touched, options_log, n):
    """Let a backward operation have another implementation; returns the length of the log."""
    options_log[n, 0], options_log[n, 1] = t, state.option[t]
    for o in (state.option[t], new):
        k = instance.options[t] + o
        for e in range(instance.read_start[k], instance.read_start[k + 1]):
            touched[instance.read_ids[e]] = True
    state.option[t] = new
    return n + 1


@njit(cache=True)
def other_option(instance, state, t):
    n = instance.options[t + 1] - instance.options[t]
    return (state.option[t] + 1 + below(state.random, n - 1)) % n


@njit(cache=True)
def switch(instance, state, touched, log, n, options_log):
    """A backward operation takes another implementation; what it reads is stored, what it read perhaps no longer."""
    t = instance.choosing[below(state.random, instance.choosing.shape[0])]
    old = instance.options[t] + state.option[t]
    set_option(instance, state, t, other_option(instance, state, t), touched, options_log, 0)
    new = instance.options[t] + state.option[t]
    v = -1
    stores, drops = uniform(state.random) < 0.5, uniform(state.random) < 0.5
    for e in range(instance.read_start[new], instance.read_start[new + 1]):
        v = instance.read_ids[e]
        if stores or instance.extra[v]:
            n = set_stored(state, v, True, touched, log, n)
    for e in range(instance.read_start[old], instance.read_start[old + 1]):
        v = instance.read_ids[e]
        if drops and not instance.extra[v]:
            n = set_stored(state, v, False, touched, log, n)
    return n, v


@njit(cache=True)
def turn(instance, state, v, touched, log, n, options_log):
    """All backward readers of a value turn away from it, and what they read instead is stored; or all turn to it."""
    away = uniform(state.random) < 0.5
    stores, keeps_reader = uniform(state.random) < 0.7, uniform(state.random) < 0.5
    m = 0
    for e in range(instance.use_start[v], instance.use_start[v + 1]):
        t = instance.use_stage[e]
        several = instance.options[t + 1] - instance.options[t] > 1
        if t == 0 or not several or (state.option[t] == instance.use_option[e]) != away or m == options_log.shape[0]:
            continue
        if not away and uniform(state.random) < 0.2:
            continue
        m = set_option(
            instance, state, t, other_option(instance, state, t) if away else instance.use_option[e], touched,
            options_log, m,
        )  # fmt: skip
        k = instance.options[t] + state.option[t]
        for f in range(instance.read_start[k], instance.read_start[k + 1]):
            u = instance.read_ids[f]
            if stores or instance.extra[u]:
                n = set_stored(state, u, True, touched, log, n)
    n = set_stored(state, v, not away, touched, log, n)
    first, end = instance.reader_start[v], instance.reader_start[v + 1]
    if away and keeps_reader and end > first:
        i = instance.reader_ids[first + below(state.random, end - first)]
        n = set_stored(state, instance.outputs[i], True, touched, log, n)
    return n, m


@njit(cache=True)
def uses_of(instance, state, v, found):
    """Stages in which a value is read, by the backward operation or by what runs again; returns their number."""
    m = 0
    for e in range(instance.use_start[v], instance.use_start[v + 1]):
        t = instance.use_stage[e]
        if t > 0 and state.option[t] == instance.use_option[e]:
            found[m] = t
            m += 1
    for e in range(instance.reader_start[v], instance.reader_start[v + 1]):
        i = instance.reader_ids[e]
        for w in range(instance.outputs[i], instance.outputs[i + 1]):
            for j in range(state.n_runs[w]):
                if m < found.shape[0]:
                    found[m] = state.runs[w, j]
                    m += 1
    return m


@njit(cache=True)
def set_early(instance, state, v, touched, log, n, candidates):
    """A value is made again before its first use, perhaps where what it is made from is there; or no longer."""
    old, t, i = state.early[v], 0, instance.maker[v]
    if old == 0 or uniform(state.random) < 0.5:
        t = 1 + below(state.random, state.option.shape[0] - 1)
        first, n_in = instance.in_start[i], instance.in_start[i + 1] - instance.in_start[i]
        if n_in > 0 and uniform(state.random) < 0.7:
            m = uses_of(instance, state, instance.in_ids[first + below(state.random, n_in)], candidates)
            t = candidates[below(state.random, m)] if m > 0 else t
        n = set_stored(state, v, False, touched, log, n)
    log[n, 0], log[n, 1] = v, -2 - old
    state.early[v] = t
    return n + 1


@njit(cache=True)
def flip(instance, state, v, touched, log, n, candidates):
    """A value is stored or no longer; or at one of its uses it is run again or no longer."""
    touched[v] = True
    r = uniform(state.random)
    if r > 1 - SHARE_EARLY:
        return set_early(instance, state, v, touched, log, n, candidates)
    if r < SHARE_AGAIN:
        m = uses_of(instance, state, v, candidates)
        if m > 0:
            t = candidates[below(state.random, m)]
            state.again[v, t] = not state.again[v, t]
            log[n, 0], log[n, 1] = v, t
            n += 1
        return n
    n = set_stored(state, v, not state.stored[v], touched, log, n)
    if uniform(state.random) < 0.1:
        for t in range(state.again.shape[1]):
            if state.again[v, t] and n < log.shape[0] - 8:
                state.again[v, t] = False
                log[n, 0], log[n, 1] = v, t
                n += 1
    return n


@njit(cache=True)
def undo_genes(state, log, n, options_log, m):
    for j in range(n - 1, -1, -1):
        v, t = log[j, 0], log[j, 1]
        if t == -1:
            state.stored[v] = not state.stored[v]
        elif t < -1:
            state.early[v] = -2 - t
        else:
            state.again[v, t] = not state.again[v, t]
    for j in range(m - 1, -1, -1):
        state.option[options_log[j, 0]] = options_log[j, 1]


@njit(cache=True)
def keep_best(state):
    """The genes of now are those of the best plan."""
    state.reals[BEST] = state.reals[EXACT_COST]
    state.best_stored[:] = state.stored
    state.best_early[:] = state.early
    state.best_again[:] = state.again
    state.best_option[:] = state.option


class Change(NamedTuple):
    """What a move changes, so that it can be taken back: V values, T stages.

    Attributes:
        touched: [V] values to look at; dirty: [T] stages to evaluate, `HOLDS` or `RUNS`.
        log, options_log: genes and options before, as `undo_genes` reads them.
        changed: values that are there in other stages; old_n, old_runs, old_col: their runs and stages before.
        stages: those evaluated; old: their costs and excesses before, `fastest`, and whether `stage` wrote over it.
        col, flags, found, candidates: working space of `column` and `flip`.
    """

    touched: np.ndarray
    dirty: np.ndarray
    log: np.ndarray
    options_log: np.ndarray
    changed: np.ndarray
    old_n: np.ndarray
    old_runs: np.ndarray
    old_col: np.ndarray
    stages: np.ndarray
    old: np.ndarray
    col: np.ndarray
    flags: np.ndarray
    found: np.ndarray
    candidates: np.ndarray


@njit(cache=True)
def no_change(n_values, n_stages):
    """Room for a change."""
    return Change(
        np.zeros(n_values, np.bool_), np.zeros(n_stages, np.int8), np.zeros((8 * n_values + 64, 2), np.int64),
        np.zeros((64, 2), np.int64), np.zeros(n_values, np.int64), np.zeros(n_values, np.int64),
        np.zeros((n_values, MOST_REPEATS), np.int64), np.zeros((n_values, n_stages + 1), np.bool_),
        np.zeros(n_stages, np.int64), np.zeros((n_stages, 8)), np.zeros(n_stages + 1, np.bool_),
        np.zeros(n_stages + 1, np.bool_), np.zeros(MOST_REPEATS, np.int64), np.zeros(n_stages + 1, np.int64),
    )  # fmt: skip


@njit(cache=True, inline="always")
def propose(instance, state, change):
    """Change genes and options at random; returns the lengths of both logs."""
    touched, log, options_log = change.touched, change.log, change.options_log
    n = m = 0
    v, r = below(state.random, instance.size.shape[0]), uniform(state.random)
    if uniform(state.random) < 0.5:
        v = large(instance, state.random)
    if r < 0.25 and instance.choosing.shape[0] > 0:
        n, v = switch(instance, state, touched, log, n, options_log)
        m = 1
        flips = 0 if uniform(state.random) < 0.6 else 1
    elif r < 0.35 and instance.choosing.shape[0] > 0:
        n, m = turn(instance, state, v, touched, log, n, options_log)
        flips = 0 if uniform(state.random) < 0.7 else 1
    else:
        flips = 1 if r >= 0.7 else 2 if r < 0.6 else 3
    for part in range(flips):
        if part > 0 or m > 0:
            if uniform(state.random) < SHARE_FAR:
                v = large(instance, state.random)
            else:
                for _hop in range(1 + below(state.random, 2)):
                    v = neighbour(instance, state, v)
        n = flip(instance, state, v, touched, log, n, change.candidates)
    return n, m


@njit(cache=True, inline="always")
def derive(instance, state, change, m):
    """Where the values touched are there now; marks the stages that this and `m` options change.

    Returns:
        number of values changed
    """
    touched, dirty, col, found = change.touched, change.dirty, change.col, change.found
    n_stages, b = state.option.shape[0], 0
    for v in range(instance.size.shape[0] - 1, -1, -1):
        if not touched[v]:
            continue
        touched[v] = False
        k = column(instance, state, v, col, change.flags, found)
        same = k == state.n_runs[v]
        for j in range(k):
            same = same and found[j] == state.runs[v, j]
        differs = False
        for t in range(1, n_stages):
            if col[t] != state.held[v, t]:
                differs = True
                break
        if same and not differs:
            continue
        change.changed[b], change.old_n[b] = v, state.n_runs[v]
        for j in range(state.n_runs[v]):
            change.old_runs[b, j] = state.runs[v, j]
        for t in range(n_stages + 1):
            change.old_col[b, t] = state.held[v, t]
        b += 1
        set_column(instance, state, v, col, dirty)
        if not same:
            for j in range(state.n_runs[v]):
                dirty[state.runs[v, j]] = RUNS
            set_runs(state, v, k, found)
            for j in range(k):
                dirty[found[j]] = RUNS
            i = instance.maker[v]
            for e in range(instance.in_start[i], instance.in_start[i + 1]):
                touched[instance.in_ids[e]] = True
    for j in range(m):
        dirty[change.options_log[j, 0]] = RUNS
    return b


@njit(cache=True)
def take_back(instance, state, change, b, d):
    """Undo a change of `b` values and `d` stages, but for its genes."""
    for j in range(b - 1, -1, -1):
        v = change.changed[j]
        set_column(instance, state, v, change.old_col[j], change.dirty)
        set_runs(state, v, change.old_n[j], change.old_runs[j])
    for j in range(d):
        t = change.stages[j]
        state.cost[t], state.excess[t] = change.old[j, 0], change.old[j, 1]
        state.exact_cost[t], state.exact_excess[t] = change.old[j, 2], change.old[j, 3]
        if change.old[j, 7] > 0:
            for i in range(3):
                state.fastest[t, i] = change.old[j, 4 + i]
    change.dirty[:] = 0


@njit(cache=True, nogil=True)
def anneal(instance, state, budget, hot, moves, floor):
    """Moves at one temperature, in units of cost; returns how many were taken. `floor`: the least price of a byte."""
    n_values, n_stages = instance.size.shape[0], state.option.shape[0]
    change, work = no_change(n_values, n_stages), workspace(n_values, instance.over.shape[0])
    more, picked, out = np.zeros(4), np.zeros(4), np.zeros(4)
    dirty, stages, old, reals, taken = change.dirty, change.stages, change.old, state.reals, 0
    # Taken out of the instance once: most stages are evaluated in a few hundred instructions.
    costs, excesses, exacts, exact_excesses = state.cost, state.excess, state.exact_cost, state.exact_excess
    runs_at, total, option, options, base = state.runs_at, state.total, state.option, instance.options, instance.base
    option_bytes, option_pick = instance.option_bytes, instance.option_pick
    pick_cost, pick_bytes = instance.pick_cost, instance.pick_bytes
    for move in range(moves):
        n, m = propose(instance, state, change)
        b, d, price = derive(instance, state, change, m), 0, reals[PRICE]
        if b == 0 and m == 0:
            undo_genes(state, change.log, n, change.options_log, m)
            continue
        more[:] = 0.0
        for t in range(n_stages):
            how = dirty[t]
            if how == 0:
                continue
            dirty[t] = 0
            stages[d] = t
            old[d, 0], old[d, 1], old[d, 2], old[d, 3] = costs[t], excesses[t], exacts[t], exact_excesses[t]
            old[d, 7] = 0.0
            if t == 0:
                forward(instance, state, budget, price, work.names, out, picked)
            elif runs_at[t] > 0:
                if how == RUNS or not shifted(instance, state, t, budget, out):
                    old[d, 4], old[d, 5], old[d, 6] = state.fastest[t, 0], state.fastest[t, 1], state.fastest[t, 2]
                    old[d, 7] = 1.0
                    stage(instance, state, t, budget, price, work, out, picked)
            else:  # as `evaluate`
                o = options[t] + option[t]
                quiet(
                    base[t] + total[t], option_bytes[o], pick_cost, pick_bytes, option_pick[o], option_pick[o + 1],
                    budget, price, out,
                )  # fmt: skip
            costs[t], excesses[t], exacts[t], exact_excesses[t] = out[0], out[1], out[2], out[3]
            for j in range(4):
                more[j] += out[j] - old[d, j]
            d += 1
        worse = more[COST] + price * more[EXCESS]
        if worse <= 0 or uniform(state.random) < np.exp(-worse / hot):
            taken += 1
            for j in range(4):
                reals[j] += more[j]
            if reals[EXACT_EXCESS] < 0.5 and reals[EXACT_COST] < reals[BEST] - 0.5:
                keep_best(state)
        else:
            take_back(instance, state, change, b, d)
            undo_genes(state, change.log, n, change.options_log, m)
        if move % 50 == 49:
            if reals[EXCESS] > 0.5:
                reals[PRICE] *= 1.03
            else:
                reals[PRICE] = max(reals[PRICE] / 1.03, floor)
    return taken


@njit(cache=True)
def refresh(instance, state, budget):
    """Derive everything from the genes, and evaluate every stage."""
    n_values, n_stages = instance.size.shape[0], state.option.shape[0]
    dirty = np.zeros(n_stages, np.int8)
    col, flags = np.zeros(n_stages + 1, np.bool_), np.zeros(n_stages + 1, np.bool_)
    found = np.zeros(MOST_REPEATS, np.int64)
    work = workspace(n_values, instance.over.shape[0])
    out, picked = np.zeros(4), np.zeros(4)
    for v in range(n_values - 1, -1, -1):
        k = column(instance, state, v, col, flags, found)
        set_column(instance, state, v, col, dirty)
        set_runs(state, v, k, found)
    state.reals[:4] = 0.0
    for t in range(n_stages):
        evaluate(instance, state, t, budget, state.reals[PRICE], work, out, picked)
        state.cost[t], state.excess[t], state.exact_cost[t], state.exact_excess[t] = out[0], out[1], out[2], out[3]
        for j in range(4):
            state.reals[j] += out[j]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A graph as an `Instance`, and what a plan needs of it.

    Attributes:
        names: [picks] name of an implementation, '' for the default one.
        first_backward: its first operation of the backward pass.
        place: [value of the forward pass] its number in the instance.
        option_of: [operation, name] which of the operation's options that implementation belongs to.
    """

    graph: Graph
    instance: Instance
    names: tuple[str, ...]
    first_backward: int
    place: Mapping[int, int]
    option_of: Mapping[tuple[int, str], int]


def prepare(graph: Graph) -> Prepared | None:
    """The instance of a training graph; None for a graph without a loss, or that such a plan cannot run."""
    if graph.loss is None or not graph.has_implementations:
        return None
    return _Builder(graph, graph.loss + 1).prepared()


class _Builder:
    """Makes the instance of a graph whose first `n_forward` operations are its forward pass."""

    def __init__(self, graph: Graph, n_forward: int):
        self.graph, self.n_forward = graph, n_forward
        self.size = [value.bytes for value in graph.values]
        forward = (v for v in range(len(graph.values)) if graph.producer[v] < n_forward)
        self.stored = sorted(forward, key=lambda v: (graph.producer[v], v))
        self.place = {v: i for i, v in enumerate(self.stored)}
        self.n_plain = len(graph.values) - graph.n_extra
        self.cost: list[int] = []  # of picks, as their bytes and names
        self.bytes: list[int] = []
        self.names: list[str] = []
        self.option_of: dict[tuple[int, str], int] = {}

    def prepared(self) -> Prepared | None:
        """The instance; None for a graph that such plans cannot run."""
        forward, backward = self.graph.operations[: self.n_forward], self.graph.operations[self.n_forward :]
        kept = any(self.graph.values[v].keep for op in forward for v in op.outputs)
        if kept or not backward or any(op.run_once or op.is_backward for op in forward):
            return None
        arrays = self._of_forward()
        if arrays is None:
            return None
        arrays |= self._of_backward()
        picks = {"pick_cost": np.array(self.cost, dtype=np.float64), "pick_bytes": _integers(self.bytes)}
        instance = Instance(**arrays, **picks)
        return Prepared(self.graph, instance, tuple(self.names), self.n_forward, self.place, self.option_of)

    def _of_forward(self) -> dict[str, np.ndarray] | None:
        """Arrays of the forward pass; None if some value can be made over an input only."""
        forward, size = self.graph.operations[: self.n_forward], _integers(self.size[v] for v in self.stored)
        makers = _integers(self.graph.producer[v] for v in self.stored)
        outputs = np.searchsorted(makers, np.arange(self.n_forward + 1))
        readers: list[list[int]] = [[] for _ in self.stored]
        for i, op in enumerate(forward):
            for v in op.inputs:
                readers[self.place[v]].append(i)
        over = list[int]()
        kinds = [self._kinds(i, over) for i in range(self.n_forward)]
        starts: tuple[list[int], list[int]] = ([], [])
        for which in (0, 1):
            for beside_and_over in (pair for own in kinds for pair in own):
                if which == 0 and not beside_and_over[0]:
                    return None
                starts[which].append(len(self.cost))
                self._picks(beside_and_over[which])
            starts[which].append(len(self.cost))
        in_start, in_ids = _csr([[self.place[v] for v in op.inputs] for op in forward])
        reader_start, reader_ids = _csr(readers)
        last_reader = [max(own, default=int(maker)) for own, maker in zip(readers, makers, strict=True)]
        dying_start, dying_ids = _csr(
            [[v for v, last in enumerate(last_reader) if last == i] for i in range(self.n_forward)]
        )
        return {
            "size": size, "maker": makers, "extra": np.array([v >= self.n_plain for v in self.stored]),
            "outputs": outputs, "in_start": in_start, "in_ids": in_ids, "over": _integers(over),
            "first_extra": outputs[:-1] + _integers(len(op.outputs) for op in forward),
            "reader_start": reader_start, "reader_ids": reader_ids, "last_reader": _integers(last_reader),
            "dying_start": dying_start, "dying_ids": dying_ids, "weight": np.cumsum(size, dtype=np.float64),
            "kinds": np.cumsum([0, *map(len, kinds)]), "plain_pick": _integers(starts[0]),
            "over_pick": _integers(starts[1]),
        }  # fmt: skip

    def _of_backward(self) -> dict[str, np.ndarray]:
        """Arrays of the backward pass; stage 0 has one empty option."""
        graph, last = self.graph, self._last_readers()
        options, base, option_bytes = [0, 1], [graph.fixed_bytes], [0]
        reads: list[tuple[int, ...]] = [()]
        option_pick = [len(self.cost), len(self.cost)]
        uses: list[list[tuple[int, int]]] = [[] for _ in self.stored]
        for t, k in enumerate(range(self.n_forward, len(graph)), start=1):
            base.append(graph.fixed_bytes + self._held(k, last))
            found = self._options(k, last)
            for o, (own_reads, implementations) in enumerate(found.items()):
                self.option_of |= {(k, "" if each.name == DEFAULT else each.name): o for each in implementations}
                needs = [self._needs(each) for each in implementations]
                reads.append(own_reads)
                option_bytes.append(min(needs))
                self._picks(implementations, [need - min(needs) for need in needs])
                option_pick.append(len(self.cost))
                for v in own_reads:
                    uses[v].append((t, o))
            options.append(len(reads))
        bits = np.zeros((len(reads), (len(self.stored) + 63) // 64), dtype=np.uint64)
        for o, own in enumerate(reads):
            for v in own:
                bits[o, v >> 6] |= np.uint64(1) << np.uint64(v & 63)
        (use_start, use_stage), (_, use_option) = (_csr([[use[j] for use in own] for own in uses]) for j in (0, 1))
        read_start, read_ids = _csr(reads)
        return {
            "base": _integers(base), "options": _integers(options), "option_bytes": _integers(option_bytes),
            "option_pick": _integers(option_pick), "read_start": read_start, "read_ids": read_ids, "reads": bits,
            "use_start": use_start, "use_stage": use_stage, "use_option": use_option,
            "choosing": _integers(t for t in range(1, len(options) - 1) if options[t + 1] - options[t] > 1),
        }  # fmt: skip

    def _kinds(self, i: int, over: list[int]) -> list[tuple[list[Implementation], list[Implementation]]]:
        """For no extra value and for each: the implementations beside the input, and those over it."""
        op = self.graph.operations[i]
        usual = [each for each in op.all_implementations if set(each.inputs) == set(op.inputs) and not each.is_lossy]
        overwritten = next((each.overwrites for each in usual if each.overwrites in self.place), None)
        over.append(-1 if overwritten is None else self.place[overwritten])
        extras = sorted({v for each in op.implementations for v in each.outputs if v >= self.n_plain})
        found = []
        for makes in ((), *((v,) for v in extras)):
            same = [each for each in usual if set(each.outputs) == {*op.outputs, *makes}]
            found.append(
                (
                    [each for each in same if each.overwrites is None],
                    [each for each in same if overwritten is not None and each.overwrites == overwritten],
                )
            )
        return found

    def _options(self, k: int, last: dict[int, int]) -> dict[tuple[int, ...], list[Implementation]]:
        """[values of the forward pass that are read] the implementations of a backward operation."""
        found: dict[tuple[int, ...], list[Implementation]] = {}
        for each in self.graph.operations[k].all_implementations:
            over = each.overwrites
            taken = over is not None and (over in self.place or last[over] > k or self.graph.values[over].keep)
            absent = any(v >= self.n_plain and v not in self.place for v in each.inputs)
            if each.is_lossy or taken or absent or set(each.outputs) != set(self.graph.operations[k].outputs):
                continue
            reads = tuple(sorted(self.place[v] for v in each.inputs if v in self.place))
            found.setdefault(reads, []).append(each)
        return found

    def _needs(self, each: Implementation) -> int:
        own = sum(self.size[v] for v in each.outputs)
        return own - (0 if each.overwrites is None else self.size[each.overwrites])

    def _last_readers(self) -> dict[int, int]:
        """[value of the backward pass] the last operation of which some implementation reads it."""
        last: dict[int, int] = {}
        for k in range(self.n_forward, len(self.graph)):
            for each in self.graph.operations[k].all_implementations:
                last |= dict.fromkeys((v for v in each.inputs if v not in self.place), k)
        return last

    def _held(self, k: int, last: dict[int, int]) -> int:
        """Bytes of the backward pass that are there before operation `k`."""
        made = (v for j in range(self.n_forward, k) for v in self.graph.operations[j].outputs)
        return sum(self.size[v] for v in made if self.graph.values[v].keep or last.get(v, -1) >= k)

    def _picks(self, implementations: Sequence[Implementation], more: Sequence[int] = ()) -> None:
        """Append equal implementations from fast to lean, without those that another one beats."""
        extra = more or [0] * len(implementations)
        scratch = [each.workspace_bytes + bytes for each, bytes in zip(implementations, extra, strict=True)]
        leanest = -1
        for i in sorted(range(len(scratch)), key=lambda i: (implementations[i].cost, scratch[i])):
            if leanest < 0 or scratch[i] < leanest:
                leanest = scratch[i]
                self.cost.append(implementations[i].cost)
                self.bytes.append(scratch[i])
                name = implementations[i].name
                self.names.append("" if name == DEFAULT else name)


def _integers(items: Any) -> np.ndarray:
    return np.array([*items], dtype=np.int64)


def _csr(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *map(len, lists)])
    return _integers(starts), _integers(x for each in lists for x in each)


class JointSearch:
    """Annealing on one graph within one budget.

    Attributes:
        best: cost of the best plan so far; infinite without one.
    """

    def __init__(self, prepared: Prepared, budget_bytes: int, seed: int):
        self.prepared, self.budget = prepared, float(budget_bytes)
        self.scale = max(1.0, float(prepared.graph.least_cost))
        self.floor = PRICE_FLOOR * self.scale / budget_bytes
        self.state = _state(prepared.instance, seed)
        self.state.reals[PRICE], self.state.reals[BEST] = FIRST_PRICE * self.floor, np.inf
        refresh(prepared.instance, self.state, self.budget)

    @property
    def best(self) -> float:
        return float(self.state.reals[BEST])

    def run(self, hot: float, moves: int) -> None:
        """Moves at one temperature, which is a share of the graph's least cost."""
        anneal(self.prepared.instance, self.state, self.budget, hot * self.scale, moves, self.floor)

    def load(self, plan: Plan) -> None:
        """Take over what a plan stores, and its implementations, as far as genes can say it."""
        prepared, instance, state = self.prepared, self.prepared.instance, self.state
        makes, reads = _events(prepared, plan, state.option)
        for v, (made, read) in enumerate(zip(makes, reads, strict=True)):
            if not made or (read and min(read) < min(made)):
                later = made
            else:
                state.stored[v] = False
                first = min(made)
                state.early[v] = 0 if first in read else first
                later = made - {first}
            for t in later & read:
                state.again[v, t] = True
        refresh(instance, state, self.budget)
        if state.reals[EXACT_EXCESS] < 0.5:
            keep_best(state)

    def plan(self) -> Plan:
        """The best plan."""
        prepared, instance, own = self.prepared, self.prepared.instance, _state(self.prepared.instance)
        own.stored[:], own.early[:], own.again[:] = self.state.best_stored, self.state.best_early, self.state.best_again
        own.option[:] = self.state.best_option
        refresh(instance, own, self.budget)
        work, out, picked = workspace(len(instance.size), len(instance.over)), np.zeros(4), np.zeros(4)
        forward(instance, own, self.budget, OVER, work.names, out, picked)
        calls = [(i, prepared.names[p]) for i, p in enumerate(work.names[:-1])]
        for t in range(1, len(own.option)):
            n = stage(instance, own, t, self.budget, OVER, work, out, picked)
            ran = zip(work.runs[:n][::-1].tolist(), work.names[:n][::-1], strict=True)
            calls += [(i, prepared.names[p]) for i, p in ran]
            calls.append((prepared.first_backward + t - 1, prepared.names[work.names[n]]))
        return Plan.from_calls(prepared.graph, calls, int(self.budget))


def _events(prepared: Prepared, plan: Plan, option: np.ndarray) -> tuple[list[set[int]], list[set[int]]]:
    """[V] stages, but for the forward pass, in which a plan runs a value again, and reads it; sets the options."""
    graph, place = prepared.graph, prepared.place
    makes: list[set[int]] = [set() for _ in place]
    reads: list[set[int]] = [set() for _ in place]
    seen, t = set[int](), 1
    for k, name in plan.calls:
        is_backward = k >= prepared.first_backward
        if t == len(option) and not is_backward:
            break
        t = k - prepared.first_backward + 1 if is_backward else t
        is_first = not is_backward and k not in seen and t == 1
        seen.add(k)
        each = next(own for own in graph.operations[k].all_implementations if own.name == (name or DEFAULT))
        if not is_first:
            for v in each.inputs:
                if v in place:
                    reads[place[v]].add(t)
        if is_backward:
            option[t] = prepared.option_of.get((k, name), 0)
            t += 1
        elif not is_first:
            for v in each.outputs:
                makes[place[v]].add(t)
    return makes, reads


def _state(instance: Instance, seed: int = 0) -> State:
    """Everything stored, each operation's first implementation."""
    n_values, n_stages, words = len(instance.size), len(instance.options) - 1, instance.reads.shape[1]
    again, ones, stages = (n_values, n_stages), np.ones(n_values, np.bool_), np.zeros(n_stages, np.int64)
    return State(
        ones, np.zeros(n_values, np.int64), np.zeros(again, np.bool_), stages,
        np.zeros((n_values, n_stages + 1), np.bool_),
        np.zeros((n_stages + 1, words), np.uint64), np.zeros(n_stages + 1, np.int64), np.zeros(n_values, np.int64),
        np.zeros((n_values, MOST_REPEATS), np.int64), stages.copy(), np.zeros(n_stages), np.zeros(n_stages),
        np.zeros(n_stages), np.zeros(n_stages), np.zeros((n_stages, 3)), np.zeros(N_REALS), ones.copy(),
        np.zeros(n_values, np.int64), np.zeros(again, np.bool_), stages.copy(), random_state(seed),
    )  # fmt: skip


def anneal_jointly(
    prepared: Prepared, budget_bytes: int, seed: int, found: Callable[[Plan], None], done: Callable[[], bool], *,
    seconds: float, moves: int | None = None, start: Plan | None = None,
) -> int:  # fmt: skip
    """Cool down again and again from the plan that stores everything; returns the number of moves.

    Args:
        found: gets each better plan.
        start: a plan to begin with instead, at a lower temperature.
        seconds: to cool down in; with `moves`, that many moves count instead, so that runs repeat.
    """
    best, total, chunk, began = np.inf, 0, FIRST_CHUNK, time.monotonic()
    cycle, n_cycles, search = -1, 1, None
    hot = HOT if start is None else WARM
    while not done():
        share = total / moves if moves else (time.monotonic() - began) / seconds
        if share >= 1:
            break
        if search is None or int(share * n_cycles) != cycle:
            cycle = int(share * n_cycles)
            search = JointSearch(prepared, budget_bytes, seed + SEED_STEP * cycle)
            if start is not None:
                search.load(start)
                best = min(best, search.best)
        own = share * n_cycles - cycle  # of this cycle
        at = time.monotonic()
        search.run(hot * (COLD / hot) ** own, min(chunk, moves - total) if moves else chunk)
        total += chunk
        took = max(1e-4, time.monotonic() - at)
        if total == chunk:
            enough = MOVES_PER_VALUE * len(prepared.instance.size)
            expected = moves or int(seconds * chunk / took)
            n_cycles = max(1, round(expected / enough))
        if not moves:
            chunk = int(min(max(chunk * CHUNK_S / took, FIRST_CHUNK), 20 * chunk))
        if search.best < best:
            best = search.best
            found(search.plan())
    return total


def compile_joint() -> None:
    """Compile the search and keep it in the cache."""
    operations = (
        Operation("forward", "", (), (0,), 1, implementations=(Implementation("mask", (), (0, 3), 1),)),
        Operation("loss", "", (0,), (1,), 1),
        Operation("backward", "", (0, 1), (2,), 1, 0, True, implementations=(Implementation("mask", (1, 3), (2,), 1),)),
    )
    graph = Graph("compiled", operations, tuple(Value(str(i), 1) for i in range(4)), loss=1)
    prepared = prepare(graph)
    assert prepared is not None
    anneal_jointly(prepared, 4, 0, lambda _: None, lambda: False, seconds=1.0, moves=10)
