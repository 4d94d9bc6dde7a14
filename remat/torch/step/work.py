"""The work of a traced ATen call: arithmetic, bytes moved, and a signature from which to rebuild it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from remat.graph import Work, reached
from remat.torch.internals.operators import OpOverload, fields_of, tree_iter
from remat.torch.step import flop_rules

GENERATED = "generated"  # the operator in the signature of a kernel that Inductor generated
CUDA_BLOCK_BYTES = 512
NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})


def kind_of(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(node.target, "__name__", str(node.target))


def tensors_of(structure: Any) -> list[torch.Tensor]:
    if isinstance(structure, torch.Tensor):
        return [structure]
    kind = type(structure)
    if kind is tuple or kind is list:  # here alone, PyTorch's iterator takes several times as long
        return [t for x in structure if type(x) not in NO_TENSORS for t in tensors_of(x)]
    if kind is dict:
        return tensors_of([*structure.values()])
    found = list[torch.Tensor]()
    for x in tree_iter(structure):
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif held := fields_of(x):
            found += tensors_of(held)
    return found


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that is divided over ranks (`DTensor`); any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the allocator takes for the tensor's storage; CUDA's allocator rounds up to blocks of 512."""
    return _allocated(tensor.untyped_storage().nbytes(), tensor.device)


def dense_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the allocator takes for a dense tensor of this shape and dtype, e.g. a gradient."""
    return _allocated(tensor.numel() * tensor.element_size(), tensor.device)


def _allocated(size: int, device: torch.device) -> int:
    return in_blocks(size) if device.type == "cuda" else size


def in_blocks(size: int) -> int:
    """Bytes of the blocks that CUDA's allocator takes for so many."""
    return -(-size // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a call reads or writes; an expanded tensor is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def work_of(node: fx.Node, kind: str) -> Work:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    inputs, outputs = tensors_of((args, kwargs)), tensors_of(node.meta["val"])
    read = {n.name: tensor_bytes(t) for n in node.all_input_nodes for t in tensors_of(n.meta["val"])}
    tags = [str(tag).rpartition(".")[2] for tag in getattr(node.target, "tags", ())]
    count = flop_rules.flops(
        kind.rpartition(".")[2], args, [tuple(t.shape) for t in inputs], [tuple(t.shape) for t in outputs], tags
    )
    dtypes = [t.dtype for t in (*outputs, *inputs)]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return Work(
        flops=count,
        bytes_moved=sum(read.values()) + sum(tensor_bytes(t) for t in outputs),
        dtype=str((floats or dtypes or [torch.float32])[0]).removeprefix("torch."),
        signature=call_signature(node.target, args, kwargs),
    )


def call_signature(target: Any, args: Any, kwargs: Any) -> str:
    """Canonical JSON from which a call can be rebuilt; '' if an argument cannot be written down."""
    if not isinstance(target, OpOverload):
        return ""
    try:
        plain = {"fw": "torch", "op": str(target), "args": plain_form(args), "kwargs": plain_form(kwargs)}
    except TypeError:
        return ""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def plain_form(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return {"t": list(x.shape), "s": list(x.stride()), "d": str(x.dtype).removeprefix("torch.")}
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, (list, tuple)):
        return [plain_form(item) for item in x]
    if isinstance(x, dict):
        return {key: plain_form(item) for key, item in x.items()}
    if isinstance(x, (torch.dtype, torch.layout, torch.device, torch.memory_format)):
        return {"x": str(x)}
    raise TypeError(f"{x!r} has no plain form")


def users_of(node: fx.Node, follows: Callable[[fx.Node], bool] = lambda _: True) -> set[fx.Node]:
    """All nodes that depend on a node, through those that `follows` accepts."""
    found = reached([node], lambda x: [user for user in x.users if user.op != "output" and follows(user)])
    return {*found} - {node}
