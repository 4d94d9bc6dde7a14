"""Measure the bytes that a real step holds, as PyTorch's allocator counts them."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from remat.torch.measuring.timing import peak_of
from remat.torch.step.loss import NO_LOSS, Meanwhile, Outside, nothing
from remat.torch.step.state import contents_kept
from remat.torch.step.work import tensors_of


def measured_peak(step: Callable[[], Any], device: str = "cpu") -> int:
    """Most bytes that PyTorch's allocator holds while `step` runs, beyond those from before.

    On a CPU the profiler counts every allocation; on CUDA the caching allocator does.
    """
    gc.collect()  # else what the step frees of earlier ones is subtracted from its own bytes
    return peak_of(step, device)[1]


def peak_of_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str, loss: Meanwhile = nothing,
    outside: Outside = NO_LOSS,
) -> int:  # fmt: skip
    """Peak of a forward and backward pass; gradients, buffers, attributes and random numbers stay as they are.

    Args:
        loss: the memory of a loss outside of the module, see `backward_from`; by default it holds nothing.
        outside: the loss, if it is given, and how it is differentiated.
    """

    def step() -> None:
        _step(model, args, kwargs, loss, outside)

    # The first step compiles and chooses kernels, which may take memory that later steps do not take.
    with undone(model, args, kwargs, device):
        step()
    with undone(model, args, kwargs, device):
        return measured_peak(step, device)


def difference_of_steps(
    model: nn.Module, other: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str
) -> float:
    """How much a step of `other` differs from one of `model` in outputs, gradients and buffers, at most.

    Both begin with the same random numbers; nothing of them is changed.

    Returns:
        The largest difference, relative to the largest number of the tensor; 0 for the same bits, infinity if a tensor
        is missing.
    """
    results = []
    for each in (model, other):
        with undone(each, args, kwargs, device) as leaves:
            outputs = _step(each, args, kwargs, nothing)
            made = [*outputs, *(x.grad for x in leaves), *each.buffers()]
            results.append([None if x is None else x.detach().clone() for x in made])
    if [x is None for x in results[0]] != [x is None for x in results[1]]:
        return math.inf
    pairs = ((x, y) for x, y in zip(*results, strict=True) if x is not None and y is not None)
    return max((relative_difference(x, y) for x, y in pairs), default=0.0)


def relative_difference(x: Tensor, y: Tensor) -> float:
    """Largest difference of two tensors over the largest number in `x`; 0 for the same bits and the same NaNs."""
    if torch.equal(x, y) or torch.equal(x.nan_to_num(), y.nan_to_num()):
        return 0.0
    x, y = x.double(), y.double()
    found = float((x - y).abs().max() / x.abs().max().clamp(min=torch.finfo(torch.float32).tiny))
    return math.inf if math.isnan(found) else found


def _step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Meanwhile, outside: Outside = NO_LOSS
) -> list[Tensor]:
    """A forward and backward pass; returns the tensors among the outputs."""
    outputs = model(*args, **kwargs)  # held until the end, as by a loop
    outside.backward_from(outputs, loss)
    return tensors_of(outputs)


@contextmanager
def undone(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> Iterator[list[Tensor]]:
    """Undo afterwards what steps change: gradients, buffers, attributes, random numbers. Gives what gets gradients.

    Steps begin without gradients: they would be added to those that are held, in place.
    """
    leaves = [*model.parameters(), *(x for x in tensors_of((args, dict(kwargs))) if x.is_leaf)]
    before = [x.grad for x in leaves]
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), contents_kept(model):
        try:
            for x in leaves:
                x.grad = None
            yield leaves
        finally:
            for x, gradient in zip(leaves, before, strict=True):
                x.grad = gradient
