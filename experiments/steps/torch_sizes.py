"""PyTorch models by name, and at sizes for a CPU."""

from dataclasses import replace

from experiments.arguments import one_of
from experiments.config import group_options
from experiments.settings import configured_model
from experiments.steps.sizes import ON_A_CPU
from remat.cost.profile import DEVICES
from remat.errors import InvalidInput
from remat.frontends.spec import ModelSpec


def torch_names() -> list[str]:
    """Names of the configured PyTorch models, without ``torch_``."""
    return [name.removeprefix("torch_") for name in group_options("model") if name.startswith("torch_")]


def torch_model(name: str) -> ModelSpec:
    """The configured PyTorch model ``torch_<name>``; raises `UnknownName`."""
    return configured_model(f"torch_{one_of('PyTorch model', name, torch_names())}")


def device_here(device: str) -> str:
    """The device.

    Raises:
        InvalidInput: it is unknown, or this machine has none of that kind.
    """
    if one_of("device", device, DEVICES) == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise InvalidInput("PyTorch finds no CUDA device here; measure on cpu")
    return device


def for_a_cpu(spec: ModelSpec) -> ModelSpec:
    """The same model at its size of `ON_A_CPU`, if it has one."""
    size = ON_A_CPU.get(spec.name.removeprefix("torch_"), {})
    return replace(spec, **{**size, "options": spec.options | size.get("options", {})})
