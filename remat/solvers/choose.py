"""A search for the implementation of each operation; a short annealing judges each choice of implementations.

The outer search switches implementations, first all of a kind at once, then some at a time. Each choice gives a
graph without implementations (`Choices.choose`); annealing on it from the best plan so far gives the choice its score.
Then the given strategy solves the graph of the best choice in the remaining time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from remat.bounds.lp import expected_seconds, lower_bound, model_columns
from remat.bounds.relax import relaxed
from remat.bounds.window_integers import COUNTED_NODES_PER_S, Listener, WindowIntegers
from remat.bounds.windows import TRIES, WindowBound
from remat.certificate import BoundCertificate, better_proof
from remat.context import Context
from remat.errors import InvalidGraph
from remat.graph import Graph
from remat.implementation import DEFAULT
from remat.incumbent import Found, Incumbent
from remat.plan import Plan, Scope
from remat.registry import Strategy
from remat.search.anneal import COLD, WARM, Annealer, Best
from remat.search.choices import Choice, Choices, choice_of
from remat.search.exhaustive_choices import exhaustive_choices
from remat.search.greedy import SHORT_S, greedy_eviction
from remat.search.joint import Prepared, anneal_jointly, prepare
from remat.search.ordering.construct import plan_in_original, reordered
from remat.search.ready import begin_compiling, is_joint_ready, is_ready, ready_by
from remat.solution import Candidate, Outcome, Solution
from remat.solvers.search import lean_plan

WHO = "search over implementations"
MOVES_PER_OPERATION = 60  # of the annealing that judges a choice
MOST_MOVES = 60_000
GRACE_S = 0.3  # to wait for the LP, which cannot be interrupted at every moment; it then ends by itself
LONGER = 8  # times as many moves, to judge a start again
OUTER_SHARE = 0.5  # of the time, for the search over implementations
# Of the time, for the window relaxation before a search by the only thread, and in the proof; for trees over it. Rounds
# of windows in a run that repeats exactly.
WINDOW_SHARE_FIRST, WINDOW_SHARE, TREE_SHARE, WINDOW_ROUNDS = 0.05, 0.2, 0.5, 8
# Of the time left, in turns: for storage and implementations together, then for the storage of the best
# implementations. Moves a second in runs that repeat exactly.
JOINT_SHARES, JOINT_PER_S = ((0.45, 0.4), (0.5, 0.7)), 3_000
OUTER_ROUNDS = 2  # of search and solving; the second begins from the result of the first
FREE_PROOF_SHARE = 0.1  # of the time, in scope free, for the bound
FREE_SHARES = ((0.25, 0.55), (0.8, 1.0))  # of the time, in scope free: end of the search for an order, then for choices
SETTLED = 4  # the search ends after this many tries in vain for each possible switch
LONGEST_RUN = 12  # most operations whose implementations are switched together
REPEATS_PER_S = 40  # choices judged per second in runs that repeat exactly
EXHAUSTIVE_OPERATIONS, EXHAUSTIVE_STATES, EXHAUSTIVE_SHARE = 12, 60_000, 0.3  # largest graph, states, share of the time
STATES_PER_S = 2_000  # of the exhaustive search, in a run that repeats exactly
SEED_STEP = 1000  # between the seeds of two searches of one solve


def choose_and_solve(context: Context, strategy: Strategy, options: Mapping[str, Any]) -> Outcome:
    """Search for implementations, and solve the graph of the best choice by a strategy for graphs without any.

    The bound is that of the window relaxation, which has columns for the choice, or of the LP of the relaxed graph
    (`relaxed`) if there is time for it. Until the search is compiled, greedy eviction judges the choices.
    """
    prepared = prepare(context.problem.graph)
    if context.repeats:
        ready_by(context.deadline, too=is_joint_ready if prepared is not None else is_ready)
    begin_compiling(context.remaining_s(), too=is_joint_ready if prepared is not None else is_ready)
    proves = bool(strategy.members)  # only a strategy that combines others has time for more than plans
    if proves and len(context.problem.graph) <= EXHAUSTIVE_OPERATIONS:
        outcome = _exhaust(context)
        if outcome is not None:
            return outcome
    if context.problem.scope is Scope.FREE:
        return _solve_free(context, strategy, options)
    search = _ChoiceSearch(context)
    repeats = context.repeats
    prover = _Prover(context) if proves else None
    stats: dict[str, Any] = {}
    try:
        if prepared is not None and is_joint_ready():
            stats["joint_moves"] = _search_jointly(context, prepared, prover, search, strategy, options)
        elif prover is not None and not repeats and context.options.threads == 1:
            prover.bound_by_windows(context.share_ends(WINDOW_SHARE_FIRST))
        if prover is not None and not repeats and context.options.threads > 1:  # the clock decides when a bound arrives
            prover.start()
            search.busy = 1
        cut = _take_turns(context, prepared, search, strategy, options, stats)
        if prover is not None:
            prover.finish()
    finally:
        if prover is not None:
            prover.stopped.set()
    stats |= {"choices": search.tried, "implementations": _used(context)}
    outcome = _outcome(context, stats, cut or search.cut or (prover is not None and prover.cut))
    return outcome if prover is None else replace(outcome, certificate=prover.certificate)


def _take_turns(
    context: Context, prepared: Prepared | None, search: _ChoiceSearch, strategy: Strategy, options: Mapping[str, Any],
    stats: dict[str, Any],
) -> bool:  # fmt: skip
    """Search for a choice and solve it, twice; whether the clock ended the last solve. Adds to `stats`."""
    repeats, cut = context.repeats, False
    began, seconds = time.monotonic(), context.remaining_s()
    for turn in range(1 if repeats else OUTER_ROUNDS):
        first, last = (0.0, 1.0) if repeats else (turn / OUTER_ROUNDS, (turn + 1) / OUTER_ROUNDS)
        if turn > 0 and prepared is not None and "joint_moves" not in stats and is_joint_ready():  # compiled meanwhile
            stats["joint_moves"] = _search_jointly(context, prepared, None, search, strategy, options)
        search.run(began + (first + OUTER_SHARE * (last - first)) * seconds)
        if turn == 0 and _offers_lean_plan(context):
            search.start_from_best_plan()
        if context.is_solved() or search.best is None:
            break
        solved = _solve_choice(context, search, strategy, options, began + last * seconds)
        stats |= {"choice_status": str(solved.status), "choice_bound": solved.bound}
        cut = bool(solved.cut_by_clock)
        if context.is_solved() or repeats:
            break
    return cut


def _offers_lean_plan(context: Context) -> bool:
    """Offer that of the smallest budget known if there is no plan yet, and the run need not repeat; whether it fits."""
    if context.incumbent.plan is not None or context.repeats:
        return False
    return lean_plan(context).bytes <= context.problem.budget_bytes


def _search_jointly(
    context: Context, prepared: Prepared, prover: _Prover | None, search: _ChoiceSearch, strategy: Strategy,
    options: Mapping[str, Any],
) -> int:  # fmt: skip
    """Anneal storage and implementations together, then solve for the storage alone, and again; the number of moves.

    What annealing stores is often not yet the best for its implementations, and the other way round afterwards.
    """
    moves, start = 0, None
    for share, choice_share in JOINT_SHARES[: 1 if context.repeats else None]:
        moves += _anneal_jointly(context, prepared, prover if start is None else None, share, start)
        search.start_from_best_plan()
        if search.best is None or context.repeats or context.is_solved():
            break
        _solve_choice(context, search, strategy, options, context.share_ends(choice_share))
        start = context.incumbent.plan
    return moves


def _anneal_jointly(
    context: Context, prepared: Prepared, prover: _Prover | None, share: float, start: Plan | None
) -> int:
    """Offer plans that store and choose implementations together; the number of moves of all threads.

    First the window relaxation has one of the threads, or the only one, for a while: its bound may end the solve.
    """
    repeats, options, until = context.repeats, context.options, context.share_ends(share)
    crew = 1 if repeats else options.threads
    moves = (options.work_limit or context.steps_in(JOINT_PER_S)) if repeats else None
    stopped = threading.Event()

    def done() -> bool:
        return time.monotonic() >= until or stopped.is_set() or context.is_solved()

    def search(i: int) -> int:
        return anneal_jointly(
            prepared, context.problem.budget_bytes, options.seed + SEED_STEP * i, offer, done,
            seconds=until - time.monotonic(), moves=moves, start=start,
        )  # fmt: skip

    def offer(plan: Plan) -> None:
        context.offer(plan, WHO)

    with ThreadPoolExecutor(crew) as pool:
        try:
            proof = None
            if prover is not None and not repeats:
                share = WINDOW_SHARE_FIRST if crew == 1 else WINDOW_SHARE
                proof = pool.submit(prover.bound_by_windows, context.share_ends(share))
            total = sum(future.result() for future in [pool.submit(search, i) for i in range(crew)])
            if proof is not None:
                proof.result()
            return total
        except BaseException:  # Ctrl-C: the others end too
            stopped.set()
            if prover is not None:
                prover.stopped.set()
            raise


def _outcome(context: Context, stats: Mapping[str, Any], cut: bool) -> Outcome:
    """The best plan and bound; `cut`: the clock ended the solve of a choice or the search over choices."""
    best = context.incumbent
    is_cut = cut or context.is_cut() or not is_ready() if context.repeats else None
    if best.plan is not None:
        return Outcome((Candidate(best.plan, {"from": best.who}),), bound=best.bound, stats=stats, cut_by_clock=is_cut)
    message = "no plan found with any choice of implementations"
    timed_out = context.is_late() if is_cut is None else is_cut
    return Outcome(message=message, timed_out=timed_out, stats=stats, cut_by_clock=is_cut)


def _solve_free(context: Context, strategy: Strategy, options: Mapping[str, Any]) -> Outcome:
    """In turns: find an order of the operations for one choice, then choices and plans in that order.

    Start from the order of the best default plan, so that the result is never worse than it.
    """
    full, best = context.problem.graph, context.incumbent
    began, seconds = time.monotonic(), context.remaining_s()
    if context.options.warm_start is not None:
        context.offer(context.options.warm_start, "warm start")
    stats: dict[str, Any] = {"choices": 0}
    cut = False
    prover = _Prover(context) if strategy.members else None
    if prover is not None and not context.is_solved():  # seconds at most: plans need the rest of the time
        prover.bound_by_windows(context.share_ends(FREE_PROOF_SHARE))
    for turn, (order_until, choice_until) in enumerate(FREE_SHARES):
        plan = best.plan
        wanted = [0] * len(full) if turn == 0 or plan is None else choice_of(full, plan)
        search = _ChoiceSearch(context)
        choice = search.choices.choose(wanted)
        if choice is not None:
            start = choice.order_of(range(len(full)))
            search.best = search.offer(choice, start)
            until = context.deadline if context.repeats else began + order_until * seconds
            cut |= bool(_solve_choice(context, search, strategy, options, until).cut_by_clock)
        if turn == 0:
            _offers_lean_plan(context)
        if context.is_solved():
            break
        order = list(range(len(full))) if best.plan is None else list(dict.fromkeys(best.plan.order.tolist()))
        try:
            moved = reordered(full, order)
        except InvalidGraph:  # another implementation of an operation reads a value that this order makes later
            order, moved = list(range(len(full))), full
        until = context.deadline if context.repeats else began + choice_until * seconds
        inner = _choose_in_order(context, moved, order, until)
        stats["choices"] += inner.tried
        cut |= inner.cut
        if context.is_solved():
            break
    stats["implementations"] = _used(context)
    outcome = _outcome(context, stats, cut)
    return outcome if prover is None else replace(outcome, certificate=prover.certificate)


def _choose_in_order(context: Context, moved: Graph, order: Sequence[int], until: float) -> _ChoiceSearch:
    """Search choices and staged plans in one order of the operations; the finished search."""
    full, best = context.problem.graph, context.incumbent

    def offer(found: Found) -> None:
        if found.plan is not None:
            context.offer(plan_in_original(full, order, found.plan), WHO)

    start = None
    if best.plan is not None:
        place = {k: i for i, k in enumerate(order)}
        calls = best.plan.order.tolist()
        start = Plan.from_order(moved, [place[k] for k in calls], context.problem.budget_bytes, best.plan.choices)
        start = start if start.scope is Scope.STAGED else None
    inner = replace(context.problem, graph=moved, scope=Scope.STAGED)
    incumbent = Incumbent(moved, inner.budget_bytes, Scope.STAGED, record=offer)
    search = _ChoiceSearch(context.about(inner, incumbent).with_options(warm_start=start).until(until))
    search.run(until)
    return search


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """A choice with its best known plan; a smaller `score` is better."""

    choice: Choice
    order: np.ndarray  # computations of choice.graph
    full_order: tuple[int, ...]
    implementations: tuple[int, ...]  # [N] of the plan; if an operation has several, the one with the least workspace
    score: tuple[int, int, int]  # bytes above the budget, cost, peak


class _ChoiceSearch:
    """Hill climbing over choices.

    Attributes:
        best: the best choice so far, None before the first one is judged.
        tried: number of choices judged.
    """

    def __init__(self, context: Context):
        self.context, self.full = context, context.problem.graph
        self.choices = Choices(context.problem.graph)
        self.best: _Trial | None = None
        self.tried = 0
        self.vain = 0  # switches tried since the last one that helped
        self.busy = 0  # threads with other work
        self.lock = threading.Lock()
        self.seen: dict[tuple[int, ...], int] = {}
        self.switches = self.choices.switches
        self.kinds: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for k, i in self.switches:
            kind = self.full.operations[k].kind, self.choices.implementations[k][i].name
            self.kinds.setdefault(kind, []).append((k, i))
        self.moves = min(MOST_MOVES, MOVES_PER_OPERATION * len(self.full))
        self.stopped = threading.Event()
        self.cut = False  # the clock ended a run that repeats exactly

    def run(self, until: float) -> None:
        """Search until the time `until`, or until nothing has helped for a long time."""
        repeats = self.context.repeats
        limit, work_limit = 1 << 60, self.context.options.work_limit
        if repeats:
            counted = work_limit // self.moves if work_limit else self.context.steps_in(REPEATS_PER_S * OUTER_SHARE)
            limit = max(2, counted)
        until = self.context.deadline - OUTER_SHARE * self.context.remaining_s() if repeats else until

        def done() -> bool:
            late = time.monotonic() >= until
            self.cut = self.cut or (repeats and late)
            return late or self.tried >= limit or self.stopped.is_set() or self.context.is_solved()

        if self.best is None:
            self._begin(done)
        if self.best is None or done() or not self.switches:
            return
        self.vain = 0
        crew = 1 if repeats else max(1, self.context.options.threads - self.busy)
        randoms = [Random(f"{self.context.options.seed} {self.tried} {i}") for i in range(crew)]
        with ThreadPoolExecutor(crew) as pool:
            try:
                for future in [pool.submit(self._climb, random, done) for random in randoms]:
                    future.result()
            except BaseException:  # Ctrl-C: the others end too
                self.stopped.set()
                raise

    def start_from_best_plan(self) -> None:
        """Go on from the best plan of anyone, unless what becomes of it in one choice is worse than the best choice."""
        plan = self.context.incumbent.plan
        if plan is None:
            return
        choice = self.choices.choose(choice_of(self.full, plan))
        if choice is not None:
            trial = self.offer(choice, choice.order_of(plan.order.tolist()))
            self.best = trial if self.best is None else min(self.best, trial, key=lambda one: one.score)

    def _climb(self, random: Random, done: Callable[[], bool]) -> None:
        while not done() and self.vain < SETTLED * max(8, len(self.switches)):
            before = self.best
            self._try(self._neighbour(random), done)
            self.vain = self.vain + 1 if self.best is before else 0

    def _begin(self, done: Callable[[], bool]) -> None:
        """Judge the default choice, all switches at once, the leanest choice; then each kind of switch on and off."""
        n = len(self.full)
        start = self.context.options.warm_start
        if start is not None:
            wanted = choice_of(self.full, start)
            if not any(self.choices.implementations[k][i].is_lossy for k, i in enumerate(wanted)):
                self.context.offer(start, "warm start")
                self._try(wanted, done, start.order.tolist())
        by_saving = sorted(self.kinds.values(), key=lambda group: -sum(map(self._saving, group)))
        everything, lean = [0] * n, [0] * n
        for k, i in itertools.chain.from_iterable(reversed(by_saving)):
            everything[k] = i
        for k, implementations in enumerate(self.choices.implementations):
            lean[k] = min(
                (i for i, implementation in enumerate(implementations) if not implementation.is_lossy),
                key=lambda i: self._need(k, i),
            )
        starts = []
        for wanted in ([0] * n, everything, lean):
            trial = self._try(wanted, done)
            starts += [] if trial is None else [trial]
        for group in by_saving:
            if done() or self.best is None:
                return
            indices = self.best.choice.indices
            on, off = list(indices), list(indices)
            for k, i in group:
                on[k], off[k] = i, 0 if indices[k] == i else indices[k]
            self._try(on, done)
            if off != list(indices) and self.best.choice.indices == indices:
                self._try(off, done)
        # A short annealing may underrate a start: starts other than the best get a longer one, each from its own plan.
        for trial in starts:
            if not done() and self.best is not None and trial.choice.indices != self.best.choice.indices:
                self._take(self._judge(trial.choice, done, trial.full_order, LONGER * self.moves))

    def _need(self, k: int, i: int) -> tuple[int, int]:
        """Bytes that operation `k` holds at once in implementation `i`, and its cost."""
        implementation = self.choices.implementations[k][i]
        return self.full.touched_bytes(implementation), implementation.cost

    def _saving(self, switch: tuple[int, int]) -> int:
        """Bytes that the implementation reads less than the default one, plus those that it writes over."""
        k, i = switch
        implementation = self.choices.implementations[k][i]
        read_less = self._bytes(self.full.operations[k].inputs) - self._bytes(implementation.inputs)
        x = implementation.overwrites
        return read_less + (0 if x is None else self.full.values[x].bytes)

    def _bytes(self, values: Iterable[int]) -> int:
        return sum(self.full.values[v].bytes for v in values)

    def _neighbour(self, random: Random) -> list[int]:
        assert self.best is not None
        wanted = list(self.best.choice.indices)
        k, i = random.choice(self.switches)
        if random.random() < 0.5:
            group = [(k, i)]
        else:  # the same switch in operations nearby
            implementation = self.choices.implementations[k][i].name
            alike = self.kinds[self.full.operations[k].kind, implementation]
            at = alike.index((k, i))
            group = alike[at : at + random.randint(2, LONGEST_RUN)]
        off = wanted[k] == i
        for k, i in group:
            if not off:
                wanted[k] = i
            elif wanted[k] == i:
                wanted[k] = 0
        return wanted

    def _try(
        self, wanted: Sequence[int], done: Callable[[], bool], order: Sequence[int] | None = None
    ) -> _Trial | None:
        """Judge a choice, from `order` or the best plan so far; None if it does not exist or is already known."""
        choice = self.choices.choose(wanted)
        if choice is None:
            return None
        looks = self.seen.get(choice.indices, 0)
        if looks and (self.best is None or choice.indices != self.best.choice.indices or looks > 3):
            return None
        self.seen[choice.indices] = looks + 1
        trial = self._judge(choice, done, order, self.moves)
        self._take(trial)
        return trial

    def _take(self, trial: _Trial | None) -> None:
        """Count the trial, and keep it if it is the best."""
        with self.lock:
            self.tried += 1
            if trial is not None and (self.best is None or trial.score < self.best.score):
                self.best = trial
                self._adopt_algorithms()

    def _adopt_algorithms(self) -> None:
        """Make the implementations of the best plan its choice, unless this makes the plan worse.

        The solver of the choice then sees their costs. If an operation has several implementations in the plan, the one
        with the least workspace counts.
        """
        assert self.best is not None
        choice = self.choices.choose(self.best.implementations)
        if choice is None or choice.indices == self.best.choice.indices:
            return
        trial = self.offer(choice, choice.order_of(self.best.full_order))
        if trial.score <= self.best.score:
            self.best = trial

    def _judge(
        self, choice: Choice, done: Callable[[], bool], order: Sequence[int] | None, moves: int
    ) -> _Trial | None:
        graph, budget = choice.graph, self.context.problem.budget_bytes
        if order is None:
            order = range(len(self.full)) if self.best is None else self.best.full_order
        start = choice.order_of(order)
        if is_ready():
            annealer = Annealer(graph, budget, self.context.options.seed * 1009 + self.tried)
            if not annealer.load(start):
                return None
            found = Best()
            annealer.round(moves, WARM, COLD, found, done, lambda: None, fixed=self.context.repeats)
            reached = found.order if found.order is not None else start
        else:
            plan = greedy_eviction(graph, budget, deadline=time.monotonic() + SHORT_S)
            reached = start if plan is None else plan.order
        return self.offer(choice, reached)

    def offer(self, choice: Choice, order: np.ndarray) -> _Trial:
        """Lift a plan of the choice's graph to the full graph, offer it, and score it."""
        budget_bytes = self.context.problem.budget_bytes
        plan = choice.lift(Plan.from_order(choice.graph, order.tolist()), budget_bytes)
        plan, cost, peak_bytes = self.choices.with_fastest_that_fit(plan, budget_bytes)
        known = self.context.incumbent.cost
        if peak_bytes <= budget_bytes and (known is None or cost < known):
            self.context.offer(plan, WHO)
        over = max(0, peak_bytes - budget_bytes)
        calls = tuple(plan.order.tolist())
        return _Trial(choice, order, calls, self._leanest(plan), (over, cost, peak_bytes))

    def _leanest(self, plan: Plan) -> tuple[int, ...]:
        """[N] index of the implementation with the least workspace among those in which a plan runs each operation."""
        leanest: dict[int, int] = {}
        for k, name in dict.fromkeys(plan.calls):
            implementations = self.choices.implementations[k]
            i = [implementation.name for implementation in implementations].index(name or DEFAULT)
            if k not in leanest or implementations[i].workspace_bytes < implementations[leanest[k]].workspace_bytes:
                leanest[k] = i
        return tuple(leanest.get(k, 0) for k in range(len(self.full)))


def _used(context: Context) -> dict[str, int]:
    """Number of operations of each kind in each implementation of the best plan, e.g. ``{"relu:mask": 3}``."""
    graph, plan = context.problem.graph, context.incumbent.plan
    calls = () if plan is None else set(plan.calls)
    counts = Counter(f"{graph.operations[k].kind}:{name}" for k, name in calls if name)
    return dict(sorted(counts.items()))


def _exhaust(context: Context) -> Outcome | None:
    """The optimum of a very small graph; None if it was not decided."""
    problem = context.problem
    if any(w.is_lossy for op in problem.graph.operations for w in op.implementations):
        return None
    states = context.steps_in(STATES_PER_S, EXHAUSTIVE_STATES) if context.repeats else EXHAUSTIVE_STATES
    deadline = context.share_ends(EXHAUSTIVE_SHARE)
    plan, bound, impossible = exhaustive_choices(problem.graph, problem.budget_bytes, states, deadline, problem.scope)
    if impossible:
        return Outcome(infeasible=True)
    if plan is None:
        return None
    return Outcome((Candidate(plan, {"from": "exhaustive"}),), bound=bound, proven_by="exhaustive")


def _solve_choice(
    context: Context, search: _ChoiceSearch, strategy: Strategy, options: Mapping[str, Any], until: float
) -> Solution:
    """Run the strategy on the graph of the best choice; its plans are lifted to the full graph and offered."""
    assert search.best is not None
    choice = search.best.choice

    def lift(found: Found) -> None:
        if found.plan is not None:
            search.offer(choice, found.plan.order)

    graph = choice.graph
    start = Plan.from_order(graph, search.best.order.tolist())
    warm = start if search.best.score[0] == 0 and context.problem.scope.contains(start.scope) else None
    inner = replace(context.problem, graph=graph, cost_cap=None)
    incumbent = Incumbent(graph, inner.budget_bytes, inner.scope, record=lift)
    aside = context.about(inner, incumbent).with_options(warm_start=warm).until(until)
    solution = context.run_strategy(aside, strategy.name, options, isolate=False)  # this process is the strategy's own
    if solution.plan is not None:
        search.best = min(search.best, search.offer(choice, solution.plan.order), key=lambda trial: trial.score)
    return solution


class _Prover:
    """The bound: of windows, trees over them, then of the relaxed graph. In its own thread if there are several."""

    def __init__(self, context: Context):
        self.context = context
        self.certificate: BoundCertificate | None = None
        self.stopped = threading.Event()
        self.running: Future[None] | None = None
        self.cut = False  # the clock ended the trees of a run that repeats exactly
        self.windows = WindowBound(context.problem, tries=1 if context.repeats else TRIES)

    def start(self) -> None:
        pool = ThreadPoolExecutor(1)
        self.running = pool.submit(self._run)
        pool.shutdown(wait=False)

    def finish(self) -> None:
        """Wait for the proof, which begins now if `start` was not called, until the deadline; raise its error."""
        if self.running is None:
            self.start()
        assert self.running is not None
        wait([self.running], self.context.remaining_s())
        self.stopped.set()
        if wait([self.running], GRACE_S).done:
            self.running.result()
        else:
            self.cut = self.context.repeats

    def bound_by_windows(self, deadline: float) -> None:
        """Rounds of the window relaxation until the time `deadline` (monotonic)."""
        rounds = WINDOW_ROUNDS if self.context.repeats else None
        self.windows.run(deadline, on_bound=self._take, should_stop=self._done, rounds=rounds)

    def _run(self) -> None:
        context = self.context
        self.bound_by_windows(context.share_ends(WINDOW_SHARE))
        if not self._done():
            listener = Listener(
                on_proof=self._take, on_bound=lambda bound: context.offer_bound(bound, "window MILP", "highs"),
                on_plan=lambda _: None, should_stop=self._done,
            )  # fmt: skip
            integers = WindowIntegers(self.windows, context.incumbent)
            nodes = context.steps_in(COUNTED_NODES_PER_S / max(1, self.windows.columns)) if context.repeats else None
            integers.run(context.share_ends(TREE_SHARE), listener, nodes)
            self.cut = context.repeats and integers.is_cut
        if (
            self._done()
            or expected_seconds(model_columns(relaxed(context.problem.graph))) > context.seconds_for_a_proof()
        ):
            return
        lower_bound(context.with_options(threads=1), on_bound=self._take, should_stop=self._done)

    def _done(self) -> bool:
        return self.stopped.is_set() or self.context.is_solved()

    def _take(self, proof: BoundCertificate) -> None:
        self.certificate = better_proof(self.certificate, proof)  # first: the offer may end the solve
        self.context.offer_bound(
            proof.bound, "windows" if proof.boundaries else "LP of the relaxed graph", "certificate"
        )
