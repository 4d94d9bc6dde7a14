"""Rebuild one ATen call from its signature, and measure its time or workspace."""

from __future__ import annotations

import contextlib
import operator
import os
import runpy
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import remat.torch.step.recurrent  # noqa: F401 - registers operators
from remat.cost.timing import Timing, measure, measure_as_in_step
from remat.torch import _random, implementations
from remat.torch.internals.autograd import memory_events, storage_key
from remat.torch.step.work import GENERATED, storage_bytes, tensors_of

# Integer tensors are indices. The bound of an operator's indices, from its rebuilt arguments. For other operators they
# are zeros, which are valid everywhere.
_INDEX_LIMITS: dict[str, Callable[[list[Any]], int]] = {
    "embedding": lambda args: args[0].shape[0],
    "embedding_dense_backward": lambda args: args[2],
    "nll_loss_forward": lambda args: args[0].shape[-1],
    "nll_loss_backward": lambda args: args[1].shape[-1],
    "remat.linear_cross_entropy": lambda args: args[1].shape[0],
    "nll_loss2d_forward": lambda args: args[0].shape[1],
    "nll_loss2d_backward": lambda args: args[1].shape[1],
    **dict.fromkeys(
        ("gather", "scatter", "scatter_add", "index_select", "index_add"), lambda args: args[0].shape[args[1]]
    ),
    **dict.fromkeys(("index", "index_put"), lambda args: min(args[0].shape)),
}

# Position of the tensor that the operation just before usually made: the gradient or the input; by default the first.
_MADE_LAST = {"aten.addmm.default": 1, "aten.baddbmm.default": 1, "aten.embedding.default": 1}

_PROFILER = threading.RLock()  # PyTorch's is one for all threads: two that begin at once crash the process


def time(description: dict[str, Any], device: str) -> Timing:
    """Time the call, with random inputs of the same shapes, strides and dtypes; on a CPU as within a step."""
    call, given = rebuilt_call(description, device)
    touched = given[_MADE_LAST.get(description["op"], 0) :][:1]
    with torch.no_grad():
        if device == "cuda":
            return measure(call, _cuda_ns)
        return measure_as_in_step(call, lambda: [tensor.sum() for tensor in touched])


def workspace(description: dict[str, Any], device: str) -> int:
    """Bytes that the call takes from PyTorch's allocator beyond its inputs and the requested outputs."""
    call, given = rebuilt_call(description, device)
    with torch.no_grad():
        call()  # the first call selects kernels, which may take memory that later calls do not take
        made, peak = peak_of(call, device)
    known = {storage_key(t) for t in given}
    own = {storage_key(t): storage_bytes(t) for t in tensors_of(_asked_for(made, description))}
    return max(0, peak - sum(size for key, size in own.items() if key not in known))


def _asked_for(made: Any, description: dict[str, Any]) -> Any:
    """The outputs that the call asks for; a convolution's backward kernels also make those that its mask excludes."""
    mask = description["args"][-1] if "_backward" in description["op"] and description["args"] else None
    if isinstance(mask, list) and isinstance(made, tuple | list) and [type(x) for x in mask] == [bool] * len(made):
        return [x for x, is_asked in zip(made, mask, strict=True) if is_asked]
    return made


@contextlib.contextmanager
def profiler_alone(*, waits: bool = True) -> Iterator[bool]:
    """Whether no other thread of remat profiles in here; `waits` until that is so."""
    is_alone = _PROFILER.acquire(blocking=waits)
    try:
        yield is_alone
    finally:
        if is_alone:
            _PROFILER.release()


def peak_of(run: Callable[[], Any], device: str) -> tuple[Any, int]:
    """(the result of `run`, the most bytes that PyTorch's allocator held during the run above those held before)."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = run()
        torch.cuda.synchronize()
        return made, torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes two lines to stderr at each use
    # `torch.profiler` is the same profiler, but imports the compiler.
    with profiler_alone(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        made = run()
    held = peak = 0
    for event in memory_events(profiler):
        held += event.nbytes()
        peak = max(peak, held)
    return made, peak


def rebuilt_call(description: dict[str, Any], device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """A function that makes the described call with arguments of its own, and the tensors among these arguments."""
    if description["op"].startswith("implementation."):
        return _implementation(description, device)
    if description["op"] == GENERATED:
        return _generated(description, device)
    call: Any = operator.attrgetter(description["op"])(torch.ops)
    name = description["op"].removeprefix("aten.").rpartition(".")[0]
    if device == "cuda":
        torch.cuda.empty_cache()  # blocks cut for the previous operation may not fit this one
    pending: list[torch.Tensor] = []
    args = _rebuild(description["args"], device, pending)
    kwargs = _rebuild(description["kwargs"], device, pending)
    if name == "max_pool2d_with_indices_backward":  # (gradient, input, window..., indices): only a forward knows them
        args[7].copy_(torch.ops.aten.max_pool2d_with_indices.default(*args[1:7])[1])
    elif name == "native_batch_norm_backward" and args[2] is not None:
        # Fake tensors give the saved statistics half precision; real ones have the weight's dtype.
        args[5:7] = [None if x is None else x.to(args[2].dtype) for x in args[5:7]]
    elif name == "remat.recurrent_backward" and args[1] is not None:
        args[1] = _random.random_state(torch.device(device))
    elif name == "_grouped_mm":  # its integers are the ends of groups
        for ends in pending:
            ends.copy_(torch.arange(1, len(ends) + 1) * _divided(args[0], args[1]) // len(ends))
    elif name in ("_embedding_bag", "_embedding_bag_backward"):
        _fill_bags(name, args)
    elif name in _INDEX_LIMITS:
        limit = _INDEX_LIMITS[name](args)
        for indices in pending:
            indices.copy_(torch.randint(max(1, limit), indices.shape, device=device))
    return (lambda: call(*args, **kwargs)), tensors_of((args, kwargs))


def _fill_bags(name: str, args: list[Any]) -> None:
    """Share out the indices of a call among its bags; what the backward kernel takes for empty needs no workspace."""
    indices, offsets = args[1], args[2]
    offsets.copy_(torch.arange(len(offsets)) * len(indices) // max(1, len(offsets)))
    if name == "_embedding_bag_backward":  # (gradient, indices, offsets, 3 results of the forward kernel, rows, ...)
        table = args[0].new_zeros(args[6], args[0].shape[1])
        args[3:6] = torch.ops.aten._embedding_bag(table, indices, offsets, *args[7:])[1:]


_compiled: dict[str, Any] = {}  # [file] kernel that Inductor generated


def prepare(descriptions: Iterable[dict[str, Any]]) -> None:
    """Compile the generated kernels among these calls, several at a time; before any is timed, which needs quiet."""
    files = {each["file"] for each in descriptions if each["op"] == GENERATED} - _compiled.keys()
    begun = {file: runpy.run_path(file) for file in sorted(files)}
    for file, names in begun.items():
        with contextlib.suppress(Exception):  # the call of a kernel that does not compile will raise this again
            _compiled[file] = _finished(names)


def _finished(names: dict[str, Any]) -> Any:
    """The kernel of a file that has begun to compile it."""
    names["async_compile"].wait(names)
    return names["kernel"]


def _generated(description: dict[str, Any], device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """A call of a kernel that Inductor generated, see `remat.torch.inductor.generated`."""
    file = description["file"]
    kernel = _compiled[file] if file in _compiled else _finished(runpy.run_path(file))
    args = _rebuild(description["args"], device, [])
    kwargs = _rebuild(description["kwargs"], device, [])
    if device == "cuda":
        stream = torch.cuda.current_stream().cuda_stream
        return (lambda: kernel.run(*args, **kwargs, stream=stream)), tensors_of(args)
    return (lambda: kernel(*args, **kwargs)), tensors_of(args)


def _divided(a: torch.Tensor, b: torch.Tensor) -> int:
    """The length of the dimension that a grouped matrix product divides."""
    if a.dim() == 2:
        return a.shape[1] if b.dim() == 2 else a.shape[0]
    return b.shape[-1]


def _implementation(description: dict[str, Any], device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """A call of one of `remat.torch.implementations`; packed masks and small indices are zeros, which are valid."""
    name, _, side = description["op"].removeprefix("implementation.").rpartition(".")
    if name == "batch_norm_from_leaky_relu":
        call: Any = implementations.batch_norm_backward_from_leaky_relu
    else:
        call = getattr(implementations.IMPLEMENTATIONS[name], side)
    args = _rebuild(description["args"], device, [])
    if (name, side) == ("dropout_replayed", "backward"):
        args[1] = _random.random_state(torch.device(device))
    if name == "max_pool2d_offsets" and side == "backward":  # the middle of a window is always inside the image
        height, width = (args[3][0], args[3][-1])
        args[-1].fill_(height // 2 * width + width // 2)
    return (lambda: call(*args)), tensors_of(args)


def _cuda_ns(run: Callable[[], object], n: int) -> float:
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    for _ in range(n):
        run()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) * 1e6


def _rebuild(x: Any, device: str, integers: list[torch.Tensor]) -> Any:
    """Arguments from their plain form; the storages of integer tensors (zero) are also appended to `integers`."""
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
        integers.append(storage)  # a tensor that repeats elements cannot be written to
    return tensor
