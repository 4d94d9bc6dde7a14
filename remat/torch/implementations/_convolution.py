"""Convolution by another kernel than PyTorch's default one, chosen through PyTorch's own switches.

On a CPU the default is oneDNN for float32, and ATen's own kernels for float64. On CUDA cuDNN's heuristic chooses.
Functions take the arguments of `aten.convolution` and `aten.convolution_backward` and agree with them to rounding: 1e-5
of the largest in float32, 1e-12 in float64. The switches are global; each is set only during the call.

cuDNN's workspace cannot be limited call by call: PyTorch takes the first plan, or the fastest, whose workspace it can
allocate (pytorch/pytorch#49207 asks for a limit and is open). The variable CUDNN_CONV_WSCAP_DBG limits it in MiB for a
whole process, and is read when cuDNN is loaded. Without cuDNN, ATen's kernel makes columns of one sample at a time.
Nothing here was tested on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from remat.torch.implementations._types import Gradients
from remat.torch.internals.operators import replaced

aten = torch.ops.aten


def _under(
    name: str, switches: Callable[[], AbstractContextManager[Any]]
) -> tuple[Callable[..., Tensor], Callable[..., Gradients]]:
    """(forward, backward) by the kernels that these switches choose, under the names that this module gives them."""

    def forward(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
        with switches():
            return aten.convolution.default(x, weight, *args)

    def backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Gradients:
        with switches():
            return aten.convolution_backward.default(grad, x, weight, *args)

    for each, own in ((forward, name), (backward, f"{name}_backward")):
        each.__name__ = each.__qualname__ = own  # by which graphs and caches find it
    return forward, backward


@contextmanager
def _native() -> Iterator[None]:
    cpu, cuda = torch.backends.mkldnn, torch.backends.cudnn
    with replaced(cpu, enabled=False), replaced(cuda, enabled=False), torch.backends.nnpack.flags(enabled=False):
        yield


# ATen's own kernel, without oneDNN or NNPACK on a CPU and without cuDNN on CUDA. Workspace: the matrix of unfolded
# windows: that of the whole batch on a CPU unless the window is dilated, and else, and on CUDA, that of one sample.
convolution_native, convolution_native_backward = _under("convolution_native", _native)
# cuDNN's fastest plan for these shapes, timed at the first call. Workspace: the fastest plan's, any size. CUDA.
convolution_cudnn_benchmark, convolution_cudnn_benchmark_backward = _under(
    "convolution_cudnn_benchmark", lambda: replaced(torch.backends.cudnn, benchmark=True)
)
# A plan of cuDNN that adds in a fixed order, by its heuristic. CUDA.
convolution_cudnn_deterministic, convolution_cudnn_deterministic_backward = _under(
    "convolution_cudnn_deterministic", lambda: replaced(torch.backends.cudnn, benchmark=False, deterministic=True)
)


def convolution_channels_last(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    """The default kernel on copies with channels last; the result is copied to the layout of the default's.

    Workspace: one input, one weight and one output, less those that have channels last already.
    """
    y = aten.convolution.default(_channels_last(x), _channels_last(weight), *args)
    return y if _is_channels_last(x) or _is_channels_last(weight) else y.contiguous()


def convolution_channels_last_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Gradients:
    """The default kernels on copies with channels last. Workspace: as many copies of inputs and results."""
    made = aten.convolution_backward.default(_channels_last(grad), _channels_last(x), _channels_last(weight), *args)
    if _is_channels_last(x) or _is_channels_last(weight):
        return made
    of_input, of_weight, of_bias = (None if t is None else t.contiguous() for t in made)
    return of_input, of_weight, of_bias


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
