"""From a strategy's claims to a solution: every plan is replayed, every claim is compared with the plans."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from remat.bounds.min_budget import describe_minimum
from remat.context import Context
from remat.errors import HostFull, RematError, plain, shortened
from remat.graph import Graph
from remat.incumbent import is_closed, is_proven, relative_gap
from remat.plan import Plan, Scope
from remat.problem import Problem
from remat.simulator import Trace, simulate
from remat.solution import Candidate, Ending, Member, Outcome, Solution, Status
from remat.units import format_size

LEAST_NAMING_S = 1e-4  # for each operation, what the search for that budget takes at least on a busy machine
OVERRUN_S = 1.0  # a family's next plan is not begun if it would end later than this after the deadline
NAMING_S = 1.7  # time after the deadline in which the smallest budget may be found; less than the allowed overrun


def judge(
    context: Context, candidates: Iterator[Candidate], who: str = "",
    on_member: Callable[[Member], None] = lambda _: None,
) -> tuple[list[Member], str]:  # fmt: skip
    """(members, why others were rejected): every candidate is replayed by the simulator, offered and reported."""
    problem = context.problem
    members: list[Member] = []
    rejected = ""
    began = time.monotonic()
    for candidate in candidates:
        plan = candidate.plan
        if not problem.scope.contains(plan.scope):
            rejected = f"its plan is {plan.scope}, but {problem.scope} was asked for"
        else:
            try:
                trace: Trace = simulate(problem.graph, plan, link=problem.link)
            except HostFull as error:
                rejected = f"a plan of it does not fit the host: {error}"
            else:
                members.append(Member(plan, trace.cost, trace.peak_bytes, candidate.parameters))
                on_member(members[-1])
                finder = str(candidate.parameters.get("from", who))
                context.incumbent.take(plan, trace.cost, trace.peak_bytes, finder)
        now = time.monotonic()
        # The next plan takes about as long as this one.
        if now > context.deadline or now + (now - began) > context.deadline + OVERRUN_S:
            rejected = rejected or cut_after(members)
            break
        began = now
    return members, rejected


def cut_after(members: Sequence[Member]) -> str:
    """Why a family has no further members."""
    return f"stopped at the time limit after {len(members)} plans"


def conclude(context: Context, strategy: str, outcome: Outcome, members: Sequence[Member], rejected: str) -> Solution:
    """The solution of an outcome, with the plans and the bound offered during the solve."""
    incumbent = context.incumbent
    stats = {**outcome.stats, **incumbent.stats()}
    more: dict[str, Any] = {
        "stats": stats, "cut_by_clock": outcome.cut_by_clock, "peak_bound_bytes": outcome.peak_bound_bytes,
        "solver_memory_bytes": outcome.members_memory_bytes,
    }  # fmt: skip
    if incumbent.contradiction:
        return without_plan(
            context.problem, strategy, Status.FAILED, incumbent.contradiction, contradicted=True, **more
        )
    known = list(members)
    if incumbent.plan is not None and incumbent.cost is not None and incumbent.peak_bytes is not None:
        known.append(Member(incumbent.plan, incumbent.cost, incumbent.peak_bytes, {"from": incumbent.who}))
    if outcome.bound is not None:
        incumbent.offer_bound(outcome.bound, strategy, _proven_by(strategy, context.problem.graph, outcome))
    bound, by = incumbent.proof
    return decide(context.problem, strategy, replace(outcome, bound=bound, proven_by=by), known, rejected, **more)


def decide(
    problem: Problem, strategy: str, outcome: Outcome, members: Sequence[Member], rejected: str, **more: Any
) -> Solution:
    """A solution with the cheapest member that fits, and its status; `more` are other fields of the solution."""
    budget = problem.budget_bytes
    bound = max(problem.graph.least_cost, outcome.bound or 0)
    by = _proven_by(strategy, problem.graph, outcome)
    fitting = [member for member in members if member.peak_bytes <= budget]
    if fitting:
        best = min(fitting, key=lambda member: (member.cost, member.peak_bytes))  # a tie goes to the strategy's own
        if outcome.infeasible or bound > best.cost:
            claim = "that no plan fits" if outcome.infeasible else f"the bound {bound}"
            message = f"strategy '{strategy}' claims {claim}, but its own plan fits and costs {best.cost}"
            return without_plan(problem, strategy, Status.FAILED, message, contradicted=True, **more)
        return _with_plan(problem, strategy, outcome, best, bound, proven_by=by, **more)
    if outcome.infeasible:
        message = outcome.message or f"no {problem.scope} plan fits {format_size(budget)}"
        message = f"{message}; {describe_minimum(problem.graph, problem.scope)}"
        return without_plan(problem, strategy, Status.INFEASIBLE, message, **more)
    if outcome.timed_out:
        message = outcome.message or "no plan found within the time limit"
        return without_plan(problem, strategy, Status.TIMEOUT, message, bound=bound, proven_by=by, **more)
    if members:
        smallest = min(member.peak_bytes for member in members)
        message = f"none of its {len(members)} plans fits; the smallest needs {format_size(smallest)}"
    else:
        message = outcome.message or rejected or "it proposed no plan"
    return without_plan(problem, strategy, Status.NO_PLAN, message, bound=bound, proven_by=by, **more)


def _proven_by(strategy: str, graph: Graph, outcome: Outcome) -> str:
    """What proves the outcome's bound, see `Solution`; the strategy, if it does not say."""
    bound = outcome.bound or 0
    if bound <= graph.least_cost:
        return ""
    if outcome.certificate is not None and outcome.certificate.bound >= bound:
        return "certificate"
    return outcome.proven_by or strategy


def _with_plan(
    problem: Problem, strategy: str, outcome: Outcome, best: Member, bound: int, proven_by: str, **more: Any
) -> Solution:  # fmt: skip
    graph, message = problem.graph, outcome.message
    gap, is_optimal = relative_gap(best.cost, bound), is_proven(best.cost, bound, proven_by)
    note = f"optimal within the tolerances of {proven_by}; no certificate"
    if is_closed(gap) and not is_optimal and note not in message:
        message = f"{message}; {note}" if message else note
    return Solution(
        status=Status.OPTIMAL if is_optimal else Status.FEASIBLE,
        strategy=strategy,
        graph_name=graph.name,
        budget_bytes=problem.budget_bytes,
        scope=problem.scope,
        accounting=problem.accounting,
        plan=replace(best.plan, budget_bytes=problem.budget_bytes, link=problem.link if best.plan.has_copies else None),
        cost=best.cost,
        peak_bytes=best.peak_bytes,
        overhead=best.cost / graph.total_cost - 1 if graph.total_cost else 0.0,
        bound=bound,
        gap=gap,
        message=message,
        parameters=dict(best.parameters),
        certificate=outcome.certificate,
        proven_by=proven_by,
        **more,
    )


def conclude_early(
    context: Context, strategy: str, ended: Ending, message: str, *, status: Status = Status.TIMEOUT
) -> Solution:
    """The solution of a strategy that did not return, from the plans and bounds that it offered before.

    Args:
        ended: how it ended.
        message: the same as one line.
        status: of the solution if no plan was offered.
    """
    incumbent = context.incumbent
    if incumbent.plan is not None or incumbent.contradiction:
        outcome = Outcome(message=f"{message}; the best plan found before is kept")
        return replace(conclude(context, strategy, outcome, (), ""), ended=ended)
    bound = None if status is Status.FAILED else incumbent.bound
    by = "" if bound is None else incumbent.proven_by
    return without_plan(context.problem, strategy, status, message, ended=ended, bound=bound, proven_by=by)


def without_plan(problem: Problem, strategy: str, status: Status, message: str, **more: Any) -> Solution:
    """A solution that says why there is no plan; `more` are its other fields."""
    return Solution(
        status, strategy, problem.graph.name, problem.budget_bytes, problem.scope, problem.accounting,
        message=message, **more,
    )  # fmt: skip


def at_least(solution: Solution, problem: Problem, warm_start: Plan) -> Solution:
    """The solution, or the warm start if that is cheaper and fits."""
    if solution.status in (Status.FAILED, Status.SKIPPED) or not problem.scope.contains(warm_start.scope):
        return solution
    try:
        trace = simulate(problem.graph, warm_start, link=problem.link)
    except HostFull:
        return solution
    if trace.peak_bytes > problem.budget_bytes or (solution.cost is not None and solution.cost <= trace.cost):
        return solution
    known = Outcome(
        bound=solution.bound, infeasible=solution.status is Status.INFEASIBLE, message=solution.message,
        certificate=solution.certificate, proven_by=solution.proven_by,
    )  # fmt: skip
    member = Member(warm_start, trace.cost, trace.peak_bytes, {"from": "warm start"})
    return decide(
        problem, solution.strategy, known, [member], "", stats=solution.stats, wall_s=solution.wall_s,
        ended=solution.ended, cut_by_clock=solution.cut_by_clock, proof_from=solution.proof_from,
        peak_bound_bytes=solution.peak_bound_bytes, solver_memory_bytes=solution.solver_memory_bytes,
    )  # fmt: skip


def restated(graph: Graph, solution: Solution, without: str) -> Solution:
    """A solution of a narrower problem, restated for `graph`, whose ids are the same.

    Its bound or INFEASIBLE does not hold here: other implementations, or copies, may be cheaper or smaller.

    Args:
        without: what makes the problem narrower.
    """
    stats = dict(solution.stats)
    if solution.bound is not None:
        stats["default_bound"] = solution.bound
    lifted = replace(solution, bound=graph.least_cost, certificate=None, proven_by="", gap=None, stats=stats)
    if solution.plan is None or solution.cost is None:
        if solution.status is not Status.INFEASIBLE:
            return lifted
        return replace(lifted, status=Status.NO_PLAN, message=f"{without}: {solution.message}")
    gap = relative_gap(solution.cost, graph.least_cost)
    status = Status.OPTIMAL if is_proven(solution.cost, graph.least_cost, "") else Status.FEASIBLE
    plan = replace(solution.plan, graph_sha256=graph.sha256())
    return replace(lifted, status=status, gap=gap, plan=plan)


def name_minimum(solution: Solution, problem: Problem, deadline: float, *, takes_start: bool) -> Solution:
    """The solution; if it has no plan, its message ends with the smallest budget known feasible.

    An INFEASIBLE already names that budget. The search for it ends `NAMING_S` after the deadline; on a large graph
    without time for it, the message stays.

    Args:
        takes_start: whether the caller can give the strategy a plan, and did not.
    """
    seconds = max(0.0, deadline + NAMING_S - time.monotonic())
    if solution.status not in (Status.TIMEOUT, Status.NO_PLAN) or seconds < LEAST_NAMING_S * len(problem.graph) - 0.2:
        return solution
    how = "; in Python, give it as warm_start" if takes_start else ""
    least = describe_minimum(
        problem.graph, problem.scope, time_limit_s=seconds, budget_bytes=problem.budget_bytes, how=how
    )
    return replace(solution, message=f"{solution.message}; {least}")


def refuse_if_impossible(problem: Problem, strategy: str) -> Solution | None:
    """An INFEASIBLE solution if some operation alone needs more than the budget."""
    reason = why_impossible(problem.graph, problem.budget_bytes, problem.scope)
    return without_plan(problem, strategy, Status.INFEASIBLE, reason) if reason else None


def why_impossible(graph: Graph, budget_bytes: int, scope: Scope) -> str:
    """Why one operation, or the values with `keep`, cannot fit the budget; '' if all of them can."""
    needed, k = graph.largest_working_set()
    if budget_bytes >= max(needed, graph.final_bytes):
        return ""
    cause = f"operation {k} ({graph.operations[k].name}) alone needs {format_size(needed)}"
    if graph.final_bytes > needed:
        cause = f"keeping values to the end (e.g. gradients) alone needs {format_size(graph.final_bytes)}"
    least = describe_minimum(graph, scope, with_operation=graph.final_bytes > needed)
    return f"budget {format_size(budget_bytes)} is too small: {cause}; {least}"


def reason_of(error: Exception) -> str:
    """The error in one line; with its class and place if it is not meant for users."""
    if isinstance(error, RematError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {plain(shortened(error, 300), 300)}{place}"
