"""Pooling, normalisation, convolution, and the output projection with its loss in chunks, as data."""

from __future__ import annotations

from typing import Any

from remat.torch.implementations import _convolution, _im2col, _max_pool, _norms, logits
from remat.torch.implementations._types import Calls, Family, TorchImplementation, value_of

OUTPUT, INTERMEDIATE = Family.OUTPUT, Family.INTERMEDIATE
BATCH_NORM, BATCH_NORM_BACKWARD = "aten._native_batch_norm_legit_functional", "aten.native_batch_norm_backward"
NORM_TOLERANCE = {str(dtype).removeprefix("torch."): error for dtype, error in _norms.TOLERANCE.items()}

_POOL = (("aten.max_pool2d_with_indices",), ("aten.max_pool2d_with_indices_backward",))


def _pool_of_shape(c: Calls, indices: Any) -> tuple[Any, ...]:
    grad, x, *window, _ = c.backward[0]
    return grad, tuple(value_of(x).shape), value_of(x).stride(), *window, indices


def _pool_why_not(c: Calls) -> str:
    cells = c.forward[0][1][0] * c.forward[0][1][-1]
    return "" if cells <= _max_pool.MOST_CELLS else f"the window has {cells} cells, more than a byte can number"


MAX_POOL = (
    TorchImplementation(
        "max_pool2d_recomputed", Family.INPUT, *_POOL, ("input",), forward=_max_pool.max_pool2d_values,
        backward=_max_pool.max_pool2d_backward_recomputed, backward_arguments=lambda c: c.backward[0][:-1]),
    TorchImplementation(
        "max_pool2d_indices", INTERMEDIATE, *_POOL, ("indices",), ((0, 0), (0, 1)),
        backward=_max_pool.max_pool2d_backward_from_indices,
        backward_arguments=lambda c: _pool_of_shape(c, c.results[1])),
    TorchImplementation(
        "max_pool2d_offsets", INTERMEDIATE, *_POOL, ("offsets",), kept=("offsets",),
        forward=_max_pool.max_pool2d_offsets, backward=_max_pool.max_pool2d_backward_from_offsets,
        backward_arguments=lambda c: _pool_of_shape(c, c.kept[0]), why_not=_pool_why_not),
)  # fmt: skip


def _batch_norm_why_not(c: Calls) -> str:
    x, weight, bias, _mean, _variance, training, *_ = (value_of(a) for a in c.forward[0])
    return _norms.why_not_invertible(weight, bias, x.dtype) if training else "it is not training"


def _leaky_abn_why_not(c: Calls) -> str:
    return _batch_norm_why_not(c) if c.forward[1][1] >= 1e-3 else "a leaky ReLU of so small a slope cannot be inverted"


def _norm_why_not(x: int, weight: int, bias: int) -> Any:
    def why_not(c: Calls) -> str:
        values = [value_of(a) for a in c.forward[0]]
        return _norms.why_not_invertible(values[weight], values[bias], values[x].dtype)

    return why_not


_BN_RESULTS, _ABN_RESULTS = tuple((0, i) for i in range(5)), ((1, 0), *((0, i) for i in range(1, 5)))
_AFFINE = ("output", "weight", "bias", "rstd")


NORMS = (
    TorchImplementation(
        "batch_norm_from_output", OUTPUT, (BATCH_NORM,), (BATCH_NORM_BACKWARD,), _AFFINE, _BN_RESULTS,
        forward=_norms.batch_norm_checked, backward=_norms.batch_norm_backward_from_output,
        backward_arguments=lambda c: (
            c.backward[0][0], c.results[0], *c.forward[0][1:3], c.results[2], c.backward[0][-1]),
        why_not=_batch_norm_why_not, tolerance=NORM_TOLERANCE),
    TorchImplementation(
        "batch_norm_leaky_relu", OUTPUT, (BATCH_NORM, "aten.leaky_relu"),
        ("aten.leaky_relu_backward", BATCH_NORM_BACKWARD), _AFFINE, _ABN_RESULTS,
        backward=_norms.batch_norm_backward_from_leaky_relu,
        backward_arguments=lambda c: (
            c.backward[1][0], c.results[0], *c.forward[0][1:3], c.results[2], c.forward[1][1], c.backward[1][-1]),
        why_not=_leaky_abn_why_not, tolerance=NORM_TOLERANCE),
    TorchImplementation(
        "layer_norm_from_output", OUTPUT, ("aten.native_layer_norm",), ("aten.native_layer_norm_backward",), _AFFINE,
        ((0, 0), (0, 1), (0, 2)), forward=_norms.layer_norm_checked, backward=_norms.layer_norm_backward_from_output,
        backward_arguments=lambda c: (
            c.backward[0][0], c.results[0], c.forward[0][1], c.results[2], *c.forward[0][2:4], c.backward[0][-1]),
        why_not=_norm_why_not(0, 2, 3), tolerance=NORM_TOLERANCE),
    TorchImplementation(
        "group_norm_from_output", OUTPUT, ("aten.native_group_norm",), ("aten.native_group_norm_backward",), _AFFINE,
        ((0, 0), (0, 1), (0, 2)), forward=_norms.group_norm_checked, backward=_norms.group_norm_backward_from_output,
        backward_arguments=lambda c: (
            c.backward[0][0], c.results[0], c.results[2], *c.forward[0][1:3], *c.backward[0][5:]),
        why_not=_norm_why_not(0, 1, 2), tolerance=NORM_TOLERANCE),
)  # fmt: skip


def _im2col_why_not(c: Calls) -> str:
    x, weight, _bias, _stride, _padding, _dilation, transposed, _output_padding, groups = map(value_of, c.forward[0])
    if transposed or groups != 1 or x.dim() != 4:
        return "only convolutions of images without groups can be done by im2col here"
    same_layout = x.is_contiguous() and weight.is_contiguous()
    return "" if same_layout else "results would have another layout than the default's"


def _convolution_of(name: str, module: Any, **more: Any) -> TorchImplementation:
    return TorchImplementation(
        f"convolution_{name}", Family.ALGORITHM, ("aten.convolution",), ("aten.convolution_backward",),
        ("input", "weight"),
        forward=getattr(module, f"convolution_{name}"), backward=getattr(module, f"convolution_{name}_backward"),
        backward_arguments=lambda c: c.backward[0], tolerance={"float32": 1e-5, "float64": 1e-12}, **more,
    )  # fmt: skip


CONVOLUTIONS = (
    _convolution_of("im2col", _im2col, why_not=_im2col_why_not),
    _convolution_of("im2col_per_sample", _im2col, why_not=_im2col_why_not),
    _convolution_of("native", _convolution),
    _convolution_of("channels_last", _convolution, why_not=lambda c: (
        "" if value_of(c.forward[0][0]).dim() == 4 else "only images have channels last")),
    _convolution_of("cudnn_benchmark", _convolution, devices=("cuda",)),
    _convolution_of("cudnn_deterministic", _convolution, devices=("cuda",)),
)  # fmt: skip


N_CHUNKS = (4, 16, 64)


def _in_chunks(n_chunks: int) -> TorchImplementation:
    def arguments(c: Calls) -> tuple[Any, ...]:
        return (*c.forward[0][:-1], n_chunks)

    def why_not(c: Calls) -> str:
        n_tokens = value_of(c.forward[0][3]).shape[0]
        return "" if n_tokens >= 2 * n_chunks else f"{n_tokens} tokens make no {n_chunks} chunks"

    return TorchImplementation(
        f"cross_entropy_in_{n_chunks}", Family.ALGORITHM, ("remat.linear_cross_entropy",), (), (),
        tuple((0, i) for i in range(4)), forward=logits.linear_cross_entropy, forward_arguments=arguments,
        why_not=why_not, tolerance={"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2},
    )  # fmt: skip


CHUNKS = tuple(map(_in_chunks, N_CHUNKS))
