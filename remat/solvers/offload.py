"""Plans that recompute and copy values to the host: annealing from many starts.

The starts are plans without copies, for the budget and for larger ones. What is above the budget is sent away greedily;
then `remat.search.offload` anneals repeats and copies together. The best starts go on, at lower temperatures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from remat.bounds.window_integers import Listener, WindowIntegers
from remat.bounds.windows import TRIES, WindowBound
from remat.certificate import BoundCertificate
from remat.context import Context
from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.problem import Problem
from remat.registry import Strategy
from remat.search.anneal import on_threads
from remat.search.offload import COLD, HOT, WARM, OffloadSearch
from remat.search.ready import is_offload_ready, ready_by
from remat.simulator import plain_peak
from remat.solution import Candidate, Outcome

# Shares of the time: for a plan without copies, for one in each larger budget, then for each round of annealing.
PLAIN_SHARE, LARGER_SHARE, ROUND_SHARES = 0.15, 0.05, (0.4, 0.5, 1.0)
LARGER = (0.15, 0.4, 0.7)  # budgets, as shares of the way from the budget to the plain peak
GO_ON = (0, 3, 1)  # starts that go on in each round, in order of their cost; 0 for all
FIRST_CHUNK, LEAST_CHUNK, CHUNK_S = 200, 20, 0.1  # moves between two looks at the clock, and their time
OFFER_S = 0.5  # between two offers
MOVES_PER_S = 5_000  # of a run that repeats exactly
SEED_STEP = 7919
LP_SHARE = 0.5  # of the proof's time, for the LP
SEARCH_SHARE, ROUNDS = 0.7, 8  # of the time, with one thread; rounds of the proof in a run that repeats exactly


def solve_with_link(context: Context, strategy: Strategy, options: Mapping[str, Any]) -> Outcome:
    """The best plan with repeats and copies in the time given, and a bound from the window relaxation with copies.

    On graphs with implementations, plans with copies use the default ones.
    """
    problem = context.problem
    plain = replace(problem, link=None)
    graph = problem.graph.default() if problem.graph.has_implementations else problem.graph
    run = _Run(context, graph, strategy, options)
    context.offer(Plan.from_order(problem.graph, range(len(problem.graph))), "run once")
    if context.options.warm_start is not None:
        context.offer(context.options.warm_start, "warm start")
    if not context.is_solved():
        run.solve_plain(plain, PLAIN_SHARE)
    if not context.is_solved():
        run.search_and_prove()
    best = context.incumbent
    candidates = () if best.plan is None else (Candidate(best.plan, {"from": best.who}),)
    return Outcome(
        candidates, bound=best.bound, timed_out=not candidates and context.is_late(), certificate=run.certificate,
        stats={"moves": run.moves},
    )  # fmt: skip


class _Run:
    """One call; `context.incumbent` keeps its plans."""

    def __init__(self, context: Context, graph: Graph, strategy: Strategy, options: Mapping[str, Any]):
        self.context, self.graph, self.strategy, self.options = context, graph, strategy, options
        self.peak = plain_peak(graph)
        self.moves = 0
        problem = context.problem
        can_prove = strategy.proves and problem.scope is not Scope.FREE and not problem.graph.has_implementations
        self.windows = WindowBound(problem, tries=1 if context.repeats else TRIES) if can_prove else None
        self.certificate: BoundCertificate | None = None
        self.proof: Future[None] | None = None
        self.is_interrupted = False
        self.stopped = threading.Event()

    def solve_plain(self, problem: Problem, share: float) -> Plan | None:
        """The strategy's plan without copies, offered too if it fits the budget."""
        context, limit_s = self.context, share * self.context.options.time_limit_s
        aside = context.about(problem).with_options(time_limit_s=limit_s, progress=None, warm_start=None)
        aside = aside.until(min(context.deadline, time.monotonic() + limit_s))
        solution = context.run_strategy(aside, self.strategy.name, self.options, isolate=False)
        if solution.plan is not None:
            self._offer(solution.plan)
        return solution.plan

    def search_and_prove(self) -> None:
        """Side by side with several threads, else one after the other."""
        context = self.context
        if self.windows is None:
            self.anneal()
        elif context.repeats or context.options.threads == 1:
            self.context = context.until(context.share_ends(SEARCH_SHARE))
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

        def offer(proof: BoundCertificate) -> None:
            if self.certificate is None or proof.bound > self.certificate.bound:
                self.certificate = proof  # first: the offer may end the solve
            context.offer_bound(proof.bound, "windows", "certificate")

        def should_stop() -> bool:  # an interrupted search ends the proof
            return context.is_solved() or context.is_over() or self.is_interrupted

        if context.repeats:
            windows.run(context.deadline, on_bound=offer, should_stop=should_stop, rounds=ROUNDS)
            return
        windows.run(context.share_ends(LP_SHARE), on_bound=offer, should_stop=should_stop)
        by_solver = partial(context.offer_bound, who="window MILP", by="highs")
        listener = Listener(on_proof=offer, on_bound=by_solver, on_plan=lambda _: None, should_stop=should_stop)
        WindowIntegers(windows, context.incumbent).run(context.deadline, listener)

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
        starts = list(self._starts())
        for share, most in zip(ROUND_SHARES, GO_ON, strict=True):
            starts = sorted(starts, key=lambda start: start.least)[: most or None]
            if context.is_over() or context.is_solved():
                return
            until = time.monotonic() + share * context.remaining_s()
            self._round(starts, until, share, is_first=not most)

    def _starts(self) -> Iterator[OffloadSearch]:
        budget, best = self.context.problem.budget_bytes, self.context.incumbent.plan
        plans = [best if best is not None and not best.implementations else None]
        for share in LARGER:
            wider = Problem(self.graph, budget + int(share * (self.peak - budget)), Scope.STAGED)
            plans.append(self.solve_plain(wider, LARGER_SHARE))
        plans.append(Plan.from_order(self.graph, range(len(self.graph))))
        for i, plan in enumerate(plan for plan in plans if plan is not None):
            start = self._start(self.context.options.seed + SEED_STEP * i)
            start.load(plan)
            yield start

    def _start(self, seed: int) -> OffloadSearch:
        problem = self.context.problem
        assert problem.link is not None
        return OffloadSearch(self.graph, problem.budget_bytes, problem.link, seed, self.peak)

    def _round(self, starts: Sequence[OffloadSearch], until: float, share: float, is_first: bool) -> None:
        """Anneal each start for an equal part of the time, as many beside each other as there are threads."""
        context = self.context
        threads = self.threads
        todo = [*starts]
        for i in range(1, threads - len(starts) + 1):  # several threads go on from one plan
            todo.append(self._start(starts[0].seed + SEED_STEP * 100 * i))
            todo[-1].take_best(starts[0])
        slice_s = (until - time.monotonic()) / -(-len(todo) // threads)
        moves = context.steps_in(share * MOVES_PER_S / len(todo)) if context.repeats else None

        def work(index: int) -> None:
            for start in todo[index::threads]:
                if self._is_over():
                    return
                if is_first:
                    start.offload_greedily(context.is_over)
                self._cool(start, HOT if is_first else WARM, slice_s, moves)

        self.stopped = threading.Event()  # of this round
        on_threads(work, threads, self.stopped)
        starts[0].take_best(min(todo, key=lambda search: search.least))

    def _cool(self, search: OffloadSearch, hot: float, seconds: float, moves: int | None) -> None:
        """Anneal from one temperature to `COLD`; offer what it finds."""
        began, done, n = time.monotonic(), 0, FIRST_CHUNK
        offered, offered_at = search.least, began
        search.begin_from_best()
        while not self._is_over():
            at = done / moves if moves else (time.monotonic() - began) / seconds
            if at >= 1:
                break
            n = min(n, moves - done) if moves else n
            now, ends = time.monotonic(), min(1.0, at + (n / moves if moves else CHUNK_S / seconds))
            search.run(hot * (COLD / hot) ** at, hot * (COLD / hot) ** ends, n)
            done += n
            if not moves:
                n = max(LEAST_CHUNK, min(int(n * CHUNK_S / max(1e-4, time.monotonic() - now)), 4 * n))
            if search.least < offered and time.monotonic() - offered_at > OFFER_S:
                offered, offered_at = search.least, time.monotonic()
                self._offer(search.plan())
        if search.least < offered:
            self._offer(search.plan())
        self.moves += done

    def _is_over(self) -> bool:
        return self.stopped.is_set() or self.context.is_over() or self.context.is_solved()

    def _offer(self, plan: Plan) -> None:
        """Offer a plan of the graph, or of its default implementations, whose ids are the same."""
        self.context.offer(replace(plan, graph_sha256=self.context.problem.graph.sha256()), self.strategy.name)
