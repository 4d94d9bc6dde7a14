"""Activations and dropout as data."""

from __future__ import annotations

from typing import Any

import torch

from remat.torch.implementations import _dropout, _pointwise
from remat.torch.implementations._bits import dense_strides
from remat.torch.implementations._types import Calls, Family, TorchImplementation, value_of

aten = torch.ops.aten
OUTPUT, INTERMEDIATE = Family.OUTPUT, Family.INTERMEDIATE


def _strides_of_input(c: Calls) -> tuple[int, ...]:
    return dense_strides(value_of(c.forward[0][0]))


def _activation(name: str, backward: Any, backward_kind: str, **more: Any) -> TorchImplementation:
    """By default `backward` takes the backward call's arguments, with the output in place of the second one."""
    more = {"backward_arguments": lambda c: (c.backward[0][0], c.results[0], *c.backward[0][2:]), **more}
    kinds = (f"aten.{name}",)
    return TorchImplementation(f"{name}_from_output", OUTPUT, kinds, (f"aten.{backward_kind}",), ("output",),
                               backward=backward, **more)  # fmt: skip


_ELU: dict[str, Any] = {
    "backward_arguments": lambda c: (c.backward[0][0], c.results[0], *c.backward[0][1:4]),
    "why_not": lambda c: (
        "" if min(c.backward[0][1:4]) > 0 else "the output does not determine on which side of zero the input is"),
    "tolerance": {"float32": 1e-6, "float64": 1e-14},
}  # fmt: skip
ACTIVATIONS = (
    # ATen's own backward operators of these five read the output already.
    _activation("relu", aten.threshold_backward.default, "threshold_backward", is_default=True),
    _activation("sigmoid", aten.sigmoid_backward.default, "sigmoid_backward", is_default=True),
    _activation("tanh", aten.tanh_backward.default, "tanh_backward", is_default=True),
    _activation("_softmax", aten._softmax_backward_data.default, "_softmax_backward_data", is_default=True),
    _activation("_log_softmax", aten._log_softmax_backward_data.default, "_log_softmax_backward_data", is_default=True),
    # The output is at a bound exactly where the input is at or beyond it, and there the gradient is zero. The same
    # kernel gives the same bits (it lets the gradient of NaN pass only in the scalar tail of its loop).
    _activation("hardtanh", aten.hardtanh_backward.default, "hardtanh_backward"),
    _activation("leaky_relu", _pointwise.leaky_relu_backward_from_output, "leaky_relu_backward",
                backward_arguments=lambda c: (c.backward[0][0], c.results[0], c.backward[0][2]),
                why_not=lambda c: "" if c.backward[0][2] >= 0 else "the output's sign does not determine the input's"),
    _activation("elu", _pointwise.elu_backward_from_output, "elu_backward", **_ELU),
    _activation("celu", _pointwise.elu_backward_from_output, "elu_backward", **_ELU),
)  # fmt: skip


def _with_strides(c: Calls) -> tuple[Any, ...]:
    """The forward call's arguments, then the strides that backward expects; those of the run may differ."""
    return *c.forward[0], _strides_of_input(c)


def _mask(name: str, backward_kind: str) -> TorchImplementation:
    return TorchImplementation(
        f"{name}_packed", INTERMEDIATE, (f"aten.{name}",), (f"aten.{backward_kind}",), ("bits",), kept=("bits",),
        forward_arguments=_with_strides, forward=getattr(_pointwise, f"{name}_packed"),
        backward=_pointwise.packed_backward,
        backward_arguments=lambda c: (c.backward[0][0], c.kept[0], _strides_of_input(c)),
    )  # fmt: skip


MASKS = (_mask("relu", "threshold_backward"), _mask("hardtanh", "hardtanh_backward"))


def _dropout_keeping(kept: str, name: str, backward_arguments: Any) -> TorchImplementation:
    return TorchImplementation(
        name, INTERMEDIATE, ("aten.native_dropout",), ("aten.native_dropout_backward",), (kept,), kept=(kept,),
        random=True, forward_arguments=_with_strides, forward=getattr(_dropout, name),
        backward=getattr(_dropout, f"{name}_backward"), backward_arguments=backward_arguments,
        why_not=lambda c: "" if c.forward[0][2] is not False else "nothing is drawn",
    )  # fmt: skip


DROPOUT = (
    _dropout_keeping("bits", "dropout_packed", lambda c: (
        c.backward[0][0], c.kept[0], c.backward[0][2], _strides_of_input(c))),
    _dropout_keeping("random state", "dropout_replayed", lambda c: (
        c.backward[0][0], c.kept[0], c.forward[0][1], c.backward[0][2], _strides_of_input(c))),
)  # fmt: skip


def _in_place_of(name: str, forward: Any, **more: Any) -> TorchImplementation:
    return TorchImplementation(f"{name}_in_place", Family.IN_PLACE, (f"aten.{name}",), (), (), overwrites=0,
                               forward=forward, **more)  # fmt: skip


def _add_why_not(c: Calls) -> str:
    x, other = value_of(c.forward[0][0]), value_of(c.forward[0][1])
    wide = getattr(other, "shape", ())
    if len(wide) > x.dim() or any(n not in (1, m) for n, m in zip(reversed(wide), reversed(x.shape), strict=False)):
        return "the sum is larger than its first term"
    same = x.is_floating_point() and getattr(other, "dtype", x.dtype) == x.dtype
    return "" if same else "the sum may have another type than its first term"


IN_PLACE = (
    # SiLU only where no gradient is needed, because its backward reads the input.
    *(_in_place_of(name, getattr(aten, f"{name}_").default)
      for name in ("relu", "hardtanh", "leaky_relu", "elu", "celu", "sigmoid", "tanh", "silu")),
    _in_place_of("add", _pointwise.add_in_place, why_not=_add_why_not),
    TorchImplementation(
        "dropout_in_place", Family.IN_PLACE, ("aten.native_dropout",), (), (), ((0, 0), (0, 1)), overwrites=0,
        forward=_pointwise.dropout_in_place, random=True, devices=("cpu",)),
)  # fmt: skip
