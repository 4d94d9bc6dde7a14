"""The networks that are measured on a device, at three sizes. Plain data, so that every machine has the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.steps.sizes import ON_A_CPU
from remat.frontends.spec import ModelSpec

BACKENDS = ("eager", "inductor")
SIZES = ("gpu", "cpu", "tiny")
_NETWORKS = "remat.torch.networks"
# The first ones are worth the most, if time runs out.
MODELS = {
    "gpt2_medium": ModelSpec(
        "gpt2_medium", "torch", f"{_NETWORKS}.transformer:gpt2", 8,
        # Without dropout: a compiled step draws other numbers than the eager one that its bits are compared with.
        options={"length": 1024, "width": 1024, "n_layers": 24, "n_heads": 16, "dropout": 0.0},
    ),
    "resnet50": ModelSpec("resnet50", "torch", f"{_NETWORKS}.resnet:resnet50", 128, (3, 224, 224)),
    "llama_1b": ModelSpec(
        "llama_1b", "torch", f"{_NETWORKS}.llama:llama", 4,
        options={"length": 2048, "width": 2048, "hidden": 8192, "n_layers": 16, "n_heads": 32, "n_groups": 8,
                 "dtype": "bfloat16"},
    ),
    "vit_large": ModelSpec(
        "vit_large", "torch", f"{_NETWORKS}.transformer:vit", 64, (3, 224, 224),
        options={"width": 1024, "n_layers": 24, "n_heads": 16},
    ),
    "unet": ModelSpec("unet", "torch", f"{_NETWORKS}.unet:unet", 11, (3, 416, 608), options={"loss": "bce"}),
}  # fmt: skip
_SMALL = {"gpt2_medium": "gpt2", "llama_1b": "llama", "vit_large": "vit"}  # names of their sizes for a CPU
_SHORT = {"length": 16, "vocabulary": 50, "width": 32, "n_layers": 1, "n_heads": 2}
_TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"batch_size": 4, "options": _SHORT | {"context": 16}},
    "llama": {"batch_size": 4, "options": _SHORT | {"hidden": 64, "n_groups": 1}},
    "vit": {
        "batch_size": 4, "input_size": (3, 16, 16),
        "options": {"patch": 4, "width": 32, "n_layers": 2, "n_heads": 2, "num_classes": 10},
    },
    "resnet50": {"batch_size": 2, "input_size": (3, 32, 32)},
    "unet": {"batch_size": 1, "input_size": (3, 32, 32)},
}  # fmt: skip


def spec_of(model: str, size: str) -> ModelSpec:
    """The network: ``gpu`` trains on a GPU of 16 GB, ``cpu`` in a second on two cores, ``tiny`` at once."""
    spec = MODELS[model]
    if size == "gpu":
        return spec
    smaller = (ON_A_CPU if size == "cpu" else _TINY)[_SMALL.get(model, model)]
    return replace(spec, **{**smaller, "options": spec.options | smaller.get("options", {})})
