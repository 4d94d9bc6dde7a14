"""Layer norm, group norm and softmax from their outputs.

The normalised input comes back as (y - bias) / weight, and ATen's backward runs on it with mean 0 and rstd 1; what it
returns for the input is then multiplied by rstd in place. Gradients agree with the default's to 1e-5 of the
largest in float32 and 1e-10 in float64. Weights too small to divide by are refused in the forward pass, while the
input is there (`NotInvertible`). Workspace: one tensor like the output, none without an affine map.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remat.torch.implementations._affine import normalised, require_invertible

aten = torch.ops.aten
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of input, weight and bias; None unless asked for


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
    grad: Tensor, output: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int,
    group: int, output_mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Gradients of group norm from its output [N, C, ...] and rstd [N, group]; the mean is not needed."""
    around = [1] * (output.dim() - 2)
    scale, shift = (None if p is None else p.view(c, *around) for p in (weight, bias))
    gradients = aten.native_group_norm_backward.default(
        grad, normalised(output, scale, shift), torch.zeros_like(rstd), torch.ones_like(rstd), weight, n, c, hw, group,
        list(output_mask),
    )  # fmt: skip
    if output_mask[0]:
        gradients[0].mul_(rstd.repeat_interleave(c // group, dim=1).view(n, c, *around))
    return gradients


def softmax_backward_from_output(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """``y * (grad - sum(grad * y))``, which is ATen's default already. Same bits, no workspace."""
    return aten._softmax_backward_data.default(grad, output, dim, dtype)


def log_softmax_backward_from_output(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """``grad - exp(y) * sum(grad)``, which is ATen's default already. Same bits, no workspace."""
    return aten._log_softmax_backward_data.default(grad, output, dim, dtype)
