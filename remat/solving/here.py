"""Run strategies in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from remat.context import Context, incumbent_of
from remat.errors import InvalidPlan, Skip, shortened
from remat.problem import Problem
from remat.registry import Strategy, get_strategy
from remat.solution import Ending, Family, Member, Outcome, Solution, Status, candidates_of
from remat.solving.judgement import (
    conclude,
    conclude_early,
    decide,
    judge,
    reason_of,
    refuse_if_impossible,
    restated,
    without_plan,
)
from remat.solving.patience import in_runs


def solve_here(context: Context, strategy: str, options: Mapping[str, Any]) -> Solution:
    """Run one strategy in this process; plans and bounds that it offered count even if it crashes."""
    began, chosen, problem = time.monotonic(), get_strategy(strategy), context.problem
    solution = refuse_if_impossible(problem, strategy)
    if solution is None and problem.link is not None and chosen.copies == "none":
        without, start = replace(problem, link=None), context.options.warm_start
        inner = context.about(without, incumbent_of(without, record=context.take_plan))
        if start is not None and start.has_copies:
            inner = inner.with_options(warm_start=None)
        solution = restated(problem.graph, _run(inner, chosen, options), "without copies")
    return replace(solution or _run(context, chosen, options), wall_s=time.monotonic() - began)


def _run(context: Context, strategy: Strategy, options: Mapping[str, Any]) -> Solution:
    name = strategy.name
    try:
        run = partial(_produced, strategy=strategy, options=options)
        is_patient = context.options.least_gain is None or context.repeats or not strategy.members
        is_patient |= context.problem.link is not None
        produced = run(context) if is_patient else in_runs(context, run)
        outcome = produced if isinstance(produced, Outcome) else Outcome()
        members, rejected = judge(context, candidates_of(produced), name)
        if context.repeats and outcome.cut_by_clock is None:
            outcome = replace(outcome, cut_by_clock=context.is_cut())
        return conclude(context, name, outcome, members, rejected)
    except Skip as skip:
        return without_plan(context.problem, name, Status.SKIPPED, shortened(skip, 1000))
    except KeyboardInterrupt:
        kept = conclude_early(context, name, Ending.INTERRUPTED, "interrupted")
        if kept.plan is None and kept.status is not Status.FAILED:
            raise
        return kept
    except Exception as error:  # a strategy that crashes fails only its own row, and the row says why
        if isinstance(error, InvalidPlan):  # the judge refutes a claim
            context.incumbent.contradict(f"strategy '{name}' proposed a plan that cannot be executed: {error}")
        return conclude_early(context, name, Ending.CRASHED, reason_of(error), status=Status.FAILED)


def _produced(context: Context, strategy: Strategy, options: Mapping[str, Any]) -> Any:
    """What a strategy returns, not judged yet."""
    if context.problem.link is not None and strategy.copies == "annealed":
        from remat.solvers.offload import solve_with_link  # here, because it imports Numba and SciPy

        return solve_with_link(context, strategy, options)
    if context.problem.graph.has_implementations and strategy.implementations == "search":
        from remat.solvers.choose import choose_and_solve  # here, because it imports Numba and SciPy

        return choose_and_solve(context, strategy, options)
    return strategy(context, options)


def run_family(
    context: Context, strategy: str, options: Mapping[str, Any], on_member: Callable[[Member], None] = lambda _: None
) -> Family:
    """Run a strategy that ignores the budget, in this process, and judge all of its plans; `on_member` gets each."""
    start = time.monotonic()
    result = Family(strategy)
    try:
        members, rejected = judge(context, candidates_of(get_strategy(strategy)(context, options)), strategy, on_member)
        result = replace(result, members=tuple(members), rejected=rejected)
    except Skip as skip:
        result = replace(result, status=Status.SKIPPED, message=shortened(skip, 1000))
    except Exception as error:  # a strategy that crashes fails only its own row, and the row says why
        result = replace(result, status=Status.FAILED, message=reason_of(error))
    return replace(result, wall_s=time.monotonic() - start)


def solve_family(family: Family, problems: Sequence[Problem]) -> list[Solution]:
    """For each problem, the cheapest member of `family` that fits its budget; nothing is solved."""
    solutions = []
    for problem in problems:
        if family.status:
            solution = without_plan(problem, family.strategy, family.status, family.message)
        else:
            solution = refuse_if_impossible(problem, family.strategy) or decide(
                problem, family.strategy, Outcome(), family.members, family.rejected
            )
        solutions.append(replace(solution, wall_s=family.wall_s))
    return solutions
