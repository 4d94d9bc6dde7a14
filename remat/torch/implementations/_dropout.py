"""Dropout that keeps one bit per element, or only the random state from which its mask was drawn.

ATen's dropout keeps a mask of one byte per element. The gradients here equal ATen's bit for bit.

A captured graph holds dropout in one of two forms. Usually it is `aten.native_dropout`. Where that would round unlike
eager mode on a CPU, the capture writes ``x * (b / keep)``, with zeros and ones b from `remat.bernoulli_like` in the
type of x. Both forms draw random numbers. So a forward function here must run as often, and in the same order, as the
call that it replaces, because later draws would differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remat.errors import InvalidInput
from remat.torch._random import random_state, with_random_state
from remat.torch.implementations._bits import dense_strides, flags_like, pack, unpack
from remat.torch.internals.operators import is_fake

aten = torch.ops.aten


def dropout_packed(
    x: Tensor, p: float, train: bool | None, strides: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """(`native_dropout(x)`'s output, bits [ceil(n / 8)] uint8: which elements pass). Workspace: 2 bytes per element.

    Args:
        strides: dense strides that give the order of the packed bits, in any layout of x; by default x's own.
    """
    y, mask = aten.native_dropout.default(x, p, train)
    memory, passes = flags_like(x, strides)
    passes.copy_(mask)
    return y, pack(memory)


def dropout_packed_backward(grad: Tensor, packed: Tensor, scale: float, strides: Sequence[int]) -> Tensor:
    """`native_dropout_backward` by the packed mask of these strides. Workspace: 1 byte per element."""
    return aten.native_dropout_backward.default(grad, unpack(packed, grad.shape, strides), scale)


def dropout_replayed(
    x: Tensor, p: float, train: bool | None, strides: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """(`native_dropout(x)`'s output, the generator's state before it: 5056 bytes on a CPU, 16 on CUDA).

    Args:
        strides: of the mask that the backward pass will draw; the order of draws is the order in memory.

    Raises:
        InvalidInput: the mask has other strides.
    """
    _check_strides(x, strides)
    state = random_state(x.device)
    return aten.native_dropout.default(x, p, train)[0], state


def dropout_replayed_backward(grad: Tensor, state: Tensor, p: float, scale: float, strides: Sequence[int]) -> Tensor:
    """`native_dropout_backward` by the mask drawn again from `state`; the generator keeps its state.

    Workspace: the mask, 1 byte per element, and the memory of the draw (on a CPU 4 bytes more per element; on CUDA,
    where the fused kernel must run again, two tensors like `grad`). Written for CUDA but not tested there.

    Args:
        strides: those of the mask, `dense_strides` of dropout's input.
    """
    mask = torch.empty_strided(grad.shape, strides, dtype=torch.bool, device=grad.device)
    if not is_fake(state):
        mask = with_random_state(state, _drawn_mask, mask, p, grad.dtype)
    return aten.native_dropout_backward.default(grad, mask, scale)


def _check_strides(x: Tensor, strides: Sequence[int] | None) -> None:
    own = zip(x.shape, dense_strides(x), strides or dense_strides(x), strict=True)
    if any(n > 1 and has != wanted for n, has, wanted in own):
        raise InvalidInput(f"dropout's mask has strides {dense_strides(x)}, but would be drawn again with {strides}")


def _drawn_mask(mask: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    if mask.device.type == "cpu":
        return mask.bernoulli_(1 - p)  # as `native_dropout` does
    return aten.native_dropout.default(torch.empty_like(mask, dtype=dtype), p, True)[1]
