"""MONeT: one integer program chooses implementations, stored values and repeats."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from remat.context import Context
from remat.errors import Skip
from remat.plan import Plan
from remat.problem import Problem
from remat.programs.backends import BACKENDS, get_backend
from remat.programs.monet import MonetModel, build_model, estimate_columns
from remat.programs.program import Limits
from remat.registry import SHARE, strategy
from remat.search.choices import drop_unread_repeats
from remat.simulator import simulate
from remat.solution import Candidate, Outcome

MAX_COLUMNS = 400_000
# Of the budget, for plans to start from; most time, and share of the time, for each.
BUDGET_SHARES, START_S, START_SHARE = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6), 5.0, 0.05


@strategy(
    "monet", isolated=True, allowed={"solver": BACKENDS, "mip_gap": SHARE}, implementations="own", version=2,
)  # fmt: skip
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

    The solver starts from the warm start, or from a plan of a short search that the program can express; where cvxpy
    passes no start on (MOSEK, SCIP), from nothing, as in the paper. The start counts, too;
    ``stats["start_cost"]`` is its cost.

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
    start = None if backend.cache_start is None else _start(context, model)
    seconds = max(0.1, context.remaining_s() - 0.5)
    limits = Limits(seconds, context.solver_threads, context.options.seed, mip_gap, context.options.work_limit)
    answer = backend.solve(model.program(), limits, start=start)
    stats: dict[str, Any] = {
        "started": start is not None, "start_cost": context.incumbent.cost, "columns": len(model.cost),
        "rows": len(model.lower), "nodes": answer.nodes,
        "milp_s": round(time.monotonic() - began, 3),
    }  # fmt: skip
    if np.isfinite(answer.bound):
        stats["monet_bound"] = int(answer.bound / model.cost_scale) * model.cost_unit
    if answer.x is None:
        if answer.infeasible:
            return Outcome(message="MONeT's program has no solution; other plans may still exist", stats=stats)
        return Outcome(message="the solver found no solution in time", timed_out=True, stats=stats)
    calls = drop_unread_repeats(graph, model.calls(answer.x))
    plan = Plan.from_calls(graph, calls, problem.budget_bytes)
    trace = simulate(graph, plan)
    objective = float(model.cost @ np.round(answer.x)) + model.cost_constant
    stats |= {"objective": round(objective * model.cost_unit), "peak": trace.peak_bytes}
    stats["monet_optimal"] = answer.optimal
    return Outcome((Candidate(plan),), stats=stats)


def _start(context: Context, model: MonetModel) -> np.ndarray | None:
    """The variables of a plan to start from, which is offered; None if none is found.

    The program counts more memory than the simulator: so the plans tried have less and less. A run that repeats exactly
    has only its warm start, because the clock ends these searches.
    """
    for plan in _starts(context):
        found = model.point(plan.calls)
        if found is not None:
            context.offer(Plan.from_calls(context.problem.graph, plan.calls, context.problem.budget_bytes), "start")
            return found
    return None


def _starts(context: Context) -> Iterator[Plan]:
    """The warm start, then plans of short searches."""
    graph, budget_bytes = context.problem.graph, context.problem.budget_bytes
    if context.options.warm_start is not None:
        yield context.options.warm_start
    # The program repeats no backward operation.
    operations = tuple(replace(op, run_once=op.run_once or op.is_backward) for op in graph.operations)
    once = replace(graph, operations=operations)
    seconds = min(START_S, START_SHARE * context.remaining_s())
    for share in () if context.repeats else BUDGET_SHARES:
        if context.remaining_s() < seconds:
            break
        asked = replace(context.problem, graph=once, budget_bytes=int(share * budget_bytes))
        member = context.about(asked).with_options(warm_start=None).until(time.monotonic() + seconds)
        plan = context.run_strategy(member, "search", {}, isolate=False).plan
        if plan is not None:
            yield plan
