"""The backward pass as in a training loop, for measuring and following steps without one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from remat.torch._private import base_of, make_contiguous_strides_for
from remat.torch._work import tensors_of

Meanwhile = Callable[[list[Tensor]], AbstractContextManager[Any]]


def nothing(_outputs: list[Tensor]) -> AbstractContextManager[Any]:
    """A loss that holds nothing."""
    return nullcontext()


def backward_from(outputs: Any, meanwhile: Meanwhile = nothing) -> None:
    """Differentiate a module's outputs: a loss directly, others through a loss outside that holds nothing.

    As in a loop, only the engine holds the gradients of outputs, and drops them after they are read. Outputs that are
    parameters, arguments or views of these are left out, because the caller had them before.

    Args:
        meanwhile: (differentiated outputs) -> a context that is entered while their gradients are made.
    """
    tensors = (x for x in tensors_of(outputs) if x.requires_grad and not _is_of_a_leaf(x))
    found = list({id(x): x for x in tensors}.values())
    if len(found) == 1 and found[0].numel() == 1:
        with meanwhile(found):
            start = torch.ones_like(found[0])
        found[0].backward(start)
    elif found:
        _LossOutside.apply(lambda: meanwhile(found), *found).backward()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def _is_of_a_leaf(x: Tensor) -> bool:
    viewed = base_of(x)
    base = x if viewed is None else viewed
    return base.is_leaf and base.requires_grad


class _LossOutside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, meanwhile: Callable[[], AbstractContextManager[Any]], *outputs: Tensor) -> Tensor:
        ctx.meanwhile = meanwhile
        ctx.like = [(*_layout(x), x.dtype, x.device) for x in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_gradient: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with ctx.meanwhile():
            return None, *(
                torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(1)
                for shape, strides, dtype, device in ctx.like
            )


def _layout(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of a gradient of `x`: those of `x`, unless it repeats elements or leaves gaps."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(x)
    return tuple(x.shape), x.stride() if dense else make_contiguous_strides_for(x.shape)
