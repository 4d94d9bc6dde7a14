"""Plans of PyTorch's own partitioner for a captured step.

`min_cut_rematerialization_partition` chooses the tensors that the forward pass saves, within a share
(``activation_memory_budget``) of the bytes that would be saved without recomputation. It runs on a copy of the
training graph, with the costs of our operations as its runtime estimates; its result is not executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from remat.graph import Graph
from remat.torch._private import min_cut, tree_iter
from remat.torch.step_graph import END_KIND, CapturedStep


def plans(step: CapturedStep, graph: Graph, shares: Sequence[float]) -> dict[float, list[int]]:
    """Orders of computations of ``graph`` (the step's, with costs), one for each ``activation_memory_budget``."""
    costs = {node.name: op.cost for op, nodes in zip(graph.operations, step.nodes, strict=True) for node in nodes}
    return {share: order_with(graph, saved_values(step, costs, share)) for share in shares}


def saved_values(step: CapturedStep, costs: Mapping[str, int], share: float) -> set[int]:
    """Values of the step that the forward half saves; `costs`: by names of calls."""
    training_graph = step.training_graph
    copied, places = fx.Graph(), dict[fx.Node, fx.Node]()
    copied.graph_copy(training_graph.module.graph, places)
    end = copied.output(tuple(None if node is None else places[node] for node in training_graph.outputs))
    end.meta.update(training_graph.module.graph.find_nodes(op="output")[0].meta)
    module = fx.GraphModule(training_graph.module, copied)
    by_name = {node.name: node for node in training_graph.module.graph.nodes}
    forward = min_cut(module, training_graph.n_forward_outputs, costs, share)
    outputs = forward.graph.find_nodes(op="output")[0].args[0]
    names = [node.name for node in outputs[training_graph.n_forward_outputs :] if isinstance(node, fx.Node)]
    return {v for name in names for v in tree_iter(step.storage[by_name[name]]) if isinstance(v, int)}


def order_with(graph: Graph, saved: set[int]) -> list[int]:
    """Every operation in its order; backward recomputes a value that forward does not save when it first reads it."""
    end = next(k for k, op in enumerate(graph.operations) if op.kind == END_KIND)
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
