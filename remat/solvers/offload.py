"""Plans that recompute and copy values to the host: annealing from many starts.

The starts are the best plan by a rule, plans without copies, for the budget and for larger ones, and rounded points of
the LP that proves the bound. What is above the budget is sent away greedily; then `remat.search.offload` anneals
repeats and copies together. The best starts go on, at lower temperatures.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from remat.bounds.window_integers import Listener, WindowIntegers
from remat.bounds.windows import TRIES, Solved, WindowBound
from remat.certificate import BoundCertificate, better_proof
from remat.context import Context
from remat.plan import Plan, Scope
from remat.problem import Problem
from remat.programs.link_windows import LinkModel
from remat.registry import Strategy, get_strategy, strategies
from remat.search.anneal import on_threads
from remat.search.chain import BlockPlans
from remat.search.choices import Choice, Choices, choice_of
from remat.search.kernel import LARGE
from remat.search.offload import COLD, HOT, WARM, OffloadSearch
from remat.search.ready import is_offload_ready, ready_by
from remat.simulator import plain_peak
from remat.solution import Candidate, Outcome
from remat.solvers.link_rounding import rounded
from remat.solvers.search import evict, in_turns

# Shares of the time: for plans by rules, for looking for starts, for each round of annealing; and, if copies do not pay
# after the starts, for a plan without them.
RULES_SHARE, MOST_RULES, EXPLORE_SHARE, ROUND_SHARES, RETURN_SHARE = 0.1, 0.4, 0.45, (0.4, 0.6, 1.0), 0.4
BLOCKS_SHARE = 0.15  # of what is left of the time, for plans of a block that repeats
BLOCKS_S_EACH = 3e-3  # seconds for each operation that must be left: the starts take half of them on an idle processor
RULES_S_EACH = 1e-3  # for each operation, that the first three plans of all rules take, up to the most
# For a plan without copies: at least a share of the time, and the seconds that a good plan needs; all if they are most.
PLAIN_SHARE, PLAIN_S, PLAIN_S_EACH, MOST_PLAIN = 0.1, 0.8, 1.2e-3, 0.75
LARGER_PART, LARGER_ROOM = 0.25, 20  # of that time, for the plan of each larger budget; and a part of the rest at most
LARGER = (0.1, 0.2, 0.3, 0.5)  # budgets at first, as shares of the way from the budget to the plain peak
LARGER_OF_BLOCKS, BLOCKS_REFINED = [0.1, 0.3, 0.5, 0.7, 0.9], 5  # the same of plans of blocks
MOST_REFINED = 3  # times that budgets next to the best one are tried
# Of the time for such a plan, for its first annealing; and of that, for copies alone: its repeats are good.
BRIEF, ALONE = 1.5, 0.7
# A point of the LP: shares from which on a value is held, or was copied out; points that are rounded by random shares.
# The time for these starts, and its part for copies alone, because the repeats of a point do not fit them.
HELD_SHARES, POINTS, LEAST_SHARE, POINT_SHARE, POINT_ALONE = (0.3, 0.5, 0.7), 6, 0.1, 0.3, 0.2
LP_FIRST = 0.3  # of the time with one thread, for the LP before the search
GO_ON = (3, 2, 1)  # starts that go on in each round, in order of their cost
FIRST_CHUNK, LEAST_CHUNK, CHUNK_S = 200, 20, 0.1  # moves between two looks at the clock, and their time
OFFER_S = 0.5  # between two offers
MOVES_PER_S = 5_000  # of a run that repeats exactly
SEED_STEP = 7919
COOLING_S_EACH = 0.012  # for each operation, of one cooling: longer ones lead away from the start, and not back
LP_SHARE = 0.5  # of the proof's time, for the LP
SEARCH_SHARE, ROUNDS = 0.7, 8  # of the time, with one thread; rounds of the proof in a run that repeats exactly
SEARCH_S_EACH = 2.4e-3  # seconds for each operation: the proof gets what the search leaves of them


def solve_with_link(context: Context, strategy: Strategy, options: Mapping[str, Any]) -> Outcome:
    """The best plan with repeats and copies in the time given, and a bound from the window relaxation with copies.

    On graphs with implementations, a plan with copies runs each operation by its default one, or by that which the best
    plan without copies has for it.
    """
    problem = context.problem
    run = _Run(context, strategy, options)
    context.offer(Plan.from_order(problem.graph, range(len(problem.graph))), "run once")
    if context.options.warm_start is not None:
        context.offer(context.options.warm_start, "warm start")
    if not context.is_solved():
        run.evict()
        run.solve_plain(problem, run.plain_share)
    if not (context.is_solved() or context.is_over()):
        run.offer_rules()
        run.search_and_prove()
    best = context.incumbent
    candidates = () if best.plan is None else (Candidate(best.plan, {"from": best.who}),)
    return Outcome(
        candidates, bound=best.bound, timed_out=not candidates and context.is_late(), certificate=run.certificate,
        stats={"moves": run.moves},
    )  # fmt: skip


class _Start(NamedTuple):
    """A search, and how it began.

    Attributes:
        choice: of the implementations whose graph it is on; None for the default ones.
        share: how far the budget of its first plan is on the way from the problem's budget to the plain peak.
    """

    search: OffloadSearch
    choice: Choice | None
    share: float


class _Run:
    """One call; `context.incumbent` keeps its plans."""

    def __init__(self, context: Context, strategy: Strategy, options: Mapping[str, Any]):
        self.context, self.strategy, self.options = context, strategy, options
        self.graph = context.problem.graph.default()
        self.moves = self.n_starts = 0
        problem = context.problem
        can_prove = strategy.proves and problem.scope is not Scope.FREE and not problem.graph.has_implementations
        self.windows = WindowBound(problem, tries=1 if context.repeats else TRIES) if can_prove else None
        self.certificate: BoundCertificate | None = None
        self.rounded: Solved | None = None  # the LP whose point gave the last starts
        self.proof: Future[None] | None = None
        self.is_interrupted = False
        self.stopped = threading.Event()

    def evict(self) -> None:
        """A plan without copies, and one that repeats nothing, at once."""
        aside = self.context.about(replace(self.context.problem, graph=self.graph, link=None))
        evict(aside)
        if aside.incumbent.plan is not None:
            self._offer(aside.incumbent.plan)
        if is_offload_ready() and not self.context.is_solved():
            search = self._start(None, self.context.options.seed).search
            search.offload_greedily(lambda: False)  # milliseconds, even if no time is left
            if not search.excess():
                self._offer(search.plan())

    def offer_rules(self) -> None:
        """Offer plans of the strategies that copy by their own rules, in turns, so that none of them is ahead."""
        if not is_offload_ready():
            return
        share = min(MOST_RULES, RULES_S_EACH * len(self.graph) / max(1e-3, self.context.remaining_s()))
        context = self.context.until(self.context.share_ends(max(RULES_SHARE, share)))
        chosen = [each for each in map(get_strategy, strategies()) if each.copies == "own"]
        chosen.sort(key=lambda each: each.takes_context)  # those that watch the clock are slow
        for who, plan in in_turns(chosen, context):
            self.context.offer(plan, who)

    @property
    def plain_share(self) -> float:
        """Of the time, for a plan without copies."""
        share = (PLAIN_S + PLAIN_S_EACH * len(self.graph)) / max(1e-3, self.context.options.time_limit_s)
        return max(PLAIN_SHARE, share) if share < MOST_PLAIN else 1.0

    def solve_plain(self, problem: Problem, share: float, warm_start: Plan | None = None) -> Plan | None:
        """A plan without copies, offered too if it fits the budget. A member is enough: a bound proves nothing here.

        Where implementations decide whether there is a plan, the whole strategy looks for it.
        """
        context, limit_s = self.context, share * self.context.options.time_limit_s
        name, *_ = self.strategy.members or (self.strategy.name,)
        options = self.options if name == self.strategy.name else {}
        aside = context.about(replace(problem, link=None))
        aside = aside.with_options(time_limit_s=limit_s, progress=None, warm_start=warm_start)
        aside = aside.until(min(context.deadline, time.monotonic() + limit_s))
        plan = context.run_strategy(aside, name, options, isolate=False).plan
        if plan is None and problem.graph.has_implementations and name != self.strategy.name:
            plan = context.run_strategy(aside, self.strategy.name, self.options, isolate=False).plan
        if plan is not None:
            self._offer(plan)
        return plan

    def search_and_prove(self) -> None:
        """Side by side with several threads, else one after the other."""
        context = self.context
        if self.windows is None:
            self.anneal()
        elif context.repeats or context.options.threads == 1:
            share = SEARCH_S_EACH * len(self.graph) / max(1e-3, context.remaining_s())
            if share < SEARCH_SHARE:
                self.raise_bound(self.windows, context, LP_FIRST)
            self.context = context.until(context.share_ends(min(1.0, max(SEARCH_SHARE, share))))
            self.anneal()
            self.prove(self.windows, context)
        else:
            with ThreadPoolExecutor(1) as pool:
                self.proof = pool.submit(self.prove, self.windows, context)
                try:
                    self.anneal()
                except BaseException:  # Ctrl-C, too
                    self.is_interrupted = True
                    raise
                self.proof.result()

    def prove(self, windows: WindowBound, context: Context) -> None:
        """Raise the bound by the LP, then in integers, until time is over; without the latter in a run that repeats."""
        self.raise_bound(windows, context, LP_SHARE)
        if not context.repeats:
            WindowIntegers(windows, context.incumbent).run(context.deadline, self._listener(context))

    def raise_bound(self, windows: WindowBound, context: Context, share: float) -> None:
        """Raise the bound by the LP for a share of the time that is left; in a run that repeats, by counted rounds."""
        listener, ends, rounds = self._listener(context), context.share_ends(share), None
        if context.repeats:
            ends, rounds = context.deadline, max(0, ROUNDS - windows.rounds)
        windows.run(ends, on_bound=listener.on_proof, should_stop=listener.should_stop, rounds=rounds)

    def _listener(self, context: Context) -> Listener:
        def offer(proof: BoundCertificate) -> None:
            self.certificate = better_proof(self.certificate, proof)  # first: the offer may end the solve
            context.offer_bound(proof.bound, "windows", "certificate")

        def should_stop() -> bool:  # an interrupted search ends the proof
            return context.is_solved() or context.is_over() or self.is_interrupted

        by_solver = partial(context.offer_bound, who="window MILP", by="highs")
        return Listener(on_proof=offer, on_bound=by_solver, on_plan=lambda _: None, should_stop=should_stop)

    @property
    def threads(self) -> int:
        """For the search; one is the proof's as long as that runs."""
        if self.context.repeats:
            return 1
        return self.context.options.threads - int(self.proof is not None and not self.proof.done())

    def anneal(self) -> None:
        """Rounds of annealing from all starts, on all threads."""
        context = self.context
        if not (is_offload_ready() or ready_by(context.deadline, too=is_offload_ready)):
            return
        starts = self._explored()
        best = context.incumbent.plan
        if best is not None and not best.has_copies and not self._is_over():
            share = RETURN_SHARE * context.remaining_s() / context.options.time_limit_s
            self.solve_plain(context.problem, self.plain_share if context.repeats else share, best)
            starts += self._begun(context.incumbent.plan)
        for share, most in zip(ROUND_SHARES, GO_ON, strict=True):
            if share < 1.0:
                starts += self._of_point()
            if self._is_over():
                return
            starts = sorted(starts, key=lambda start: start.search.least)[:most]
            self._round(starts, time.monotonic() + share * context.remaining_s(), share)

    def _explored(self) -> list[_Start]:
        """Starts from plans for larger budgets, annealed for a moment; then more next to the best one."""
        context, once = self.context, Plan.from_order(self.graph, range(len(self.graph)))
        ends = context.share_ends(EXPLORE_SHARE)
        starts = [*self._begun(context.incumbent.plan), *self._begun(once, 1.0)]
        of_blocks = self._of_blocks()
        if of_blocks:
            return starts + of_blocks
        if self._has_point():
            return starts
        starts += self._larger(LARGER)
        for _ in range(MOST_REFINED):
            if not starts or time.monotonic() >= ends or self._is_over() or self._has_point():
                break
            best = min(starts, key=lambda start: start.search.least).share
            starts += self._larger(_next_to(best, {start.share for start in starts}))
        return starts

    def _of_blocks(self) -> list[_Start]:
        """Starts from plans for larger budgets in which each block follows one of the plans of a block.

        Such a plan and its copies take a moment, so that many budgets are compared as they are. None on small graphs,
        without repeated blocks, and in a run that repeats exactly, as in the search without copies.
        """
        context, found = self.context, list[tuple[float, float, Plan]]()
        has_time = context.remaining_s() >= BLOCKS_S_EACH * len(self.graph)
        if len(self.graph) < LARGE or context.repeats or not has_time or self._is_over():
            return []
        until, seed = context.share_ends(BLOCKS_SHARE), context.options.seed
        blocks = BlockPlans.of(self.graph, seed=seed, threads=self.threads, deadline=until)
        if blocks is None:
            return []
        search, shares = self._start(None, seed).search, LARGER_OF_BLOCKS
        for _ in range(1 + BLOCKS_REFINED):
            for share in shares:
                if self._is_over():
                    break
                plan = blocks.within(self._budget(share))
                if plan is not None:
                    search.load(plan)
                    _fit(search, self._is_over)
                    if search.least < min((least for least, *_ in found), default=math.inf):
                        self._offer(search.best_plan())
                    found.append((search.least, share, plan))
            if not found:
                return []
            found.sort(key=lambda each: each[:2])
            shares = _next_to(found[0][1], {0.0, 1.0, *(share for _, share, _ in found)})
        return [start for _, share, plan in found[: GO_ON[0]] for start in self._begun(plan, share)]

    def _has_point(self) -> bool:
        """Whether the LP has a point that was not rounded yet."""
        solved = None if self.windows is None else self.windows.solved
        return solved is not None and solved is not self.rounded

    def _of_point(self) -> list[_Start]:
        """Annealed starts from the LP's last point, rounded in several ways; a point's second starts are all random."""
        context, is_new = self.context, self._has_point()
        solved = None if self.windows is None else self.windows.solved
        if solved is None or self._is_over():
            return []
        self.rounded, (model, point, _) = solved, solved
        random, size = np.random.default_rng(context.options.seed + self.n_starts), len(self.graph.values)
        shares = [(np.full(size, held), np.full(size, 0.5)) for held in HELD_SHARES if is_new]
        while len(shares) < POINTS:
            held, out = random.uniform(LEAST_SHARE, 1 - LEAST_SHARE, (2, size))
            shares.append((held, out))
        starts = list[_Start]()
        for held, out in shares:
            start = self._start(None, context.options.seed + SEED_STEP * self.n_starts)
            start.search.begin_with(*rounded(cast(LinkModel, model), point, held, out))
            _fit(start.search, self._is_over)
            starts.append(start)
        self._round(starts, context.share_ends(POINT_SHARE), POINT_SHARE, POINT_ALONE)
        return starts

    def _budget(self, share: float) -> int:
        """The budget so far on the way from the problem's to the plain peak."""
        budget = self.context.problem.budget_bytes
        return budget + int(share * (plain_peak(self.graph) - budget))

    def _larger(self, shares: Sequence[float]) -> list[_Start]:
        """Annealed starts from plans for budgets that are so far on the way from the budget to the plain peak."""
        starts = list[_Start]()
        own = min(LARGER_PART * self.plain_share, (1 - self.plain_share) / LARGER_ROOM)
        for share in shares:
            if not self._is_over():
                wider = Problem(self.graph, self._budget(share), Scope.STAGED)
                starts += self._begun(self.solve_plain(wider, own), share)
        if starts and not self._is_over():
            lasts = BRIEF * own * len(starts)
            self._round(starts, time.monotonic() + lasts * self.context.options.time_limit_s, lasts, ALONE)
        return starts

    def _begun(self, plan: Plan | None, share: float = 0.0) -> Iterator[_Start]:
        """A start from a plan, of the graph with the implementations that it has; none without one."""
        if plan is None or plan.scope is Scope.FREE:
            return
        full, choice = self.context.problem.graph, None
        if plan.implementations:
            choice = Choices(full).choose(choice_of(full, plan))
            if choice is None:
                return
            plan = Plan.from_order(choice.graph, choice.order_of(plan.order.tolist()).tolist())
        start = self._start(choice, self.context.options.seed + SEED_STEP * self.n_starts, share)
        start.search.load(plan)
        _fit(start.search, self.context.is_over)
        yield start

    def _start(self, choice: Choice | None, seed: int, share: float = 0.0) -> _Start:
        problem, graph = self.context.problem, self.graph if choice is None else choice.graph
        assert problem.link is not None
        self.n_starts += 1
        return _Start(OffloadSearch(graph, problem.budget_bytes, problem.link, seed), choice, share)

    def _round(self, starts: Sequence[_Start], until: float, share: float, alone: float = 0.0) -> None:
        """Anneal each start for an equal part of the time, as many beside each other as there are threads.

        In the first part `alone` of it the repeats stay as they are.
        """
        context = self.context
        threads = self.threads
        todo = [*starts]
        for i in range(1, threads - len(starts) + 1):  # several threads go on from one plan
            todo.append(self._start(starts[0].choice, starts[0].search.seed + SEED_STEP * 100 * i))
            todo[-1].search.take_best(starts[0].search)
        slice_s = (until - time.monotonic()) / -(-len(todo) // threads)
        moves = context.steps_in(share * MOVES_PER_S / len(todo)) if context.repeats else None

        def work(index: int) -> None:
            for start in todo[index::threads]:
                if self._is_over():
                    return
                if alone:
                    self._cool(start, alone * slice_s, moves and max(1, int(alone * moves)), repeats=False)
                    self._cool(start, (1 - alone) * slice_s, moves and max(1, int((1 - alone) * moves)))
                else:
                    self._cool(start, slice_s, moves)

        on_threads(work, threads, self.stopped)
        self.stopped = threading.Event()  # `on_threads` leaves it set, and the next round would end at once
        for start in todo[len(starts) :]:
            starts[0].search.take_best(start.search)

    def _cool(self, start: _Start, seconds: float, moves: int | None, *, repeats: bool = True) -> None:
        """Anneal to `COLD` from the best plan, once or several times; offer what it finds."""
        search, began, done, n, cooling, hot = start.search, time.monotonic(), 0, FIRST_CHUNK, -1, HOT
        offered, offered_at = search.least, began
        lasts = moves / MOVES_PER_S if moves else seconds
        coolings = max(1, round(lasts / (COOLING_S_EACH * len(search.graph))))
        while not self._is_over():
            at = coolings * (done / moves if moves else (time.monotonic() - began) / seconds)
            if at >= coolings:
                break
            if at >= cooling + 1:
                cooling = int(at)
                search.begin_from_best()
                hot = WARM if cooling % 2 else HOT
            n = min(n, moves - done) if moves else n
            now, share = time.monotonic(), n / moves if moves else CHUNK_S / seconds
            at, ends = at - cooling, min(1.0, at - cooling + coolings * share)
            search.run(hot * (COLD / hot) ** at, hot * (COLD / hot) ** ends, n, repeats)
            done += n
            if not moves:
                n = max(LEAST_CHUNK, min(int(n * CHUNK_S / max(1e-4, time.monotonic() - now)), 4 * n))
            if search.least < offered and time.monotonic() - offered_at > OFFER_S:
                offered, offered_at = search.least, time.monotonic()
                self._offer(search.best_plan(), start.choice)
        if search.least < offered:
            self._offer(search.best_plan(), start.choice)
        self.moves += done

    def _is_over(self) -> bool:
        return self.stopped.is_set() or self.context.is_over() or self.context.is_solved()

    def _offer(self, plan: Plan, choice: Choice | None = None) -> None:
        """Offer a plan of the graph, of that of a choice, or of default implementations, whose ids are the same."""
        full = self.context.problem.graph
        plan = choice.lift(plan) if choice is not None else replace(plan, graph_sha256=full.sha256())
        self.context.offer(plan, self.strategy.name)


def _fit(search: OffloadSearch, done: Callable[[], bool]) -> None:
    """Copy until the loaded plan fits, and find its makespan."""
    search.offload_greedily(done)
    search.run(HOT, COLD, 0)


def _next_to(best: float, shares: Collection[float]) -> list[float]:
    """Halfway from the best of the shares to those next to it."""
    others = max((s for s in shares if s < best), default=None), min((s for s in shares if s > best), default=None)
    return [(best + other) / 2 for other in others if other is not None]
