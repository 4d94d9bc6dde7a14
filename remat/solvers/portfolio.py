"""The portfolio: a search for plans and a proof of a bound, until they meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from remat.bounds.lp import SMALL_COLUMNS, expected_seconds, lower_bound, model_columns
from remat.bounds.window_integers import COUNTED_NODES_PER_S, Listener, WindowIntegers
from remat.bounds.windows import TRIES, WindowBound
from remat.certificate import BoundCertificate, better_proof
from remat.context import Context, incumbent_of
from remat.incumbent import Incumbent, is_closed
from remat.plan import Plan, Scope
from remat.problem import Problem
from remat.registry import strategy
from remat.search.exhaustive import exhaustive
from remat.search.ready import begin_compiling, is_ready, ready_by
from remat.solution import Candidate, Outcome
from remat.solvers._milp_restricted import Refiner
from remat.solvers._milp_trimmed import solve_trimmed
from remat.solvers.search import (
    COLD,
    DEADLINE_MARGIN_S,
    FIRST_CYCLE_S,
    HOT,
    SMALL,
    WARM,
    evict,
    evict_greedily,
    family_plans,
    first_heat,
    fixed_moves,
    lean_plan,
    quick_plan,
    search_free,
    search_staged,
    start_plans,
)

EXHAUSTIVE_OPERATIONS = 24  # on larger graphs A* rarely ends
EXHAUSTIVE_STATES, EXHAUSTIVE_SHARE = 50_000, 0.5  # most states, and share of the time
STATES_PER_S, NODES_PER_S = 1_000, 100_000  # of A*, and of a MILP with one column, in a run that repeats exactly
SMALL_SHARE = 0.8  # of the time, for a small MILP
# Shares of the time at which the steps of the search end, if one thread does search and proof. The search continues
# while each step lowers the cost by STILL_FALLING, because the proof should begin from a good plan.
SEARCH_SHARES, SEARCH_SHARES_SMALL, STILL_FALLING = (0.2, 0.3, 0.4, 0.5, 0.6), (0.02,), 0.02
# One annealing of all that time finds better plans on a large graph than several short ones. From `SMALL` operations on
# restricted MILPs find little, unless eviction finds a poor plan, and the search has more of the time.
SEARCH_SHARES_LARGE, SEARCH_SHARES_HUGE, PROOF_ENDS, PROOF_ENDS_LARGE = (0.75,), (0.88,), 0.7, 0.9
FIRST_TURN_SHARE, LAST_TURN_SHARE, SHORTEST_TURN_S = 0.35, 0.5, 0.2  # of the time that is left then, for each turn
WHOLE_COLUMNS = 40_000  # largest model that gets an LP and then its whole MILP
LP_GAP = 3e-3  # that LP leaves a larger gap on most graphs, and with a smaller one trees and restricted MILPs go on
REFINE_SHARE, REFINE_SHARE_LARGE = 0.08, 0.2  # of the time, for restricted MILPs before the LP bound
# Of the time, for the window relaxation: its first round, those before anything else, and those after the first
# restricted MILPs; rounds of it in a run that repeats exactly. With a cost cap its bound often decides, and with little
# time it tries too few boundaries.
WINDOW_SHARE_FIRST, WINDOW_SHARE, WINDOW_SHARE_LATER, WINDOW_ROUNDS = 0.5, 0.05, 0.15, 8
WINDOW_SHARE_CAP = 0.3
WINDOW_INTEGER_SHARE, WINDOW_INTEGER_SHARE_SMALL = 0.5, 0.15  # of the time that is left then
TURN_SHARE, LEAST_TURN_S = 0.5, 1.0  # of the time that is left, for each turn at the end; the shortest turn
IDLE_S = 0.01  # a shorter turn had nothing to do
# With one thread: most seconds and share of the time for a first plan, so that a good one is there in a second; then
# share of the time for a bound before the rest of the search.
FIRST_PLAN_S, FIRST_PLAN_SHARE, FIRST_BOUND_SHARE = 0.8, 0.2, 0.3
STARTS_S, STARTS_SHARE = 5.0, 0.4  # most time, and share of what is left, for plans of other strategies
# In scope free: of the time, for plans of scope staged, where there is a plan to begin with and where there is none;
# the share of the cost that more time for them is to save.
STAGED_SHARE, STAGED_SHARE_LEAN, STAGED_GAIN = 0.5, 0.2, 5e-4
FREE_SHARE = 0.3  # of the time that is left, in scope free, for the window relaxation and then for its integers
FREE_SEARCH_SHARE = 0.6  # of the time that is left then, for a search
SEED_STEP = 7919  # between the seeds of searches in the prover's thread
IN_VAIN = 2  # restricted MILPs without a better plan before the LP bound begins
PROVER_GRACE_S = 0.3  # to wait for a prover that cannot be interrupted: a presolve ends by itself soon after
MILP_GAP = 9e-5  # below OPTIMAL's tolerance
FAMILY_SHARE = 0.2  # of the time, for the baselines if the search is not compiled


@strategy(
    "portfolio",
    proves=True,
    implementations="search",
    members=("search", "checkmate_milp"),
    begins_greedily=True,
    copies="annealed",
    version=6,
)
def portfolio(problem: Problem, context: Context) -> Outcome:
    """Best plan and best bound in the time given: search, LP bounds with a certificate, MILPs.

    A plan by eviction comes first. Then one thread proves and the others search, from plans of other strategies too on
    graphs of a few hundred operations (`Strategy.gives_starts`). The proof begins with the window relaxation
    (`remat.bounds.windows`), refines the best plans by restricted MILPs, goes on with more windows, with the window
    relaxation in integers, the staged LP and the trimmed MILP of the whole problem from the best plan. Ends at
    `target_gap` or at the time limit; Ctrl-C returns the best plan. Very small graphs are solved by A*, in every scope.
    Scope free begins with what scope staged finds, then searches on several topological orders, and its proof has
    windows only. With one thread the proof follows the search; on a graph of `SMALL` operations and more it has turns
    in the last eighth of the time (`_Run._last_turns`), unless eviction finds a poor plan. It follows too with
    ``deterministic=True`` (or a work limit): the time limit then gives the number of moves, and the plan is the
    search's unless the proof ends with an optimum. The proof's work is counted as well (states, columns, nodes); a MILP
    that the time limit ends counts for nothing.
    """
    run = _Run(context)
    graph = context.problem.graph
    context.offer(Plan.from_order(graph, range(len(graph)), context.problem.budget_bytes), "run once")
    if context.options.warm_start is not None:
        context.offer(context.options.warm_start, "warm start")
    if not context.repeats and not context.is_solved():
        evict(context)
    if context.is_solved():
        return run.outcome()
    run.hot = first_heat(graph, context.incumbent.cost)
    if len(graph) <= EXHAUSTIVE_OPERATIONS and run.exhaust():
        return run.outcome()
    if not (ready_by(context.deadline) if context.repeats else is_ready()):
        run.without_search()
        if run.is_decided() or not is_ready():
            return run.outcome()
    run.staged_first()
    if context.is_solved() or context.is_over():
        return run.outcome()
    if context.repeats or context.options.threads == 1:
        run.one_after_the_other()
    else:
        run.side_by_side()
    return run.outcome()


class _Run:
    """One call; `context.incumbent` keeps its plans and bounds."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.columns = model_columns(context.problem.graph)
        self.certificate: BoundCertificate | None = None
        self.infeasible = False
        self.is_settled = False  # HiGHS alone has proven the plan optimal, and nothing is left that could certify it
        self.cut = False  # in a run that repeats exactly: the clock ended some step
        self.notes: list[str] = []
        self.stats: dict[str, Any] = {}
        self.members_memory_bytes = 0
        self.stopped = threading.Event()
        self.is_compiled: Callable[[], bool] = lambda: False  # the search became ready, so that proofs without it end
        self.refiner = Refiner(context)
        self.hot: float | None = None  # with which temperature the search begins, see `search_staged`
        self.is_beside = False  # a search runs in other threads
        self.windows = WindowBound(context.problem, tries=1 if context.repeats else TRIES)
        self.integers = WindowIntegers(self.windows, context.incumbent)

    def outcome(self) -> Outcome:
        """The result, with the plan and the bound of `context.incumbent`."""
        context, best = self.context, self.context.incumbent
        candidates = () if best.plan is None else (Candidate(best.plan, {"from": best.who}),)
        notes = [] if context.is_solved() else self.notes
        cut = self.cut or (not self._done() and context.is_cut()) if context.repeats else None
        timed_out = context.is_late() if cut is None else cut
        return Outcome(
            candidates, bound=best.bound, infeasible=self.infeasible and not candidates,
            timed_out=timed_out and not candidates, message="; ".join(notes), stats=self.stats,
            certificate=self.certificate, cut_by_clock=cut, members_memory_bytes=self.members_memory_bytes,
        )  # fmt: skip

    def exhaust(self) -> bool:
        """A* on a very small graph; whether it decided the problem."""
        context = self.context
        states = context.steps_in(STATES_PER_S, EXHAUSTIVE_STATES) if context.repeats else EXHAUSTIVE_STATES
        result = exhaustive(
            context.problem.graph, context.problem.budget_bytes, str(context.problem.scope), max_states=states,
            deadline=context.share_ends(EXHAUSTIVE_SHARE),
        )  # fmt: skip
        if context.repeats and not result.is_decided and context.is_cut():
            self.cut = True  # its progress depends on the clock
            return False
        if result.plan is not None:
            context.offer(result.plan, "exhaustive")
        if result.bound is not None:
            context.offer_bound(result.bound, "exhaustive", "exhaustive")
        self.infeasible = result.infeasible
        return result.is_decided

    def staged_first(self) -> None:
        """In scope free, offer what the portfolio finds in scope staged, unless the best plan has another order.

        The search over orders improves a good plan. Alone, it takes long to find one among a thousand operations.
        """
        context, best = self.context, self.context.incumbent
        if context.problem.scope is not Scope.FREE or context.repeats:
            return
        if best.plan is not None and best.plan.scope is Scope.FREE:
            return

        staged = replace(context.problem, scope=Scope.STAGED)
        own = incumbent_of(staged, record=context.take_plan)
        share = STAGED_SHARE_LEAN if best.plan is None else STAGED_SHARE
        aside = context.about(staged, own).with_options(warm_start=best.plan, least_gain=STAGED_GAIN)
        context.run_strategy(aside.until(context.share_ends(share)), "portfolio", {}, isolate=False)

    def search(self, context: Context, threads: int, *, hot: float | None = None) -> None:
        """Search in the problem's scope until the limits of `context`, an optimum, or `stopped`, if it is ready.

        `hot`: see `search_staged`; by default as the plan by eviction tells.
        """
        if not is_ready():
            time.sleep(IDLE_S)  # a proof that asks for a search has little else to do
            return
        if context.problem.scope is Scope.FREE:
            if context.repeats:
                start = quick_plan(context)  # on the graph's own order, because other orders take time
                if start is not None:
                    context.offer(start, "search")
            search_free(context, threads, should_stop=lambda: self._done(context))
        else:
            best = search_staged(
                context, threads, should_stop=self.stopped.is_set, on_round=self.refiner.add,
                hot=self.hot if hot is None else hot,
            )  # fmt: skip
            self.stats["moves"] = self.stats.get("moves", 0) + best.moves

    def _prove_free(self, context: Context) -> None:
        """Windows, then windows in integers beside a plan, with a search in between: plans are far from optimal there.

        Without a plan, all threads are to search.
        """
        done, best = partial(self._done, context), context.incumbent
        self._window_bound(context.until(context.share_ends(WINDOW_SHARE_FIRST)), rounds=1)
        self._window_bound(context.until(context.share_ends(FREE_SHARE)))
        if best.plan is None or done():
            return
        self._window_integers(context.until(context.share_ends(FREE_SHARE)))
        if not done() and not is_closed(best.gap):
            other = context.with_options(seed=context.options.seed + SEED_STEP, warm_start=best.plan)
            self.search(other.until(context.share_ends(FREE_SEARCH_SHARE)), 1)
        if not done():
            self._window_integers(context)

    def prove(self, context: Context) -> None:
        """Windows, restricted MILPs for a better plan, windows in integers, the LP bound, the MILP from the best plan.

        A small problem has no restricted MILPs: its whole MILP comes in their place. A large one has neither the LP nor
        the whole MILP: the windows prove more. The LP begins only if it is expected to end in time, and if the windows
        leave a larger gap than it does. In scope free, windows are all there is.
        """
        if context.problem.scope is Scope.FREE:
            return self._prove_free(context)
        done = partial(self._done, context)
        if context.incumbent.plan is None and not context.repeats and not done():
            # Minimise memory alone: find a plan to start from, or prove that none fits.
            self.infeasible = lean_plan(context).lower_bound_bytes > context.problem.budget_bytes
        refiner = self.refiner
        if not done():  # on a large graph one round takes more than the share of the others
            self._window_bound(context.until(context.share_ends(WINDOW_SHARE_FIRST)), rounds=1)
            is_capped = context.problem.cost_cap is not None
            self._window_bound(context.until(context.share_ends(WINDOW_SHARE_CAP if is_capped else WINDOW_SHARE)))
        if self.is_small():
            if not done():
                self._window_integers(context.until(context.share_ends(WINDOW_INTEGER_SHARE_SMALL)))
            if not done() and not is_closed(context.incumbent.gap):
                self._small_milp(context)
        elif not done():
            share = REFINE_SHARE if self.columns <= WHOLE_COLUMNS else REFINE_SHARE_LARGE
            until = time.monotonic() + share * context.remaining_s()
            refiner.run(until, context.options.threads, done, in_vain=IN_VAIN, is_beside=self.is_beside)
        if done():
            return
        self._window_bound(context.until(context.share_ends(WINDOW_SHARE_LATER)))
        if not done():
            self._window_integers(context.until(context.share_ends(WINDOW_INTEGER_SHARE)))
        gap = context.incumbent.gap
        is_open = gap is None or gap > LP_GAP
        if not done() and is_open and self.columns <= WHOLE_COLUMNS and self._has_time_for_lp(context):
            self._lp_bound(context)
            if not done() and not is_closed(context.incumbent.gap):
                self._whole_milp(context)
        self._in_turn(context)
        self.stats["restricted_milps"] = refiner.solves

    def _in_turn(self, context: Context) -> None:
        """Restricted MILPs and the window relaxation in integers; a search in between when neither helps.

        Once HiGHS has proven the plan optimal, trees alone are left, to certify it.
        """
        done, best, turns = partial(self._done, context), context.incumbent, 0
        while not done() and context.remaining_s() > LEAST_TURN_S:
            turns += 1
            known = best.cost, best.bound
            if is_closed(best.gap):
                began = time.monotonic()
                self._window_integers(context)
                self.is_settled = self.integers.ended or time.monotonic() - began < IDLE_S
                continue
            ends, threads = _turn_ends(context), context.options.threads
            self.refiner.run(ends, threads, done, in_vain=IN_VAIN, is_beside=self.is_beside)
            if not done():
                self._window_integers(context.until(_turn_ends(context)))
            if not done() and known == (best.cost, best.bound):
                other = context.with_options(seed=context.options.seed + SEED_STEP * turns, warm_start=best.plan)
                ends = _turn_ends(context)
                self.search(other.until(ends), 1, hot=WARM if ends - time.monotonic() < FIRST_CYCLE_S else None)

    def _starts(self, context: Context) -> None:
        """Plans of other strategies, of a kind that annealing misses on graphs of a few hundred operations.

        On larger graphs the search is ahead of them, and on smaller ones the MILP ends.
        """
        if self._done() or self.is_small() or len(context.problem.graph) >= SMALL:
            return
        until = min(context.share_ends(STARTS_SHARE), time.monotonic() + STARTS_S)
        for name, plan in start_plans(context.until(until)):
            context.offer(plan, name)

    def is_small(self) -> bool:
        """Whether the MILP of the whole problem comes before the LP bound, because it is likely to end soon."""
        return self.context.problem.scope is Scope.STAGED and self.columns <= SMALL_COLUMNS

    def _window_bound(self, context: Context, rounds: int | None = None) -> None:
        """The bound of the window relaxation, for as long as it rises."""
        rounds = WINDOW_ROUNDS if context.repeats else rounds
        self.windows.run(
            context.deadline, on_bound=partial(self._bound, context, "windows"),
            should_stop=partial(self._done, context), rounds=rounds,
        )  # fmt: skip
        self.stats |= {"window_rounds": self.windows.rounds, "window_columns": self.windows.columns}

    def _window_integers(self, context: Context) -> None:
        """The window relaxation in integers."""
        listener = Listener(
            on_proof=partial(self._bound, context, "window tree"),
            on_bound=lambda bound: context.offer_bound(bound, "window MILP", "highs"),
            on_plan=lambda plan: context.offer(plan, "windows in integers"),
            should_stop=partial(self._done, context),
        )
        nodes = None
        if context.repeats:
            nodes = context.steps_in(
                COUNTED_NODES_PER_S / max(1, self.windows.columns), context.options.work_limit or 1 << 40
            )
        self.integers.known = context.incumbent
        self.integers.run(context.deadline, listener, nodes)
        self.cut = self.cut or (context.repeats and self.integers.is_cut)
        self.stats["window_programs"] = self.integers.rounds

    def _has_time_for_lp(self, context: Context) -> bool:
        """Whether the LP of the whole problem is expected to end in time; if not, a note says so."""
        seconds = expected_seconds(self.columns)
        if seconds > context.seconds_for_a_proof():
            self.notes.append(f"no LP bound: with {self.columns:,} columns it takes about {seconds:.0f} s")
            return False
        return True

    def _lp_bound(self, context: Context) -> None:
        found = lower_bound(
            context, on_bound=partial(self._bound, context, "LP"), should_stop=partial(self._done, context)
        )
        self.stats |= found.stats

    def _whole_milp(self, context: Context) -> None:
        """The MILP of the whole problem, in a process of its own, from the best plan.

        It is not for large problems, nor for small ones, because their MILP came before the LP bound.
        """
        if context.problem.scope is not Scope.STAGED or self.is_small() or self.columns > WHOLE_COLUMNS:
            return
        if context.remaining_s() < 0.5:
            return
        known = context.with_options(warm_start=context.incumbent.plan)
        solution = context.run_strategy(
            known, "checkmate_milp", {}, should_stop=lambda: self.stopped.is_set() or self.is_compiled()
        )
        self.stats["checkmate_milp_status"] = str(solution.status)
        self.members_memory_bytes = solution.solver_memory_bytes
        if solution.status == "INFEASIBLE":
            self.infeasible = True
        if solution.status == "FAILED" and not self.stopped.is_set():
            self.notes.append(f"checkmate_milp failed: {solution.message}")

    def _small_milp(self, context: Context) -> None:
        """The MILP of a small problem, in this process, which saves the start of another one."""
        share = context.with_options(warm_start=context.incumbent.plan).until(context.share_ends(SMALL_SHARE))
        outcome = solve_trimmed(share, MILP_GAP, self._done)
        for candidate in outcome.candidates:
            context.offer(candidate.plan, "checkmate_milp")
        if outcome.bound is not None:
            context.offer_bound(outcome.bound, "checkmate_milp", "highs")
        self.infeasible = self.infeasible or outcome.infeasible
        self.stats |= {f"milp_{key}": value for key, value in outcome.stats.items() if key in ("rounds", "nodes")}

    def _bound(self, context: Context, who: str, proof: BoundCertificate) -> None:
        self.certificate = better_proof(self.certificate, proof)  # first: the offer may end the solve
        context.offer_bound(proof.bound, who, "certificate")

    def one_after_the_other(self) -> None:
        """Search, then proof: for one thread, and for runs that repeat exactly."""
        context = self.context
        if context.repeats:
            # No early end, because the arrival of a bound depends on the clock.
            counted = context.asking(cost_cap=None).with_options(work_limit=fixed_moves(context), target_gap=-1.0)
            self.search(counted, context.options.threads)
            self.cut = self.cut or context.is_cut()
            if not self._done():
                self._at_most_until_the_deadline(self._prove_aside)
            return
        began, seconds = time.monotonic(), context.remaining_s()
        start = context.with_options(warm_start=context.incumbent.plan)
        self.search(start.until(began + min(FIRST_PLAN_S, FIRST_PLAN_SHARE * seconds)), 1)
        if self._done():
            return
        self._window_bound(context.until(context.share_ends(FIRST_BOUND_SHARE)), rounds=1)
        self._starts(context)
        is_large = self.columns > WHOLE_COLUMNS
        is_huge = is_large and len(context.problem.graph) >= SMALL and self.hot != HOT
        shares = SEARCH_SHARES_SMALL if self.is_small() else SEARCH_SHARES_LARGE if is_large else SEARCH_SHARES
        for step, share in enumerate(SEARCH_SHARES_HUGE if is_huge else shares):
            before = context.incumbent.cost
            self.search(context.with_options(warm_start=context.incumbent.plan).until(began + share * seconds), 1)
            after = context.incumbent.cost or 0
            has_settled = step > 0 and before is not None and after > (1 - STILL_FALLING) * before
            if self._done() or has_settled or context.remaining_s() <= 0:
                break
        if is_huge:
            self._last_turns()
        elif not self._done() and context.remaining_s() > 0:
            until = began + (PROOF_ENDS_LARGE if is_large else PROOF_ENDS) * seconds
            self._at_most_until_the_deadline(lambda: self.prove(context.until(until)))
        if is_closed(context.incumbent.gap):
            self._in_turn(context)
        elif not is_huge and not self._done():
            more = context.with_options(seed=context.options.seed + 1, warm_start=context.incumbent.plan)
            self.search(more, 1, hot=WARM)

    def _last_turns(self) -> None:
        """Proof and search in turns: each has one, then the one that closed more of the gap per second in its last."""
        context, gains, n = self.context, dict[bool, float](), 0  # [whether it is the proof]
        while not self._done() and not is_closed(context.incumbent.gap) and context.remaining_s() > DEADLINE_MARGIN_S:
            is_proof = not gains or (len(gains) == 2 and gains[True] > gains[False])
            share = LAST_TURN_SHARE if gains else FIRST_TURN_SHARE
            began, before, n = time.monotonic(), context.incumbent.gap, n + 1
            ends = min(context.deadline, max(context.share_ends(share), began + SHORTEST_TURN_S))
            if is_proof:
                self._at_most_until_the_deadline(partial(self.prove, context.until(ends)))
            else:
                more = context.with_options(seed=context.options.seed + n, warm_start=context.incumbent.plan)
                self.search(more.until(ends), 1, hot=WARM)
            gained = (1.0 if before is None else before) - (context.incumbent.gap or 0.0)
            seconds = time.monotonic() - began
            gains[is_proof] = gained / seconds if seconds > IDLE_S else -1.0  # a turn with nothing to do

    def _prove_aside(self) -> None:
        """Prove step by step, by counted work; change the plan only if a step solves the problem.

        Other plans of a proof, and the bound of a MILP that the time limit ends, depend on the clock.
        """
        context = self.context
        nodes = context.options.work_limit or context.steps_in(NODES_PER_S / max(1, self.columns))
        has_time = context.problem.scope is not Scope.FREE and self._has_time_for_lp(context)
        windows = [self._window_bound, self._window_integers]
        bounds = [*windows, self._lp_bound] if has_time else windows
        milp = [self._small_milp] if self.is_small() else [self._whole_milp] if has_time else []
        for step in [*milp, *bounds] if self.is_small() else [*bounds, *milp]:
            aside = self._aside(nodes)
            step(aside)
            if step in milp and aside.is_cut():
                self.cut = True
            else:  # each round of an LP is complete in itself
                self._adopt(aside)
            if self._done():
                return

    def _aside(self, nodes: int) -> Context:
        """The same problem with a copy of the incumbent, and `nodes` as its work limit."""
        known = self.context.incumbent
        aside = self.context.about(self.context.problem).with_options(work_limit=nodes)
        if known.plan is not None:
            aside.offer(known.plan, known.who)
        _offer_bounds(known, aside)
        return aside

    def _adopt(self, aside: Context) -> None:
        """Take the bound, and the plan if it is the first or solves the problem."""
        context, found = self.context, aside.incumbent
        _offer_bounds(found, context)
        if found.plan is not None and (context.incumbent.plan is None or is_closed(found.gap)):
            context.offer(found.plan, found.who)

    def side_by_side(self) -> None:
        """One thread proves and the others search; after the proof all search."""
        context = self.context

        def prove() -> None:
            own = context.with_options(threads=1)
            self._starts(own)
            self.prove(own)
            if not self._done():
                seed = context.options.seed + SEED_STEP
                self.search(own.with_options(seed=seed, warm_start=context.incumbent.plan), 1)

        # Not a daemon: a process that ends inside the prover's solver would crash.
        prover = _Thread(prove, daemon=False)
        threads = context.options.threads - 1
        searcher = _Thread(lambda: self.search(context.with_options(warm_start=context.incumbent.plan), threads))
        self.is_beside = True
        try:
            searcher.start()
            prover.start()
            # Not join(): after Ctrl-C it takes a running thread for an ended one (Python 3.11).
            while not (prover.ended.is_set() and searcher.ended.is_set()) and not self._done():
                failed = prover.error or searcher.error
                if failed is not None or context.remaining_s() <= 0:
                    break
                (searcher if prover.ended.is_set() else prover).ended.wait(0.02)
        finally:
            self.stopped.set()
            if searcher.ident is not None:  # Ctrl-C may come before it starts
                searcher.ended.wait()
                prover.ended.wait(PROVER_GRACE_S)
        for thread in (searcher, prover):
            if thread.error is not None:
                raise thread.error

    def _at_most_until_the_deadline(self, prove: Callable[[], None]) -> None:
        """Prove in another thread: a step of HiGHS that nothing interrupts is left at the deadline, and ends later."""
        prover = _Thread(prove, daemon=False)
        prover.start()
        try:
            while not prover.ended.wait(0.02) and self.context.remaining_s() > 0:
                pass
        finally:
            if not prover.ended.is_set():
                self.stopped.set()
                self.cut = self.context.repeats
                prover.ended.wait(PROVER_GRACE_S)
        if prover.error is not None:
            raise prover.error

    def without_search(self) -> None:
        """Greedy eviction, baselines and the proof, until a child has compiled the search."""
        context = self.context
        self.is_compiled = begin_compiling(context.remaining_s())
        if context.repeats:
            self.cut = True  # a run with the search finds other plans
            evict_greedily(context)
        until = time.monotonic() + FAMILY_SHARE * context.remaining_s()
        for name, plan in family_plans(context, until):
            context.offer(plan, name)
        if not self._done():
            self._at_most_until_the_deadline(lambda: self.prove(context))
        self.is_compiled = lambda: False
        if not self.is_decided() and not ready_by(context.deadline):
            self.notes.append(COLD)

    def is_decided(self, context: Context | None = None) -> bool:
        """Whether nothing is left to do: an optimum is proven, or that no plan fits."""
        return self.infeasible or self.is_settled or (context or self.context).is_solved()

    def _done(self, context: Context | None = None) -> bool:
        return self.stopped.is_set() or self.is_compiled() or self.is_decided(context)


def _offer_bounds(known: Incumbent, context: Context) -> None:
    """Offer the bounds of an incumbent: the best one, and the best one that is proven exactly."""
    context.offer_bound(known.bound, known.bound_who, known.proven_by)
    context.offer_bound(known.exact_bound, known.exact_who, known.exact_by)


def _turn_ends(context: Context) -> float:
    """The monotonic time at which a turn that begins now is over."""
    return min(context.deadline, max(context.share_ends(TURN_SHARE), time.monotonic() + LEAST_TURN_S))


class _Thread(threading.Thread):
    """A thread that keeps its error, with an event that is set at its end."""

    def __init__(self, work: Callable[[], None], *, daemon: bool = True) -> None:
        super().__init__(daemon=daemon)
        self.work = work
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # the waiting thread raises it again
            self.error = error
        finally:
            self.ended.set()
