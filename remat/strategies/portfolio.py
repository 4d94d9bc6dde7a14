"""The portfolio: search on one side, proof on the other, until they meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from remat.bounds.certificate import BoundCertificate
from remat.bounds.lp import SMALL_COLUMNS, expected_seconds, lower_bound, model_columns
from remat.eviction import greedy_eviction
from remat.exhaustive import exhaustive
from remat.incumbent import GAP_TOLERANCE
from remat.ordering.joint import free_plan
from remat.plan import Plan, Scope
from remat.registry import strategy
from remat.search import is_warm
from remat.solve import Candidate, Outcome, Problem
from remat.strategies._families import family_plans
from remat.strategies._milp_restricted import Refiner
from remat.strategies._milp_trimmed import solve_trimmed
from remat.strategies.search import COLD_START_S, DEADLINE_MARGIN_S, fixed_moves, quick_plan, search_staged

EXHAUSTIVE_OPERATIONS = 24  # beyond it A* rarely ends
EXHAUSTIVE_STATES, EXHAUSTIVE_SHARE = 50_000, 0.5  # and share of the time
STATES_PER_S, NODES_PER_S = 1_000, 100_000  # of A*, and of a MILP with one column, in a run that repeats exactly
SMALL_SHARE = 0.8  # of the time
# Of the time, for the search before the proof where one thread does both: it goes on from step to step while each
# takes so much off the cost, since what comes next should begin from a plan that is worth it.
SEARCH_SHARES, SEARCH_SHARES_SMALL, STILL_FALLING = (0.2, 0.3, 0.4, 0.5, 0.6), (0.02,), 0.02
WHOLE_COLUMNS = 40_000  # up to which the MILP of the whole problem gets the time that remains
REFINE_SHARE, REFINE_SHARE_LARGE = 0.08, 0.2  # of the time, for restricted MILPs before the LP bound
IN_VAIN = 2  # restricted MILPs without a better plan, then comes the LP bound
PROVER_GRACE_S = 0.3  # for the end of what does not listen: a presolve ends by itself a moment later
GREEDY_S = 0.1  # at most, for a first plan
MILP_GAP = 9e-5  # lands below OPTIMAL's tolerance
FAMILY_SHARE = 0.2  # of the time, for the baselines where the search is not compiled


@strategy("portfolio", implementations="search", members=("search", "checkmate_milp"))
def portfolio(problem: Problem) -> Outcome:
    """Best plan and best bound in the time given: search, LP bound with a certificate, MILP.

    A greedy plan comes in milliseconds; then one thread refines the best plans by restricted MILPs and
    proves (the LP bound, then the trimmed MILP of the whole from the best plan), while the others search.
    Ends at `target_gap` or at the time limit; Ctrl-C returns the best plan. Very small graphs are solved by
    A*, in every scope. Scope free searches on several topological orders. With ``deterministic=True`` (or a
    work limit) search and proof run one after the other, the search for a number of moves that follows
    from the time limit, and the plan is the search's unless the proof ends with an optimum. The proof's work is counted
    as well (states, columns, nodes); a MILP that the time limit ends counts for nothing.
    """
    if problem.best is None:
        problem = problem.collecting()
    best = problem.best
    assert best is not None
    run = _Run(problem)
    graph = problem.graph
    problem.offer(Plan.from_order(graph, range(len(graph)), problem.budget_bytes), "run once")
    if problem.warm_start is not None:
        problem.offer(problem.warm_start, "warm start")
    if not problem.repeats and not problem.is_solved():
        # In milliseconds, where a process's first solve needs a second to load the compiled search; a plan to start
        # from that was made for a smaller budget may be far worse.
        plan = greedy_eviction(graph, problem.budget_bytes, deadline=time.monotonic() + GREEDY_S)
        if plan is not None:
            problem.offer(plan, "greedy eviction")
    if problem.is_solved():
        return run.outcome()
    if len(graph) <= EXHAUSTIVE_OPERATIONS and run.exhaust():
        return run.outcome()
    if not is_warm() and problem.remaining_s() < COLD_START_S:
        run.without_search()
    elif problem.repeats or problem.threads == 1:
        run.one_after_the_other()
    else:
        run.side_by_side()
    return run.outcome()


class _Run:
    """One call: what it has learnt besides the plans and bounds that `problem.best` keeps."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.columns = model_columns(problem.graph)
        self.certificate: BoundCertificate | None = None
        self.infeasible = False
        self.cut = False  # a run that repeats exactly: the clock ended a step, whatever the next ones found
        self.notes: list[str] = []
        self.stats: dict[str, Any] = {}
        self.stopped = threading.Event()
        self.refiner = Refiner(problem)

    def outcome(self) -> Outcome:
        """The result; the plan and the bound are with `problem.best` already."""
        best = self.problem.best
        assert best is not None
        candidates = () if best.plan is None else (Candidate(best.plan, {"from": best.who}),)
        notes = [] if self.problem.is_solved() else self.notes
        timed_out = not candidates and bool(self.stats.get("cut_by_clock", self.problem.is_late()))
        return Outcome(
            candidates, bound=best.bound, infeasible=self.infeasible and not candidates, timed_out=timed_out,
            message="; ".join(notes), stats=self.stats, certificate=self.certificate,
        )  # fmt: skip

    def exhaust(self) -> bool:
        """A* on a very small graph; whether it decided."""
        problem = self.problem
        states = problem.steps_in(STATES_PER_S, EXHAUSTIVE_STATES) if problem.repeats else EXHAUSTIVE_STATES
        result = exhaustive(
            problem.graph, problem.budget_bytes, str(problem.scope), max_states=states,
            deadline=problem.until(EXHAUSTIVE_SHARE),
        )  # fmt: skip
        if problem.repeats and not result.is_decided and problem.is_cut():
            self.cut = True  # how far it came depends on the clock
            return False
        if result.plan is not None:
            problem.offer(result.plan, "exhaustive")
        if result.bound is not None:
            problem.offer_bound(result.bound, "exhaustive")
        self.infeasible = result.infeasible
        return result.is_decided

    def search(self, problem: Problem, threads: int) -> None:
        """Search in the scope asked for, until the limits of `problem`, an optimum, or `stopped`."""
        if problem.scope is Scope.FREE:
            start = quick_plan(problem)  # on the graph's own order, for the orders take their time
            if start is not None:
                problem.offer(start, "search")

            def offer(plan: Plan, _cost: int) -> None:
                problem.offer(plan, "search over orders")

            free_plan(
                problem.graph, problem.budget_bytes, seed=problem.seed, threads=threads,
                deadline=problem.deadline - DEADLINE_MARGIN_S, work_limit=problem.work_limit, on_plan=offer,
                should_stop=lambda: self._done(problem),
            )  # fmt: skip
        else:
            best = search_staged(problem, threads, should_stop=self.stopped.is_set, on_round=self.refiner.add)
            self.stats["moves"] = self.stats.get("moves", 0) + best.moves

    def prove(self, problem: Problem) -> None:
        """Restricted MILPs for a better plan, the LP bound, the MILP from the best plan; a small MILP at once.

        The proofs are begun only where they can end in time.
        """
        if problem.scope is Scope.FREE:
            return
        small = self.is_small()

        def done() -> bool:
            return self._done(problem)

        if small:
            self._small_milp(problem)
        refiner = self.refiner
        if not small and not done():
            share = REFINE_SHARE if self.columns <= WHOLE_COLUMNS else REFINE_SHARE_LARGE
            until = time.monotonic() + share * problem.remaining_s()
            refiner.run(until, problem.threads, done, in_vain=IN_VAIN)
        if done():
            return
        if self._lp_bound(problem) and not done():
            self._whole_milp(problem)
        if not done():
            refiner.run(problem.deadline, problem.threads, done)
        self.stats["restricted_milps"] = refiner.solves

    def is_small(self) -> bool:
        """Whether the MILP of the whole is tried before the LP bound: it is likely to end soon."""
        return self.problem.scope is Scope.STAGED and self.columns <= SMALL_COLUMNS

    def _expected_s(self) -> float:
        """Seconds of the LP bound, roughly."""
        return expected_seconds(self.columns)

    def _lp_bound(self, problem: Problem) -> bool:
        """The LP bound, where it can be expected in time; whether it was."""
        if self._expected_s() > problem.seconds_for_a_proof():
            self.notes.append(f"no LP bound: with {self.columns:,} columns it takes about {self._expected_s():.0f} s")
            return False
        result = lower_bound(
            problem, on_bound=lambda proof: self._bound(problem, proof), should_stop=lambda: self._done(problem)
        )
        self.stats |= result.stats
        return True

    def _whole_milp(self, problem: Problem) -> bool:
        """The MILP of the whole, where it has not been tried before the LP and is not too large; whether it was."""
        if problem.scope is not Scope.STAGED or self.is_small() or self.columns > WHOLE_COLUMNS:
            return False
        self._member("checkmate_milp", problem)
        return True

    def _small_milp(self, problem: Problem) -> bool:
        """The MILP of a small problem, in this process, which saves the start of another one; it knows when to stop."""
        assert problem.best is not None
        share = replace(problem, warm_start=problem.best.plan, deadline=problem.until(SMALL_SHARE))
        outcome = solve_trimmed(share, MILP_GAP, self._done)
        for candidate in outcome.candidates:
            problem.offer(candidate.plan, "checkmate_milp")
        if outcome.bound is not None:
            problem.offer_bound(outcome.bound, "checkmate_milp")
        self.infeasible = self.infeasible or outcome.infeasible
        self.stats |= {f"milp_{key}": value for key, value in outcome.stats.items() if key in ("rounds", "nodes")}
        return True

    def _bound(self, problem: Problem, proof: BoundCertificate) -> None:
        self.certificate = proof  # first: the offer may end the solve
        problem.offer_bound(proof.bound, "LP")

    def _member(self, name: str, problem: Problem) -> None:
        """Another strategy in a process of its own, from the best plan so far."""
        from remat.worker import solve_isolated  # imports the strategies

        assert problem.best is not None
        if problem.remaining_s() < 0.5:
            return
        solution = solve_isolated(replace(problem, warm_start=problem.best.plan), name, {}, self.stopped.is_set)
        self.stats[f"{name}_status"] = str(solution.status)
        held = solution.stats.get("solver_peak_memory_bytes", 0)
        self.stats["member_peak_memory_bytes"] = max(held, self.stats.get("member_peak_memory_bytes", 0))
        if solution.status == "INFEASIBLE":
            self.infeasible = True
        if solution.status == "FAILED" and not self.stopped.is_set():
            self.notes.append(f"{name} failed: {solution.message}")

    def one_after_the_other(self) -> None:
        """Search, then proof: for one thread, and for runs that repeat exactly."""
        problem = self.problem
        if problem.repeats:
            # No early end: when a bound arrives depends on the clock.
            self.search(replace(problem, work_limit=fixed_moves(problem), target_gap=-1.0, cost_cap=None),
                        problem.threads)  # fmt: skip
            self.cut = self.cut or problem.is_cut()
            if not self._done():
                self._prove_aside()
            self.stats["cut_by_clock"] = self.cut or (not self._done() and problem.is_cut())
            return
        began, seconds = time.monotonic(), problem.remaining_s()
        shares = SEARCH_SHARES_SMALL if self.is_small() else SEARCH_SHARES
        for step, share in enumerate(shares):
            before = self._cost()
            self.search(replace(problem, deadline=began + share * seconds, warm_start=self._plan()), 1)
            has_settled = step > 0 and before is not None and (self._cost() or 0) > (1 - STILL_FALLING) * before
            if self._done() or has_settled:
                break
        if not self._done():
            self.prove(replace(problem, deadline=began + 0.7 * seconds))
        if not self._done():
            self.search(replace(problem, seed=problem.seed + 1, warm_start=self._plan()), 1)

    def _prove_aside(self) -> None:
        """Prove step by step, by counted work, without touching the plan unless a step solves the problem.

        What else a proof finds on its way, and the bound of a MILP that the time limit ends, depend on the clock.
        """
        problem = self.problem
        if problem.scope is Scope.FREE:
            return
        nodes = problem.work_limit or problem.steps_in(NODES_PER_S / max(1, self.columns))
        for step in (self._small_milp, self._lp_bound) if self.is_small() else (self._lp_bound, self._whole_milp):
            aside = self._aside(nodes)
            if not step(aside):
                return
            if step != self._lp_bound and aside.is_cut():
                self.cut = True
            else:  # each round of the LP is complete in itself
                self._adopt(aside)
            if self._done():
                return

    def _aside(self, nodes: int) -> Problem:
        """The problem with what is known of it, and `nodes` as its work limit."""
        known = self.problem.best
        aside = replace(self.problem, report=None, work_limit=nodes).collecting()
        assert known is not None
        assert aside.best is not None
        if known.plan is not None:
            aside.offer(known.plan, known.who)
        aside.offer_bound(known.bound, known.bound_who)
        return aside

    def _adopt(self, aside: Problem) -> None:
        """Take the bound; the plan only if it is the first or solves the problem."""
        problem, found = self.problem, aside.best
        assert problem.best is not None
        assert found is not None
        problem.offer_bound(found.bound, found.bound_who)
        is_solved = found.gap is not None and found.gap <= GAP_TOLERANCE
        if found.plan is not None and (problem.best.plan is None or is_solved):
            problem.offer(found.plan, found.who)

    def side_by_side(self) -> None:
        """One thread proves, the others search; when the proof has ended, all search."""
        problem = self.problem
        if problem.scope is Scope.FREE:  # nothing to prove
            self.search(problem, problem.threads)
            return
        # The process must not end in the middle of the prover's solver, which would abort it.
        prover = _Thread(lambda: self._prove_then_search(replace(problem, threads=1)), daemon=False)
        searcher = _Thread(lambda: self.search(replace(problem, warm_start=self._plan()), problem.threads - 1))
        try:
            searcher.start()
            prover.start()
            # Not join(): interrupted by Ctrl-C, it takes a running thread for an ended one (Python 3.11).
            while not (prover.ended.is_set() and searcher.ended.is_set()) and not self._done():
                failed = prover.error or searcher.error
                if failed is not None or problem.remaining_s() <= 0:
                    break
                (searcher if prover.ended.is_set() else prover).ended.wait(0.02)
        finally:
            self.stopped.set()
            if searcher.ident is not None:  # Ctrl-C may come before it runs
                searcher.ended.wait()
                prover.ended.wait(PROVER_GRACE_S)
        for thread in (searcher, prover):
            if thread.error is not None:
                raise thread.error

    def _prove_then_search(self, problem: Problem) -> None:
        self.prove(problem)
        if not self._done():
            again = replace(problem, seed=problem.seed + 7919, warm_start=self._plan())
            self.search(again, 1)

    def without_search(self) -> None:
        """The search is not compiled and there is no time to: greedy and baselines, then the proof."""
        problem = self.problem
        self.notes.append("the search is not compiled yet: run 'python -m remat.search' once (30 s)")
        if problem.repeats:
            self.stats["cut_by_clock"] = True  # a run that has the search finds other plans
        plan = greedy_eviction(problem.graph, problem.budget_bytes, deadline=problem.deadline)
        if plan is not None:
            problem.offer(plan, "greedy eviction")
        until = time.monotonic() + FAMILY_SHARE * problem.remaining_s()
        for name, plan in family_plans(problem, until):
            problem.offer(plan, name)
        if not self._done():
            self.prove(problem)

    def _cost(self) -> int | None:
        assert self.problem.best is not None
        known = self.problem.best.snapshot()
        return None if known is None else known[1]

    def _plan(self) -> Plan | None:
        assert self.problem.best is not None
        return self.problem.best.plan

    def _done(self, problem: Problem | None = None) -> bool:
        solved = (self.problem if problem is None else problem).is_solved()
        return self.stopped.is_set() or solved or self.infeasible


class _Thread(threading.Thread):
    """A thread that keeps the error it ended with, and tells when it has ended."""

    def __init__(self, work: Callable[[], None], *, daemon: bool = True) -> None:
        super().__init__(daemon=daemon)
        self.work = work
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # raised again by the thread that waits for this one
            self.error = error
        finally:
            self.ended.set()
