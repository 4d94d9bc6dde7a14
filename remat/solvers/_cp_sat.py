"""Parts shared by the strategies that solve the retention-interval program with OR-tools CP-SAT."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from remat.context import Context
from remat.errors import InvalidPlan
from remat.graph import Graph
from remat.plan import Plan
from remat.programs.interval import IntervalModel
from remat.solvers._polish import StagedSolver

# In a run that repeats exactly: work for one program in CP-SAT's deterministic time, about seconds, and without a
# work limit its largest share of the time.
REPEATED_WORK, REPEATED_SHARE = 5.0, 0.04


class IntervalSolver(StagedSolver):
    """A solver of the retention-interval program."""

    def keep_solution(self, built: IntervalModel, values: Any) -> None:
        """Keep the plan of a solution if it is better."""
        plan = Plan.from_order(self.graph, built.order(values), self.context.problem.budget_bytes)
        if not self.keep(plan):
            raise InvalidPlan("the program's plan does not fit the budget that it was given")

    def is_unlimited(self, built: IntervalModel) -> bool:
        """Whether no plan as cheap as the best one runs any operation more often than the model's limits."""
        return is_unlimited(self.graph, built.limits, None if self.best is None else self.best[0])


def tensorflow_came_first() -> bool:
    """Whether TensorFlow was imported before OR-tools: the solver then binds to TensorFlow's symbols and crashes."""
    order = [name for name in sys.modules if name in ("tensorflow", "ortools")]  # in order of import
    return order[:1] == ["tensorflow"]


def new_solver(context: Context, seconds: float) -> Any:
    """A solver with the context's threads and seed; in a run that must repeat exactly, its work is limited too."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = context.solver_threads
    solver.parameters.random_seed = context.options.seed % 2**31
    if context.repeats:
        share = math.inf if context.options.work_limit else REPEATED_SHARE * context.options.time_limit_s
        solver.parameters.max_deterministic_time = min(REPEATED_WORK, share)
    solver.parameters.max_time_in_seconds = seconds
    return solver


def solve_interruptibly(solver: Any, model: Any, callback: Any = None) -> Any:
    """`solver.solve(model)` in another thread, because CP-SAT would swallow Ctrl-C and return normally."""
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(solver.solve, model, callback)
        try:
            return running.result()
        except BaseException:
            solver.stop_search()
            raise


def is_unlimited(graph: Graph, limits: Sequence[int], cost: int | None) -> bool:
    """Whether no plan as cheap as `cost` runs any operation more often than its limit."""
    n = len(graph)
    for k, (op, limit) in enumerate(zip(graph.operations, limits, strict=True)):
        if op.run_once or limit >= n - k:
            continue  # it cannot run more often
        if cost is None or not op.cost or limit < 1 + (cost - graph.total_cost) // op.cost:
            return False
    return True


def proven_cost(built: IntervalModel, solver: Any) -> int:
    """The bound that a solver of the whole program has proven for plans within its limits on runs."""
    claimed = solver.best_objective_bound  # a double: beyond 2**53 it may be rounded up
    claimed -= max(1e-6, 2.0 * abs(np.spacing(claimed)))
    return built.base + max(0, math.ceil(claimed)) * built.cost_unit
