"""Checkpoints of a model's layers, which may keep the results of some operators. This file needs PyTorch only."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

# [name of a layer] (operators whose results it keeps, whether it draws random numbers)
CHECKPOINTS: dict[str, tuple[tuple[str, ...], bool]] = {}


def apply(model: nn.Module, checkpoints: Mapping[str, tuple[tuple[str, ...], bool]] = CHECKPOINTS) -> nn.Module:
    """Wrap these layers of `model`, in place, before `fully_shard` does; returns it."""
    for name, (kept, draws) in checkpoints.items():
        operators = [attrgetter(operator)(torch.ops) for operator in kept]
        policy = functools.partial(create_selective_checkpoint_contexts, operators) if kept else noop_context_fn
        wrap(model, name, context_fn=policy, preserve_rng_state=draws)
    return model


def wrap(model: nn.Module, name: str, **options: Any) -> None:
    """Put the wrapper of a layer in its place; a layer that the model has several times has as many places."""
    layer = model.get_submodule(name)
    wrapper = checkpoint_wrapper(layer, **options)
    for parent in list(model.modules()):
        for child in [child for child, module in parent._modules.items() if module is layer]:
            parent.register_module(child, wrapper)
