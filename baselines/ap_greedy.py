"""Greedy checkpointing by segment size on articulation points."""

from __future__ import annotations

from collections.abc import Iterator

from baselines._chen import greedy_family
from baselines._forward import Forward
from remat import Candidate, Problem, strategy


@strategy("ap_greedy", baseline=True, ignores_budget=True)
def ap_greedy(problem: Problem) -> Iterator[Candidate]:
    """Checkpoint at the first articulation point at which a segment exceeds b bytes, b swept.

    The "AP greedy" of Jain et al., MLSys 2020: their extension of Chen et al. (2016) to graphs with branches.
    b is swept as in `chen_greedy`.

    @inproceedings{jain2020checkmate, title={Checkmate: Breaking the Memory Wall with Optimal Tensor
    Rematerialization}, author={Jain, Paras and others}, booktitle={MLSys}, year={2020}}
    """
    forward = Forward.of(problem.graph)
    yield from greedy_family(forward, forward.articulation_points(), problem.accounting)
