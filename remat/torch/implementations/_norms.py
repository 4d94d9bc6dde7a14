"""Batch norm in training, layer norm and group norm from their outputs, so that their input can be dropped.

The normalised input is (y - bias) / weight. y has a rounding error of eps * |y|, so that the error of the normalised
input is about eps * (1 + |bias / weight|). A layer is refused (`NotInvertible`), in the forward pass, which still has
the input, if that exceeds the promised tolerance in one channel: gradients agree with the default's to 1e-5 of the
largest in float32 and 1e-10 in float64; half precision is refused.

Batch norm, alone or followed by an invertible activation: In-Place Activated BatchNorm (Rota Bulo, Porzi, Kontschieder,
CVPR 2018), written from the paper's equations, but the weight stays, where the paper takes |weight| + eps, so that the
model is the same. ReLU is not invertible and has no such form. Shapes are those of `aten.native_batch_norm_backward`:
grad and output [N, C, ...], weight, bias and rstd [C].

For layer norm and group norm ATen's backward runs on the normalised input with mean 0 and rstd 1; the gradient of the
input is then multiplied by rstd in place. Workspace: one tensor like the output, none without an affine map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat.errors import RematError
from remat.torch.implementations._types import Gradients
from remat.torch.internals.operators import is_fake

aten = torch.ops.aten
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # of gradients, relative to the largest; no half precision
SMALLEST_WEIGHT = 1e-12  # its square and the inverse of its square are far from the limits of float32


class NotInvertible(RematError):
    """A layer's input cannot be computed from its output; run it with the default implementation."""


def why_not_invertible(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> str:
    """Why the affine map of a normalisation cannot be inverted; '' if it can.

    Reading weights waits for the device. Planning calls this once; the functions that run call it in the forward pass,
    which still has the input. Fake tensors have no contents: of these, only the type counts.
    """
    if dtype not in TOLERANCE:
        return f"{dtype} is too coarse to compute the input from the output"
    if weight is None or is_fake(weight):  # PyTorch's layers have no bias without a weight
        return ""
    size = weight.detach().abs()
    ratio = torch.zeros_like(size) if bias is None else bias.detach().abs() / size
    worst = torch.finfo(dtype).eps * (1 + ratio.amax().item())
    if not size.amin().item() >= SMALLEST_WEIGHT:  # NaN is refused too
        return f"a weight is below {SMALLEST_WEIGHT:g} in size"
    if not worst <= TOLERANCE[dtype]:
        return f"a bias is {ratio.amax().item():.3g} times its weight, more than {dtype} can undo"
    return ""


def require_invertible(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> None:
    """Raise `NotInvertible` with the reason of `why_not_invertible`, if there is one."""
    reason = why_not_invertible(weight, bias, dtype)
    if reason:
        raise NotInvertible(f"{reason}: keep the layer's input")


def normalised(output: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``(output - bias) / weight`` with both broadcast; a new tensor, or `output` itself without an affine map."""
    x = output if bias is None else output - bias
    if weight is None:
        return x
    return x / weight if bias is None else x.div_(weight)


def _checked(name: str, operator: Callable[..., tuple[Tensor, ...]], weight: int) -> Callable[..., tuple[Tensor, ...]]:
    """`operator`, whose output may replace its input, under the name that this module gives it. Same bits.

    It raises `NotInvertible` before anything is computed, so that the caller can take the default.

    Args:
        weight: its position among the arguments; the bias follows.
    """

    def checked(*args: Any) -> tuple[Tensor, ...]:
        require_invertible(args[weight], args[weight + 1], args[0].dtype)
        return operator(*args)

    checked.__name__ = checked.__qualname__ = name  # by which graphs find it
    return checked


batch_norm_checked = _checked("batch_norm_checked", aten._native_batch_norm_legit_functional.default, 1)
layer_norm_checked = _checked("layer_norm_checked", aten.native_layer_norm.default, 2)  # (output, mean, rstd)
group_norm_checked = _checked("group_norm_checked", aten.native_group_norm.default, 1)  # (output, mean, rstd)


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


def batch_norm_backward_from_leaky_relu(
    grad: Tensor, activated: Tensor, weight: Tensor | None, bias: Tensor | None, save_rstd: Tensor,
    negative_slope: float, output_mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """`batch_norm_backward_from_output` from the output of a leaky ReLU, which is inverted first.

    grad is the gradient of batch norm's output. Workspace: that of batch norm, and a tensor like grad.
    """
    y = aten.leaky_relu.default(activated, 1 / negative_slope)
    return batch_norm_backward_from_output(grad, y, weight, bias, save_rstd, output_mask)


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
