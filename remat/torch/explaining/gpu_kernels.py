"""Kernels that a GPU would run, put into a capture on a machine without it.

PyTorch chooses some kernels by the device. A capture on the CPU's fake tensors would show the CPU's choice: attention
with dropout in many operations, and an RMS norm in float32. These rules follow PyTorch 2.13 for CUDA
(``sdp_utils.cpp``, ``layer_norm.cpp``). Kernels that no rule names are the same on both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from remat.cost import Gpu
from remat.cost.gpu import operation_class
from remat.graph import Graph, Operation, with_numbers
from remat.torch.implementations import logits
from remat.torch.internals.operators import overridden, tree_map, without_autocast
from remat.torch.step.work import in_blocks

# Operators that autocast on CUDA computes in float32, and the CPU's does not (``autocast_mode.h``)
WIDE = (
    "layer_norm", "group_norm", "softmax.int", "log_softmax.int", "pow.Tensor_Scalar", "rsqrt", "exp", "cumsum", "sum",
    "sum.dim_IntList",
)  # fmt: skip
HALF = (torch.float16, torch.bfloat16)
AMPERE, HOPPER = 80, 90
CUDNN_WIDTHS = {HOPPER: 256, 100: 128}  # widest heads for which PyTorch prefers cuDNN's attention
LIBRARY_BYTES = {90: 32 << 20, 100: 32 << 20, 120: 32 << 20, 94: 128 << 20, 95: 128 << 20}  # the last two are AMD's
aten = torch.ops.aten


@contextmanager
def kernels_of(gpu: Gpu) -> Iterator[None]:
    """Let fake CPU tensors run the kernels of a GPU; a device that is no CUDA GPU changes nothing."""
    if not gpu.compute_capability:
        yield
        return

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        kernel = attention_kernel(
            gpu.compute_capability, query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa
        )
        if kernel == "math":
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
        width = value.shape[-1]
        if kernel == "flash":
            if width % 8:
                query, key, value = (F.pad(x, (0, -width % 8)) for x in (query, key, value))
            out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return out[..., :width] if width % 8 else out
        bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
        fused = getattr(aten, f"_scaled_dot_product_{kernel}_attention")  # cuDNN's, or the efficient one
        return fused(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]

    kernels = {"scaled_dot_product_attention": attention, "rms_norm": _rms_norm}
    with overridden(kernels), overridden({name: _in_float32(name) for name in WIDE}, "AutocastCPU"):
        yield


def _in_float32(name: str) -> Callable[..., Any]:
    operator, _, overload = name.partition(".")
    kernel = getattr(getattr(aten, operator), overload or "default")

    def wide(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return kernel(
                *tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in HALF else x, args), **kwargs
            )

    return wide


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is None or weight.dtype != x.dtype:  # the fused kernel takes one type
        wide = x.float()
        squares = wide.pow(2).mean([-i - 1 for i in range(len(normalized_shape))], keepdim=True)
        normed = wide * torch.rsqrt(squares + (torch.finfo(x.dtype).eps if eps is None else eps))
        return (normed if weight is None else normed * weight).to(x.dtype)
    return _fused_rms_norm(x, list(normalized_shape), weight, torch.finfo(x.dtype).eps if eps is None else eps)[0]


@torch.library.custom_op("remat::_fused_rms_norm", mutates_args=())
def _fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The kernel that CUDA has for ``aten._fused_rms_norm``; on the CPU PyTorch takes that operator apart.

    Returns:
        (output, [rows] 1 / root of the mean square, in float32)
    """
    wide, dims = x.float(), [-i - 1 for i in range(len(shape))]
    scale = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype), scale


@torch.library.custom_op("remat::_fused_rms_norm_backward", mutates_args=())
def _fused_rms_norm_backward(
    gradient: Tensor, x: Tensor, shape: Sequence[int], scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of x, gradient of the weight)"""
    wide, given, dims = x.float() * scale, gradient.float(), [-i - 1 for i in range(len(shape))]
    inner = given * weight.float()
    of_x = scale * (inner - wide * (inner * wide).mean(dims, keepdim=True))
    rows = list(range(x.dim() - len(shape)))
    return of_x.to(x.dtype), (given * wide).sum(rows).to(weight.dtype)


@_fused_rms_norm.register_fake
def _(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


@_fused_rms_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, shape: Sequence[int], scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.shape, weight, _ = inputs
    ctx.save_for_backward(x, output[1], weight)


def _differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    x, scale, weight = ctx.saved_tensors
    of_x, of_weight = _fused_rms_norm_backward(gradient, x, ctx.shape, scale, weight)
    return of_x, None, of_weight, None


_fused_rms_norm.register_autograd(_differentiate, setup_context=_save)


def kernel_family(gpu: Gpu) -> tuple[bool, bool, int]:
    """GPUs of one family run the same kernels in a step."""
    return bool(gpu.compute_capability), gpu.compute_capability >= AMPERE, CUDNN_WIDTHS.get(gpu.compute_capability, 0)


def attention_kernel(
    capability: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool = False,
    enable_gqa: bool = False,
) -> str:  # fmt: skip
    """``cudnn``, ``flash``, ``efficient`` or ``math``: the first in PyTorch's order that takes these tensors.

    cuDNN is taken to be 9.10 or newer, as PyTorch's own builds have it.
    """
    if not _are_fused(query, key, value, enable_gqa):
        return "math"
    is_half = query.dtype in HALF
    widths = query.shape[-1], value.shape[-1]
    length, key_length = query.shape[-2], key.shape[-2]
    aligned = all(width % (8 if is_half else 4) == 0 for width in widths)
    most = CUDNN_WIDTHS.get(capability, 0)
    trained_mask = mask is not None and mask.requires_grad
    if is_half and aligned and max(widths) <= most and key_length > 1 and not trained_mask:
        return "cudnn"
    square = length == key_length or not is_causal
    if is_half and capability >= AMPERE and mask is None and square and widths[0] == widths[1] <= 256:
        return "flash"
    takes = query.dtype in (torch.float32, torch.float16) or (is_half and capability >= AMPERE)
    return "efficient" if takes and aligned and query.shape[1] == key.shape[1] else "math"


def _are_fused(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether any fused kernel takes the shapes: none broadcasts."""
    if {x.dim() for x in (query, key, value)} != {4} or len({x.dtype for x in (query, key, value)}) > 1:
        return False
    heads, others = query.shape[1], {key.shape[1], value.shape[1]}
    fits = len(others) == 1 and (heads % key.shape[1] == 0 if enable_gqa else others == {heads})
    return fits and query.shape[-1] == key.shape[-1] and len({x.shape[0] for x in (query, key, value)}) == 1


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores, for every head."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -math.inf)
    length = key.shape[-2]
    if length % 8:  # rows of the bias are aligned
        mask = F.pad(mask.expand(*mask.shape[:-1], length), (0, -length % 8))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], length)


def with_workspaces(graph: Graph) -> Graph:
    """The graph with the workspaces of attention's backward kernels.

    Flash attention adds the gradient of queries up in float32, and holds a number for each row; with grouped heads it
    makes gradients of keys and values for every head (Dao, 2023; ``flash_api.cpp``). cuDNN's is taken to be as large.
    The rounding of lengths to 128 is left out, so that sizes stay polynomials.
    """
    return graph.resized([*map(_with_workspace, graph.operations)])


def _with_workspace(op: Operation) -> Operation:
    known = 0 if op.work is None else workspace_of_call(op.work.signature)
    return replace(op, workspace_bytes=max(op.workspace_bytes, known)) if known else op


def workspace_of_call(signature: str) -> int:
    """Bytes of workspace by rule, as in `with_workspaces`; 0 without a rule."""
    if "remat.linear_cross_entropy" in signature:
        return logits.workspace_bytes([*map(_on_meta, json.loads(signature)["args"])])
    if not any(f"dot_product_{kernel}_attention_backward" in signature for kernel in ("flash", "cudnn")):
        return 0
    _, query, key, *_ = json.loads(signature)["args"]
    batch, heads, length, width = query["t"]
    sums = 4 * batch * heads * length * (-(-width // 32) * 32 + 1)
    grouped = 0 if key["t"][1] == heads else 2 * 2 * batch * heads * key["t"][2] * width
    return sums + grouped


def _on_meta(x: Any) -> Any:
    """An argument of a signature, a tensor without contents."""
    if not isinstance(x, dict):
        return x
    if "t" in x:
        return torch.empty(x["t"], dtype=getattr(torch, x["d"]), device="meta")
    return getattr(torch, x["x"].removeprefix("torch."))


def allocated(graph: Graph, gpu: Gpu) -> Graph:
    """The graph as CUDA's allocator takes it: in blocks of 512 bytes; on another device as it is."""
    if not gpu.compute_capability:
        return graph

    def rounded(each: Any, field: str) -> Any:
        size = getattr(each, field)
        return each if in_blocks(size) == size else with_numbers(each, **{field: in_blocks(size)})

    operations = [rounded(op, "workspace_bytes") for op in graph.operations]
    return graph.resized(operations, [rounded(value, "bytes") for value in graph.values])


def library_bytes(graph: Graph, gpu: Gpu) -> int:
    """Bytes that cuBLAS or hipBLAS takes for good if the step has a matrix product (``CublasHandlePool.cpp``)."""
    if not gpu.compute_capability or not any(operation_class(op.kind) == "matmul" for op in graph.operations):
        return 0
    return LIBRARY_BYTES.get(gpu.compute_capability, (2 * 4096 + 8 * 16) << 10)
