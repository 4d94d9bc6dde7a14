"""What fits, and what it is worth: largest batches (Figure 6), throughput, larger models, memory (Figures 1, 3, 7)."""

from dataclasses import replace
from typing import Any

from analysis.batches import ENCODERS
from experiments.batch_search import per_sample
from experiments.budget_sweep import budgets_of_sweep, run_single
from experiments.build import Subject
from experiments.largest_model import largest_models
from experiments.max_batch_size import max_batches
from experiments.paper.graphs import Context, Network, extracted, in_figure_6, panel_of
from experiments.paper.sweeps import with_starts
from experiments.settings import configured_model
from experiments.throughput import best_batch
from remat.frontends.json import graph_to_dict
from remat.graph import Graph

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
    documents = max_batches(context.run, chosen)
    claims = [claim for document in documents for claim in document["contradicted"]]
    return {"documents": documents, "contradicted": claims}


def larger(context: Context) -> dict[str, Any]:
    """A document of each experiment for each network it runs on."""
    known = [configured_model(network.name) for network in context.networks if in_figure_6(network)]
    specs = [spec for spec in known if spec.framework == "keras"]
    scale, documents = context.scale, []
    for spec in specs:
        context.print(f"{spec.name}: samples a second")
        settings = replace(context.settings, spec=spec, graph_file=None, cost="roofline")
        amount = {"coarse": scale.batches, "rounds": scale.refinements, "price_limit_s": scale.price_limit_s}
        documents.append(best_batch(context.run, settings, **amount))
    images = next((spec for spec in specs if spec.name == "unet"), specs[0] if specs else None)
    searches: list[dict[str, Any]] = []
    if images is not None:
        settings = replace(context.settings, spec=images, graph_file=None, cost="flops")
        searches = largest_models(context.run, settings, max_trials=scale.sizes)["searches"]
    return {"throughput": documents, "searches": searches, "memory_bytes": int(context.settings.gpu.memory_bytes),
            "gpu": context.settings.gpu.name}  # fmt: skip


SHOWN = "unet"  # the network whose plans are drawn over time and as schedules


def memory(context: Context) -> dict[str, Any]:
    """The plans of every strategy for one network at a tight budget of its sweep, and sizes of all networks.

    The graph is ours, so that it stays with the rows: figures replay the plans.
    """
    network = next((network for network in context.networks if network.name == SHOWN), context.networks[0])
    subjects = {each.name: extracted(context, each) for each in context.networks}
    subject = subjects[network.name]
    graph_run = with_starts(context.graph_run(subject, "paper/memory", budget_bytes=None))
    budgets = budgets_of_sweep(graph_run, by_factor=True, at=int(context.settings.gpu.memory_bytes))
    rows, families = run_single(graph_run, budgets[len(budgets) // 3])
    plans = panel_of(graph_run, rows, families, network.label) | {"graph": graph_to_dict(subject.graph)}
    return {"plans": plans, "sizes": [
        _sizes(each, subjects[each.name], extracted(context, each, cost="flops").graph) for each in context.networks
    ]}  # fmt: skip


def _sizes(network: Network, subject: Subject, in_flops: Graph) -> dict[str, Any]:
    """Bytes of one network's parameters, its features at the published batch, and costs and bytes of its layers.

    The loss is no layer: its one number would be the smallest by far.
    """
    graph = subject.graph
    layers = [k for k, op in enumerate(graph.operations) if not op.is_backward and k != graph.loss]
    sizes = [sum(graph.values[v].bytes for v in graph.operations[k].outputs) for k in layers]
    return {"name": network.name, "label": network.label, "batch": subject.batch_size, "features_bytes": sum(sizes),
            "parameter_bytes": per_sample(configured_model(network.name)).parameter_bytes // 2,
            "layer_costs": [graph.operations[k].cost for k in layers], "layer_bytes": sizes,
            "layer_flops": [in_flops.operations[k].cost for k in layers]}  # fmt: skip
