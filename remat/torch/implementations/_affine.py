"""When a normalisation's output may replace its input: the rule for ``xhat = (y - bias) / weight``.

y has a rounding error of eps * |y|, so that the error of the normalised input is about eps * (1 + |bias / weight|).
A layer is refused if that exceeds the promised tolerance in one channel: the caller then keeps the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remat.errors import RematError
from remat.torch.internals.operators import is_fake

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
