"""Pointwise operators: backward passes from outputs, from one bit per element, and results over an input.

MONeT (Shah et al., ICLR 2021, section 4) calls them output- and intermediate-activated. SiLU, GELU and Mish have no
backward pass from their output: they are not monotonic, so that two inputs with different derivatives can have the same
output. With one bit per element the next operator may overwrite or drop the output, too. n elements keep ceil(n / 8)
bytes, in the order in which the output lies in memory, in any layout; workspace: n bytes forward and n bytes backward.

Most operators that write their result over their first argument are ATen's own (``aten.relu_``). The graph decides
where they may run: the overwritten tensor must have no gaps or overlaps, must not be read afterwards, by the backward
pass either, and must not be a parameter or an input of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remat.torch.implementations._bits import flags_like, pack, unpack

aten = torch.ops.aten


def leaky_relu_backward_from_output(grad: Tensor, output: Tensor, negative_slope: float) -> Tensor:
    """Gradient of leaky ReLU of a slope of zero or more, by the sign of the output. Same bits, NaN included.

    Raises:
        RuntimeError: from ATen for a negative slope, because the output's sign then says nothing.
    """
    return aten.leaky_relu_backward.default(grad, output, negative_slope, True)


def elu_backward_from_output(grad: Tensor, output: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    """Gradient of ELU, CELU and SELU, as ``input_scale * (y + alpha * scale)`` below zero. Needs alpha of zero or more.

    Equal to rounding: ``y + alpha * scale`` cancels where ATen's default takes the exponential of the input. The
    largest error is 1e-6 of the largest gradient in float32, 1e-14 in float64.
    """
    return aten.elu_backward.default(grad, alpha, scale, input_scale, True, output)


def relu_packed(x: Tensor, strides: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """(`relu(x)`, bits [ceil(n / 8)] uint8: where the gradient stops). The output has the same bits.

    Args:
        strides: dense strides that give the order of the packed bits, in any layout of x; by default x's own.
    """
    y = aten.relu.default(x)
    memory, stops = flags_like(x, strides)
    torch.le(y, 0, out=stops)
    return y, pack(memory)


def hardtanh_packed(
    x: Tensor, min_val: float = -1.0, max_val: float = 1.0, strides: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """(`hardtanh(x)`, bits [ceil(n / 8)] uint8: where the gradient stops). ReLU6 has bounds 0 and 6.

    The gradient of NaN is zero. ATen's is zero in the vectorised part of its loop, and passes in the scalar tail.
    `strides` as for `relu_packed`.
    """
    y = aten.hardtanh.default(x, min_val, max_val)
    memory, stops = flags_like(x, strides)
    torch.gt(y, min_val, out=stops)
    stops.logical_and_(y < max_val).logical_not_()
    return y, pack(memory)


def packed_backward(grad: Tensor, packed: Tensor, strides: Sequence[int]) -> Tensor:
    """`grad` where the packed bits let it pass, else zero: the bits of `aten.threshold_backward`, NaN included.

    Args:
        strides: those of the forward function.
    """
    return torch.where(unpack(packed, grad.shape, strides), grad.new_zeros(()), grad)  # in the layout of the bits


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
