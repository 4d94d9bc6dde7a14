"""Plans of PyTorch's own partitioner for a captured step.

`min_cut_rematerialization_partition` chooses the tensors that the forward pass saves, within a share
(``activation_memory_budget``) of the bytes that would be saved without recomputation. It runs on a copy of the
training graph; its result is not executed.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from remat.graph import Graph
from remat.torch.internals.aot import min_cut
from remat.torch.step.training_graph import CapturedStep, values_in

SOLVERS = ("dp", "greedy", "ilp")  # values of ``activation_memory_budget_solver``
FLOPS, PROFILE = "flops", "profile"  # values of ``activation_memory_budget_runtime_estimator``


def order_within(step: CapturedStep, graph: Graph, share: float, solver: str, estimator: str) -> list[int]:
    """The order of computations of ``graph`` (the step's, with costs) that the partitioner chooses.

    Args:
        share: ``activation_memory_budget``.
        solver: of the knapsack, one of `SOLVERS`.
        estimator: of runtimes: `FLOPS`, or `PROFILE` for the costs of the graph's operations.
    """
    costs = {node.name: op.cost for op, nodes in zip(graph.operations, step.nodes, strict=True) for node in nodes}
    training_graph = step.training_graph
    forward, _ = min_cut(
        training_graph.module, training_graph.n_forward_outputs, costs if estimator == PROFILE else None, share, solver
    )
    return order_with(graph, values_saved_by(forward, step))


def values_saved_by(forward: fx.GraphModule, step: CapturedStep) -> set[int]:
    """Values of the step that a forward half with the names of its training graph saves."""
    by_name = {node.name: node for node in step.training_graph.module.graph.nodes}
    outputs: Any = forward.graph.find_nodes(op="output")[0].args[0]
    saved = outputs[step.training_graph.n_forward_outputs :]
    names = [node.name for node in saved if isinstance(node, fx.Node)]
    return {v for name in names for v in values_in(step.storage[by_name[name]])}


def order_with(graph: Graph, saved: set[int]) -> list[int]:
    """Every operation in its order; backward recomputes a value that forward does not save when it first reads it."""
    end = next(k for k, op in enumerate(graph.operations) if op.is_backward) - 1
    order = list(range(end + 1))
    kept = {v for v, value in enumerate(graph.values) if value.keep or not value.bytes}
    once = {v for op in graph.operations if op.run_once for v in op.outputs}
    resident = {v for v in saved | kept | once if graph.producer[v] <= end}
    for k in range(end + 1, len(graph)):
        stack = [k]
        while stack:
            missing = [graph.producer[v] for v in graph.operations[stack[-1]].inputs if v not in resident]
            if missing:
                stack.append(missing[0])
                continue
            order.append(stack[-1])
            resident.update(graph.operations[stack.pop()].outputs)
    return order
