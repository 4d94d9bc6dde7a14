"""Checkpoint every articulation point of the forward graph."""

from __future__ import annotations

from baselines._forward import Forward
from baselines._segments import segment_plans
from remat import Candidate, Problem, strategy


@strategy("checkpoint_all_ap", baseline=True, ignores_budget=True)
def checkpoint_all_ap(problem: Problem) -> list[Candidate]:
    """Keep every articulation point of the forward graph and rebuild the operations between them.

    "Checkpoint all APs" in Jain et al., MLSys 2020. On a chain this keeps all but the first layer and the loss.
    """
    forward = Forward.of(problem.graph)
    return segment_plans(forward, forward.articulation_points(), problem.accounting)
