"""Overheads if depthwise convolutions take longer than a roofline says.

The roofline was compared with measured times on three networks, none of which has such a convolution. Networks with
published costs are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.build import Subject
from experiments.monet.cases import NO_WINOGRAD, OURS, Context, budgets_of, graph_run_of, published_graph
from experiments.monet.published import Network
from experiments.solving import GraphRun, solve_each
from remat.frontends.monet import plain_pytorch
from remat.graph import Graph, Operation
from remat.simulator import simulate

FACTORS = (1, 2, 4)  # of the roofline's time
CONVOLUTION = "aten::_convolution"


def run(context: Context) -> dict[str, Any]:
    """A row for each network with depthwise convolutions, factor and budget, with the cost of PyTorch's own step."""
    rows = []
    for network in context.networks if OURS in context.settings.strategies else ():
        if published_graph(context, network) is not None:
            continue
        graph = graph_run_of(context, network, NO_WINOGRAD).subject.graph
        for factor in FACTORS if depthwise(graph) else ():
            rows += _rows(context, network, factor)
    return {"rows": rows, "store": context.store_from(context.folder)}


def _rows(context: Context, network: Network, factor: int) -> list[dict[str, Any]]:
    graph_run = _graph_run(context, network, factor)
    budgets, graph = budgets_of(context, network), graph_run.subject.graph
    plain = simulate(graph, plain_pytorch(graph)).cost
    rows = solve_each([(graph_run, OURS, budget) for budget in budgets])
    return [
        {"network": network.name, "label": network.label, "factor": factor, "budget_bytes": budget,
         "published_percent": dict(zip(network.budgets_bytes, network.overheads_percent, strict=True)).get(budget),
         "pytorch_cost": plain, "key": row.key}
        for budget, row in zip(budgets, rows, strict=True)
    ]  # fmt: skip


def _graph_run(context: Context, network: Network, factor: int) -> GraphRun:
    """The solves with slower depthwise convolutions; those of the part ``overhead`` for the factor 1."""
    longer = graph_run_of(context, network, NO_WINOGRAD, longer=True)
    if factor == 1:
        return longer
    subject: Subject = replace(longer.subject, graph=slower(longer.subject.graph, factor))
    return context.graph_run(subject, "paper/monet", strategies=(OURS,), time_limit_s=longer.settings.time_limit_s)


def depthwise(graph: Graph) -> set[int]:
    """The depthwise convolutions of a graph of `monet_graph`, forward and backward.

    One operation makes both gradients of such a convolution. It reads what the convolution reads.
    """
    operations = graph.operations
    backward = {
        k for k, op in enumerate(operations)
        if op.kind == f"{CONVOLUTION}_ip_grad" and operations[k - 1].kind != f"{CONVOLUTION}_param_grad"
    }  # fmt: skip
    read = {v for k in backward for v in operations[k].inputs}
    return backward | {
        k for k, op in enumerate(operations) if op.kind == CONVOLUTION and not read.isdisjoint(op.inputs)
    }


def slower(graph: Graph, factor: int) -> Graph:
    """The graph with depthwise convolutions that cost `factor` times as much."""
    slow = depthwise(graph)

    def changed(op: Operation) -> Operation:
        others = tuple(replace(other, cost=factor * other.cost) for other in op.implementations)
        return replace(op, cost=factor * op.cost, implementations=others)

    operations = tuple(changed(op) if k in slow else op for k, op in enumerate(graph.operations))
    return replace(graph, name=f"{graph.name}_depthwise_x{factor}", operations=operations)
