"""Activations and dropout as data. A backward call's arguments are named where they are taken apart."""

from __future__ import annotations

from typing import Any

from remat.torch.implementations import _activations, _dropout, _in_place, _masks, _norms
from remat.torch.implementations._bits import dense_strides
from remat.torch.implementations._types import Calls, Family, TorchImplementation, value_of

OUTPUT, INTERMEDIATE = Family.OUTPUT, Family.INTERMEDIATE


def _strides_of_input(c: Calls) -> tuple[int, ...]:
    return dense_strides(value_of(c.forward[0][0]))


def _from_output(c: Calls) -> tuple[Any, ...]:
    """The backward call's own arguments with the output in place of its second."""
    grad, _, *options = c.backward[0]
    return (grad, c.results[0], *options)


def _activation(name: str, backward: Any, backward_kind: str, **more: Any) -> TorchImplementation:
    more = {"backward_arguments": _from_output, **more}
    kinds = (f"aten.{name}",)
    return TorchImplementation(f"{name}_from_output", OUTPUT, kinds, (f"aten.{backward_kind}",), ("output",),
                               backward=backward, **more)  # fmt: skip


def _leaky_relu_why_not(c: Calls) -> str:
    return "" if c.backward[0][2] >= 0 else "the sign of the output does not tell that of the input"


def _elu_arguments(c: Calls) -> tuple[Any, ...]:
    grad, alpha, scale, input_scale, _is_result, _x = c.backward[0]
    return grad, c.results[0], alpha, scale, input_scale


def _elu_why_not(c: Calls) -> str:
    return "" if min(c.backward[0][1:4]) > 0 else "the output does not tell the side of zero that the input is on"


_ELU: dict[str, Any] = {"backward_arguments": _elu_arguments, "why_not": _elu_why_not, "exact": False,
                        "tolerance": {"float32": 1e-6, "float64": 1e-14}}  # fmt: skip
ACTIVATIONS = (
    _activation("relu", _activations.relu_backward_from_output, "threshold_backward", is_default=True,
                backward_arguments=lambda c: (c.backward[0][0], c.results[0])),
    _activation("sigmoid", _activations.sigmoid_backward_from_output, "sigmoid_backward", is_default=True),
    _activation("tanh", _activations.tanh_backward_from_output, "tanh_backward", is_default=True),
    _activation("_softmax", _norms.softmax_backward_from_output, "_softmax_backward_data", is_default=True),
    _activation("_log_softmax", _norms.log_softmax_backward_from_output, "_log_softmax_backward_data", is_default=True),
    _activation("hardtanh", _activations.hardtanh_backward_from_output, "hardtanh_backward"),
    _activation("leaky_relu", _activations.leaky_relu_backward_from_output, "leaky_relu_backward",
                backward_arguments=lambda c: (c.backward[0][0], c.results[0], c.backward[0][2]),
                why_not=_leaky_relu_why_not),
    _activation("elu", _activations.elu_backward_from_output, "elu_backward", **_ELU),
    _activation("celu", _activations.elu_backward_from_output, "elu_backward", **_ELU),
)  # fmt: skip


def _with_strides(c: Calls) -> tuple[Any, ...]:
    """The forward call's arguments and the strides that backward expects, should the run's differ from the trace's."""
    return *c.forward[0], _strides_of_input(c)


def _by_bits(c: Calls) -> tuple[Any, ...]:
    return c.backward[0][0], c.kept[0], _strides_of_input(c)


MASKS = (
    TorchImplementation("relu_packed", INTERMEDIATE, ("aten.relu",), ("aten.threshold_backward",), ("bits",),
                        kept=("bits",), forward_arguments=_with_strides,
                        forward=_masks.relu_packed, backward=_masks.packed_backward,
                        backward_arguments=_by_bits),
    TorchImplementation("hardtanh_packed", INTERMEDIATE, ("aten.hardtanh",), ("aten.hardtanh_backward",), ("bits",),
                        kept=("bits",), forward_arguments=_with_strides,
                        forward=_masks.hardtanh_packed, backward=_masks.packed_backward,
                        backward_arguments=_by_bits),
)  # fmt: skip

_DROPOUT = (("aten.native_dropout",), ("aten.native_dropout_backward",))


def _dropout_why_not(c: Calls) -> str:
    return "" if c.forward[0][2] is not False else "nothing is drawn"


DROPOUT = (
    TorchImplementation(
        "dropout_packed", INTERMEDIATE, *_DROPOUT, ("bits",), kept=("bits",), random=True,
        forward_arguments=_with_strides,
        forward=_dropout.dropout_packed, backward=_dropout.dropout_packed_backward, why_not=_dropout_why_not,
        backward_arguments=lambda c: (c.backward[0][0], c.kept[0], c.backward[0][2], _strides_of_input(c))),
    TorchImplementation(
        "dropout_replayed", INTERMEDIATE, *_DROPOUT, ("random state",), kept=("random state",), random=True,
        forward_arguments=_with_strides,
        forward=_dropout.dropout_replayed, backward=_dropout.dropout_replayed_backward, why_not=_dropout_why_not,
        backward_arguments=lambda c: (
            c.backward[0][0], c.kept[0], c.forward[0][1], c.backward[0][2], _strides_of_input(c))),
)  # fmt: skip


def _in_place_of(name: str, **more: Any) -> TorchImplementation:
    return TorchImplementation(f"{name}_in_place", Family.IN_PLACE, (f"aten.{name}",), (), (), overwrites=0,
                               forward=getattr(_in_place, f"{name}_in_place"), **more)  # fmt: skip


def _add_why_not(c: Calls) -> str:
    x, other = value_of(c.forward[0][0]), value_of(c.forward[0][1])
    wide = getattr(other, "shape", ())
    if len(wide) > x.dim() or any(n not in (1, m) for n, m in zip(reversed(wide), reversed(x.shape), strict=False)):
        return "the sum is larger than its first term"
    same = x.is_floating_point() and getattr(other, "dtype", x.dtype) == x.dtype
    return "" if same else "the sum may have another type than its first term"


IN_PLACE = (
    *(_in_place_of(name) for name in ("relu", "hardtanh", "leaky_relu", "elu", "celu", "sigmoid", "tanh", "silu")),
    _in_place_of("add", why_not=_add_why_not),
    TorchImplementation(
        "dropout_in_place", Family.IN_PLACE, ("aten.native_dropout",), (), (), ((0, 0), (0, 1)), overwrites=0,
        forward=_in_place.dropout_in_place, random=True, devices=("cpu",)),
)  # fmt: skip
