"""Measure the bytes that a real step holds, as PyTorch's allocator counts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from remat.torch._loss import Meanwhile, backward_from, nothing
from remat.torch._work import tensors_of
from remat.torch.timing import peak_of


def measured_peak(step: Callable[[], Any], device: str = "cpu") -> int:
    """Most bytes that PyTorch's allocator holds while `step` runs, beyond those from before.

    On a CPU the profiler counts every allocation; on CUDA the caching allocator does.
    """
    return peak_of(step, device)[1]


def peak_of_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str, loss: Meanwhile = nothing
) -> int:
    """Peak of a forward and backward pass; gradients, buffers and random numbers stay as they are.

    Args:
        loss: the memory of a loss outside of the module, see `backward_from`; by default it holds nothing.
    """

    def step() -> None:
        outputs = model(*args, **kwargs)  # held until the end, as by a loop
        backward_from(outputs, loss)

    leaves = [*model.parameters(), *(x for x in tensors_of((args, dict(kwargs))) if x.is_leaf)]
    before = [x.grad for x in leaves]
    buffers = [b.detach().clone() for b in model.buffers()]
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        try:
            step()  # the first step compiles and chooses kernels, which may take memory that later steps do not take
            for x in leaves:
                x.grad = None
            return measured_peak(step, device)
        finally:
            with torch.no_grad():
                for buffer, old in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(old)
            for x, gradient in zip(leaves, before, strict=True):
                x.grad = gradient
