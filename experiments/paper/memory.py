"""Memory over time of a chain, bytes of features, parameters and layers, and every strategy's schedule."""

from __future__ import annotations

from typing import Any

from experiments.budget_sweep import run_single
from experiments.build import Subject
from experiments.paper.graphs import Context, budgets_at, extracted, panel_of
from experiments.paper.networks import Network
from experiments.per_sample import per_sample
from experiments.settings import configured_model
from remat.frontends import synthetic
from remat.frontends.json import graph_to_dict

LAYERS = 32


def run(context: Context) -> dict[str, Any]:
    """A plan for the chain, a plan of every strategy for the first network, and sizes of all networks.

    The graphs are ours, so that they stay with the rows: figures replay the plans.
    """
    graph, first = synthetic.chain(n=LAYERS, name=f"chain of {LAYERS} layers"), context.networks[0]
    chain = Subject(graph, cost_source="modelled")
    over_time = _solve(context, chain, f"Memory over time, {LAYERS} layers", 2,
                       strategies=("checkpoint_all", "chen_sqrtn", "portfolio"))  # fmt: skip
    subject = extracted(context, first)
    matrices = _solve(context, subject, f"Schedules of {first.label}", 1)
    sizes = [_sizes(context, network) for network in context.networks]
    return {"over_time": over_time, "matrices": matrices, "sizes": sizes}


def _solve(context: Context, subject: Subject, title: str, tenth: int, **changes: Any) -> dict[str, Any]:
    """Solve one graph at the budget of `budgets_at`; its panel, with the graph."""
    graph_run = context.graph_run(subject, "paper/memory", **changes)
    rows, families = run_single(graph_run, *budgets_at(graph_run, [tenth]))
    return panel_of(graph_run, rows, families, title) | {"graph": graph_to_dict(subject.graph)}


def _sizes(context: Context, network: Network) -> dict[str, Any]:
    """Bytes of one network's parameters, its features at the published batch, and costs and bytes of its layers.

    The loss is no layer: its one number would be the smallest by far.
    """
    subject = extracted(context, network)
    graph = subject.graph
    forward = [op for k, op in enumerate(graph.operations) if not op.is_backward and k != graph.loss]
    sizes = [sum(graph.values[v].bytes for v in op.outputs) for op in forward]
    return {"name": network.name, "label": network.label, "batch": subject.batch_size, "features_bytes": sum(sizes),
            "parameter_bytes": per_sample(configured_model(network.name)).parameter_bytes // 2,
            "layer_costs": [op.cost for op in forward], "layer_bytes": sizes}  # fmt: skip
