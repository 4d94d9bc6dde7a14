"""Checkpoints per block, which PyTorch users write by hand to save memory, for any model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from remat.torch.step.blocks import blocks_of

aten = torch.ops.aten
# Operators whose results selective checkpointing keeps, because they are expensive to compute.
SAVED = {
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
}  # fmt: skip


def checkpointed(
    model: nn.Module, every: int = 1, *, selective: bool = False, replays_random: bool = True
) -> nn.Module:
    """A copy of `model` with shared parameters, in which every `every`-th block is a checkpoint.

    Args:
        selective: keep the results of `SAVED` within blocks.
        replays_random: restore the random generator's state, as users must; fake tensors have none.
    """
    wrapped = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    context: dict[str, Any] = {}
    if selective:
        context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}
    for i, name in enumerate(list(blocks_of(wrapped))):
        if i % every == 0:
            block = wrapped.get_submodule(name)
            block.forward = _checkpoint(block.forward, replays_random, context)
    return wrapped


def _checkpoint(forward: Callable[..., Any], replays_random: bool, context: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=replays_random, **context)

    return run


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
