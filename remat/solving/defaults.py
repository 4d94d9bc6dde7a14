"""Results of strategies that know only default implementations, for graphs with several."""

from __future__ import annotations

from dataclasses import replace

from remat.graph import Graph
from remat.incumbent import GAP_TOLERANCE, relative_gap
from remat.solution import Solution, Status


def restated(graph: Graph, solution: Solution) -> Solution:
    """A solution for `graph.default()`, restated for `graph`, whose ids are the same.

    A bound or an INFEASIBLE of the default graph does not hold here: other implementations may be cheaper or smaller.
    """
    stats = dict(solution.stats)
    if solution.bound is not None:
        stats["default_bound"] = solution.bound
    lifted = replace(solution, bound=graph.least_cost, certificate=None, gap=None, stats=stats)
    if solution.plan is None or solution.cost is None:
        if solution.status is not Status.INFEASIBLE:
            return lifted
        return replace(lifted, status=Status.NO_PLAN, message=f"with default implementations: {solution.message}")
    gap = relative_gap(solution.cost, graph.least_cost)
    status = Status.OPTIMAL if gap <= GAP_TOLERANCE else Status.FEASIBLE
    plan = replace(solution.plan, graph_sha256=graph.sha256())
    return replace(lifted, status=status, gap=gap, plan=plan)
