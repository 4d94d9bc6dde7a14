"""Floating-point operations of ATen operators from shapes alone; 2 per multiply-add.

Matrix products, convolutions and attention follow the conventions of PyTorch's own counter
(`torch.utils.flop_counter`), which counts nothing else: it leaves out bias additions, and it counts the matrix products
that fused attention's backward recomputes. All other operators are counted by element with the small factors below, one
per arithmetic operation or transcendental; operators that only move data cost 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

Shape = tuple[int, ...]

# Per element of the first tensor input.
_PER_INPUT = {
    "_native_batch_norm_legit_functional": 7, "_native_batch_norm_legit": 7, "native_batch_norm": 7,
    "_native_batch_norm_legit_no_training": 4, "_batch_norm_with_update_functional": 7,
    "native_batch_norm_backward": 11, "batch_norm_backward": 11, "native_layer_norm": 8,
    "native_layer_norm_backward": 12, "native_group_norm": 8, "native_group_norm_backward": 12,
    "_fused_rms_norm": 5, "_fused_rms_norm_backward": 9,
    "_softmax": 5, "_log_softmax": 5, "_softmax_backward_data": 4, "_log_softmax_backward_data": 4,
    "sum": 1, "mean": 1, "amax": 1, "amin": 1, "max": 1, "min": 1, "argmax": 1, "argmin": 1,
    "prod": 1, "any": 1, "all": 1, "_safe_softmax": 5, "_adaptive_avg_pool3d": 1, "_adaptive_avg_pool3d_backward": 1,
    "var": 3, "var_mean": 4, "std": 3, "logsumexp": 3, "linalg_vector_norm": 2, "norm": 2, "cumsum": 1, "cumprod": 1,
    "nll_loss_forward": 1, "nll_loss2d_forward": 1, "mse_loss": 3, "binary_cross_entropy": 6, "huber_loss": 4,
    "smooth_l1_loss": 4, "_adaptive_avg_pool2d": 1, "adaptive_avg_pool2d": 1, "_adaptive_avg_pool2d_backward": 1,
    "avg_pool2d": 1, "adaptive_max_pool2d": 1, "embedding_dense_backward": 1, "hardtanh_backward": 2, "pow": 2,
}  # fmt: skip
# Per element of the first output.
_PER_OUTPUT = {
    "native_dropout": 2, "avg_pool2d_backward": 1, "upsample_nearest2d": 0, "upsample_nearest2d_backward": 1,
    "upsample_bilinear2d": 8, "upsample_bilinear2d_backward": 8, "max_pool2d_with_indices_backward": 1,
    "rand": 1, "rand_like": 1, "randn": 1, "randn_like": 1, "bernoulli": 1, "bernoulli_like": 1, "arange": 1,
    "nll_loss_backward": 1,
    "nll_loss2d_backward": 1, "mse_loss_backward": 3, "binary_cross_entropy_backward": 5,
    "binary_cross_entropy_with_logits": 6, "scatter_add": 1, "index_add": 1, "index_put": 1,
    "_unsafe_index_put": 1, "cumsum_backward": 1,
}  # fmt: skip
_MOVEMENT = frozenset([
    "clone", "_to_copy", "copy", "cat", "stack", "constant_pad_nd", "reflection_pad2d", "replication_pad2d",
    "slice_backward", "select_backward", "slice_scatter", "select_scatter", "as_strided_scatter",
    "diagonal_backward", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "empty",
    "empty_like", "empty_strided", "empty_permuted", "new_zeros", "new_ones", "new_full", "new_empty",
    "new_empty_strided", "fill", "scalar_tensor", "lift_fresh_copy", "index", "index_select", "gather",
    "scatter", "embedding", "roll", "flip", "repeat", "expand_copy", "permute_copy", "view_copy", "slice_copy",
    "select_copy", "tril", "triu", "eye", "copy_", "update_buffers", "end_forward", "masked_fill", "where",
    "_unsafe_index",
    "clone_", "contiguous", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "unfold_backward",
    "nonzero_static", "_assert_async", "_assert_scalar",
])  # fmt: skip


def _matmul(args: Sequence[Any], out: Sequence[Shape]) -> int:
    """2 x elements of the result x length of the contracted dimension (mm, bmm, mv, dot)."""
    return 2 * prod(out[0]) * args[0].shape[-1]


def _matmul_add(args: Sequence[Any], out: Sequence[Shape]) -> int:
    return 2 * prod(out[0]) * args[1].shape[-1]


def _conv(x: Shape, weight: Shape, out: Shape, transposed: bool) -> int:
    """2 x positions x weight elements; a transposed convolution has the positions of its input."""
    return 2 * x[0] * prod((x if transposed else out)[2:]) * prod(weight)


def _convolution(args: Sequence[Any], out: Sequence[Shape]) -> int:
    return _conv(args[0].shape, args[1].shape, out[0], args[6])


def _convolution_backward(args: Sequence[Any], _out: Sequence[Shape]) -> int:
    """The forward's FLOPs for each of input and weight gradient that is asked for."""
    grad, x, weight, transposed, mask = args[0].shape, args[1].shape, args[2].shape, args[7], args[10]
    return _conv(x, weight, grad, transposed) * (bool(mask[0]) + bool(mask[1]))


def _attention(q: Shape, k: Shape, v: Shape) -> tuple[int, int]:
    """(query-key product, product with the values) of attention on [batch, heads, length, width]."""
    scores = prod(q[:2]) * q[2] * k[2]
    return 2 * scores * q[3], 2 * scores * v[3]


def _sdpa(args: Sequence[Any], _out: Sequence[Shape]) -> int:
    return sum(_attention(*(a.shape for a in args[:3])))


def _sdpa_backward(args: Sequence[Any], _out: Sequence[Shape]) -> int:
    """Recomputed scores, gradients of scores and values, then of queries and keys: five products."""
    qk, av = _attention(*(a.shape for a in args[1:4]))
    return 3 * qk + 2 * av


def _linear_cross_entropy(args: Sequence[Any], _out: Sequence[Shape]) -> int:
    """The product that makes the logits, and one for each gradient of a factor that is asked for."""
    return 2 * prod(args[0].shape) * args[1].shape[0] * (1 + args[10][0] + args[10][1])


_COUNTED: dict[str, Callable[[Sequence[Any], Sequence[Shape]], int]] = {
    "mm": _matmul, "bmm": _matmul, "mv": _matmul, "dot": _matmul, "addmm": _matmul_add, "baddbmm": _matmul_add,
    "convolution": _convolution, "convolution_backward": _convolution_backward,
    "linear_cross_entropy": _linear_cross_entropy,
}  # fmt: skip
for _kernel in ("flash", "efficient", "cudnn", "fused_overrideable"):
    for _suffix in ("", "_for_cpu"):
        _COUNTED[f"_scaled_dot_product_{_kernel}_attention{_suffix}"] = _sdpa
        _COUNTED[f"_scaled_dot_product_{_kernel}_attention{_suffix}_backward"] = _sdpa_backward


def _recurrent(weights: Iterable[Any], data: Shape) -> int:
    """Matrix products of a recurrent layer on `data` [steps, batch, width] (or unbatched): each weight at each step."""
    return 2 * prod(data[:-1]) * sum(prod(w.shape) for w in weights if len(w.shape) == 2)


def is_counted(kind: str) -> bool:
    """Whether PyTorch's counter counts operators of this kind (``aten.mm``)."""
    return kind.removeprefix("aten.") in _COUNTED


def flops(
    name: str, args: Sequence[Any], inputs: Sequence[Shape], outputs: Iterable[Shape], tags: Iterable[str] = ()
) -> int | None:
    """FLOPs of one call; None when there is no rule.

    Args:
        name: operator without namespace and overload, e.g. ``convolution_backward``.
        args: its positional arguments; a tensor is anything with a ``shape``.
        inputs: shapes of its tensor inputs, in order.
        outputs: shapes of its tensor outputs, in order.
        tags: PyTorch's tags of the operator; ``pointwise`` is one per output element, ``reduction``
            one per input element.
    """
    outputs = list(outputs)
    if name in _COUNTED:
        return _COUNTED[name](args, outputs)
    if name in ("recurrent", "recurrent_random"):
        return _recurrent(args[3], args[1].shape)
    if name == "recurrent_backward":  # the forward pass again, and its two gradients
        return 3 * _recurrent(args[5], args[3].shape)
    if name in _MOVEMENT:
        return 0
    if name in _PER_INPUT and inputs:
        return _PER_INPUT[name] * prod(inputs[0])
    if name in _PER_OUTPUT and outputs:
        return _PER_OUTPUT[name] * prod(outputs[0])
    if name == "max_pool2d_with_indices":
        return prod(args[1]) * prod(outputs[0])
    if "pointwise" in tags:
        return max((prod(shape) for shape in outputs), default=0)
    if "reduction" in tags:
        return max((prod(shape) for shape in inputs), default=0)
    return None
