"""PyTorch's min-cut partitioner with ``activation_memory_budget``, which most PyTorch users have today."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from remat import Candidate, Plan, Problem, Skip, strategy

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


@strategy("torch_mincut", baseline=True, ignores_budget=True)
def torch_mincut(problem: Problem) -> Iterator[Candidate]:
    """PyTorch's partitioner chooses the values that the forward pass saves, for each of several shares.

    All other values are recomputed once, where the backward pass first reads them. A share is of the bytes saved
    between the passes; it does not bound the peak. The baseline needs a step that this process captured for execution
    (`remat.torch`), because a graph alone does not tell PyTorch enough.
    """
    needed = "needs a step that this process captured with PyTorch: python run.py experiment=execution"
    if "remat.torch.graphs" not in sys.modules:  # then nothing was captured, and the import takes seconds
        raise Skip(needed)
    from remat.torch import mincut
    from remat.torch.graphs import step_behind

    step = step_behind(problem.graph)
    if step is None:
        raise Skip(needed)
    for share, order in mincut.plans(step, problem.graph, SHARES).items():
        yield Candidate(Plan.from_order(problem.graph, order), {"activation_memory_budget": share})
