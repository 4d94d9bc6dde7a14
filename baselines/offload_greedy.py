"""Copy to the host what is unused for longest, until the plan fits."""

from __future__ import annotations

from baselines._offload import offloaded
from remat import Candidate, Plan, Problem, strategy


@strategy("offload_greedy", baseline=True, copies="own")
def offload_greedy(problem: Problem) -> Candidate:
    """Nothing runs again: over the fullest place, the value with most bytes and time without use goes, and so on.

    The rule of swapping by benefit, as in Capuchin (Peng et al., ASPLOS 2020) without its choice to recompute.
    """
    graph = problem.graph
    return Candidate(offloaded(problem, Plan.from_order(graph, range(len(graph))), greedily=True))
