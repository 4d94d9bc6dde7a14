"""Checkmate's mixed-integer program: trimmed, or as published (the faithful, slow reference)."""

from __future__ import annotations

import math
import time
from typing import Any

from remat.bounds.lp import SMALL_COLUMNS, model_columns
from remat.context import Context
from remat.errors import InvalidInput, Skip
from remat.plan import Plan, Scope
from remat.problem import Problem
from remat.programs.backends import BACKENDS, Backend, get_backend
from remat.programs.highs import Answer
from remat.programs.program import TOLERANCE, half_unit_is_lost, least_whole
from remat.programs.published import Equations, build, estimate_nonzeros
from remat.registry import POSITIVE, SHARE, strategy
from remat.search.choices import drop_unread_repeats
from remat.search.greedy import greedy_eviction
from remat.simulator import simulate
from remat.solution import Candidate, Outcome
from remat.solvers._milp_peak import solve_peak
from remat.solvers._milp_trimmed import MARGIN_S, limits_of, solve_trimmed
from remat.solvers._polish import StagedSolver, drop_needless_repeats, scope_note
from remat.solvers.search import quick_plan

FORMULATIONS = ("trimmed", "published", "peak")
BYTES_PER_NONZERO = 400  # of the matrices and the copies of cvxpy and the solver, measured on ResNet50
MAX_NONZEROS = 20_000_000


def check_options(options: dict[str, Any]) -> None:
    """Raise `InvalidInput` for a formulation that needs another solver."""
    solver, formulation = options.get("solver", "highs"), options.get("formulation") or "published"
    if formulation != "published" and solver != "highs":
        raise InvalidInput(
            f"formulation={formulation} needs solver=highs; with solver={solver} use formulation=published"
        )


@strategy(
    "checkmate_milp", proves=True, isolated=True, check=check_options, version=1,
    allowed={"solver": BACKENDS, "formulation": FORMULATIONS, "mip_gap": SHARE, "max_nonzeros": POSITIVE},
)  # fmt: skip
def checkmate_milp(
    problem: Problem,
    context: Context,
    *,
    solver: str = "highs",
    formulation: str | None = None,
    mip_gap: float = 9e-5,
    max_nonzeros: int = MAX_NONZEROS,
) -> Outcome:
    """The exact MILP of Checkmate, equations (1) to (9), frontier-advancing, FREE and U as published.

    Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys
    2020. (6) and (7) are linearised with the largest value that each count of hazards can take.
    `remat.programs.published` generalises it to operations and values.

    Variables that (8) fixes to zero are not created, and U ends with the stage's own operation, because later entries
    of a row of U change nothing. Fixed bytes are subtracted from the budget; sizes are divided by their greatest
    common divisor and scaled; the budget grows by half a unit, which is exact. Needless repeats of the solver are
    removed. If a plan slips over the budget by the solver's tolerance, the solver runs again a little below the budget.
    INFEASIBLE is claimed only if it also holds with a millionth more, and the bound is lowered by a millionth.

    A staged `warm_start` becomes the solver's first incumbent where cvxpy passes it on (HiGHS, Gurobi). Without one,
    the trimmed form starts from a greedy plan or a short search, and the published form from nothing. (The paper's
    artifact gives it the cheapest plan of a heuristic that fits.) All plans are staged. They count in a wider scope
    too, but the bound and INFEASIBLE do not.

    Args:
        solver: ``highs``, ``mosek``, ``gurobi`` or ``scip``.
        formulation: ``trimmed`` (`remat.programs.staged`, HiGHS only, the default there), ``published``, or ``peak``:
            the least peak among the plans within the problem's cost cap (`remat.solvers._milp_peak`).
        mip_gap: relative gap at which the solver stops; the default lies below OPTIMAL's 1e-4.
        max_nonzeros: a model with more is skipped, not built (about 400 bytes for each).
    """
    backend, graph = get_backend(solver), context.problem.graph
    if formulation == "peak":
        backend.require()
        return solve_peak(context, mip_gap)
    once = Plan.from_order(graph, range(len(graph)))
    if simulate(graph, once).peak_bytes <= context.problem.budget_bytes:
        return Outcome((Candidate(once),), message="running every operation once fits; nothing to solve")
    nonzeros = estimate_nonzeros(graph)  # of the published form; the trimmed form has a tenth
    trimmed = formulation == "trimmed" or (formulation is None and solver == "highs")
    if trimmed and nonzeros // 10 <= max_nonzeros:
        backend.require()
        if context.options.warm_start is None:
            # Loading the compiled search takes as long as solving a small model.
            small = model_columns(graph) <= SMALL_COLUMNS
            start = greedy_eviction(graph, context.problem.budget_bytes, deadline=context.deadline) if small else None
            context = context.with_options(warm_start=start if small else quick_plan(context))
        return solve_trimmed(context, mip_gap)
    if nonzeros > max_nonzeros:
        raise Skip(
            f"the model would have {nonzeros:,} nonzeros (about {nonzeros * BYTES_PER_NONZERO / 1e9:.1f} GB); "
            f"the limit is max_nonzeros={max_nonzeros:,}"
        )
    backend.probe()
    started = time.monotonic()
    equations = build(graph)
    stats = {"solver": solver, "columns": equations.columns.n, "build_s": time.monotonic() - started}
    return _Published(context, equations, backend, mip_gap, stats).run()


class _Published(StagedSolver):
    """The published form: the first solve, and the further solves that tolerances make necessary."""

    def __init__(
        self, context: Context, equations: Equations, backend: Backend, mip_gap: float, stats: dict[str, Any]
    ) -> None:
        super().__init__(context, "checkmate_milp", backend.name)
        self.equations, self.backend, self.mip_gap, self.stats = equations, backend, mip_gap, stats

    def run(self) -> Outcome:
        context, graph, budget_bytes = self.context, self.graph, self.context.problem.budget_bytes
        units = (budget_bytes - graph.fixed_bytes) // self.equations.unit_bytes
        answer, plan = self._solve(units + 0.5)
        if answer is None:
            return self.outcome("the time limit was over before the model was built", timed_out=True)
        if answer.infeasible:
            return self._infeasible(units)
        if math.isfinite(answer.bound):
            scale = self.equations.cost_scale
            self.keep_bound(least_whole(answer.bound / scale, scale) * self.equations.cost_unit)
        shrink = TOLERANCE
        while plan is not None and simulate(graph, plan).peak_bytes > budget_bytes:
            self.stats["slips"] = self.stats.get("slips", 0) + 1
            answer, plan = self._solve(min(units - 0.5, units * (1 - shrink)))
            shrink *= 4
        if plan is not None:
            self.keep(drop_needless_repeats(graph, plan, budget_bytes, context.deadline - 0.2))
            return self.outcome(scope_note(context.problem.scope))
        if answer is None or not (answer.optimal or answer.infeasible):
            return self.outcome("no plan found within the limit", timed_out=True)
        message = "plans exceed the budget by the solver's tolerance and none fits just below it; unproven"
        return self.outcome(message, timed_out=False)

    def _solve(self, units: float) -> tuple[Answer | None, Plan | None]:
        """Solve with a budget of `units`; (None, None) if no time is left."""
        if self.context.remaining_s() <= MARGIN_S:
            return None, None
        graph, plan, start = self.graph, self.context.options.warm_start, None
        if plan is not None and plan.scope is Scope.STAGED:
            start = self.equations.point(units, *plan.matrices(graph))
        started = time.monotonic()
        limits = limits_of(self.context, self.mip_gap)
        answer = self.backend.solve(self.equations.program(units), limits, start=start)
        self.stats["solve_s"] = self.stats.get("solve_s", 0.0) + time.monotonic() - started
        self.stats["nodes"] = self.stats.get("nodes", 0) + answer.nodes
        if answer.x is None:
            return answer, None
        calls = drop_unread_repeats(graph, [(k, "") for k in self.equations.order(answer.x)])
        return answer, Plan.from_order(graph, [k for k, _ in calls])

    def _infeasible(self, units: int) -> Outcome:
        """Claim INFEASIBLE if the scope is staged and the claim holds beyond the tolerance."""
        scope = self.context.problem.scope
        if scope is not Scope.STAGED:
            return self.outcome(f"no staged plan fits; {scope_note(scope)}", timed_out=False)
        if half_unit_is_lost(units):
            answer, _ = self._solve(units * (1 + TOLERANCE) + 0.5)
            if answer is None or not answer.infeasible:
                message = "infeasible within the solver's tolerance, feasible or undecided just above; unproven"
                return self.outcome(message, timed_out=answer is None or not answer.optimal)
        self.infeasible = True
        return self.outcome("")
