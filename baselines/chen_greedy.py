"""Chen et al.'s greedy checkpointing by segment size, linearised for graphs that are not chains."""

from __future__ import annotations

from collections.abc import Iterator

from baselines._chen import greedy_family
from baselines._forward import Forward
from remat import Candidate, Problem, strategy


@strategy("chen_greedy", baseline=True, ignores_budget=True)
def chen_greedy(problem: Problem) -> Iterator[Candidate]:
    """Checkpoint whenever a segment exceeds b bytes, b swept (Chen et al. 2016, Alg. 3), linearised.

    b runs over sqrt(n)'s activation peak times 0 to 2.95 in steps of 0.05, as in the artifact of Jain et al.,
    MLSys 2020 ("Linearized greedy"); each b is one member of the family.

    @article{chen2016training, title={Training Deep Nets with Sublinear Memory Cost}, author={Chen, Tianqi
    and Xu, Bing and Zhang, Chiyuan and Guestrin, Carlos}, journal={arXiv:1604.06174}, year={2016}}
    """
    forward = Forward.of(problem.graph)
    yield from greedy_family(forward, range(len(forward.operations)), problem.accounting)
