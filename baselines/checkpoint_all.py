"""Checkpoint-all: keep every activation, recompute nothing; the framework's default."""

from __future__ import annotations

from remat import Plan, Problem, strategy
from remat.plan import frees_held_to_end


@strategy("checkpoint_all", ignores_budget=True)
def checkpoint_all(problem: Problem) -> Plan:
    """Compute everything once, in order.

    Under ``accounting=published`` every value is held to the end of the step, as the artifact of
    Checkmate (Jain et al., MLSys 2020) counts it; otherwise it is freed at its last use.
    """
    graph = problem.graph
    order = range(len(graph))
    if problem.accounting == "published":
        return Plan.from_steps(graph, frees_held_to_end(graph, order, held=range(len(graph.values))))
    return Plan.from_order(graph, order)
