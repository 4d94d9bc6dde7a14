"""Parts shared by the strategies that solve the retention-interval program with OR-tools CP-SAT."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from remat.context import Context
from remat.graph import Graph
from remat.programs.interval import IntervalModel

# In a run that repeats exactly: work for one program, and without a work limit its largest share of the time.
REPEATED_WORK, REPEATED_SHARE = 5.0, 0.04


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
        solver.parameters.max_deterministic_time = _repeated_work(context)
    solver.parameters.max_time_in_seconds = seconds
    return solver


def _repeated_work(context: Context) -> float:
    """Limit of one program in a run that must repeat exactly, in CP-SAT's deterministic time (about seconds)."""
    if context.options.work_limit is not None:
        return REPEATED_WORK
    return min(REPEATED_WORK, REPEATED_SHARE * context.options.time_limit_s)


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
