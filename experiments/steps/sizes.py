"""Sizes of the PyTorch networks: plain data, read on machines that have PyTorch alone."""

from dataclasses import replace
from typing import Any

from remat.frontends.spec import ModelSpec

# Two CPU cores train these in seconds: the networks of these names, narrower and with smaller inputs, so that most of
# the peak is activations.
ON_A_CPU: dict[str, dict[str, Any]] = {
    "gpt2": {
        "batch_size": 8,
        "options": {"length": 256, "vocabulary": 4000, "width": 192, "n_layers": 6, "n_heads": 6},
    },
    "llama": {
        "batch_size": 4,
        "options": {
            "length": 256, "vocabulary": 4000, "width": 192, "hidden": 512, "n_layers": 6, "n_heads": 6,
            "dtype": "float32",
        },
    },
    "vit": {
        "batch_size": 16, "input_size": (3, 96, 96), "options": {"patch": 8, "width": 192, "n_layers": 6, "n_heads": 6},
    },
    "resnet50": {"batch_size": 16, "input_size": (3, 128, 128)},
    "unet": {"batch_size": 4, "input_size": (3, 128, 128), "options": {"width": 32}},
    "mobilenet_v2": {"batch_size": 16, "input_size": (3, 128, 128)},
    "googlenet": {"batch_size": 16, "input_size": (3, 128, 128)},
    "vgg16": {"batch_size": 24, "input_size": (3, 96, 96), "options": {"hidden": 512, "channels_last": True}},
    "densenet121": {"batch_size": 8, "input_size": (3, 96, 96)},
    "lstm": {"batch_size": 16, "options": {"length": 48, "vocabulary": 1000, "width": 128}},
}  # fmt: skip

_NETWORKS = "remat.torch.networks"
# Measured on a GPU of 16 GB or more. The first ones are worth the most, if time runs out.
ON_A_GPU = {
    "resnet50": ModelSpec("resnet50", "torch", f"{_NETWORKS}.resnet:resnet50", 128, (3, 224, 224)),
    "gpt2_medium": ModelSpec(
        "gpt2_medium", "torch", f"{_NETWORKS}.transformer:gpt2", 8,
        # Without dropout: a compiled step draws other numbers than the eager one that its bits are compared with.
        options={"length": 1024, "width": 1024, "n_layers": 24, "n_heads": 16, "dropout": 0.0},
    ),
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
SIZES = ("gpu", "cpu", "tiny")


def spec_at(model: str, size: str) -> ModelSpec:
    """A network of `ON_A_GPU`: at its own size, smaller for two CPU cores, or so tiny that it trains at once."""
    spec = ON_A_GPU[model]
    if size == "gpu":
        return spec
    smaller = (ON_A_CPU if size == "cpu" else _TINY)[spec.target.rpartition(":")[2]]
    return replace(spec, **{**smaller, "options": spec.options | smaller.get("options", {})})
