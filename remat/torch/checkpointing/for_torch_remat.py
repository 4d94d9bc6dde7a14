"""Checkpoints of a model's blocks, which save some regions. This file needs PyTorch and torch_remat only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# [name of a block] (names within it of the modules that are saved, whether it draws random numbers)
CHECKPOINTS: dict[str, tuple[tuple[str, ...], bool]] = {}


def apply(model: nn.Module, checkpoints: Mapping[str, tuple[tuple[str, ...], bool]] = CHECKPOINTS) -> nn.Module:
    """Make checkpoints of these blocks of `model`, in place, with saved regions; returns it."""
    import torch_remat  # pyright: ignore[reportMissingImports]

    for name, (regions, draws) in checkpoints.items():
        block = model.get_submodule(name)
        for region in regions:
            save = functools.partial(torch_remat.region, name=region, recompute=False)
            _run_as(block.get_submodule(region), functools.partial(_saved, save, torch_remat.recompute_needs_tensor))
        hooks = (RandomState(),) if draws else ()
        _run_as(block, torch_remat.checkpoint(region_name=name, recompute_state_hooks=hooks))
    return model


class RandomState:
    """The random generators' states, which torch_remat does not restore by itself."""

    def snapshot(self) -> tuple[Tensor, list[Tensor]]:
        """The states now."""
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self, state: tuple[Tensor, list[Tensor]]) -> None:
        """Go back to these states."""
        torch.set_rng_state(state[0])
        if state[1]:
            torch.cuda.set_rng_state_all(state[1])


def _saved(save: Callable[..., Any], needs: Callable[..., None], forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` as a saved region, whose results are there when the rest of the block runs again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        made = save(forward)(*args, **kwargs)
        needs(*(x for x in (made if isinstance(made, (tuple, list)) else [made]) if x is not None))
        return made

    return run


def _run_as(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let the module run its `forward` wrapped; by a class of its own, so that a copy of it runs itself."""
    kind = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrap(functools.partial(kind.forward, self))(*args, **kwargs)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
