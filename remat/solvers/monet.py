"""MONeT: implementations, storing and recomputation decided by one integer program."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from remat.context import Context
from remat.errors import InvalidInput, Skip
from remat.plan import Plan
from remat.problem import Problem
from remat.programs.backends import Limits, Verdict, get_backend
from remat.programs.monet import build_model, estimate_columns
from remat.registry import strategy
from remat.simulator import simulate
from remat.solution import Candidate, Outcome
from remat.solvers._polish import drop_unread_repeats

MAX_COLUMNS = 400_000


def check_options(options: dict[str, Any]) -> None:
    """Raise `InvalidInput` for a value that `monet` cannot use."""
    get_backend(options.get("solver", "highs"))
    gap = options.get("mip_gap", 0.0)
    if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 <= gap < 1:
        raise InvalidInput(f"mip_gap must be in [0, 1), not {gap!r}")


@strategy("monet", isolated=True, check=check_options, implementations="own")
def monet(problem: Problem, context: Context, *, solver: str = "highs", mip_gap: float = 9e-5) -> Outcome:
    """MONeT's integer program: implementations and checkpoints jointly, through cvxpy.

    Shah et al., "Memory Optimization for Deep Networks", ICLR 2021 (arXiv 2010.14501), section 4; the program is
    in `remat.programs.monet`. On a graph without implementations it is the paper's
    "checkpointing only". Deviations: values and operations are apart (an operation may make several values, and an
    extra value of an implementation is made with it); the union of what is stored and what is read counts no value
    twice; variables that can be of no use are not made; the budget gets half a unit of room, which is exact, or on
    large ones a millionth less; the plan, with values freed at their last use, is judged by the simulator. Needless
    repeats are dropped.

    Its optimum is that of its own problem: only forward operations are repeated, each at most once before
    a backward operation, and memory is counted as above. It proves nothing of all plans: its bound is in
    ``stats["monet_bound"]``, and where it has no solution the status is NO_PLAN.

    Args:
        solver: ``highs``, ``mosek``, ``gurobi`` or ``scip``.
        mip_gap: relative gap at which the solver stops.
    """
    backend = get_backend(solver)
    graph = context.problem.graph
    if estimate_columns(graph) > MAX_COLUMNS:
        raise Skip(f"the program would have about {estimate_columns(graph):,} variables, more than {MAX_COLUMNS:,}")
    model = build_model(graph, context.problem.budget_bytes)
    backend.probe()
    began = time.monotonic()
    seconds = max(0.1, context.remaining_s() - 0.5)
    asked = Limits(seconds, context.solver_threads, context.options.seed, mip_gap, context.options.work_limit)
    answer = backend.solve(model.program(), asked)
    stats: dict[str, Any] = {
        "columns": len(model.cost), "rows": len(model.lower), "nodes": answer.nodes,
        "milp_s": round(time.monotonic() - began, 3),
    }  # fmt: skip
    if np.isfinite(answer.bound):
        stats["monet_bound"] = int(answer.bound / model.cost_scale) * model.cost_unit
    if answer.x is None:
        if answer.verdict is Verdict.INFEASIBLE:
            return Outcome(message="MONeT's program has no solution; that proves nothing of other plans", stats=stats)
        return Outcome(message="the solver found no solution in time", timed_out=True, stats=stats)
    calls = drop_unread_repeats(graph, model.calls(answer.x))
    plan = Plan.from_order(graph, [k for k, _ in calls], context.problem.budget_bytes, [name for _, name in calls])
    trace = simulate(graph, plan)
    objective = float(model.cost @ np.round(answer.x)) + model.cost_constant
    stats |= {"objective": round(objective * model.cost_unit), "peak": trace.peak_bytes}
    stats["monet_optimal"] = answer.verdict is Verdict.SOLVED
    return Outcome((Candidate(plan),), stats=stats)
