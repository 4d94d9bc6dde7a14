"""The blocks of a model: the modules that per-block checkpointing repeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


def blocks_of(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the outermost modules with children that stand in a row or consist of layers only."""
    for name, child in module.named_children():
        if not list(child.children()) or isinstance(child, nn.RNNBase):
            continue
        in_a_row = isinstance(module, (nn.Sequential, nn.ModuleList))
        only_layers = all(not list(part.children()) for part in child.children())
        holds_a_row = isinstance(child, (nn.Sequential, nn.ModuleList)) and not only_layers
        if (in_a_row or only_layers) and not holds_a_row and any(True for _ in child.parameters()):
            yield prefix + name
        else:
            yield from blocks_of(child, f"{prefix}{name}.")


@contextmanager
def forwards_restored(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Give the modules of these names their own ``forward`` back afterwards."""
    modules = [model.get_submodule(name) for name in names]
    own = [module.__dict__.get("forward") for module in modules]
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.forward = forward
