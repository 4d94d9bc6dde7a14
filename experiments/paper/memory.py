"""Memory over time of a chain, what features and parameters take in known networks, and every strategy's schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.budget_sweep import run_single
from experiments.build import CACHE_FOLDER
from experiments.paper.lab import Lab
from experiments.paper.rounding import middle_budget
from experiments.settings import configured_model
from remat.frontends import synthetic
from remat.frontends.subprocess import extract_in_child

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
    return {"over_time": over_time, "matrices": matrices, "sizes": [_sizes(lab, n.name, n.label) for n in lab.networks]}


def _sizes(lab: Lab, name: str, label: str) -> dict[str, Any]:
    """Bytes of one network's parameters, and of its features at the published batch."""
    # In the published accounting, fixed is the parameters and their gradients alone.
    spec = replace(configured_model(name), accounting="published")
    if spec.framework == "synthetic":
        graph = synthetic.extract(spec)
    else:
        graph = extract_in_child(spec, CACHE_FOLDER / "graphs")
    features = sum(graph.values[v].bytes for op in graph.operations if not op.is_backward for v in op.outputs)
    return {"name": name, "label": label, "batch": spec.batch_size, "features_bytes": features,
            "parameter_bytes": graph.fixed_bytes // 2}  # fmt: skip
