"""Layouts and storages of the results of PyTorch's CPU kernels, where fake tensors have others.

A step is captured on tensors without contents. If such a tensor has another memory layout than the kernel's result,
the trace makes copies that eager mode does not make, or leaves some out, and workspaces are measured on the wrong
layout. If its storage is smaller, a plan counts too few bytes. The rules below come from comparing both for all
operators of PyTorch's own test samples, on inputs in several layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from remat.torch.internals.aot import gradients_without_holes
from remat.torch.internals.operators import FakeTensorMode, corrected_fakes, suggest_memory_format
from remat.torch.step.work import tensors_of

aten = torch.ops.aten
Rule = Callable[..., Any]  # (PyTorch's fake result, arguments of the call) -> a fake result like the kernel's


@contextmanager
def layouts_of_kernels() -> Iterator[None]:
    """Let tensors without contents have the layouts and storages of the kernels' results."""
    with corrected_fakes(_as_kernels_make, _made_instead), gradients_without_holes():
        yield


def _as_kernels_make(mode: FakeTensorMode, func: Any, args: Any, made: Any) -> Any:
    rule = _RULES.get(func)
    if rule is None or any(x.device.type != "cpu" for x in tensors_of(args)):
        return made
    with mode:
        return rule(made, *args)


def _made_instead(func: Any, args: Any) -> Rule | None:
    """What makes the result of an operator that refuses tensors without contents, although its kernel takes them."""
    return _grouped_product if func is aten._grouped_mm.default and args[0].device.type == "cpu" else None


def _grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Matrix products of groups; a matrix with two dimensions is divided into groups by `offs`."""
    shape = (a.shape[-2], b.shape[-1])
    if a.dim() == 3 == b.dim():
        shape = (len(a), *shape)
    elif a.dim() == 2 == b.dim() and offs is not None:
        shape = (len(offs), *shape)
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


def _contiguous(made: Any, *_args: Any) -> Any:
    if isinstance(made, tuple):
        return tuple(map(_contiguous, made))
    if not isinstance(made, Tensor):  # a gradient that is not asked for
        return made
    return torch.empty(made.shape, dtype=made.dtype, device=made.device)


def _as_input(position: int) -> Rule:
    """The first result is contiguous, or has channels last if the input at `position` has."""

    def rule(made: Any, *args: Any) -> Any:
        first = made[0] if isinstance(made, tuple) else made
        if not isinstance(first, Tensor):  # a gradient that is not asked for
            return made
        laid_out = torch.empty(
            first.shape, dtype=first.dtype, device=first.device, memory_format=suggest_memory_format(args[position])
        )
        return (laid_out, *made[1:]) if isinstance(made, tuple) else laid_out

    return rule


def _elementwise(made: Tensor, *args: Any) -> Tensor:
    """The layout of the tensors' sum, which PyTorch knows; with a number PyTorch's fake result is right."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    if len(tensors) < 2:
        return made
    total = tensors[0] + tensors[1]
    return torch.empty_strided(made.shape, total.stride(), dtype=made.dtype, device=made.device)


def _layer_norm(made: Any, _x: Tensor, _shape: Any, weight: Tensor | None, *_args: Any) -> Any:
    """Mean and deviation have the weight's type, which may be wider than the input's."""
    if weight is None or made[1].dtype == weight.dtype:
        return made
    return (made[0], *(x.to(weight.dtype) for x in made[1:]))


def _roll(made: Tensor, x: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    """The kernel joins two parts in each dimension; without dimensions it rolls a flat copy."""
    if not dims or not x.numel():
        return _contiguous(made)
    for shift, dim in zip(shifts, dims, strict=True):
        start = -shift % x.shape[dim]
        x = torch.cat((x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)), dim)
    return x


def _reduced_in_place(reduction_at: int) -> Rule:
    """A loss of one element keeps the storage of all elements that it was reduced from."""

    def rule(made: Tensor, *args: Any) -> Tensor:
        reduction = args[reduction_at] if len(args) > reduction_at else 1
        if reduction == 0:
            return made
        n = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        return torch.empty(max(1, n), dtype=made.dtype, device=made.device).as_strided((), ())

    return rule


def _folded(made: Tensor, columns: Tensor, *_args: Any) -> Tensor:
    """The result's storage is as large as that of the columns."""
    n = max(made.numel(), columns.numel())
    return torch.empty(n, dtype=made.dtype, device=made.device).as_strided(made.shape, made.stride())


_RULES: dict[Any, Rule] = {
    aten.log_sigmoid_forward.default: _contiguous, aten.glu_backward.default: _contiguous,
    aten._log_softmax_backward_data.default: _contiguous, aten.mse_loss_backward.default: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous, aten.huber_loss_backward.default: _contiguous,
    aten.normal.Tensor_Tensor: _contiguous, aten.native_layer_norm_backward.default: _contiguous,
    aten.pow.Scalar: _contiguous, aten.native_layer_norm.default: _layer_norm,
    aten.native_batch_norm.default: _as_input(0), aten._native_batch_norm_legit.default: _as_input(0),
    aten._native_batch_norm_legit.no_stats: _as_input(0),
    aten._native_batch_norm_legit_functional.default: _as_input(0),
    aten._native_batch_norm_legit_no_training.default: _as_input(0),
    aten._batch_norm_with_update.default: _as_input(0), aten._batch_norm_with_update_functional.default: _as_input(0),
    aten.native_batch_norm_backward.default: _as_input(1), aten.batch_norm_backward.default: _as_input(1),
    aten.reflection_pad2d_backward.default: _as_input(1), aten.replication_pad2d_backward.default: _as_input(1),
    aten.reflection_pad2d.default: _as_input(0), aten.replication_pad2d.default: _as_input(0),  # for PyTorch 2.11
    aten.reflection_pad3d.default: _as_input(0), aten.replication_pad3d.default: _as_input(0),
    aten.reflection_pad3d_backward.default: _as_input(1), aten.replication_pad3d_backward.default: _as_input(1),
    aten.max_unpool2d.default: _as_input(0), aten.channel_shuffle.default: _as_input(0),
    aten.hardswish_backward.default: _elementwise, aten.hardsigmoid_backward.default: _elementwise,
    aten.softplus_backward.default: _elementwise,
    aten.elu_backward.default: _elementwise, aten.native_dropout_backward.default: _elementwise,
    aten.logical_and.default: _elementwise, aten.logical_or.default: _elementwise,
    aten.logical_xor.default: _elementwise, aten.heaviside.default: _elementwise,
    aten.copysign.Tensor: _elementwise, aten.div.Tensor_mode: _elementwise,
    aten.floor_divide.default: _elementwise, aten.ldexp.Tensor: _elementwise, aten.logaddexp.default: _elementwise,
    aten.roll.default: _roll, aten.col2im.default: _folded,
    aten.mse_loss.default: _reduced_in_place(2), aten.smooth_l1_loss.default: _reduced_in_place(2),
    aten.soft_margin_loss.default: _reduced_in_place(2), aten.binary_cross_entropy.default: _reduced_in_place(3),
}  # fmt: skip
