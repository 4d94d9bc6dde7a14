"""PyTorch's partitioner with ``activation_memory_budget``, on a step that this process captured."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import product

from remat import Candidate, Plan, Problem, Skip

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


def partitioned(problem: Problem, estimators: Iterable[str], solvers: Iterable[str]) -> Iterator[Candidate]:
    """A plan for each estimator, solver and share; equal plans once.

    Raises:
        Skip: the graph is of no step that this process captured.
    """
    needed = "needs a step that this process captured with PyTorch: python run.py experiment=execution"
    if "remat.torch.graphs" not in sys.modules:  # then nothing was captured, and the import takes seconds
        raise Skip(needed)
    from remat.torch import mincut
    from remat.torch.graphs import step_behind

    graph = problem.graph
    step = step_behind(graph)
    if step is None:
        raise Skip(needed)
    known, ends = set[tuple[int, ...]](), set[float]()
    for estimator, solver, share in product(estimators, solvers, SHARES):
        if share in ends:
            continue  # neither solver nor estimator is asked
        ends |= {share} & {0.0, 1.0}
        order = mincut.order_within(step, graph, share, solver, estimator)
        if tuple(order) not in known:
            known.add(tuple(order))
            choice = {"activation_memory_budget": share, "solver": solver, "estimator": estimator}
            yield Candidate(Plan.from_order(graph, order), choice)
