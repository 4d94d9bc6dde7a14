"""Checkpoints of a model's modules, which may keep some results. This file needs PyTorch only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# [name of a module] (numbers of the calls in one run of it whose results are kept, whether it draws random numbers)
CHECKPOINTS: dict[str, tuple[tuple[int, ...], bool]] = {}


def apply(model: nn.Module, checkpoints: Mapping[str, tuple[tuple[int, ...], bool]] = CHECKPOINTS) -> nn.Module:
    """Make checkpoints of modules of `model`, in place; returns it."""
    for name, (kept, draws) in checkpoints.items():
        module = model.get_submodule(name)
        module.forward = checkpointed(module.forward, frozenset(kept), draws)
    return model


def checkpointed(forward: Callable[..., Any], kept: frozenset[int], draws: bool) -> Callable[..., Any]:
    """`forward` as a checkpoint: the backward pass runs it again, except for the calls in `kept`.

    Args:
        draws: restore the random generator's state before the second run.
    """
    contexts = {"context_fn": lambda: create_selective_checkpoint_contexts(policy(kept))} if kept else {}

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=draws, **contexts, **kwargs)

    return run


def policy(kept: frozenset[int]) -> Callable[..., CheckpointPolicy]:
    """A policy of selective checkpointing for one run: it keeps the results of the calls with the numbers `kept`."""
    numbers = {False: itertools.count(), True: itertools.count()}  # of the first run, and of the second

    def choose(context: Any, _operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_kept = next(numbers[context.is_recompute]) in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return choose
