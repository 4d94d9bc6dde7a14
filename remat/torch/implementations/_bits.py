"""Truth values packed eight to a byte, in the order in which a tensor lies in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten

# Eight bytes of 0 or 1 are one little-endian word. Times this, its highest byte has byte i as bit i. No two products of
# a byte and a bit of the factor fall on the same place, so that nothing is carried.
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))
_SPREAD = sum(1 << (8 * i) for i in range(8))  # a byte times this fills a word with copies of it
_PICK = sum(1 << (9 * i) for i in range(8)) - (1 << 64)  # bit i of byte i; a negative int64


def packed_bytes(n: int) -> int:
    """Bytes that `n` truth values take."""
    return -(-n // 8)


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of a copy of `x` without gaps (`torch.preserve_format`): its own if `x` has no gaps."""
    return x.stride() if aten.is_non_overlapping_and_dense.default(x) else torch.empty_like(x, device="meta").stride()


def flags_like(x: Tensor, strides: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """(memory for one truth value per element of `x`, the same memory in the shape of `x`).

    Args:
        strides: of the second tensor, dense; by default those of `x`. `unpack` needs the same.
    """
    n = x.numel()
    memory = torch.empty(8 * packed_bytes(n), dtype=torch.bool, device=x.device)
    memory[n:].zero_()
    return memory, memory.as_strided(x.shape, dense_strides(x) if strides is None else strides)


def pack(memory: Tensor) -> Tensor:
    """One uint8 for eight truth values of `flags_like`'s memory, which is overwritten: no workspace."""
    words = memory.view(torch.int64).mul_(_GATHER)
    return torch.empty(len(words), dtype=torch.uint8, device=memory.device).copy_(words.view(torch.uint8)[7::8])


def unpack(packed: Tensor, size: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The truth values as a bool tensor of this shape and these dense strides, one byte per element."""
    words = packed.to(torch.int64).mul_(_SPREAD).bitwise_and_(_PICK)
    return words.view(torch.uint8).ne_(0).view(torch.bool).as_strided(size, strides)
