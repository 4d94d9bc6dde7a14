"""Keep only the last forward value: recompute everything for each gradient."""

from __future__ import annotations

from baselines._forward import Forward
from baselines._segments import base_residency, hold_latest, plan_of_residency
from remat import Plan, Problem, strategy


@strategy("checkpoint_last", baseline=True, ignores_budget=True)
def checkpoint_last(problem: Problem) -> Plan:
    """Keep only the latest value of the forward pass; rebuild the inputs of each gradient from scratch.

    "Checkpoint last node" in Jain et al., MLSys 2020. Its cost grows with the square of the depth. Unlike their
    artifact, it never recomputes gradients.
    """
    forward = Forward.of(problem.graph)
    return plan_of_residency(forward, hold_latest(forward, base_residency(forward)), problem.accounting)
