"""Solves of several budgets share results: plans go to larger budgets, bounds to smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from remat.incumbent import is_proven, relative_gap
from remat.plan import Plan
from remat.problem import Problem
from remat.solution import Ending, Solution, Status
from remat.solving.judgement import without_plan
from remat.units import format_size


def solve_ascending(
    problems: Sequence[Problem], warm_start: Plan | None, solve: Callable[[Problem, Plan | None], Solution]
) -> list[Solution]:
    """Solve each problem from `warm_start`, or else from the cheapest plan of the smaller budgets.

    Returns:
        Solutions in the order of `problems`; after Ctrl-C, those of larger budgets are NO_PLAN and say so.
    """
    solutions: dict[int, Solution] = {}
    best: Solution | None = None
    interrupted: Solution | None = None
    for i in sorted(range(len(problems)), key=lambda i: problems[i].budget_bytes):
        problem = problems[i]
        if interrupted is not None:
            solutions[i] = without_plan(
                problem, interrupted.strategy, Status.NO_PLAN, "interrupted before this budget was solved",
                bound=problem.graph.least_cost, ended=Ending.INTERRUPTED,
            )  # fmt: skip
            continue
        solutions[i] = solution = solve(problem, best.plan if warm_start is None and best is not None else warm_start)
        if solution.ended is Ending.INTERRUPTED:
            interrupted = solution
        if solution.cost is not None and (best is None or best.cost is None or solution.cost < best.cost):
            best = solution
    return [solutions[i] for i in range(len(problems))]


def share(solutions: Sequence[Solution]) -> list[Solution]:
    """Solutions of one strategy, graph and scope, each improved by the plans and bounds of the others.

    A larger budget takes the plan of a smaller one if that is cheaper; ``parameters["plan_from_bytes"]`` names the
    budget that it came from. A smaller budget takes the bound of a larger one if that is higher. Claims that
    contradict each other are FAILED.
    """
    order = sorted(range(len(solutions)), key=lambda i: solutions[i].budget_bytes)
    shared = list(solutions)
    best: Solution | None = None
    for i in order:
        one = shared[i]
        if best is not None and best.cost is not None and one.status not in (Status.SKIPPED, Status.FAILED):
            if one.status is Status.INFEASIBLE or (one.bound or 0) > best.cost:
                shared[i] = _contradicted(one, best)
                continue
            if one.cost is None or best.cost < one.cost:
                origin = best.parameters.get("plan_from_bytes", best.budget_bytes)
                note = f"plan found at {format_size(origin)}"
                one = replace(
                    one, plan=best.plan and replace(best.plan, budget_bytes=one.budget_bytes), cost=best.cost,
                    peak_bytes=best.peak_bytes, overhead=best.overhead,
                    parameters={**best.parameters, "plan_from_bytes": origin},
                    message=f"{note}; {one.message}" if one.message else note,
                )  # fmt: skip
        if one.cost is not None and (best is None or best.cost is None or one.cost < best.cost):
            best = one
        shared[i] = one
    bound: Solution | None = None
    for i in reversed(order):
        one = shared[i]
        if bound is not None and bound.bound is not None and one.cost is not None and bound.bound > one.cost:
            shared[i] = _contradicted(bound, one, at=one)
            continue
        has_cost = one.status not in (Status.SKIPPED, Status.FAILED, Status.INFEASIBLE)  # else there is none to bound
        if bound is not None and bound.bound is not None and has_cost and (one.bound or 0) < bound.bound:
            proofs = [proof for proof in (bound.certificate, one.certificate) if proof is not None]
            proof = max(proofs, key=lambda proof: proof.bound, default=None)
            if one.status is not Status.OPTIMAL or is_proven(one.cost or 0, bound.bound, bound.proven_by):
                one = replace(one, bound=bound.bound, proven_by=bound.proven_by, certificate=proof)
        if one.bound is not None and (bound is None or bound.bound is None or one.bound > bound.bound):
            bound = one
        shared[i] = _with_gap(one)
    return shared


def _with_gap(solution: Solution) -> Solution:
    if solution.cost is None or solution.bound is None:
        return solution
    gap = relative_gap(solution.cost, solution.bound)
    proven = is_proven(solution.cost, solution.bound, solution.proven_by)
    optimal = proven and (solution.status is Status.OPTIMAL or gap != solution.gap)
    return replace(solution, gap=gap, status=Status.OPTIMAL if optimal else Status.FEASIBLE)


def _contradicted(claim: Solution, plan: Solution, at: Solution | None = None) -> Solution:
    what = "that no plan fits" if claim.status is Status.INFEASIBLE else f"the bound {claim.bound}"
    where = at or claim
    return replace(
        where, status=Status.FAILED, plan=None, cost=None, peak_bytes=None, overhead=None, bound=None, gap=None,
        contradicted=True,
        message=f"strategy '{claim.strategy}' claims {what} at {format_size(claim.budget_bytes)}, "
                f"but its plan for {format_size(plan.budget_bytes)} costs {plan.cost}",
    )  # fmt: skip
