"""Rebuild and time one ATen call from its signature (checked with torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat.cost._timing import Timing, measure

# Integer tensors are indices. What they index, from the rebuilt arguments; others get zeros, which are valid anywhere.
_INDEX_LIMITS: dict[str, Callable[[list[Any]], int]] = {
    "embedding": lambda args: args[0].shape[0],
    "embedding_dense_backward": lambda args: args[2],
    "nll_loss_forward": lambda args: args[0].shape[-1],
    "nll_loss_backward": lambda args: args[1].shape[-1],
    "nll_loss2d_forward": lambda args: args[0].shape[1],
    "nll_loss2d_backward": lambda args: args[1].shape[1],
    "gather": lambda args: args[0].shape[args[1]],
    "scatter": lambda args: args[0].shape[args[1]],
    "scatter_add": lambda args: args[0].shape[args[1]],
    "index_select": lambda args: args[0].shape[args[1]],
    "index_add": lambda args: args[0].shape[args[1]],
    "index": lambda args: min(args[0].shape),
    "index_put": lambda args: min(args[0].shape),
}


def time(description: dict[str, Any], device: str) -> Timing:
    """Time the call with random inputs of the same shapes, strides and dtypes on `device`."""
    name, _, overload = description["op"].removeprefix("aten.").rpartition(".")
    namespace = torch.ops.aten if description["op"].startswith("aten.") else torch.ops
    call: Any = namespace
    for part in name.split("."):
        call = getattr(call, part)
    call = getattr(call, overload)
    if device == "cuda":
        torch.cuda.empty_cache()  # blocks cut for the previous operation may not fit this one
    pending: list[torch.Tensor] = []
    args = _rebuild(description["args"], device, pending)
    kwargs = _rebuild(description["kwargs"], device, pending)
    if name == "max_pool2d_with_indices_backward":  # (gradient, input, window..., indices): only a forward knows them
        args[7].copy_(torch.ops.aten.max_pool2d_with_indices.default(*args[1:7])[1])
    elif name in _INDEX_LIMITS:
        limit = _INDEX_LIMITS[name](args)
        for indices in pending:
            indices.copy_(torch.randint(max(1, limit), indices.shape, device=device))
    with torch.no_grad():
        return measure(lambda: call(*args, **kwargs), _cuda_ns if device == "cuda" else None)


def _cuda_ns(run: Callable[[], object], n: int) -> float:
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    for _ in range(n):
        run()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) * 1e6


def _rebuild(x: Any, device: str, integers: list[torch.Tensor]) -> Any:
    """Arguments from their plain form; integer tensors (zero) are also appended to `integers`."""
    if isinstance(x, list):
        return [_rebuild(item, device, integers) for item in x]
    if not isinstance(x, dict):
        return x
    if "x" in x:
        attribute = getattr(torch, x["x"].removeprefix("torch."), None)
        plain = isinstance(attribute, (torch.dtype, torch.layout, torch.memory_format))
        return attribute if plain else torch.device(device)  # torch.cpu exists, and is a module
    if "t" not in x:
        return {key: _rebuild(item, device, integers) for key, item in x.items()}
    dtype = getattr(torch, x["d"])
    extent = 0 if 0 in x["t"] else 1 + sum((n - 1) * s for n, s in zip(x["t"], x["s"], strict=True))
    storage = torch.zeros(extent, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        storage.uniform_(0.1, 1.0) if dtype.is_floating_point else storage.fill_(1)
    elif dtype is torch.bool:
        storage.random_(0, 2)
    tensor = storage.as_strided(x["t"], x["s"])
    if dtype in (torch.int64, torch.int32):
        integers.append(tensor)
    return tensor
