"""Checkpoint every articulation point of the forward graph."""

from __future__ import annotations

from baselines._forward import Forward
from baselines._segments import segment_plans
from remat import Candidate, Problem, Skip, strategy


@strategy("checkpoint_all_ap", baseline=True, ignores_budget=True)
def checkpoint_all_ap(problem: Problem) -> list[Candidate]:
    """Keep every articulation point of the forward graph and rebuild what lies between them.

    "Checkpoint all APs" in Jain et al., MLSys 2020. On a chain this keeps all but the first layer and the loss.
    """
    forward = Forward.of(problem.graph)
    chosen = forward.articulation_points()
    if not chosen:
        raise Skip("the forward pass has no articulation points to keep")
    return segment_plans(forward, chosen, problem.accounting)
