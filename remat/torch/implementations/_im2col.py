"""Convolution of images as a matrix product with columns of patches, written with ATen's `im2col` and `col2im`.

For x [N, C, H, W] and weight [O, C, h, w] the column matrix is [C h w, H' W'] per sample, as much memory as h w inputs
at stride 1. One variant makes it for the whole batch, the other for one sample after the other. Of a 1 x 1 window of
stride 1 without padding, the input itself holds the columns. Groups (depthwise too), transposed convolutions and other
numbers of dimensions than four have no such form here. Results are contiguous and agree with the default's to rounding:
1e-5 of the largest in float32, 1e-12 in float64. MONeT (Shah et al., ICLR 2021) chooses among convolution algorithms
by their workspace and time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remat.torch.implementations._types import Gradients

aten = torch.ops.aten
Ints = Sequence[int]
Window = tuple[Ints, Ints, Ints, Ints]  # size, dilation, padding and stride, in the order in which im2col takes them


def convolution_im2col(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints, *_groups: Any
) -> Tensor:
    """`aten.convolution`. Workspace: the column matrix of the whole batch."""
    window = (weight.shape[2:], dilation, padding, stride)
    columns = _columns(x, window)
    out = x.new_empty((len(x), len(weight), *_positions(x, window)))
    torch.bmm(weight.flatten(1).expand(len(x), -1, -1), columns, out=out.flatten(2))
    return out if bias is None else out.add_(bias.view(-1, 1, 1))


def convolution_im2col_per_sample(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints, *_groups: Any
) -> Tensor:
    """`aten.convolution`. Workspace: the column matrix of one sample."""
    window, matrix = (weight.shape[2:], dilation, padding, stride), weight.flatten(1)
    out = x.new_empty((len(x), len(weight), *_positions(x, window)))
    for i in range(len(x)):
        torch.mm(matrix, _columns(x[i : i + 1], window)[0], out=out[i].flatten(1))
    return out if bias is None else out.add_(bias.view(-1, 1, 1))


def convolution_im2col_backward(*arguments: Any) -> Gradients:
    """`aten.convolution_backward`. Workspace: the column matrix of the whole batch, one at a time."""
    return _backward(False, *arguments)


def convolution_im2col_per_sample_backward(*arguments: Any) -> Gradients:
    """`aten.convolution_backward`. Workspace: the column matrix of one sample."""
    return _backward(True, *arguments)


def _backward(per_sample: bool, grad: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Gradients:
    _bias_sizes, stride, padding, dilation, *_transposed_and_groups, output_mask = options
    window = (weight.shape[2:], dilation, padding, stride)
    return (
        _input_gradient(grad, x.shape, weight, window, per_sample) if output_mask[0] else None,
        _weight_gradient(grad, x, weight.shape, window, per_sample) if output_mask[1] else None,
        grad.sum((0, 2, 3)) if output_mask[2] else None,
    )


def _input_gradient(grad: Tensor, size: Ints, weight: Tensor, window: Window, per_sample: bool) -> Tensor:
    out, matrix = grad.new_empty(tuple(size)), weight.flatten(1).t()
    if per_sample:
        for i in range(len(grad)):
            _add_up(torch.mm(matrix, grad[i].flatten(1))[None], window, out[i : i + 1])
    else:
        _add_up(torch.bmm(matrix.expand(len(grad), -1, -1), grad.flatten(2)), window, out)
    return out


def _weight_gradient(grad: Tensor, x: Tensor, size: Ints, window: Window, per_sample: bool) -> Tensor:
    every = None if per_sample else _columns(x, window)
    out = grad.new_zeros((size[0], math.prod(size[1:])))
    for i in range(len(x)):
        # A name for the columns would hold them while the next ones are made.
        out.addmm_(grad[i].flatten(1), (_columns(x[i : i + 1], window)[0] if every is None else every[i]).t())
    return out.view(tuple(size))


def _columns(x: Tensor, window: Window) -> Tensor:
    """[N, C h w, H' W']: each column is a patch; a view of x where patches are pixels."""
    if _is_pointwise(window):
        return x.flatten(2)
    n_patches = math.prod(_positions(x, window))
    # Without `out`, im2col would also allocate as much memory as an input.
    out = x.new_empty((len(x), x.shape[1] * math.prod(window[0]), n_patches))
    return aten.im2col.out(x, *(list(part) for part in window), out=out)


def _add_up(columns: Tensor, window: Window, out: Tensor) -> None:
    """Add patches up where they came from, into `out` [N, C, H, W]."""
    if _is_pointwise(window):
        out.copy_(columns.view(out.shape))
    else:  # without `out` the result would lie in memory of the columns' size
        aten.col2im.out(columns, list(out.shape[2:]), *(list(part) for part in window), out=out)


def _is_pointwise(window: Window) -> bool:
    kernel_size, _dilation, padding, stride = window
    return set(kernel_size) == {1} and set(stride) == {1} and set(padding) == {0}


def _positions(x: Tensor, window: Window) -> list[int]:
    """(H', W'): how often the window fits in each dimension."""
    sides = zip(x.shape[2:], *window, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in sides]
