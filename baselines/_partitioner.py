"""PyTorch's partitioner with ``activation_memory_budget``, on the captured step behind a graph."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from remat import Candidate, Graph, Plan, Problem, Scope, Skip
from remat.frontends.spec import ModelSpec
from remat.search.online import in_stages

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


def captured_again(spec: ModelSpec, graph: Graph) -> Any:
    """The captured step behind the graph of a PyTorch network, for as long as the caller keeps it."""
    if spec.framework != "torch":
        return None
    from remat.torch.frontend.graphs import step_of_spec  # imports PyTorch

    return step_of_spec(spec, graph)


def partitioned(problem: Problem, estimators: Iterable[str], solvers: Iterable[str]) -> Iterator[Candidate]:
    """A plan for each estimator, solver and share; equal plans once.

    In scope staged, what a stage recomputes is in the graph's order.

    Raises:
        Skip: this process holds no captured step behind the graph.
    """
    needed = "needs a network captured with PyTorch, e.g. python run.py model=torch_gpt2"
    if "remat.torch.frontend.graphs" not in sys.modules:  # then nothing was captured, and the import takes seconds
        raise Skip(needed)
    from remat.torch.frontend.graphs import step_behind
    from remat.torch.inductor import mincut

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
        order = in_stages(order) if problem.scope is Scope.STAGED else order
        if tuple(order) not in known:
            known.add(tuple(order))
            choice = {"activation_memory_budget": share, "solver": solver, "estimator": estimator}
            yield Candidate(Plan.from_order(graph, order), choice)
