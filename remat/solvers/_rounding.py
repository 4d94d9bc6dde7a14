"""Parts shared by the two rounding strategies: the relaxation, phase two, the improvement beyond the paper."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from remat.bounds.lp import model_columns, solve_relaxation
from remat.context import Context
from remat.errors import Skip
from remat.graph import Graph
from remat.plan import Plan
from remat.programs.highs import interior_point
from remat.programs.published import build
from remat.programs.staged import build_staged_model
from remat.registry import POSITIVE, SHARE
from remat.search.anneal import minimise_cost
from remat.search.greedy import with_missing_ancestors
from remat.search.ready import ready_by
from remat.simulator import simulate
from remat.solution import Candidate, Outcome

LARGEST_COLUMNS = 400_000
RELAXATIONS = TRIMMED, PUBLISHED = "trimmed", "published"
ALLOWED = {"epsilon": SHARE, "samples": POSITIVE, "relaxation": RELAXATIONS, "improve": bool}
NOT_IN_TIME = "the relaxation was not solved in time; raise time_limit"
LP_SHARE = 0.7  # largest share of the time for the relaxation
IMPROVE_MOVES = 200_000  # of the search, beyond the paper


def relaxed_residency(
    context: Context, epsilon: float, relaxation: str, *, may_shrink: bool
) -> tuple[np.ndarray | None, str]:  # fmt: skip
    """([T, V] S of the LP relaxation within fixed + (1 - epsilon) (budget - fixed) or None, a message).

    The relaxation is that of the trimmed model or of the published one. Near the smallest budgets it has no solution
    there: with `may_shrink` it is tried again with epsilon / 2, epsilon / 4 and 0.

    Raises:
        Skip: the relaxation is too large.
    """
    graph = context.problem.graph
    columns = model_columns(graph)
    if columns > LARGEST_COLUMNS:
        raise Skip(f"the relaxation would have {columns:,} columns; the limit is {LARGEST_COLUMNS:,}")
    for share in (epsilon, epsilon / 2, epsilon / 4, 0.0) if may_shrink else (epsilon,):
        reduced = int((1 - share) * (context.problem.budget_bytes - graph.fixed_bytes))
        until = context.share_ends(LP_SHARE)
        S_TV = (_published if relaxation == PUBLISHED else _trimmed)(context, reduced, until)
        if S_TV is not None:
            note = "" if share == epsilon else f"nothing fits with epsilon {epsilon:g}: relaxed with {share:g}"
            return S_TV, note
        if time.monotonic() > until - 0.1:
            return None, NOT_IN_TIME
    advice = "" if may_shrink else "; lower epsilon"
    return None, f"the relaxation has no solution within {1 - epsilon:.0%} of the budget{advice}"


def _trimmed(context: Context, room_bytes: int, until: float) -> np.ndarray | None:
    """[T, V] S of the trimmed relaxation with that room above the fixed bytes; None without a solution until then."""
    graph = context.problem.graph
    model = build_staged_model(graph, graph.fixed_bytes + room_bytes, memory="stage_end")
    if model.infeasible:
        return None
    all_columns = np.ones(model.shape[1], dtype=bool)
    solved = solve_relaxation(model, all_columns, until - time.monotonic(), context.solver_threads)
    return None if solved is None else model.matrices(solved[0])[1]


def _published(context: Context, room_bytes: int, until: float) -> np.ndarray | None:
    """The same of the published relaxation, with FREE and U."""
    graph = context.problem.graph
    equations = build(graph)
    program = replace(equations.program(room_bytes // equations.unit_bytes), is_integer=None)
    solved = interior_point(program, until - time.monotonic(), context.solver_threads)
    return None if solved is None else equations.residency(solved[0])


def cheapest_runs(graph: Graph, S_TV: np.ndarray) -> list[int] | None:
    """Phase two: the fewest computations that make a 0/1 S possible, in order; None if a run-once operation repeats.

    Stage t computes operation t, the producers of values in S[t+1] but not in S[t], and the absent ancestors of both.
    """
    order: list[int] = []
    for t in range(len(graph)):
        wanted = {t}
        if t + 1 < len(graph):
            fresh = np.nonzero(S_TV[t + 1] & ~S_TV[t])[0].tolist()
        else:
            fresh = [v for v, value in enumerate(graph.values) if value.keep and not S_TV[t, v]]
        wanted |= {graph.producer[v] for v in fresh if graph.producer[v] < t}
        wanted = with_missing_ancestors(graph, wanted, S_TV[t])
        if any(k != t and graph.operations[k].run_once for k in wanted):
            return None
        order.extend(sorted(wanted))
    return order


def round_all(
    context: Context, who: str, residencies: Iterable[tuple[np.ndarray, dict[str, Any]]], improve: bool, note: str
) -> Outcome:
    """Phase two of every rounded S; with `improve` the search continues from the best one.

    `note` becomes the message if there is a plan. ``stats["points"]`` has (cost, peak in bytes) of every rounding that
    can be executed, also of those that do not fit.
    """
    graph = context.problem.graph
    candidates: list[Candidate] = []
    best: tuple[tuple[bool, int, int], list[int]] | None = None
    tried = 0
    points: list[tuple[int, int]] = []
    for S_TV, parameters in residencies:
        if context.remaining_s() < 0.1:
            break
        tried += 1
        order = cheapest_runs(graph, S_TV)
        if order is None:
            continue
        plan = Plan.from_order(graph, order, context.problem.budget_bytes)
        trace = simulate(graph, plan)
        fits = trace.peak_bytes <= context.problem.budget_bytes
        points.append((trace.cost, trace.peak_bytes))
        if fits:
            candidates.append(Candidate(plan, parameters))
            context.offer(plan, who)
        key = (not fits, trace.cost if fits else trace.peak_bytes, trace.cost)
        if best is None or key < best[0]:
            best = key, order
    stats: dict[str, Any] = {"roundings": tried, "roundings_that_fit": len(candidates), "points": points}
    if improve and best is not None and ready_by(context.deadline) and context.remaining_s() > 0.2:
        began = time.monotonic()
        found = minimise_cost(
            graph, context.problem.budget_bytes, np.array(best[1], dtype=np.int32), seed=context.options.seed,
            deadline=context.deadline - 0.1, work_limit=context.options.work_limit or IMPROVE_MOVES,
        )  # fmt: skip
        stats["improve_s"] = time.monotonic() - began
        plan = found.plan(graph, context.problem.budget_bytes)
        if plan is not None:
            candidates.append(Candidate(plan, {"improved": True}))
    message = note if candidates else f"none of {tried} roundings fits the budget"
    return Outcome(tuple(candidates), message=message, stats=stats)
