"""Checkpoint-all: keep every activation, recompute nothing; the framework's default."""

from __future__ import annotations

from baselines._forward import Forward
from baselines._segments import segment_plan
from remat import Plan, Problem, Skip, strategy
from remat.plan import frees_held_to_end


@strategy("checkpoint_all", baseline=True, ignores_budget=True)
def checkpoint_all(problem: Problem) -> Plan:
    """Compute everything once, in order.

    Under ``accounting=published`` every forward value stays until the step ends, as the artifact of Checkmate
    (Jain et al., MLSys 2020) counts it. Otherwise each value is freed at its last use.
    """
    graph = problem.graph
    order = range(len(graph))
    if problem.accounting == "exact":
        return Plan.from_order(graph, order)
    try:
        forward = Forward.of(graph)
    except Skip:  # no backward pass: every value is a forward value
        return Plan.from_steps(graph, frees_held_to_end(graph, order, held=range(len(graph.values))))
    return segment_plan(forward, range(len(forward.operations)), problem.accounting)
