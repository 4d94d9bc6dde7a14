"""Max pooling whose backward pass needs less than ATen's, which takes the input and int64 indices.

ATen's backward reads the indices and only the shape of the input. All forms here add up gradients by the same indices
in the same order, so that the bits are the same, with ties and NaN, in any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
Ints = Sequence[int]
MOST_CELLS = 256  # of a window: a byte holds one offset


class _Window(NamedTuple):
    """The arguments of ATen's operator behind the input; a graph leaves out those that are the default."""

    kernel_size: Ints
    stride: Ints = ()
    padding: Ints = (0,)
    dilation: Ints = (1,)
    ceil_mode: bool = False


def max_pool2d_values(x: Tensor, *window: Any) -> Tensor:
    """Max pooling of x [(N,) C, H, W] alone. Workspace: the indices, 8 bytes per output element, dropped at once."""
    return aten.max_pool2d_with_indices.default(x, *_Window(*window))[0]


def max_pool2d_backward_recomputed(grad: Tensor, x: Tensor, *window: Any) -> Tensor:
    """Backward that pools the input again to get the indices; only the input is kept. Workspace: output and indices."""
    indices = aten.max_pool2d_with_indices.default(x, *window)[1]
    return aten.max_pool2d_with_indices_backward.default(grad, x, *window, indices)


def max_pool2d_backward_from_indices(grad: Tensor, size: Ints, strides: Ints, *window_and_indices: Any) -> Tensor:
    """Backward from ATen's int64 indices and the input's `size` and `strides`, without the input.

    On a CPU gradients are added up in the order of ATen's kernel, without a workspace. On CUDA ATen's kernel gets
    memory of the input's size in place of the input, a workspace that is never written.
    """
    if grad.device.type != "cpu" or grad.dtype not in (torch.float32, torch.float64):  # half adds up in float32 there
        like = torch.empty_strided(size, strides, dtype=grad.dtype, device=grad.device)
        return aten.max_pool2d_with_indices_backward.default(grad, like, *window_and_indices)
    indices: Tensor = window_and_indices[-1]
    out = torch.empty(tuple(size), dtype=grad.dtype, memory_format=_memory_format(size, strides)).zero_()
    out.flatten(-2).scatter_add_(-1, indices.flatten(-2), grad.flatten(-2))
    return out


def max_pool2d_offsets(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    """(max pooling of x, uint8 of the output's shape: the cell of its window, counted row by row).

    An eighth of the int64 indices, for windows of up to 256 cells. Workspace: the indices and three times as much.
    """
    kernel_size, stride, padding, dilation, _ = full = _Window(*window)
    y, indices = aten.max_pool2d_with_indices.default(x, *full)
    rows, columns = _first_cells(y, kernel_size, stride, padding)
    width, (down, right) = x.shape[-1], _pair(dilation)
    offsets = indices.div(width, rounding_mode="floor").sub_(rows)
    if down != 1:
        offsets = offsets.div_(down, rounding_mode="floor")
    in_row = indices.remainder_(width).sub_(columns)
    if right != 1:
        in_row = in_row.div_(right, rounding_mode="floor")
    return y, offsets.mul_(_pair(kernel_size)[1]).add_(in_row).to(torch.uint8)


def max_pool2d_backward_from_offsets(
    grad: Tensor, size: Ints, strides: Ints, kernel_size: Ints, stride: Ints, padding: Ints, dilation: Ints,
    ceil_mode: bool, offsets: Tensor,
) -> Tensor:  # fmt: skip
    """Backward from offsets in windows, for an input of this size and these strides, which is not read.

    Workspace: int64 indices twice, and that of `max_pool2d_backward_from_indices`.
    """
    rows, columns = _first_cells(offsets, kernel_size, stride, padding)
    width, (down, right), across = size[-1], _pair(dilation), _pair(kernel_size)[1]
    in_row = offsets.remainder(across).to(torch.int64).mul_(right).add_(columns)
    indices = offsets.div(across, rounding_mode="floor").to(torch.int64).mul_(down).add_(rows).mul_(width).add_(in_row)
    return max_pool2d_backward_from_indices(
        grad, size, strides, kernel_size, stride, padding, dilation, ceil_mode, indices
    )


def _first_cells(y: Tensor, kernel_size: Ints, stride: Ints, padding: Ints) -> tuple[Tensor, Tensor]:
    """(row [H, 1], column [W]) of each window's first cell in the input, negative in the padding."""
    (down, right), (above, before) = _pair(stride or kernel_size), _pair(padding)
    height, width = y.shape[-2:]
    rows = torch.arange(height, device=y.device).mul_(down).sub_(above).unsqueeze(1)
    return rows, torch.arange(width, device=y.device).mul_(right).sub_(before)


def _pair(x: Ints) -> tuple[int, int]:
    return (x[0], x[-1])


def _memory_format(size: Ints, strides: Ints) -> torch.memory_format:
    x = torch.empty_strided(tuple(size), tuple(strides), device="meta")
    is_last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format
