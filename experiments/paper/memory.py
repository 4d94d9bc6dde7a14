"""Memory over time of a chain, what features and parameters take in known networks, and every strategy's schedule."""

from __future__ import annotations

from typing import Any

from experiments.budget_sweep import run_single
from experiments.paper.lab import Lab
from experiments.paper.networks import Network
from experiments.paper.rounding import middle_budget
from experiments.per_sample import per_sample
from experiments.settings import configured_model
from remat.frontends import synthetic

LAYERS = 32


def run(lab: Lab) -> dict[str, Any]:
    """A plan for the chain, sizes of the networks, and a plan of every strategy for the first network."""
    chain = lab.given(synthetic.chain(n=LAYERS, name=f"chain of {LAYERS} layers"))
    bench = lab.bench(chain, "memory", strategies=("checkpoint_all", "chen_sqrtn", "portfolio"))
    rows, families = run_single(bench, middle_budget(bench, 2))
    over_time = lab.write_panel("memory/chain", bench, rows, families, f"Memory over time, {LAYERS} layers")
    first = lab.networks[0]
    bench = lab.bench(lab.published(first) or lab.ours(first), "memory")
    rows, families = run_single(bench, middle_budget(bench))
    matrices = lab.write_panel("memory/matrices", bench, rows, families, f"Schedules of {first.label}")
    return {"over_time": over_time, "matrices": matrices, "sizes": [_sizes(lab, network) for network in lab.networks]}


def _sizes(lab: Lab, network: Network) -> dict[str, Any]:
    """Bytes of one network's parameters, and of its features at the published batch."""
    subject = lab.ours(network)
    graph = subject.graph
    features = sum(graph.values[v].bytes for op in graph.operations if not op.is_backward for v in op.outputs)
    return {"name": network.name, "label": network.label, "batch": subject.batch_size, "features_bytes": features,
            "parameter_bytes": per_sample(configured_model(network.name)).parameter_bytes // 2}  # fmt: skip
