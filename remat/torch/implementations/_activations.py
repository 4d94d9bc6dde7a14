"""Backward passes of pointwise activations from their output, so that their input can be dropped.

MONeT (Shah et al., ICLR 2021, section 4) calls them output-activated. SiLU, GELU and Mish have no such form: they are
not monotonic, so that two inputs with different derivatives can have the same output. Each function allocates only the
gradient that it returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def hardtanh_backward_from_output(grad: Tensor, output: Tensor, min_val: float, max_val: float) -> Tensor:
    """Gradient of hardtanh and ReLU6 where the output lies strictly between the bounds.

    The output is at a bound exactly where the input is at or beyond it, and there ATen's gradient is zero. Same bits,
    those of NaN included: the same kernel runs (it lets the gradient of NaN pass only in the scalar tail of its loop).
    """
    return aten.hardtanh_backward.default(grad, output, min_val, max_val)


def leaky_relu_backward_from_output(grad: Tensor, output: Tensor, negative_slope: float) -> Tensor:
    """Gradient of leaky ReLU of a slope of zero or more, by the sign of the output. Same bits, NaN included.

    Raises:
        RuntimeError: from ATen for a negative slope, because the output's sign then says nothing.
    """
    return aten.leaky_relu_backward.default(grad, output, negative_slope, True)


def elu_backward_from_output(grad: Tensor, output: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    """Gradient of ELU, CELU and SELU, as ``input_scale * (y + alpha * scale)`` below zero. Needs alpha of zero or more.

    Equal to rounding: ``y + alpha * scale`` cancels where ATen's default takes the exponential of the input. The
    largest error is 1e-6 of the largest gradient in float32, 1e-14 in float64.
    """
    return aten.elu_backward.default(grad, alpha, scale, input_scale, True, output)
