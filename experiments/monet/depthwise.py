"""Overheads if depthwise convolutions take longer than a roofline says.

The roofline was compared with measured times on three networks, none of which has such a convolution. Networks with
published costs are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.monet.algorithms import CONVOLUTION
from experiments.monet.cases import NO_WINOGRAD, OURS, Case, Context, budgets_of, entry, graph_run_of, published_graph
from experiments.monet.published import Network
from experiments.solving import GraphRun, solve_each
from remat.frontends.monet import plain_pytorch
from remat.graph import Graph
from remat.simulator import simulate

FACTORS = (2, 4)  # of the roofline's time; the part ``overhead`` has the solves at this time itself


def run(context: Context) -> dict[str, Any]:
    """A row for each network with depthwise convolutions, factor and budget, with the cost of PyTorch's own step."""
    rows = []
    for network in context.networks if OURS in context.settings.strategies else ():
        if published_graph(context, network) is not None:
            continue
        as_it_is = graph_run_of(context, network, NO_WINOGRAD, longer=True)
        for factor in FACTORS if depthwise(as_it_is.subject.graph) else ():
            rows += _rows(context, network, as_it_is, factor)
    return {"rows": rows}


def _rows(context: Context, network: Network, as_it_is: GraphRun, factor: int) -> list[dict[str, Any]]:
    graph = slower(as_it_is.subject.graph, factor)
    graph_run = context.graph_run(
        replace(as_it_is.subject, graph=graph), "paper/monet", strategies=(OURS,),
        time_limit_s=as_it_is.settings.time_limit_s,
    )  # fmt: skip
    cases = [Case(network.name, NO_WINOGRAD, OURS, budget) for budget in budgets_of(context, network)]
    rows = solve_each([(graph_run, OURS, case.budget_bytes) for case in cases])
    own = {"factor": factor, "pytorch_cost": simulate(graph, plain_pytorch(graph)).cost}
    return [entry(case, row) | own for case, row in zip(cases, rows, strict=True)]


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
    costs = [
        each.cost * (factor if k in slow else 1)
        for k, op in enumerate(graph.operations) for each in op.all_implementations
    ]  # fmt: skip
    return replace(graph.with_costs(costs, graph.cost_unit), name=f"{graph.name}_depthwise_x{factor}")
