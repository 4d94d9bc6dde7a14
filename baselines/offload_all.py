"""Copy everything to the host that the backward pass reads."""

from __future__ import annotations

from baselines._offload import offloaded
from remat import Candidate, Plan, Problem, strategy


@strategy("offload_all", baseline=True, copies="own")
def offload_all(problem: Problem) -> Candidate:
    """Copy what the forward pass makes to the host, and back when the backward pass reads it; repeat nothing.

    What vDNN (Rhu et al., MICRO 2016, "all") and PyTorch's ``save_on_cpu`` do. Copies back begin as late as they can
    without making the computations wait, where the link is fast enough.
    """
    graph = problem.graph
    return Candidate(offloaded(problem, Plan.from_order(graph, range(len(graph)))))
