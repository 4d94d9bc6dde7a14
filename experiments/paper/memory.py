"""Memory over time of a chain, what features and parameters take in known networks, and every strategy's schedule."""

from __future__ import annotations

from typing import Any

from experiments.budget_sweep import run_single
from experiments.paper.graphs import Context, extracted, own_costs, published_or_extracted, write_run_folder
from experiments.paper.networks import Network
from experiments.paper.rounding import middle_budget
from experiments.per_sample import per_sample
from experiments.settings import configured_model
from remat.frontends import synthetic

LAYERS = 32


def run(context: Context) -> dict[str, Any]:
    """A plan for the chain, sizes of the networks, and a plan of every strategy for the first network."""
    chain = own_costs(synthetic.chain(n=LAYERS, name=f"chain of {LAYERS} layers"))
    graph_run = context.graph_run(chain, "paper/memory", strategies=("checkpoint_all", "chen_sqrtn", "portfolio"))
    rows, families = run_single(graph_run, middle_budget(graph_run, 2))
    over_time = write_run_folder(
        context, "memory/chain", graph_run, rows, families, f"Memory over time, {LAYERS} layers"
    )
    first = context.networks[0]
    graph_run = context.graph_run(published_or_extracted(context, first), "paper/memory")
    rows, families = run_single(graph_run, middle_budget(graph_run))
    matrices = write_run_folder(context, "memory/matrices", graph_run, rows, families, f"Schedules of {first.label}")
    sizes = [_sizes(context, network) for network in context.networks]
    return {"over_time": over_time, "matrices": matrices, "sizes": sizes}


def _sizes(context: Context, network: Network) -> dict[str, Any]:
    """Bytes of one network's parameters, and of its features at the published batch."""
    subject = extracted(context, network)
    graph = subject.graph
    features = sum(graph.values[v].bytes for op in graph.operations if not op.is_backward for v in op.outputs)
    return {"name": network.name, "label": network.label, "batch": subject.batch_size, "features_bytes": features,
            "parameter_bytes": per_sample(configured_model(network.name)).parameter_bytes // 2}  # fmt: skip
