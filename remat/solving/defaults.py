"""Strategies that know one implementation of each operation, on graphs with several: they use the default ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from remat.graph import Graph
from remat.incumbent import GAP_TOLERANCE, relative_gap
from remat.plan import Plan
from remat.solution import Solution, Status


def lift_default(graph: Graph, plan: Plan) -> Plan:
    """A plan of `graph.default()` as a plan of `graph`, whose ids are the same."""
    return replace(plan, graph_sha256=graph.sha256())


def solve_default(graph: Graph, solve: Callable[[Graph], Sequence[Solution]]) -> list[Solution]:
    """Solve the graph with default implementations; restate the result for the full graph.

    A bound or an INFEASIBLE of the default graph does not hold here: other implementations may be cheaper or smaller.
    """
    return [_lifted(graph, solution) for solution in solve(graph.default())]


def _lifted(graph: Graph, solution: Solution) -> Solution:
    stats = dict(solution.stats)
    if solution.bound is not None:
        stats["default_bound"] = solution.bound
    restated = replace(solution, bound=graph.least_cost, certificate=None, gap=None, stats=stats)
    if solution.plan is None or solution.cost is None:
        status = Status.NO_PLAN if solution.status is Status.INFEASIBLE else solution.status
        message = solution.message
        if status is not solution.status:
            message = f"with default implementations: {message}"
        return replace(restated, status=status, message=message)
    gap = relative_gap(solution.cost, graph.least_cost)
    status = Status.OPTIMAL if gap <= GAP_TOLERANCE else Status.FEASIBLE
    return replace(restated, status=status, gap=gap, plan=lift_default(graph, solution.plan))
