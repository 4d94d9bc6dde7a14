"""ReLU and hardtanh that keep one bit per element and need neither input nor output afterwards.

MONeT (Shah et al., ICLR 2021, section 4) calls them intermediate-activated: the next operator may overwrite or drop the
output. n elements of b bytes keep ceil(n / 8) bytes, a 1 / 8b of a tensor, in the order in which the output lies in
memory, in any layout. Workspace: n bytes forward and n bytes backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remat.torch.implementations._bits import flags_like, pack, unpack, zeroed

aten = torch.ops.aten


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
    return zeroed(grad, unpack(packed, grad.shape, strides))
