"""Operators that write their result over their first argument and return that: no output is allocated.

Same bits as the allocating form. What is overwritten must have no gaps or overlaps, be read by nobody afterwards, the
backward pass included, and be no parameter or input of the caller's: only a graph can tell.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def relu_in_place(x: Tensor) -> Tensor:
    """`aten.relu` over x."""
    return aten.relu_.default(x)


def hardtanh_in_place(x: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """`aten.hardtanh` over x."""
    return aten.hardtanh_.default(x, min_val, max_val)


def leaky_relu_in_place(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """`aten.leaky_relu` over x."""
    return aten.leaky_relu_.default(x, negative_slope)


def elu_in_place(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """`aten.elu` over x."""
    return aten.elu_.default(x, alpha, scale, input_scale)


def celu_in_place(x: Tensor, alpha: float = 1.0) -> Tensor:
    """`aten.celu` over x."""
    return aten.celu_.default(x, alpha)


def sigmoid_in_place(x: Tensor) -> Tensor:
    """`aten.sigmoid` over x."""
    return aten.sigmoid_.default(x)


def tanh_in_place(x: Tensor) -> Tensor:
    """`aten.tanh` over x."""
    return aten.tanh_.default(x)


def silu_in_place(x: Tensor) -> Tensor:
    """`aten.silu` over x; only where no gradient is needed, as its backward reads the input."""
    return aten.silu_.default(x)


def add_in_place(x: Tensor, other: Tensor | float, alpha: float = 1) -> Tensor:
    """`aten.add` over x, which must have the shape and type of the result."""
    if isinstance(other, Tensor):
        return aten.add_.Tensor(x, other, alpha=alpha)
    return aten.add_.Scalar(x, other, alpha)


def dropout_in_place(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """(`native_dropout`'s output over x, its mask of one byte per element). The same draws, on a CPU only.

    On CUDA a fused kernel draws the mask, in another order.
    """
    if train is False:
        return x, torch.ones_like(x, dtype=torch.bool)
    keep = 1 - p
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(keep)
    return x.mul_(mask).mul_(0.0 if keep == 0 else 1 / keep), mask
