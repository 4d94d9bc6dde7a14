"""What the largest batch only stands for: the batch of highest throughput, the largest resolution, the deepest ResNet.

`experiments.throughput` on the networks of Figure 6 and `experiments.largest_model` on the first of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.largest_model import largest_models
from experiments.paper.lab import Lab
from experiments.paper.networks import in_figure_6
from experiments.settings import configured_model
from experiments.throughput import throughput


def run(lab: Lab) -> dict[str, Any]:
    """A document of each experiment for each network it runs on."""
    known = [configured_model(network.name) for network in lab.networks if in_figure_6(network)]
    specs = [spec for spec in known if spec.framework == "keras"]
    scale, documents = lab.scale, []
    for spec in specs:
        lab.say(f"{spec.name}: samples a second")
        settings = replace(lab.settings, spec=spec, graph_file=None, cost="roofline")
        documents.append(throughput(
            settings, lab.store, lab.engine, lab.progress, coarse=scale.batches, rounds=scale.refinements,
            price_limit_s=scale.price_limit_s,
        ))  # fmt: skip
    images = next((spec for spec in specs if spec.name == "unet"), specs[0] if specs else None)
    searches: list[dict[str, Any]] = []
    if images is not None:
        settings = replace(lab.settings, spec=images, graph_file=None, cost="flops")
        sizes = largest_models(settings, None, lab.store, lab.engine, lab.progress, max_trials=scale.sizes)
        searches = sizes["searches"]
    return {"throughput": documents, "searches": searches, "memory_bytes": int(lab.settings.gpu.memory_bytes),
            "gpu": lab.settings.gpu.name}  # fmt: skip
