"""A graph in another topological order, and its plans restated in the labels of the original graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from remat.errors import InvalidInput
from remat.graph import Graph
from remat.plan import COMPUTE, Plan


def reordered(graph: Graph, order: Sequence[int]) -> Graph:
    """The same graph with its operations listed in `order`; values keep their ids.

    Operation i of the result is operation ``order[i]`` of `graph`.

    Raises:
        InvalidInput: `order` does not name every operation once.
        InvalidGraph: a user comes before a producer.
    """
    order = [int(k) for k in order]
    if sorted(order) != list(range(len(graph))):
        raise InvalidInput(f"an order must name each of the {len(graph)} operations once")
    loss = None if graph.loss is None else order.index(graph.loss)
    return replace(graph, operations=tuple(graph.operations[k] for k in order), loss=loss)


def plan_in_original(graph: Graph, order: Sequence[int], plan: Plan) -> Plan:
    """Restate a plan of ``reordered(graph, order)`` as a plan of `graph`; its scope is derived again."""
    steps = [
        (kind, int(order[i]) if kind == COMPUTE else i, name)
        for kind, i, name in zip(
            plan.kinds.tolist(), plan.ids.tolist(), plan.implementations or [""] * len(plan.ids), strict=True
        )
    ]
    return Plan.from_steps(graph, steps, plan.budget_bytes)
