"""MONeT: one integer program chooses implementations, stored values and repeats."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from remat.context import Context
from remat.errors import Skip
from remat.plan import Plan
from remat.problem import Problem
from remat.programs.backends import Verdict, check_options, get_backend
from remat.programs.monet import build_model, estimate_columns
from remat.programs.program import Limits
from remat.registry import strategy
from remat.simulator import simulate
from remat.solution import Candidate, Outcome
from remat.solvers._polish import drop_unread_repeats

MAX_COLUMNS = 400_000


@strategy("monet", isolated=True, check=check_options, implementations="own")
def monet(problem: Problem, context: Context, *, solver: str = "highs", mip_gap: float = 9e-5) -> Outcome:
    """MONeT's integer program: implementations and checkpoints jointly, through cvxpy.

    Shah et al., "Memory Optimization for Deep Networks", ICLR 2021 (arXiv 2010.14501), section 4; the program is
    in `remat.programs.monet`. On a graph without implementations it is the paper's
    "checkpointing only". Deviations: values are separate from operations (an operation may make several values, and an
    extra value of an implementation is made with it); a value that is both stored and read counts once; useless
    variables are left out; the budget grows by half a unit, which is exact, or if it is large shrinks by a millionth;
    values are freed at their last use, and the simulator judges the plan. Needless repeats are removed.

    Its optimum is the optimum of its own problem: only forward operations are repeated, each at most once before
    a backward operation, and memory counts as above. It proves nothing for all plans: its bound is in
    ``stats["monet_bound"]``, and without a solution the status is NO_PLAN.

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
    limits = Limits(seconds, context.solver_threads, context.options.seed, mip_gap, context.options.work_limit)
    answer = backend.solve(model.program(), limits)
    stats: dict[str, Any] = {
        "columns": len(model.cost), "rows": len(model.lower), "nodes": answer.nodes,
        "milp_s": round(time.monotonic() - began, 3),
    }  # fmt: skip
    if np.isfinite(answer.bound):
        stats["monet_bound"] = int(answer.bound / model.cost_scale) * model.cost_unit
    if answer.x is None:
        if answer.verdict is Verdict.INFEASIBLE:
            return Outcome(message="MONeT's program has no solution; other plans may still exist", stats=stats)
        return Outcome(message="the solver found no solution in time", timed_out=True, stats=stats)
    calls = drop_unread_repeats(graph, model.calls(answer.x))
    plan = Plan.from_order(graph, [k for k, _ in calls], context.problem.budget_bytes, [name for _, name in calls])
    trace = simulate(graph, plan)
    objective = float(model.cost @ np.round(answer.x)) + model.cost_constant
    stats |= {"objective": round(objective * model.cost_unit), "peak": trace.peak_bytes}
    stats["monet_optimal"] = answer.verdict is Verdict.SOLVED
    return Outcome((Candidate(plan),), stats=stats)
