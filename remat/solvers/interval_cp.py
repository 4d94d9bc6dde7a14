"""Retention intervals on CP-SAT: the whole program on small graphs, neighbourhoods of the best plan on large ones."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from remat.context import CUT_S, Context
from remat.plan import Scope
from remat.problem import Problem
from remat.programs.interval import build_intervals, run_stages
from remat.registry import strategy
from remat.search.ready import is_ready
from remat.solution import Outcome
from remat.solvers._cp_sat import (
    IntervalSolver,
    new_solver,
    proven_cost,
    solve_interruptibly,
    tensorflow_came_first,
)
from remat.solvers._polish import scope_note
from remat.solvers.search import quick_plan, search_staged

WHOLE_OPERATIONS = 300  # of the largest graph for which the whole program comes first
WHOLE_SHARE = 0.5  # of the time, for the whole program
START_SHARE = 0.1  # of the time, for the first plan
NEIGHBOURHOOD_S = 3.0
LARGEST_C = 8
IN_VAIN = 4  # neighbourhoods in vain before C grows
REPEATED_ROUNDS = 10  # neighbourhoods of a run that repeats exactly and has no work limit


@strategy(
    "interval_cp",
    proves=True,
    isolated=True,
    must_isolate=tensorflow_came_first,
    implementations="search",
    begins_greedily=True,
    version=3,
)
def interval_cp(problem: Problem, context: Context) -> Outcome:
    """The retention-interval program (MOCCASIN, Bartan et al., ICML 2023) on OR-tools CP-SAT.

    Starts from `warm_start` or a short search. Small graphs are solved whole, with C = 2 runs per operation, and more
    runs as long as that helps. Then, and on larger graphs, the solver repeatedly fixes all operations of the best plan
    except a window and solves again, until the limits. A bound is claimed if C restricts nothing: with more than C runs
    of an operation, a plan would cost more than the best one. Plans are staged; in wider scopes nothing is proven.
    """
    return _Intervals(context).run()


class _Intervals(IntervalSolver):
    def __init__(self, context: Context) -> None:
        super().__init__(context, "interval_cp", "cp-sat")
        self.stats["solves"] = 0

    def run(self) -> Outcome:
        context = self.context
        if context.options.warm_start is not None and context.options.warm_start.scope is Scope.STAGED:
            self.keep(context.options.warm_start)
        if self.best is None:
            self._first_plan()
        if len(self.graph) <= WHOLE_OPERATIONS:
            self._whole()
        if self.best is not None and not self._solved():
            self._neighbourhoods()
        message = "" if context.is_solved() else scope_note(context.problem.scope)
        if self.best is None and not self.infeasible:
            message = "no plan found; portfolio and search find plans sooner"
        return self.outcome(message)

    def _first_plan(self) -> None:
        context = self.context
        least_s = (1 - START_SHARE) * context.remaining_s()
        if not is_ready() or context.repeats:
            plan = quick_plan(context)
        else:
            quick = context.about(context.problem)
            search_staged(quick, 1, should_stop=lambda: context.remaining_s() < least_s)
            plan = quick.incumbent.plan
        if plan is not None:
            self.keep(plan)

    def _solved(self) -> bool:
        known = self.bound is not None and self.best is not None and self.best[0] <= self.bound
        return known or self.infeasible or self.context.is_solved()

    def _whole(self) -> None:
        """Solve with at most C = 2, 3, ... runs of an operation, until a larger C is no help or the plan is optimal."""
        until = self.context.share_ends(WHOLE_SHARE)
        for most_runs in range(2, LARGEST_C + 1):
            if time.monotonic() >= until or self._solved():
                return
            before = self.best
            ended = self._solve(most_runs, (), until - time.monotonic())
            if not ended or (before is not None and self.best is before and most_runs > 2):
                return

    def _neighbourhoods(self) -> None:
        """Improve the best plan window by window. After windows in vain, their size and the limit C on runs change."""
        context, n = self.context, len(self.graph)
        random = np.random.default_rng(abs(context.options.seed))
        size = min(n, 60)
        rounds = in_vain = 0
        most_rounds = (context.options.work_limit or REPEATED_ROUNDS) if context.repeats else 1 << 60
        while context.remaining_s() > CUT_S and rounds < most_rounds and not self._solved():
            rounds += 1
            free = self._window(random, size)
            before = self.best
            fixed = [k for k in range(n) if k not in free]
            most_runs = 2 + in_vain // IN_VAIN % (LARGEST_C - 1)  # grows in vain up to the largest C, then starts again
            most_s = math.inf if context.repeats else NEIGHBOURHOOD_S
            ended = self._solve(most_runs, fixed, min(most_s, context.remaining_s() - 0.3))
            if self.best is before:
                in_vain += 1
                size = min(n, size + 5) if ended else max(10, int(size * 0.9))
            else:
                in_vain = 0
        self.stats["neighbourhoods"] = rounds

    def _window(self, random: np.random.Generator, size: int) -> set[int]:
        """Operations around a random one, along the edges; the program decides their runs together."""
        graph = self.graph
        seed = int(random.integers(len(graph)))
        chosen, border = {seed}, [seed]
        while border and len(chosen) < size:
            k = border.pop(int(random.integers(len(border))))
            near = {graph.producer[v] for v in graph.operations[k].inputs}
            near |= {u for v in graph.operations[k].outputs for u in graph.users[v]}
            for other in sorted(near - chosen):
                chosen.add(other)
                border.append(other)
        return chosen

    def _solve(self, most_runs: int, fixed: Any, seconds: float) -> bool:
        """Solve one program and keep its plan if it is better; whether the program was decided."""
        from ortools.sat.python import cp_model

        context = self.context
        hint = None if self.best is None else run_stages(self.graph, self.best[1].order.tolist())
        built = build_intervals(self.graph, context.problem.budget_bytes, most_runs, hint, frozenset(fixed))
        if built is None or seconds <= 0.05:
            return False
        self.stats["solves"] += 1
        solver = new_solver(context, seconds)
        status = solve_interruptibly(solver, built.model)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            self.keep_solution(built, solver)
        if not fixed and self.is_unlimited(built):  # else the limit C on runs may bind
            if status == cp_model.INFEASIBLE:
                self.infeasible = True  # a contradiction if there is a plan, which `remat.solve` reports
            else:
                self.keep_bound(proven_cost(built, solver))
        return status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
