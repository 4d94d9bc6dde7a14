"""Checkpoints of some layers of a model of transformers. This file needs PyTorch and transformers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

# [name of a layer] ((), whether it draws random numbers)
CHECKPOINTS: dict[str, tuple[tuple[str, ...], bool]] = {}


def apply(model: nn.Module, checkpoints: Mapping[str, tuple[tuple[str, ...], bool]] = CHECKPOINTS) -> nn.Module:
    """Make checkpoints of these layers of `model`, in place, and of no others; returns it.

    Leave ``activation_checkpointing`` and ``gradient_checkpointing`` of a trainer off: they take every layer.
    """
    whole: Any = next(module for module in model.modules() if hasattr(module, "gradient_checkpointing_enable"))
    enable = getattr(whole, "activation_checkpointing_enable", whole.gradient_checkpointing_enable)  # the newer name
    enable({"use_reentrant": False, "preserve_rng_state": any(draws for _, draws in checkpoints.values())})
    layer: Any
    for name, layer in model.named_modules():
        if hasattr(layer, "gradient_checkpointing"):
            layer.gradient_checkpointing = name in checkpoints
    return model
