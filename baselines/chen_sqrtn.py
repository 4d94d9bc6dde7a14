"""Chen et al.'s sqrt(n) checkpointing, linearised for graphs that are not chains."""

from __future__ import annotations

from baselines._chen import sqrt_checkpoints
from baselines._forward import Forward
from baselines._segments import segment_plans
from remat import Candidate, Problem, strategy


@strategy("chen_sqrtn", baseline=True, ignores_budget=True)
def chen_sqrtn(problem: Problem) -> list[Candidate]:
    """Checkpoint every floor(sqrt(n))-th of the n forward operations (Chen et al. 2016), linearised.

    On a graph that is not a chain every operation of the forward pass, in the graph's order, is a candidate,
    and a value that crosses a segment's border is rebuilt when it is read: "Linearized sqrt(n)" in Jain et
    al., MLSys 2020. The loss counts as a forward operation, as in their artifact.

    @article{chen2016training, title={Training Deep Nets with Sublinear Memory Cost}, author={Chen, Tianqi
    and Xu, Bing and Zhang, Chiyuan and Guestrin, Carlos}, journal={arXiv:1604.06174}, year={2016}}
    """
    forward = Forward.of(problem.graph)
    chosen = sqrt_checkpoints(range(len(forward.operations)))
    return segment_plans(forward, chosen, problem.accounting)
