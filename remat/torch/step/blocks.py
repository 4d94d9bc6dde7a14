"""The blocks of a model: its outermost modules with children that stand in a row.

Checkpoints repeat a block, FSDP2 gathers its parameters at once, and of many equal ones a few are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from remat.errors import InvalidInput
from remat.torch.internals.autograd import places_of_children


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


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of the outermost modules that stand in a row of modules of one class, each with children.

    Raises:
        InvalidInput: there are none.
    """
    names = list(blocks_in_rows(model))
    if not names:
        raise InvalidInput(
            "shard= plans block by block, and the model has no row of modules of one class; name its blocks, e.g. "
            "parts=['encoder', 'decoder']"
        )
    return names


def blocks_in_rows(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the outermost modules with trained parameters that stand in a row of modules of one class."""
    children = dict(module.named_children())
    is_row = isinstance(module, (nn.Sequential, nn.ModuleList)) and len({type(x) for x in children.values()}) == 1
    for name, child in children.items():
        if is_row and len(children) > 1 and list(child.children()) and any(p.requires_grad for p in child.parameters()):
            yield prefix + name
        else:
            yield from blocks_in_rows(child, f"{prefix}{name}.")


@contextmanager
def forwards_replaced(model: nn.Module, forwards: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let these functions be the forward passes of the model's modules of these names, inside their hooks."""
    modules = {name: model.get_submodule(name) for name in forwards}
    own = {name: module.__dict__.get("forward") for name, module in modules.items()}
    try:
        for name, forward in forwards.items():
            modules[name].forward = forward
        yield
    finally:
        for name, module in modules.items():
            module.__dict__.pop("forward", None)
            if (forward := own[name]) is not None:
                module.forward = forward


@contextmanager
def in_place(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let the model find `modules` in place of its submodules of these names."""
    of = {id(model.get_submodule(name)): module for name, module in modules.items()}
    places = [place for place in places_of_children(model) if id(place[2]) in of]  # a shared one has several
    try:
        for table, name, child in places:
            table[name] = of[id(child)]
        yield
    finally:
        for table, name, child in places:
            table[name] = child
