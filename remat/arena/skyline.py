"""Compiled: a complete search for places below a capacity.

Time is cut into sections: the largest sets of buffers that are live at once. Each section has a floor, below which
everything is decided. A node takes a section in a local minimum of the floors and asks which open buffer lies on its
floor: one of those that can, or none (waste, if the section has room for it); the floor rises then to the lowest offset
that something else could hold a buffer up to. Every packing can be pushed down until each buffer rests on a floor or on
another buffer, so that these answers are all there are: a search that ends without places is a proof.

After each answer, floors rise to the lowest offset that any open buffer of the section can have. Sections that no open
buffer connects are searched one after another, because they do not depend on each other. A table holds the failed
states (open buffers and floors of such a part) and survives restarts.

This is one file on purpose: the cache of compiled code checks only the file of a function.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
from numba import njit

from remat.arena.intervals import members_of
from remat.randomness import uniform

RUNNING, FOUND, REFUTED, FULL = range(4)  # FULL: a stack needs more room
# Places in `Skyline.scalar`.
(
    CAPACITY, TRAIL_TOP, N_QUEUE, DEPTH, N_OPTIONS, N_PARTS, NODES, TABLE_USED, IS_FULL,
) = range(9)  # fmt: skip
N_SCALARS = 9
FLOOR, LEAST, PLACED = range(3)  # what an entry of the trail undoes
WASTE = -1  # the option that nothing lies on the floor
# Columns of `Skyline.frame`: the part's sections, the section asked about, its options, the parts that the current
# option leaves, the trail before the option, where the floor rises to in case of waste.
LOW, HIGH, SECTION, OPTION, OPTIONS_END, OPTIONS_AT, PART, PARTS_END, PARTS_AT, MARK, RISE = range(11)
N_COLUMNS = 11
WEIGHT_POWER = 0.25  # how much sections in which the search failed often are preferred
TABLE = 1 << 20  # failed states; half of the table stays empty

# n buffers, S sections, E places of buffers in sections.
#     low, high, size: [n] int64, sections [low, high) and size of each buffer; start: [n] of its places in `spot`.
#     first: [S + 1], members: [E] buffers of each section, the open ones first; spot: [E] where in `members` they are.
#     floor, rest, n_open, n_at: [S] its height, bytes and number of its open buffers, how many of these can lie on it.
#     least: [n] the least offset of an open buffer, the offset of a placed one; is_open: [n].
#     key: [n, 2] and open_key: [S, 2] uint64, random numbers of the buffers, and their xor over the open ones that
#     begin in a section; table: [size, 2] uint64, the failed states.
#     score: [n] float64, options with a higher one are tried first.
Skyline = namedtuple(
    "Skyline",
    (
        "low", "high", "size", "start", "first", "members", "spot", "floor", "rest", "n_open", "n_at", "least",
        "is_open", "key", "open_key", "table", "queue", "queued", "trail", "frame", "frame_key", "options", "parts",
        "score", "random", "scalar", "noise", "weight",
    ),
)  # fmt: skip


def new_skyline(low: np.ndarray, high: np.ndarray, size: np.ndarray, capacity: int, seed: int, room: int) -> Skyline:
    """The search's first state, for buffers that cover sections [low, high); `room`: entries of its longest stack."""
    n, n_sections = len(low), int(high.max(initial=0))
    first, members, spot = members_of(low, high)
    n_open = np.diff(first)
    rng = np.random.default_rng(seed)
    key = rng.integers(1, 2**63, (n, 2), dtype=np.uint64)
    open_key = np.zeros((n_sections, 2), dtype=np.uint64)
    for column in range(2):
        np.bitwise_xor.at(open_key[:, column], low, key[:, column])
    rest = np.add.reduceat(size[members], first[:-1])
    depth = 2 * n + 2 * n_sections + 16
    scalar = np.zeros(N_SCALARS, dtype=np.int64)
    scalar[CAPACITY] = capacity
    random = np.array([rng.integers(1, 2**63)], dtype=np.uint64)
    score = np.log(size.astype(float))
    return Skyline(
        low, high, size, np.cumsum(high - low) - (high - low), first, members, spot,
        np.zeros(n_sections, dtype=np.int64), rest, n_open.copy(), n_open.copy(), np.zeros(n, dtype=np.int64),
        np.ones(n, dtype=np.uint8), key, open_key, np.zeros((TABLE, 2), dtype=np.uint64),
        np.zeros(n_sections, dtype=np.int64), np.zeros(n_sections, dtype=np.uint8),
        np.zeros((room, 4), dtype=np.int64), np.zeros((depth, N_COLUMNS), dtype=np.int64),
        np.zeros((depth, 2), dtype=np.uint64), np.zeros(room, dtype=np.int64),
        np.zeros((room, 2), dtype=np.int64), score, random, scalar, np.zeros(2),
        np.ones(n_sections),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def lift(k, b, v):
    """Raise the least offset of an open buffer; sections whose floor nothing can lie on any more are queued."""
    old = k.least[b]
    top = k.scalar[TRAIL_TOP]
    if top == len(k.trail):
        k.scalar[IS_FULL] = 1
        return
    k.trail[top, 0], k.trail[top, 1], k.trail[top, 2] = LEAST, b, old
    k.scalar[TRAIL_TOP] = top + 1
    k.least[b] = v
    for s in range(k.low[b], k.high[b]):
        if k.floor[s] == old:
            k.n_at[s] -= 1
            if k.n_at[s] == 0 and not k.queued[s]:
                k.queued[s] = 1
                k.queue[k.scalar[N_QUEUE]] = s
                k.scalar[N_QUEUE] += 1
        elif k.floor[s] == v:
            k.n_at[s] += 1


@njit(cache=True, nogil=True)
def raise_floor(k, s, v):
    """Raise a floor; whether the open buffers still fit above it."""
    top = k.scalar[TRAIL_TOP]
    if top == len(k.trail):
        k.scalar[IS_FULL] = 1
        return False
    k.trail[top, 0], k.trail[top, 1], k.trail[top, 2], k.trail[top, 3] = FLOOR, s, k.floor[s], k.n_at[s]
    k.scalar[TRAIL_TOP] = top + 1
    k.floor[s] = v
    if v + k.rest[s] > k.scalar[CAPACITY]:
        k.weight[s] += 1.0
        return False
    at = 0
    for i in range(k.first[s], k.first[s] + k.n_open[s]):
        b = k.members[i]
        if k.least[b] < v:
            lift(k, b, v)
        if k.least[b] == v:
            at += 1
    k.n_at[s] = at
    if at == 0 and k.n_open[s] > 0 and not k.queued[s]:
        k.queued[s] = 1
        k.queue[k.scalar[N_QUEUE]] = s
        k.scalar[N_QUEUE] += 1
    return True


@njit(cache=True, nogil=True)
def settle(k):
    """Raise floors that nothing can lie on, until there are none; False if something does not fit."""
    fits = True
    while k.scalar[N_QUEUE] > 0:
        k.scalar[N_QUEUE] -= 1
        s = k.queue[k.scalar[N_QUEUE]]
        k.queued[s] = 0
        if not fits or k.n_at[s] > 0 or k.n_open[s] == 0:
            continue
        v = k.scalar[CAPACITY] + 1
        for i in range(k.first[s], k.first[s] + k.n_open[s]):
            v = min(v, k.least[k.members[i]])
        fits = raise_floor(k, s, v)
    return fits


@njit(cache=True, nogil=True)
def put(k, b):
    """Place an open buffer at its least offset; whether everything else still fits."""
    top = k.scalar[TRAIL_TOP]
    if top == len(k.trail):
        k.scalar[IS_FULL] = 1
        return False
    k.trail[top, 0], k.trail[top, 1] = PLACED, b
    k.scalar[TRAIL_TOP] = top + 1
    k.is_open[b] = 0
    k.open_key[k.low[b], 0] ^= k.key[b, 0]
    k.open_key[k.low[b], 1] ^= k.key[b, 1]
    offset = k.least[b]
    for s in range(k.low[b], k.high[b]):
        last = k.first[s] + k.n_open[s] - 1
        at = k.spot[k.start[b] + s - k.low[b]]
        other = k.members[last]
        k.members[last], k.members[at] = b, other
        k.spot[k.start[other] + s - k.low[other]] = at
        k.spot[k.start[b] + s - k.low[b]] = last
        k.n_open[s] -= 1
        k.rest[s] -= k.size[b]
        if k.floor[s] == offset:
            k.n_at[s] -= 1
    for s in range(k.low[b], k.high[b]):
        if not raise_floor(k, s, offset + k.size[b]):
            settle_nothing(k)
            return False
    return settle(k)


@njit(cache=True, nogil=True)
def settle_nothing(k):
    """Empty the queue."""
    for i in range(k.scalar[N_QUEUE]):
        k.queued[k.queue[i]] = 0
    k.scalar[N_QUEUE] = 0


@njit(cache=True, nogil=True)
def undo(k, mark):
    """Take back everything since the trail had `mark` entries, in reverse order."""
    for i in range(k.scalar[TRAIL_TOP] - 1, mark - 1, -1):
        kind, j, old = k.trail[i, 0], k.trail[i, 1], k.trail[i, 2]
        if kind == FLOOR:
            k.floor[j], k.n_at[j] = old, k.trail[i, 3]
        elif kind == LEAST:
            new = k.least[j]
            k.least[j] = old
            for s in range(k.low[j], k.high[j]):
                if k.floor[s] == old:
                    k.n_at[s] += 1
                elif k.floor[s] == new:
                    k.n_at[s] -= 1
        else:
            k.is_open[j] = 1
            k.open_key[k.low[j], 0] ^= k.key[j, 0]
            k.open_key[k.low[j], 1] ^= k.key[j, 1]
            for s in range(k.low[j], k.high[j]):
                k.n_open[s] += 1
                k.rest[s] += k.size[j]
                if k.floor[s] == k.least[j]:
                    k.n_at[s] += 1
    k.scalar[TRAIL_TOP] = mark


@njit(cache=True, nogil=True)
def mixed(x):
    """A hash of 64 bits (the finalizer of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def hash_part(k, low, high, depth):
    """Write the two hashes of a part's open buffers and floors to its frame."""
    one, two = np.uint64(low + 1), np.uint64(high + 1)
    for s in range(low, high):
        one = mixed(one ^ k.open_key[s, 0]) + np.uint64(k.floor[s])
        two = mixed(two ^ k.open_key[s, 1]) + np.uint64(k.floor[s])
    k.frame_key[depth, 0], k.frame_key[depth, 1] = mixed(one) | np.uint64(1), mixed(two)


@njit(cache=True, nogil=True)
def has_failed(k, depth):
    """Whether the table has the frame's state."""
    size = np.uint64(len(k.table))
    at = k.frame_key[depth, 0] % size
    while k.table[at, 0] != 0:
        if k.table[at, 0] == k.frame_key[depth, 0] and k.table[at, 1] == k.frame_key[depth, 1]:
            return True
        at = (at + np.uint64(1)) % size
    return False


@njit(cache=True, nogil=True)
def remember(k, depth):
    """Enter the frame's state as failed, if the table has room."""
    if k.scalar[TABLE_USED] * 2 > len(k.table):
        return
    size = np.uint64(len(k.table))
    at = k.frame_key[depth, 0] % size
    while k.table[at, 0] != 0:
        at = (at + np.uint64(1)) % size
    k.table[at, 0], k.table[at, 1] = k.frame_key[depth, 0], k.frame_key[depth, 1]
    k.scalar[TABLE_USED] += 1


@njit(cache=True, nogil=True)
def chosen_section(k, low, high):
    """A section in a local minimum of the floors with the fewest options; noise decides between near ones."""
    best, fewest = -1, np.inf
    s = low
    while s < high:
        end = s + 1
        while end < high and k.floor[end] == k.floor[s]:
            end += 1
        is_valley = (s == low or k.floor[s - 1] > k.floor[s]) and (end == high or k.floor[end] > k.floor[s])
        if is_valley:
            for t in range(s, end):
                slack = k.scalar[CAPACITY] - k.floor[t] - k.rest[t]
                count = k.n_at[t] + (0.9 if slack > 0 else 0.0) + slack / k.scalar[CAPACITY]
                count /= k.weight[t] ** WEIGHT_POWER
                if k.noise[0] > 0:
                    count += k.noise[0] * uniform(k.random)
                if count < fewest:
                    best, fewest = t, count
        s = end
    return best


@njit(cache=True, nogil=True)
def lowest_support(k, s):
    """Where the floor of section `s` rises to if nothing lies on it; above the capacity if nothing can be held up."""
    floor, found = k.floor[s], k.scalar[CAPACITY] + 1
    low, high = s, s + 1
    for i in range(k.first[s], k.first[s] + k.n_open[s]):
        b = k.members[i]
        if k.least[b] > floor:
            found = min(found, k.least[b])
        else:
            low, high = min(low, k.low[b]), max(high, k.high[b])
    for t in range(low, high):  # all of them have this floor, because the section lies in a local minimum
        for i in range(k.first[t], k.first[t] + k.n_open[t]):
            o = k.members[i]
            if k.low[o] <= s < k.high[o]:
                continue
            found = min(found, k.least[o] + k.size[o])
    return found


@njit(cache=True, nogil=True)
def open_frame(k, low, high):
    """Push the node of a part, unless it is known to fail or a stack is full."""
    depth = k.scalar[DEPTH]
    k.scalar[NODES] += 1
    hash_part(k, low, high, depth)
    if has_failed(k, depth):
        return
    s = chosen_section(k, low, high)
    begin = k.scalar[N_OPTIONS]
    if depth + 2 >= len(k.frame) or begin + k.n_open[s] + 1 >= len(k.options):
        k.scalar[IS_FULL] = 1
        return
    n = begin
    for i in range(k.first[s], k.first[s] + k.n_open[s]):
        b = k.members[i]
        if k.least[b] != k.floor[s]:
            continue
        is_twin = False
        for j in range(begin, n):
            o = k.options[j]
            if k.low[o] == k.low[b] and k.high[o] == k.high[b] and k.size[o] == k.size[b]:
                is_twin = True
        if is_twin:
            continue
        k.options[n] = b
        n += 1
    noisy = np.empty(n - begin)
    for j in range(begin, n):
        noisy[j - begin] = k.score[k.options[j]] + k.noise[1] * uniform(k.random)
    for j in range(1, n - begin):  # by insertion: there are few
        b, x, at = k.options[begin + j], noisy[j], j
        while at > 0 and noisy[at - 1] < x:
            noisy[at], k.options[begin + at] = noisy[at - 1], k.options[begin + at - 1]
            at -= 1
        noisy[at], k.options[begin + at] = x, b
    slack = k.scalar[CAPACITY] - k.floor[s] - k.rest[s]
    rise = 0
    if slack > 0:
        rise = lowest_support(k, s)
        if rise <= k.floor[s] + slack:
            k.options[n] = WASTE
            n += 1
    frame = k.frame[depth]
    frame[LOW], frame[HIGH], frame[SECTION], frame[RISE] = low, high, s, rise
    frame[OPTION], frame[OPTIONS_END], frame[OPTIONS_AT] = begin, n, begin
    frame[PART] = frame[PARTS_END] = frame[PARTS_AT] = k.scalar[N_PARTS]
    frame[MARK] = k.scalar[TRAIL_TOP]
    k.scalar[N_OPTIONS] = n
    k.scalar[DEPTH] = depth + 1


@njit(cache=True, nogil=True)
def close_frame(k, depth):
    """Pop the node, its options and its parts."""
    k.scalar[DEPTH] = depth
    k.scalar[N_OPTIONS] = k.frame[depth, OPTIONS_AT]
    k.scalar[N_PARTS] = k.frame[depth, PARTS_AT]


@njit(cache=True, nogil=True)
def split(k, low, high, top):
    """Write the parts of sections [low, high) that open buffers connect to `parts`; where they end."""
    s, begin = low, top
    while s < high:
        if k.n_open[s] == 0:
            s += 1
            continue
        reach, end = s, s
        while end <= reach and end < high:
            for i in range(k.first[end], k.first[end] + k.n_open[end]):
                reach = max(reach, k.high[k.members[i]] - 1)
            end += 1
        at = top
        while at > begin and k.parts[at - 1, 1] - k.parts[at - 1, 0] > end - s:  # small parts first
            k.parts[at, 0], k.parts[at, 1] = k.parts[at - 1, 0], k.parts[at - 1, 1]
            at -= 1
        k.parts[at, 0], k.parts[at, 1] = s, end
        top += 1
        s = end
    return top


@njit(cache=True, nogil=True)
def restart(k):
    """Back to the root, which is a frame without a section: its parts are those of the whole problem."""
    undo(k, 0)
    frame = k.frame[0]
    frame[LOW], frame[HIGH], frame[SECTION], frame[MARK] = 0, len(k.floor), -1, 0
    frame[OPTION] = frame[OPTIONS_END] = frame[OPTIONS_AT] = 0
    frame[PART] = frame[PARTS_AT] = 0
    frame[PARTS_END] = split(k, 0, len(k.floor), 0)
    k.scalar[N_PARTS], k.scalar[N_OPTIONS], k.scalar[DEPTH] = frame[PARTS_END], 0, 1


@njit(cache=True, nogil=True)
def next_option(k, depth):
    """Try options of a frame until one fits; False if there are no others."""
    frame = k.frame[depth]
    while True:
        undo(k, frame[MARK])
        if frame[OPTION] == frame[OPTIONS_END]:
            return False
        option = k.options[frame[OPTION]]
        frame[OPTION] += 1
        if option == WASTE:
            fits = raise_floor(k, frame[SECTION], frame[RISE])
            if fits:
                fits = settle(k)
            else:
                settle_nothing(k)
        else:
            fits = put(k, option)
        if k.scalar[N_PARTS] + frame[HIGH] - frame[LOW] >= len(k.parts):
            k.scalar[IS_FULL] = 1
        if k.scalar[IS_FULL]:
            return False
        if fits:
            frame[PART] = frame[PARTS_AT]
            frame[PARTS_END] = k.scalar[N_PARTS] = split(k, frame[LOW], frame[HIGH], frame[PARTS_AT])
            return True


@njit(cache=True, nogil=True)
def go_on(k, n_nodes):
    """Search up to `n_nodes` further nodes; `RUNNING`, `FOUND`, `REFUTED` or `FULL`, which ends this state's use."""
    until = k.scalar[NODES] + n_nodes
    while k.scalar[NODES] < until:
        depth = k.scalar[DEPTH] - 1
        frame = k.frame[depth]
        if frame[PART] < frame[PARTS_END]:
            low, high = k.parts[frame[PART], 0], k.parts[frame[PART], 1]
            frame[PART] += 1
            open_frame(k, low, high)
            # The part tries its options. If all fail, so does the option that left it, and the frames below go on.
            while True:
                if k.scalar[IS_FULL]:
                    return FULL
                depth = k.scalar[DEPTH] - 1
                if depth == 0:
                    return REFUTED
                if next_option(k, depth):
                    break
                if not k.scalar[IS_FULL]:
                    remember(k, depth)
                    close_frame(k, depth)
        elif depth == 0:
            return FOUND
        else:  # all parts have places: so has this one
            close_frame(k, depth)
    return RUNNING
