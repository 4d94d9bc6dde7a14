"""The blocks of a model: the modules that per-block checkpointing repeats."""

from __future__ import annotations

from collections.abc import Iterator

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
