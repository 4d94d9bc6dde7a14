"""PyTorch's min-cut partitioner with ``activation_memory_budget``, which most PyTorch users have today."""

from __future__ import annotations

from collections.abc import Iterator

from baselines._partitioner import captured_again, partitioned
from remat import Candidate, Problem, strategy


@strategy("torch_mincut", baseline=True, ignores_budget=True, prepare=captured_again, version=2)
def torch_mincut(problem: Problem) -> Iterator[Candidate]:
    """PyTorch's partitioner chooses the values that the forward pass saves, for each of several shares.

    All other values are recomputed once, where the backward pass first reads them. A share is of the bytes saved
    between the passes; it does not bound the peak. The knapsack's solver is PyTorch's default, and runtimes are the
    costs of the graph; `torch_budget` has the others. The baseline needs the captured step behind the graph, because
    a graph alone does not tell PyTorch enough: runs of PyTorch networks capture it.
    """
    return partitioned(problem, ["profile"], ["dp"])
