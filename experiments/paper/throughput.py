"""The reasons to want a larger batch: the batch of highest throughput, the largest resolution, the deepest ResNet.

`experiments.throughput` runs on the networks of Figure 6, `experiments.largest_model` on U-Net or else the first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.largest_model import largest_models
from experiments.paper.graphs import Context
from experiments.paper.networks import in_figure_6
from experiments.settings import configured_model
from experiments.throughput import best_batch


def run(context: Context) -> dict[str, Any]:
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
