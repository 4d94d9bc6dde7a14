"""sqrt(n) checkpointing on articulation points."""

from __future__ import annotations

from baselines._chen import sqrt_checkpoints
from baselines._forward import Forward
from baselines._segments import segment_plans
from remat import Candidate, Problem, strategy


@strategy("ap_sqrtn", baseline=True, ignores_budget=True)
def ap_sqrtn(problem: Problem) -> list[Candidate]:
    """Checkpoint every floor(sqrt(n))-th of the n articulation points of the forward graph.

    The "AP sqrt(n)" of Jain et al., MLSys 2020: their extension of Chen et al. (2016) to graphs with
    branches. On a chain the candidates are all forward operations but the first and the loss.

    @inproceedings{jain2020checkmate, title={Checkmate: Breaking the Memory Wall with Optimal Tensor
    Rematerialization}, author={Jain, Paras and others}, booktitle={MLSys}, year={2020}}
    """
    forward = Forward.of(problem.graph)
    chosen = sqrt_checkpoints(forward.articulation_points())
    return segment_plans(forward, chosen, problem.accounting)
