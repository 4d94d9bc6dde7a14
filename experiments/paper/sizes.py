"""What fits, and what it is worth: largest batches (Figure 6), throughput, larger models, memory (Figures 1, 3, 7)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from analysis.max_batch_size import ENCODERS
from experiments.budget_sweep import run_single
from experiments.build import Subject
from experiments.largest_model import largest_models
from experiments.max_batch_size import max_batches
from experiments.paper.graphs import Context, Network, budgets_at, extracted, in_figure_6, panel_of
from experiments.per_sample import per_sample
from experiments.settings import configured_model
from experiments.throughput import best_batch
from remat.frontends import synthetic
from remat.frontends.json import graph_to_dict

SHARE = 2 / 3  # of the scale's time limit for one solve, because a strategy has several for each network


def fig6(context: Context) -> dict[str, Any]:
    """Solve the networks of the figure; a document for each."""
    limit = SHARE * context.scale.time_limit_s
    names = [network.name for network in context.networks if in_figure_6(network)]
    names += [ENCODERS[name] for name in names if name in ENCODERS]
    chosen = [
        replace(context.settings, spec=configured_model(name), graph_file=None, cost="flops", budget_bytes=None,
                time_limit_s=limit)
        for name in dict.fromkeys(names)
    ]  # fmt: skip
    run = context.run
    documents = max_batches(chosen, run.store, run.engine, run.progress, console=run.console)
    claims = [claim for document in documents for claim in document["contradicted"]]
    return {"documents": documents, "contradicted": claims}


def larger(context: Context) -> dict[str, Any]:
    """A document of each experiment for each network it runs on."""
    known = [configured_model(network.name) for network in context.networks if in_figure_6(network)]
    specs = [spec for spec in known if spec.framework == "keras"]
    run, scale, documents = context.run, context.scale, []
    for spec in specs:
        context.print(f"{spec.name}: samples a second")
        settings = replace(context.settings, spec=spec, graph_file=None, cost="roofline")
        documents.append(best_batch(
            settings, run.store, run.engine, run.progress, coarse=scale.batches, rounds=scale.refinements,
            price_limit_s=scale.price_limit_s,
        ))  # fmt: skip
    images = next((spec for spec in specs if spec.name == "unet"), specs[0] if specs else None)
    searches: list[dict[str, Any]] = []
    if images is not None:
        settings = replace(context.settings, spec=images, graph_file=None, cost="flops")
        sizes = largest_models(settings, None, run.store, run.engine, run.progress, max_trials=scale.sizes)
        searches = sizes["searches"]
    return {"throughput": documents, "searches": searches, "memory_bytes": int(context.settings.gpu.memory_bytes),
            "gpu": context.settings.gpu.name}  # fmt: skip


LAYERS = 32


def memory(context: Context) -> dict[str, Any]:
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
