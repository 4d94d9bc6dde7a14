"""Strategies that know of one implementation only, on graphs with several: they run with the default ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from remat.graph import Graph
from remat.incumbent import GAP_TOLERANCE, relative_gap
from remat.plan import Plan
from remat.solve import Solution, Status


def lift_default(joint: Graph, plan: Plan) -> Plan:
    """A plan of `joint.default()` as a plan of `joint`, whose ids are the same."""
    return replace(plan, graph_sha256=joint.sha256())


def solve_default(joint: Graph, solve: Callable[[Graph], Sequence[Solution]]) -> list[Solution]:
    """What `solve` finds on the graph of default implementations, said of the joint graph.

    What is proven there does not hold here: other implementations may be cheaper or smaller.
    """
    return [_lifted(joint, solution) for solution in solve(joint.default())]


def _lifted(joint: Graph, solution: Solution) -> Solution:
    stats = dict(solution.stats)
    if solution.bound is not None:
        stats["default_bound"] = solution.bound
    said = replace(solution, bound=joint.least_cost, certificate=None, gap=None, stats=stats)
    if solution.plan is None or solution.cost is None:
        status = Status.NO_PLAN if solution.status is Status.INFEASIBLE else solution.status
        message = solution.message
        if status is not solution.status:
            message = f"with default implementations: {message}"
        return replace(said, status=status, message=message)
    gap = relative_gap(solution.cost, joint.least_cost)
    status = Status.OPTIMAL if gap <= GAP_TOLERANCE else Status.FEASIBLE
    return replace(said, status=status, gap=gap, plan=lift_default(joint, solution.plan))
