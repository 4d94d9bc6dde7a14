"""Batch norm in training from its output, alone or followed by an invertible activation.

In-Place Activated BatchNorm (Rota Bulo, Porzi, Kontschieder, CVPR 2018), written from the paper's equations.
Departures: the weight stays, where the paper takes |weight| + eps, so that the model is the same; weights too small to
divide by are refused (`remat.torch.implementations._affine`). ReLU is not invertible and has no such form. Gradients
agree with the default's to 1e-5 of the largest in float32 and 1e-10 in float64; half precision is refused. Shapes are
those of `aten.native_batch_norm_backward`: grad and output [N, C, ...], weight, bias and rstd [C].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remat.torch.implementations._affine import NotInvertible, require_invertible
from remat.torch.implementations._types import Gradients

aten = torch.ops.aten


def batch_norm_checked(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten._native_batch_norm_legit_functional`, whose output may replace its input. Same bits.

    Raises:
        NotInvertible: before anything is computed, so that the caller can take the default.
    """
    require_invertible(weight, bias, x.dtype)
    return aten._native_batch_norm_legit_functional.default(x, weight, bias, mean, variance, training, momentum, eps)


def batch_norm_backward_from_output(
    grad: Tensor, output: Tensor, weight: Tensor | None, bias: Tensor | None, save_rstd: Tensor,
    output_mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Gradients of batch norm in training from its output. Workspace: the default's (on a CPU, a tensor like it).

    ATen's kernel computes the normalised input as (x - mean) * rstd, and multiplies the result by rstd * weight. It
    computes the same from the output as x, the bias as mean, 1 / weight as rstd and weight^2 * rstd as weight.
    """
    bias = torch.zeros_like(save_rstd) if bias is None else bias
    inverse = torch.ones_like(save_rstd) if weight is None else weight.reciprocal()
    factor = save_rstd if weight is None else weight.square().mul_(save_rstd)
    return aten.native_batch_norm_backward.default(
        grad, output, factor, None, None, bias, inverse, True, 0.0, list(output_mask)
    )


def batch_norm_leaky_relu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, training: bool,
    momentum: float, eps: float, negative_slope: float = 0.01,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Batch norm with leaky ReLU written over its output. Same bits as one after the other; no workspace.

    Returns:
        (activated output, mean, rstd, new running mean, new running variance).

    Raises:
        NotInvertible: the slope is too near zero, or as `batch_norm_checked`.
    """
    if not negative_slope >= 1e-3:
        raise NotInvertible(f"leaky ReLU of slope {negative_slope:g} cannot be inverted: keep the layer's input")
    y, *rest = batch_norm_checked(x, weight, bias, mean, variance, training, momentum, eps)
    return aten.leaky_relu_.default(y, negative_slope), *rest


def batch_norm_leaky_relu_backward(
    grad: Tensor, output: Tensor, weight: Tensor | None, bias: Tensor | None, save_rstd: Tensor, negative_slope: float,
    output_mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Gradients of both from the activated output. Workspace: that of batch norm, and two tensors like the output."""
    inner = aten.leaky_relu_backward.default(grad, output, negative_slope, True)
    return batch_norm_backward_from_leaky_relu(inner, output, weight, bias, save_rstd, negative_slope, output_mask)


def batch_norm_backward_from_leaky_relu(
    grad: Tensor, activated: Tensor, weight: Tensor | None, bias: Tensor | None, save_rstd: Tensor,
    negative_slope: float, output_mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """`batch_norm_backward_from_output` from the output of a leaky ReLU, which is inverted first.

    grad is the gradient of batch norm's output. Workspace: that of batch norm, and a tensor like grad.
    """
    y = aten.leaky_relu.default(activated, 1 / negative_slope)
    return batch_norm_backward_from_output(grad, y, weight, bias, save_rstd, output_mask)
