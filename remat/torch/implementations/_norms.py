"""Layer norm and group norm from their outputs.

The normalised input is (y - bias) / weight. ATen's backward runs on it with mean 0 and rstd 1; the gradient of the
input is then multiplied by rstd in place. Gradients agree with the default's to 1e-5 of the largest in float32 and
1e-10 in float64. The forward pass, which still has the input, refuses weights too small to divide by (`NotInvertible`).
Workspace: one tensor like the output, none without an affine map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remat.torch.implementations._affine import normalised, require_invertible
from remat.torch.implementations._types import Gradients

aten = torch.ops.aten


def layer_norm_checked(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """`aten.native_layer_norm`: (output, mean, rstd). Same bits.

    Raises:
        NotInvertible: before anything is computed, so that the caller can take the default.
    """
    require_invertible(weight, bias, x.dtype)
    return aten.native_layer_norm.default(x, normalized_shape, weight, bias, eps)


def layer_norm_backward_from_output(
    grad: Tensor, output: Tensor, normalized_shape: Sequence[int], rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, output_mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Gradients of layer norm from its output [..., *normalized_shape] and rstd [..., 1]; the mean is not needed."""
    gradients = aten.native_layer_norm_backward.default(
        grad, normalised(output, weight, bias), normalized_shape, torch.zeros_like(rstd), torch.ones_like(rstd),
        weight, bias, list(output_mask),
    )  # fmt: skip
    if output_mask[0]:
        gradients[0].mul_(rstd)
    return gradients


def group_norm_checked(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, group: int, eps: float
) -> tuple[Tensor, ...]:
    """`aten.native_group_norm`: (output, mean, rstd). Same bits.

    Raises:
        NotInvertible: before anything is computed, so that the caller can take the default.
    """
    require_invertible(weight, bias, x.dtype)
    return aten.native_group_norm.default(x, weight, bias, n, c, hw, group, eps)


def group_norm_backward_from_output(
    grad: Tensor, output: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes_and_mask: Any
) -> Gradients:
    """Gradients of group norm from its output [N, C, ...] and rstd [N, group]; the mean is not needed.

    Args:
        sizes_and_mask: the last arguments of `aten.native_group_norm_backward`: N, C, HxW, groups, output_mask.
    """
    n, c, hw, group, output_mask = sizes_and_mask
    around = [1] * (output.dim() - 2)
    scale, shift = (None if p is None else p.view(c, *around) for p in (weight, bias))
    gradients = aten.native_group_norm_backward.default(
        grad, normalised(output, scale, shift), torch.zeros_like(rstd), torch.ones_like(rstd), weight, n, c, hw, group,
        list(output_mask),
    )  # fmt: skip
    if output_mask[0]:
        gradients[0].mul_(rstd.repeat_interleave(c // group, dim=1).view(n, c, *around))
    return gradients
