"""Operators that write their result over their first argument and return it: no output is allocated.

Same bits as the allocating form. Most are ATen's own (``aten.relu_``). The graph decides where they may run: the
overwritten tensor must have no gaps or overlaps, must not be read afterwards, by the backward pass either, and must not
be a parameter or an input of the caller.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def add_in_place(x: Tensor, other: Tensor | float, alpha: float = 1) -> Tensor:
    """`aten.add` over x, which must have the shape and type of the result."""
    return aten.add_(x, other, alpha=alpha)


def dropout_in_place(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """(`native_dropout`'s output over x, its mask of one byte per element). The same draws, on a CPU only.

    On CUDA a fused kernel draws the mask, in another order.
    """
    if train is False:
        return x, torch.ones_like(x, dtype=torch.bool)
    keep = 1 - p
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(keep)
    return x.mul_(mask).mul_(0.0 if keep == 0 else 1 / keep), mask
