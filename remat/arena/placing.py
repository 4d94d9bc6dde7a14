"""Offsets for intervals: greedy orders, a local search over orders, then a complete search."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any

import numpy as np

from remat.arena.intervals import load_of, members_of, sections_of
from remat.compiled import is_compiled
from remat.errors import InvalidInput, shown
from remat.units import MAX_BYTES, check_time_limit, parse_seed, parse_size

# Where between the proven bound and the best arena the complete search looks next.
LEVELS = (0.0, 0.5, 0.25, 0.75)
UNIT = 200  # nodes of the shortest run between restarts
NOISE = (1.0, 1.0)  # of restarts: on the number of options of a section, on the logarithm of an option's size
FIRST_S, GROWTH = 0.2, 1.5  # seconds of the first turn of either search; the next ones are longer
MANY = 50_000  # places of buffers in sections; with more, the complete search gets less time
STEP_S = 0.05  # the clock is read about so often
COMPILES_S, PUSH_COMPILES_S = 25.0, 9.0  # the complete and the local search are not compiled for a call with less time
MOVES, FRUITLESS = 1000, 5_000  # of a run of the local search; without progress, after which a start may end
# Where between the goal and the best block the local search looks: farther down after successes, nearer after failures.
FARTHEST, NEAREST, STEP = 0.65, 0.95, 0.05
SMALL = 0.1  # of the slack, for a strip of small buffers
SWEEPS, NEAR, NOISY = 30, (0.03, 0.3), 0.03  # of a start: how many, and how they differ, see `remat.arena.fit.sweep`
FIXED = 1e6  # weight of a buffer that stays where it is
LENGTH_POWER = 0.7  # of a buffer's life in its first weight, which is also proportional to its size
WEIGHT_GROWTH = 0.3  # of a buffer that is pushed out of its place, as a share of its first weight


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Placement:
    """Offsets of buffers in one block.

    Attributes:
        offsets: [n] int64, in the order given.
        bytes: of the block.
        load: the largest sum of sizes that are live at once.
        bound: proven lower bound on the bytes of any placement: the load, or what the complete search refuted, plus 1.
    """

    offsets: np.ndarray
    bytes: int
    load: int
    bound: int

    @property
    def is_optimal(self) -> bool:
        """Whether no placement needs fewer bytes, by proof."""
        return self.bytes == self.bound

    @property
    def ratio(self) -> float:
        """Bytes of the block over the load."""
        return self.bytes / self.load if self.load else 1.0

    def __repr__(self) -> str:
        proof = "optimal" if self.is_optimal else f"at least {self.bound}"
        return f"<Placement: {len(self.offsets)} buffers in {self.bytes} bytes, load {self.load}, {proof}>"


def place(
    lower: Any, upper: Any, size: Any, capacity: int | str | None = None, time_limit_s: float = 10.0, *, seed: int = 0
) -> Placement:
    """Find offsets, so that no two buffers that are live at once overlap, in a block as small as possible.

    Args:
        lower, upper: [n] integers: a buffer is live in [lower, upper).
        size: [n] bytes.
        capacity: stop at a block of at most so many bytes; None for the smallest one.
        time_limit_s: limits the call.
        seed: of every random choice.

    Returns:
        A `Placement`, also if the capacity is not reached; its `bound` says if no placement can reach it.

    Raises:
        InvalidInput: arrays of other shapes or kinds, an interval that ends before it begins, a negative size, a seed
            that is no integer.
    """
    began = time.monotonic()
    lower, upper, size = checked_buffers(lower, upper, size)
    check_time_limit(time_limit_s)
    aim = 0 if capacity is None else parse_size(capacity)
    return _Placer(lower, upper, size, aim, began + time_limit_s, parse_seed(seed)).run()


def compile_places() -> None:
    """Compile the searches, so that the first call has its time for them."""
    lower, upper, size = (np.array(each) for each in ([0, 1, 0], [2, 3, 3], [2, 3, 4]))
    placer = _Placer(lower, upper, size, 0, time.monotonic() + 300.0, 0)
    placer.bytes += 1  # so that there is something to find
    placer.greedy()
    placer.bytes = placer.bound + 2  # so that both searches look below it
    _Pushes(placer).turn(time.monotonic() + STEP_S)
    placer.bytes = placer.bound + 1
    _Exact(placer).turn(placer.deadline)


def _compiled() -> Any:
    """The package with its compiled searches, which are imported here because Numba takes time."""
    import remat.arena.fit
    import remat.arena.push
    import remat.arena.skyline

    return remat.arena


def checked_buffers(*arrays: Any) -> list[np.ndarray]:
    """Lower and upper ends and sizes as [n] int64; raises `InvalidInput`, see `place`."""
    found = []
    for name, given in zip(("lower", "upper", "size"), arrays, strict=True):
        try:
            array = np.asarray(given)
        except ValueError:
            array = np.empty((0, 0))
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise InvalidInput(f"{name} must be a list of integers, not {shown(given)}")
        if array.size and (int(array.max()) > MAX_BYTES or int(array.min()) < -MAX_BYTES):
            raise InvalidInput(f"{name} must hold integers from -2**60 to 2**60, not {int(abs(array).max())}")
        found.append(array.astype(np.int64))
    lower, upper, size = found
    if not len(lower) == len(upper) == len(size):
        raise InvalidInput(f"lower, upper and size have {len(lower)}, {len(upper)} and {len(size)} entries")
    for wrong, why in ((upper <= lower, "must end after it begins"), (size < 0, "must have a size of at least 0")):
        if wrong.any():
            i = int(wrong.argmax())
            raise InvalidInput(f"buffer {i} (live in [{lower[i]}, {upper[i]}), {size[i]} bytes) {why}")
    if sum(size.tolist()) > MAX_BYTES:
        raise InvalidInput("all sizes together are too large")
    return found


def _luby() -> Iterator[int]:
    """1 1 2 1 1 2 4 ...: within a constant factor of the best lengths of runs (Luby, Sinclair, Zuckerman, 1993)."""
    for i in count(1):
        k = i
        while (k + 1) & k:  # no power of 2 minus 1
            k -= (1 << (k.bit_length() - 1)) - 1
        yield (k + 1) >> 1


class _Placer:
    """The best offsets so far. Sizes are in units of their greatest common divisor; buffers of 0 bytes lie at 0."""

    def __init__(self, lower: np.ndarray, upper: np.ndarray, size: np.ndarray, aim: int, deadline: float, seed: int):
        self.n = len(size)
        self.chosen = np.nonzero(size)[0]
        self.unit = int(np.gcd.reduce(size)) or 1
        self.size = size[self.chosen] // self.unit
        self.lower, self.upper = lower[self.chosen], upper[self.chosen]
        self.deadline, self.random = deadline, np.random.default_rng(abs(seed))
        self.load = load_of(self.lower, self.upper, self.size)
        self.bound, self.aim = self.load, aim // self.unit
        self.bytes = int(self.size.sum())
        self.offsets = np.cumsum(self.size) - self.size

    def run(self) -> Placement:
        if self.bytes > self.goal():
            self.greedy()
            exact, pushes = _Exact(self), _Pushes(self)
            turn_s = FIRST_S
            while not self.is_done() and (exact.can_run() or pushes.can_run()):
                if exact.can_run():
                    exact.turn(min(self.deadline, time.monotonic() + exact.share * turn_s))
                if pushes.can_run():
                    pushes.turn(min(self.deadline, time.monotonic() + turn_s))
                turn_s *= GROWTH
        offsets = np.zeros(self.n, dtype=np.int64)
        offsets[self.chosen] = self.offsets * self.unit
        return Placement(offsets, self.bytes * self.unit, self.load * self.unit, self.bound * self.unit)

    def is_done(self) -> bool:
        """Whether the capacity is reached, nothing better exists or the time is over."""
        return self.bytes <= self.goal() or time.monotonic() >= self.deadline

    def goal(self) -> int:
        """A block of so many bytes ends the call."""
        return max(self.bound, self.aim)

    def take(self, offsets: np.ndarray) -> None:
        """Keep these offsets if they are better."""
        needed = int((offsets + self.size).max())
        if needed < self.bytes:
            self.bytes, self.offsets = needed, offsets.copy()

    def greedy(self) -> None:
        """Place in several orders, each buffer in the lowest and in the tightest gap; the first one always."""
        fit = _compiled().fit.fit
        offsets = np.zeros(len(self.size), dtype=np.int64)
        for order in self.greedy_orders():
            for is_tight in (False, True):
                fit(order, self.lower, self.upper, self.size, is_tight, MAX_BYTES, offsets)
                self.take(offsets)
                if self.is_done():
                    return

    def greedy_orders(self) -> Iterator[np.ndarray]:
        """By size, by the largest load during a buffer's life, by its length, by both multiplied, by time."""
        size, length = self.size, self.upper - self.lower
        area, load = size * (length + 0.0), self.largest_loads()
        yield np.lexsort((-length, -size))
        yield np.lexsort((-size, -load))
        yield np.lexsort((-size, -length, -load))
        yield np.lexsort((-size, -length))
        yield np.lexsort((-area, -load))
        yield np.argsort(-area, kind="stable")
        yield np.lexsort((-length, self.lower))
        yield np.lexsort((-length, -self.upper))

    def largest_loads(self) -> np.ndarray:
        """[n] the largest load while each buffer is live."""
        times = np.unique(np.concatenate([self.lower, self.upper]))
        first, last = np.searchsorted(times, self.lower), np.searchsorted(times, self.upper)
        change = np.zeros(len(times) + 1, dtype=np.int64)
        np.add.at(change, first, self.size)
        np.add.at(change, last, -self.size)
        return np.maximum.reduceat(np.cumsum(change), np.column_stack([first, last]).ravel())[::2]


class _Pushes:
    """The local search below a level, from one start after another; after a success, below one nearer to the goal.

    Small buffers lie in a strip of their own above the others: their edges would only leave gaps of odd sizes. In every
    other start, what outlives the step lies at the top of the rest, first come first, where it leaves no gaps.
    """

    def __init__(self, placer: _Placer):
        self.placer, self.level, self.n_starts, self.n_failed = placer, -1, 0, 0
        self.descent = FARTHEST
        self.sizes = np.unique(placer.size)
        self.strips: dict[int, tuple[np.ndarray, int, np.ndarray]] = {}
        self.offsets = placer.offsets  # of all buffers; those of `rows` without a place have -1
        self.rows = np.empty(0, dtype=np.int64)  # the buffers that are searched for
        self.arguments: tuple[Any, ...] = ()  # of the search, see `remat.arena.push.push`
        self.progress = np.zeros(2)

    def can_run(self) -> bool:
        """Whether it is compiled, or there is time to compile it."""
        return is_compiled(_compiled().push.push) or self.placer.deadline - time.monotonic() > PUSH_COMPILES_S

    def turn(self, until: float) -> None:
        """Search until then; what is found goes to the placer."""
        push = _compiled().push.push
        while time.monotonic() < until and not self.placer.is_done():
            patience = max(FRUITLESS, 2 * len(self.rows)) * (1 + self.n_failed)
            if not self.arguments or self.placer.bytes <= self.level or self.progress[1] >= patience:
                self.start()
            if push(MOVES, *self.arguments):
                self.offsets[self.rows] = self.arguments[1]
                self.placer.take(self.offsets)

    def start(self) -> None:
        """Start anew: below another level if there was a success, else from other places.

        These are those of the best block in every other start, without what ends above the level; or of sweeps.
        """
        placer = self.placer
        has_failed = bool(self.arguments) and placer.bytes > self.level
        self.n_failed = self.n_failed + 1 if has_failed else 0
        self.n_starts += has_failed
        goal = placer.goal()
        self.descent = min(NEAREST, self.descent + STEP) if has_failed else max(FARTHEST, self.descent - 2 * STEP)
        self.level = goal + int(self.descent * (placer.bytes - 1 - goal))
        self.offsets, level, is_large = self.strip()
        if self.n_starts % 2:
            stay = is_large & (placer.offsets + placer.size <= level)
            self.offsets[stay] = placer.offsets[stay]
        self.begin(np.nonzero(is_large)[0], level)

    def strip(self) -> tuple[np.ndarray, int, np.ndarray]:
        """(offsets, level, is_large): small buffers in a strip of their own, and the level for the large ones."""
        slack = SMALL * (self.level - self.placer.load)
        n = bisect_right(range(len(self.sizes) - 1), slack, key=lambda i: self.strip_below(i + 1)[1])
        offsets, _, is_large = self.strip_below(n)
        level = self.level - int((offsets + self.placer.size)[~is_large].max(initial=0))
        return np.where(is_large, -1, offsets + level), level, is_large

    def strip_below(self, i: int) -> tuple[np.ndarray, int, np.ndarray]:
        """(offsets, cost, is_large) if buffers smaller than the i-th size have a strip of their own, from 0."""
        if i not in self.strips:
            lower, upper, size = self.placer.lower, self.placer.upper, self.placer.size
            is_large = size >= self.sizes[i]
            order = np.lexsort((lower - upper, -size))
            offsets = np.zeros(len(size), dtype=np.int64)
            n_bytes = _compiled().fit.fit(order[~is_large[order]], lower, upper, size, False, MAX_BYTES, offsets)
            load = load_of(lower[is_large], upper[is_large], size[is_large])
            self.strips[i] = offsets, n_bytes + load - self.placer.load, is_large
        return self.strips[i]

    def begin(self, rows: np.ndarray, level: int) -> None:
        """Search for these buffers below the level, from their offsets; by sweeps through time if they have none."""
        placer = self.placer
        low, high = sections_of(placer.lower[rows], placer.upper[rows])
        order = np.lexsort((-placer.size[rows], -high, low))
        self.rows, low, high = rows[order], low[order], high[order]
        size, offsets = placer.size[self.rows], self.offsets[self.rows]
        share = size / size.max() * (high - low) ** LENGTH_POWER
        weight = share.copy()
        random = np.array([placer.random.integers(1, 1 << 62)], dtype=np.uint64)
        if offsets.max() < 0:
            outlives = high == high.max()
            weight[outlives] = FIXED
            offsets = self.swept(low, high, size, outlives, level, share, random)
        first, members, _ = members_of(low, high)
        begins = np.searchsorted(low, np.arange(len(first)))
        self.progress[:] = np.inf, 0
        buffers = _compiled().push.Buffers(low, high, size, first, members, begins)
        self.arguments = (
            level, offsets, buffers, weight, share * WEIGHT_GROWTH, random, offsets.copy(), self.progress,
        )  # fmt: skip

    def swept(
        self, low: np.ndarray, high: np.ndarray, size: np.ndarray, outlives: np.ndarray, level: int, share: np.ndarray,
        random: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Offsets by the best of some sweeps; what outlives the step lies at the top, by beginning."""
        sweep, tops = _compiled().fit.sweep, np.cumsum(size * outlives)
        ceiling = level - np.append(0, tops)[np.searchsorted(low, high - 1, "right")]
        others, best, least = np.nonzero(~outlives)[0], np.empty(0, dtype=np.int64), np.inf
        for _ in range(SWEEPS):
            offsets = np.where(outlives, level - tops, -1)
            near, noise = self.placer.random.uniform(*NEAR), self.placer.random.uniform(0, NOISY)
            sweep(others, low, high, size, ceiling, near, noise, random, offsets)
            if (missing := share[offsets < 0].sum()) < least:
                least, best = missing, offsets
        return best


class _Exact:
    """The complete search, below one level after another between the proven bound and the best block."""

    def __init__(self, placer: _Placer):
        self.placer = placer
        self.low, self.high = sections_of(placer.lower, placer.upper)
        self.room, self.node_s = 1 << 16, STEP_S
        self.level, self.levels = -1, cycle(LEVELS)
        self.share = min(1.0, MANY / int((self.high - self.low).sum()))  # of the time
        self.skyline: Any = None
        self.runs = _luby()

    def can_run(self) -> bool:
        """Whether it is compiled, or there is time to compile it."""
        return is_compiled(_compiled().skyline.go_on) or self.placer.deadline - time.monotonic() > COMPILES_S

    def next_level(self) -> int:
        placer = self.placer
        if placer.aim >= placer.bound:
            return placer.aim
        return placer.bound + int(next(self.levels) * (placer.bytes - 1 - placer.bound))

    def turn(self, until: float) -> None:
        """Search below the next level until then; what is found or refuted goes to the placer."""
        skyline, placer, level = _compiled().skyline, self.placer, self.next_level()
        if level != self.level or self.skyline is None:
            seed = int(placer.random.integers(1 << 62))
            self.skyline = skyline.new_skyline(self.low, self.high, placer.size, level, seed, self.room)
            self.level, self.runs = level, _luby()
            self.skyline.noise[:] = 0.0  # the first run is the heuristic's
        unit = max(UNIT, len(placer.size) // 2)
        while time.monotonic() < until:
            skyline.restart(self.skyline)
            result = self.run(unit * next(self.runs), until)
            self.skyline.noise[:] = NOISE
            if result == skyline.FOUND:
                placer.take(self.skyline.least)
            elif result == skyline.REFUTED:
                placer.bound = max(placer.bound, level + 1)
            elif result == skyline.FULL:
                self.room, self.skyline = 4 * self.room, None
            if result != skyline.RUNNING:
                return

    def run(self, n_nodes: int, until: float) -> int:
        """One run of so many nodes, unless the time ends it."""
        skyline = _compiled().skyline
        while n_nodes > 0 and (now := time.monotonic()) < until:
            before = self.skyline.scalar[skyline.NODES]
            result = skyline.go_on(self.skyline, min(n_nodes, max(1, int(STEP_S / self.node_s))))
            done = max(1, int(self.skyline.scalar[skyline.NODES] - before))
            n_nodes -= done
            self.node_s = 0.7 * self.node_s + 0.3 * (time.monotonic() - now) / done
            if result != skyline.RUNNING:
                return result
        return skyline.RUNNING
