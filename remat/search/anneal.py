"""Annealing a staged plan: rounds of growing length, one seed per thread, the best plan kept."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from remat.arrays import GraphArrays, least_unit
from remat.graph import Graph
from remat.plan import Plan
from remat.randomness import random_state
from remat.search import kernel
from remat.search.kernel import ARENA_TOP, BUDGET, COST, EXCESS, LARGE, N_REALS, N_SCALARS, State

# Temperatures in mean operation costs. A round starts hot enough to build a plan anew (HOT is a cycle, because no
# single temperature suits all graphs), or just warm enough to rearrange the best plan of all threads.
HOT, WARM, COLD = (1.0, 0.5, 2.0), 0.1, 0.003
FIRST_ROUND = 20_000  # moves; each cycle of rounds is GROWTH times as long as the one before
GROWTH = 2.0
CYCLE = 2  # rounds of one length: a hot one, then warm ones
LONGEST_ROUND = 2_500  # moves per operation; beyond that, more rounds are better than longer ones
CHUNK_S = 0.05  # duration of one call of compiled code, between two looks at the clock
FIXED_CHUNK = 8192  # moves of one call in runs that must repeat exactly
ROOM = 16  # runs per operation and copies per value, to begin with
LEAST_ROOM, MOST_STATE_BYTES = 256, 1 << 27  # a plan beyond both repeats too much; memory stays linear in the graph
REPORT_SHARE = 20.0  # between two reports, in processor seconds of a report
# Price of all bytes above the budget in one stage, in costs of the whole graph. From a low price the moves that save
# the most come first, and the price rises where the excess does not fall. Small graphs get a first plan sooner from a
# high price, so every other thread begins with it there.
LOW_PRICE, FIRST_PRICE = 0.001, 0.1
MUCH_MORE = 1.05  # a thread keeps its own plan if the shared one, with less excess, costs more than so many times it
NOTHING = 1 << 120  # cost and excess before there is a plan
COMPILED_ON = Graph.from_nodes("chain", [[], [0], [1], [0, 2]], [2, 2, 2, 2], [1, 1, 1, 1])


@dataclass(slots=True)
class Best:
    """The best plan found so far, shared by the threads.

    Attributes:
        order: [C] int32 computations, or None.
        cost, excess: excess is the sum over stages of the bytes above the budget; both to within the
            annealer's units.
        moves: tried by all threads.
    """

    order: np.ndarray | None = None
    cost: int = NOTHING
    excess: int = NOTHING
    moves: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def offer(self, order: np.ndarray, cost: int, excess: int) -> bool:
        """Keep the plan if it is better; whether it is."""
        with self.lock:
            if (excess, cost) >= (self.excess, self.cost):
                return False
            self.order, self.cost, self.excess = order, cost, excess
            return True

    def plan(self, graph: Graph, budget_bytes: int | None = None) -> Plan | None:
        """The plan on its graph; None if none fits."""
        if self.order is None or self.excess:
            return None
        return Plan.from_order(graph, self.order.tolist(), budget_bytes)


@dataclass(frozen=True, slots=True)
class Calls:
    """What an annealing calls, from any thread.

    Attributes:
        on_order: gets the computations and cost of better plans that fit: the first at once, later ones so rarely that
            the calls take a twentieth of the time, and the best at the end.
        should_stop: is asked every few hundredths of a second.
        adopt: before each round, returns the computations and cost of the best plan that fits, for use where others
            look for plans too.
        on_round: gets the computations and cost of the best plan of each round that fits. These good plans differ more
            than successive plans of one round.
    """

    on_order: Callable[[np.ndarray, int], None] | None = None
    should_stop: Callable[[], bool] = lambda: False
    adopt: Callable[[], tuple[np.ndarray, int] | None] = lambda: None
    on_round: Callable[[np.ndarray, int], None] | None = None


class Annealer:
    """One annealing run on one state: a seed, a budget, a plan that changes.

    Attributes:
        unit, cost_unit: bytes and cost that count as one: more than 1 where sums over all stages would not
            fit 64 bits.
    """

    def __init__(self, graph: Graph, budget_bytes: int, seed: int, arrays: GraphArrays | None = None) -> None:
        self.arrays = GraphArrays.of(graph) if arrays is None else arrays
        n = len(self.arrays.cost)
        self.unit = least_unit(
            sum(self.arrays.size_bytes.tolist()) + int(self.arrays.workspace_bytes.max(initial=0)), n
        )
        self.cost_unit = least_unit(graph.total_cost, n)
        self.seed = seed
        total = max(1, graph.total_cost // self.cost_unit)
        self.mean_cost = total / n  # in cost units, as everything inside
        self.low_price = LOW_PRICE * total / max(1.0, float(self.arrays.size_bytes.sum()) / self.unit)
        self.price = self.low_price * (1.0 if n >= LARGE else FIRST_PRICE / LOW_PRICE)
        self.budget = max(budget_bytes - graph.fixed_bytes, 0) // self.unit
        self.state = self._new_state(ROOM, 4 * n + 1000)

    def load(self, order: np.ndarray) -> bool:
        """Start from a staged plan's computations; False if it repeats too much to be searched."""
        order = np.ascontiguousarray(order, dtype=np.int32)
        n = len(self.arrays.cost)
        repeats = int(np.bincount(order, minlength=n).max(initial=1))
        room = max(self.state.runs.shape[1], 2 * repeats + 4)
        if room > max(LEAST_ROOM, MOST_STATE_BYTES // (4 * (n + 2 * len(self.arrays.size_bytes)))):
            return False
        if room > self.state.runs.shape[1] or 2 * len(order) + 8 * n > len(self.state.arena):
            random = self.state.random.copy()
            self.state = self._new_state(room, 4 * len(order) + 16 * n + 1000)
            self.state.random[:] = random
        return bool(kernel.load_order(self.state, order))

    @property
    def cost(self) -> int:
        """Cost of the current plan; at most `cost_unit` too low for each computation."""
        return int(self.state.scalar[COST]) * self.cost_unit

    @property
    def excess(self) -> int:
        """Sum over stages of the current plan's bytes above the budget, in `unit` bytes."""
        return int(self.state.scalar[EXCESS])

    def order(self) -> np.ndarray:
        """Computations of the current plan."""
        s = self.state
        spans = zip(s.list_start.tolist(), s.list_length.tolist(), strict=True)
        return np.concatenate([s.arena[first : first + length] for first, length in spans])

    def round(
        self,
        moves: int,
        hot: float,
        cold: float,
        best: Best,
        should_stop: Callable[[], bool],
        on_better: Callable[[], None],
        deadline: float = float("inf"),
        fixed: bool = False,
    ) -> bool:
        """Cool from `hot` to `cold` (in mean operation costs) over `moves` moves; False if stopped.

        With a deadline the temperature follows the moves or the time, whichever is further on. `fixed` looks
        at the clock after a fixed number of moves, so that a run repeats exactly.
        """
        done, chunk, began = 0, FIXED_CHUNK if fixed else 2000, time.monotonic()
        seen_cost, seen_excess = int(self.state.scalar[COST]), self.excess
        best.offer(self.order(), self.cost, seen_excess)
        while done < moves:
            started = time.monotonic()
            progress = max(done / moves, (started - began) / max(deadline - began, 1e-9))
            n = min(chunk, moves - done)
            if progress >= 1.0 or should_stop():
                return False
            high = max(hot * (cold / hot) ** progress, 1e-12) * self.mean_cost
            low = max(hot * (cold / hot) ** min(1.0, progress + n / moves), 1e-12) * self.mean_cost
            seen_cost, seen_excess, length, self.price = kernel.anneal(
                self.state, n, high, low, self.price, seen_cost, seen_excess
            )
            took_s = time.monotonic() - started
            done += n
            best.moves += n
            order = self.state.order[:length].copy()
            if length and best.offer(order, seen_cost * self.cost_unit, seen_excess):
                on_better()
            if self.state.scalar[ARENA_TOP] > 0.7 * len(self.state.arena):
                self.load(self.order())  # more room
            if not fixed:
                chunk = int(np.clip(n * CHUNK_S / max(took_s, 1e-6), 500, 1_000_000))
        return True

    def _new_state(self, room: int, list_room: int) -> State:
        """An empty state; `room` intervals per value and computations per operation."""
        n, n_values = len(self.arrays.cost), len(self.arrays.size_bytes)
        scalar = np.zeros(N_SCALARS, dtype=np.int64)
        scalar[BUDGET] = self.budget

        def ints(*shape: int) -> np.ndarray:
            return np.zeros(shape, dtype=np.int32)

        def longs(*shape: int) -> np.ndarray:
            return np.zeros(shape, dtype=np.int64)

        return State(
            *self.arrays.in_units(self.unit, self.cost_unit),
            intervals=ints(n_values, 2 * room), n_intervals=ints(n_values),
            runs=ints(n, room), n_runs=ints(n),
            list_start=longs(n), list_length=ints(n), list_room=ints(n), arena=ints(list_room),
            through=longs(n), peak=longs(n), stage_cost=longs(n),
            log=longs(64 * n + 100_000), queue=ints(n + 1), queued=np.zeros(n + 1, dtype=np.bool_),
            seeds=ints(2 * n + 64, 2), random=random_state(self.seed), scalar=scalar, real=np.zeros(N_REALS),
            order=ints(list_room), scratch_stack=ints(n + 1), scratch_list=ints(n + 1),
            mark_op=longs(n), mark_value=longs(n_values), last_use=ints(n_values), residence=ints(n_values),
            logged_value=longs(n_values), logged_op=longs(n),
        )  # fmt: skip


def minimise_cost(
    graph: Graph,
    budget_bytes: int,
    start: np.ndarray | None = None,
    *,
    seed: int = 0,
    threads: int = 1,
    deadline: float = float("inf"),
    work_limit: int | None = None,
    target_cost: int = 0,
    calls: Calls | None = None,
) -> Best:
    """Anneal until the deadline (`time.monotonic()`), the work limit or the target is reached.

    Args:
        start: computations of a staged plan, which need not fit; by default every operation once.
        work_limit: moves of each thread; threads then share nothing, so that runs repeat exactly.
        target_cost: stop when a plan that fits costs no more (a lower bound).

    Returns:
        The best plan; it fits if its `excess` is 0.
    """
    best, calls = Best(), calls or Calls()
    reporter = Reporter(best, target_cost, calls.on_order)
    # Threads that must repeat exactly keep their plans to themselves: among equal plans the first thread's counts.
    alone = [Best() for _ in range(threads)] if work_limit is not None else []
    arrays = GraphArrays.of(graph)
    first = np.arange(len(graph), dtype=np.int32) if start is None else start

    def stop() -> bool:
        return reporter.is_stopped() or time.monotonic() >= deadline or calls.should_stop()

    def work(index: int) -> None:
        annealer = Annealer(graph, budget_bytes, seed * 1009 + index, arrays)
        if work_limit is None:
            _rounds(annealer, first, best, stop, reporter.report, calls, deadline, None)
        else:
            _rounds(annealer, first, alone[index], stop, lambda: None, calls, deadline, work_limit)

    try:
        on_threads(work, threads, reporter.stopped)
    finally:  # after Ctrl-C too, the best plan counts
        for own in alone:
            if own.order is not None:
                best.offer(own.order, own.cost, own.excess)
        best.moves = max(best.moves, sum(own.moves for own in alone))
        reporter.report(last=True)
    return best


def compile_annealing() -> None:
    """Compile what annealing calls, or load it from Numba's cache; the first time takes half a minute."""
    minimise_cost(COMPILED_ON, 6, work_limit=100)


class Reporter:
    """Reports plans that fit to `on_order`, see `Calls`.

    Attributes:
        stopped: set when a plan reaches the target; the threads then end.
    """

    def __init__(self, best: Best, target_cost: int, on_order: Callable[[np.ndarray, int], None] | None) -> None:
        self.best, self.target_cost, self.on_order = best, target_cost, on_order
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.cost = float("inf")  # of the last plan reported
        self.next_report = 0.0  # earliest time

    def is_stopped(self) -> bool:
        """Whether the threads are to end. A plan that was found when no report was due is reported if one is now."""
        self.report()
        return self.stopped.is_set()

    def report(self, last: bool = False) -> None:
        """Report the best plan if it is better than the last one reported and a report is due, or the `last` one."""
        with self.lock:
            order, cost, excess = self.best.order, self.best.cost, self.best.excess
            if excess or order is None or cost >= self.cost:
                return
            if self.on_order is not None and (last or time.monotonic() >= self.next_report):
                began_s = time.thread_time()  # on a busy machine a report may wait, and the next one is not to
                self.on_order(order, cost)
                self.cost = cost
                self.next_report = time.monotonic() + REPORT_SHARE * (time.thread_time() - began_s)
            if cost <= self.target_cost:
                self.stopped.set()


def on_threads(work: Callable[[int], None], threads: int, stopped: threading.Event) -> None:
    """Run `work(index)` on every thread and wait for all; Ctrl-C or an error sets `stopped`, which must end them.

    A single thread is the caller's own. Raises the first error of a thread, after all have ended.
    """
    if threads == 1:
        work(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        try:
            for future in [pool.submit(work, index) for index in range(threads)]:
                future.result()
        finally:
            stopped.set()


def _rounds(
    annealer: Annealer, first: np.ndarray, best: Best, stop: Callable[[], bool], report: Callable[[], None],
    calls: Calls, deadline: float, work_limit: int | None,
) -> None:  # fmt: skip
    """Anneal in rounds of growing length, until the limits or `stop`.

    Of each `CYCLE` rounds the first is hot and starts from `first`; the others are warm and start from the best plan of
    all threads. Until a plan fits, every round starts from the best one so far.
    """
    own, this = Best(), Best()
    left = work_limit if work_limit is not None else 1 << 62
    moves, rate = float(FIRST_ROUND), 0.0

    def better() -> None:
        order, cost, excess = this.order, this.cost, this.excess
        if order is not None and own.offer(order, cost, excess) and best.offer(order, cost, excess):
            report()

    for index in itertools.count():
        if stop() or left <= 0:
            return
        better_elsewhere = calls.adopt()
        if better_elsewhere is not None:
            best.offer(*better_elsewhere, 0)
        _load_start(annealer, index, first, own, best)
        this = Best()
        this.offer(annealer.order(), annealer.cost, annealer.excess)
        better()
        n, ends = int(moves), float("inf")
        if work_limit is not None:
            n = left if left < n * (1 + GROWTH) else n
        elif rate and deadline < float("inf"):
            seconds = deadline - time.monotonic()
            if n * (1 + GROWTH) > rate * seconds:  # another round would not end in time, so this is the last
                n, ends = max(1, int(2 * rate * seconds)), deadline
        hot = WARM if index % CYCLE else HOT[(index // CYCLE + annealer.seed) % len(HOT)]
        began = time.monotonic()
        finished = annealer.round(n, hot, COLD, this, stop, better, ends, work_limit is not None)
        with best.lock:
            best.moves += this.moves
        if calls.on_round is not None and this.order is not None and not this.excess:
            calls.on_round(this.order, this.cost)
        if not finished:
            return
        rate = n / max(time.monotonic() - began, 1e-6)
        left -= n
        if (index + 1) % CYCLE == 0:
            moves = min(moves * GROWTH, max(moves, LONGEST_ROUND * len(first)))


def _load_start(annealer: Annealer, index: int, first: np.ndarray, own: Best, best: Best) -> None:
    """Set the annealer to the plan, and the price, with which a round begins; see `_rounds`."""
    rebuild = index % CYCLE == 0
    order = first
    if best.excess and own.order is not None and best.order is not None:  # go on towards a plan that fits
        order = own.order if best.cost > MUCH_MORE * own.cost else best.order
    elif best.order is not None and not rebuild:
        order = best.order
    # A low price gives better plans on large graphs, where it rises slowly. On small tight graphs every other
    # hot round does better with the current price, which every other thread begins at FIRST_PRICE.
    if rebuild and order is first and (len(first) >= LARGE or (annealer.seed + index // CYCLE) % 2 == 0):
        annealer.price = annealer.low_price
    if not annealer.load(order):
        annealer.load(np.arange(len(annealer.arrays.cost), dtype=np.int32))
