"""Backward of pointwise activations from their output, so that their input can be dropped.

All of them are what MONeT (Shah et al., ICLR 2021, section 4) calls output-activated. SiLU, GELU and Mish have no such
form: they are not monotonic, so that two inputs have the same output with different derivatives. Nothing but
the gradient that is returned is allocated.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def relu_backward_from_output(grad: Tensor, output: Tensor) -> Tensor:
    """`aten.threshold_backward` on the output, which is ATen's default already. Same bits, NaN included."""
    return aten.threshold_backward.default(grad, output, 0)


def sigmoid_backward_from_output(grad: Tensor, output: Tensor) -> Tensor:
    """``grad * y * (1 - y)``, which is ATen's default already. Same bits."""
    return aten.sigmoid_backward.default(grad, output)


def tanh_backward_from_output(grad: Tensor, output: Tensor) -> Tensor:
    """``grad * (1 - y^2)``, which is ATen's default already. Same bits."""
    return aten.tanh_backward.default(grad, output)


def hardtanh_backward_from_output(grad: Tensor, output: Tensor, min_val: float, max_val: float) -> Tensor:
    """Gradient of hardtanh and ReLU6 where the output lies strictly between the bounds.

    The input is at or beyond a bound exactly where the output is at it, and there ATen's gradient is zero. Same bits;
    of NaN too, as the same kernel runs (it lets the gradient pass in the scalar tail of its loop only).
    """
    return aten.hardtanh_backward.default(grad, output, min_val, max_val)


def leaky_relu_backward_from_output(grad: Tensor, output: Tensor, negative_slope: float) -> Tensor:
    """Gradient of leaky ReLU of a slope of zero or more, by the sign of the output. Same bits, NaN included.

    Raises:
        RuntimeError: from ATen for a negative slope, whose output's sign says nothing.
    """
    return aten.leaky_relu_backward.default(grad, output, negative_slope, True)


def elu_backward_from_output(grad: Tensor, output: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    """Gradient of ELU, CELU and SELU, as ``input_scale * (y + alpha * scale)`` below zero. Needs alpha of zero or more.

    To rounding: ``y + alpha * scale`` cancels where ATen's default takes the exponential of the input. The largest
    error is 1e-6 of the largest gradient in float32, 1e-14 in float64.
    """
    return aten.elu_backward.default(grad, alpha, scale, input_scale, True, output)
