"""PyTorch models by name, at sizes for a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.arguments import names_of, one_of
from experiments.config import group_options
from experiments.settings import configured_model
from remat.cost.profile import DEVICES
from remat.errors import InvalidInput
from remat.frontends.spec import ModelSpec

# Two CPU cores train these in about a second: the networks of these names, narrower and with smaller inputs.
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
    "unet": {"batch_size": 2, "input_size": (3, 128, 128)},
    "mobilenet_v2": {"batch_size": 16, "input_size": (3, 128, 128)},
    "vgg16": {"batch_size": 32, "input_size": (3, 96, 96)},
    "densenet121": {"batch_size": 8, "input_size": (3, 96, 96)},
    "lstm": {"batch_size": 16, "options": {"length": 48, "vocabulary": 1000, "width": 128}},
}  # fmt: skip
# A GPU of 16 GB or more trains these; GPT-2 is the medium one.
ON_A_GPU: dict[str, dict[str, Any]] = {
    "resnet50": {"batch_size": 128},
    "unet": {"batch_size": 11},
    "gpt2": {"batch_size": 8, "options": {"length": 1024, "width": 1024, "n_layers": 24, "n_heads": 16}},
    "vit": {"batch_size": 64},
}


def torch_names() -> list[str]:
    """Names of the configured PyTorch models, without ``torch_``."""
    return [name.removeprefix("torch_") for name in group_options("model") if name.startswith("torch_")]


def torch_model(name: str) -> ModelSpec:
    """The configured PyTorch model ``torch_<name>``; raises `UnknownName`."""
    return configured_model(f"torch_{one_of('PyTorch model', name, torch_names())}")


def devices_here(given: str) -> list[str]:
    """The devices of a comma-separated list, each once.

    Raises:
        InvalidInput: one is unknown, or this machine has none of that kind.
    """
    devices = names_of("device", given, DEVICES)
    if "cuda" in devices:
        import torch

        if not torch.cuda.is_available():
            raise InvalidInput("PyTorch finds no CUDA device here; measure on cpu")
    return devices


def for_a_cpu(spec: ModelSpec) -> ModelSpec:
    """The same model at its size of `ON_A_CPU`, if it has one."""
    return resized(spec, ON_A_CPU)


def resized(spec: ModelSpec, sizes: Mapping[str, Mapping[str, Any]]) -> ModelSpec:
    """The same model at the size that `sizes` has for its name, if any."""
    size = sizes.get(spec.name.removeprefix("torch_"), {})
    return replace(spec, **{**size, "options": spec.options | size.get("options", {})})
