"""Convolution of images as a matrix product with columns of patches (im2col), written with ATen's `im2col`, `col2im`.

Of x [N, C, H, W] and weight [O, C, h, w] the column matrix is [C h w, H' W'] per sample, as much memory as h w inputs
at stride 1. One variant makes it for the whole batch, the other for one sample after the other. A 1 x 1 window of
stride 1 without padding has the input itself for columns. Groups (depthwise ones too), transposed convolutions and
other than four dimensions have no such form here. Results are contiguous and agree with the default's to rounding:
1e-5 of the largest in float32, 1e-12 in float64. MONeT (Shah et al., ICLR 2021) chooses among convolution algorithms
by their workspace and time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten
Ints = Sequence[int]
Window = tuple[Ints, Ints, Ints, Ints]  # of the kernel's size, dilation, padding and stride, as im2col takes them


def convolution_im2col(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints,
    transposed: bool = False, output_padding: Ints = (), groups: int = 1,
) -> Tensor:  # fmt: skip
    """`aten.convolution`. Workspace: the column matrix of the whole batch."""
    columns = _columns(x, (weight.shape[2:], dilation, padding, stride))
    out = x.new_empty(_output_size(x, weight, stride, padding, dilation))
    torch.bmm(weight.flatten(1).expand(len(x), -1, -1), columns, out=out.flatten(2))
    return out if bias is None else out.add_(bias.view(-1, 1, 1))


def convolution_im2col_per_sample(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints,
    transposed: bool = False, output_padding: Ints = (), groups: int = 1,
) -> Tensor:  # fmt: skip
    """`aten.convolution`. Workspace: the column matrix of one sample."""
    window, matrix = (weight.shape[2:], dilation, padding, stride), weight.flatten(1)
    out = x.new_empty(_output_size(x, weight, stride, padding, dilation))
    for i in range(len(x)):
        torch.mm(matrix, _columns(x[i : i + 1], window)[0], out=out[i].flatten(1))
    return out if bias is None else out.add_(bias.view(-1, 1, 1))


def convolution_im2col_input_gradient(
    grad: Tensor, size: Ints, weight: Tensor, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """Gradient of an input of `size`. Workspace: the column matrix of the whole batch."""
    out = grad.new_empty(tuple(size))
    columns = torch.bmm(weight.flatten(1).t().expand(len(grad), -1, -1), grad.flatten(2))
    _add_up(columns, (weight.shape[2:], dilation, padding, stride), out)
    return out


def convolution_im2col_per_sample_input_gradient(
    grad: Tensor, size: Ints, weight: Tensor, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """Gradient of an input of `size`. Workspace: the column matrix of one sample."""
    window, matrix = (weight.shape[2:], dilation, padding, stride), weight.flatten(1).t()
    out = grad.new_empty(tuple(size))
    for i in range(len(grad)):
        _add_up(torch.mm(matrix, grad[i].flatten(1))[None], window, out[i : i + 1])
    return out


def convolution_im2col_weight_gradient(
    grad: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """Gradient of a weight of `size`. Workspace: the column matrix of the whole batch."""
    columns = _columns(x, (size[2:], dilation, padding, stride))
    out = grad.new_zeros((size[0], columns.shape[1]))
    for i in range(len(x)):
        out.addmm_(grad[i].flatten(1), columns[i].t())
    return out.view(tuple(size))


def convolution_im2col_per_sample_weight_gradient(
    grad: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    """Gradient of a weight of `size`. Workspace: the column matrix of one sample."""
    window = (size[2:], dilation, padding, stride)
    out = grad.new_zeros((size[0], size[1] * size[2] * size[3]))
    for i in range(len(x)):
        out.addmm_(grad[i].flatten(1), _columns(x[i : i + 1], window)[0].t())
    return out.view(tuple(size))


def convolution_im2col_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Ints | None, stride: Ints, padding: Ints, dilation: Ints,
    transposed: bool, output_padding: Ints, groups: int, output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """`aten.convolution_backward`. Workspace: the column matrix of the whole batch, one at a time."""
    window = (stride, padding, dilation)
    return (
        convolution_im2col_input_gradient(grad, x.shape, weight, *window) if output_mask[0] else None,
        convolution_im2col_weight_gradient(grad, x, weight.shape, *window) if output_mask[1] else None,
        grad.sum((0, 2, 3)) if output_mask[2] else None,
    )


def convolution_im2col_per_sample_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Ints | None, stride: Ints, padding: Ints, dilation: Ints,
    transposed: bool, output_padding: Ints, groups: int, output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """`aten.convolution_backward`. Workspace: the column matrix of one sample."""
    window = (stride, padding, dilation)
    return (
        convolution_im2col_per_sample_input_gradient(grad, x.shape, weight, *window) if output_mask[0] else None,
        convolution_im2col_per_sample_weight_gradient(grad, x, weight.shape, *window) if output_mask[1] else None,
        grad.sum((0, 2, 3)) if output_mask[2] else None,
    )


def _columns(x: Tensor, window: Window) -> Tensor:
    """[N, C h w, H' W']: each column a patch; a view of x where patches are pixels."""
    if _is_pointwise(window):
        return x.flatten(2)
    kernel_size, dilation, padding, stride = window
    sides = zip(x.shape[2:], *window, strict=True)
    n_patches = math.prod((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in sides)
    made = x.new_empty((len(x), x.shape[1] * math.prod(kernel_size), n_patches))  # else it allocates an input besides
    return aten.im2col.out(x, list(kernel_size), list(dilation), list(padding), list(stride), out=made)


def _add_up(columns: Tensor, window: Window, out: Tensor) -> None:
    """Patches added up where they came from, into `out` [N, C, H, W]."""
    if _is_pointwise(window):
        out.copy_(columns.view(out.shape))
    else:  # without `out` the result would lie in memory of the columns' size
        aten.col2im.out(columns, list(out.shape[2:]), *(list(part) for part in window), out=out)


def _is_pointwise(window: Window) -> bool:
    kernel_size, _dilation, padding, stride = window
    return set(kernel_size) == {1} and set(stride) == {1} and set(padding) == {0}


def _output_size(x: Tensor, weight: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> list[int]:
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return [len(x), len(weight), *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)]
