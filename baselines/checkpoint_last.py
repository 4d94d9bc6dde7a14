"""Keep only the last forward value: recompute everything for each gradient."""

from __future__ import annotations

import numpy as np

from baselines._forward import Forward
from baselines._segments import base_residency, plan_of_residency
from remat import Plan, Problem, strategy


def last_value_residency(forward: Forward) -> np.ndarray:
    """S_TV in which the forward pass hands on only the outputs of the stage before."""
    S_TV = base_residency(forward)
    for k in forward.operations:
        S_TV[k + 1 : k + 2, list(forward.graph.operations[k].outputs)] = True
    return S_TV


@strategy("checkpoint_last", ignores_budget=True)
def checkpoint_last(problem: Problem) -> Plan:
    """Keep nothing of the forward pass but its latest value; rebuild the inputs of each gradient from scratch.

    "Checkpoint last node" in Jain et al., MLSys 2020: cost grows with the square of the depth. Unlike their
    artifact, gradients are never recomputed.
    """
    forward = Forward.of(problem.graph)
    return plan_of_residency(forward, last_value_residency(forward), problem.accounting)
