"""Checkpoints of a model's modules, which may keep some results. This file needs PyTorch only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# [name of a module] (numbers of the calls in one run of it whose results are kept, whether it draws random numbers)
CHECKPOINTS: dict[str, tuple[tuple[int, ...], bool]] = {}
KEPT = "_remat_checkpoint"  # a module's attribute; models have attributes of plainer names of their own


def apply(model: nn.Module, checkpoints: Mapping[str, tuple[tuple[int, ...], bool]] = CHECKPOINTS) -> nn.Module:
    """Make checkpoints of modules of `model`, in place, and of no others; returns it."""
    undo(model)
    for name, (kept, draws) in checkpoints.items():
        module = model.get_submodule(name)
        module.__dict__[KEPT] = frozenset(kept), draws
        module.__class__ = _checkpointed(type(module))
    return model


def undo(model: nn.Module) -> None:
    """Make ordinary modules of the checkpoints of `model`."""
    for module in model.modules():
        if module.__dict__.pop(KEPT, None) is not None:
            module.__class__ = type(module).__bases__[0]


@functools.cache
def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of this kind that are checkpoints; a class, so that a copy of a module runs itself.

    The backward pass runs the module again, except for the calls whose results it keeps.
    """

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kept, draws = self.__dict__[KEPT]

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if not kept:
                return nullcontext(), statistics_kept(self)
            first, second = create_selective_checkpoint_contexts(policy(kept))
            return first, _in_turn(statistics_kept(self), second)

        inner = casting_anew(functools.partial(kind.forward, self))
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


def casting_anew(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` without autocast's memory of casts, so that both runs make the same calls."""

    def run(*args: Any, **kwargs: Any) -> Any:
        remembers = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(remembers)

    return run


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Undo what a second run changes in the statistics of batch norms."""
    norms = [part for part in module.modules() if part.training and getattr(part, "track_running_stats", False)]
    before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, contents in before:
            buffer.data.copy_(contents)  # autograd must not take this for a change of what it saved


@contextmanager
def _in_turn(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def policy(kept: frozenset[int]) -> Callable[..., CheckpointPolicy]:
    """A policy of selective checkpointing for one run: it keeps the results of the calls with the numbers `kept`."""
    numbers = {False: itertools.count(), True: itertools.count()}  # of the first run, and of the second

    def choose(context: Any, _operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_kept = next(numbers[context.is_recompute]) in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return choose
