"""Capture of the step of a model's call, as the compiled call captures it, and its sample arguments."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from remat.cost.gpu import DEFAULT_GPU, Gpu, gpu_names, load_gpu
from remat.errors import InvalidInput
from remat.link import Link, parse_link
from remat.torch.internals.dynamo import TraceSettings
from remat.torch.internals.operators import is_fake, tree_leaves, tree_map
from remat.torch.measuring.plain import plain_step
from remat.torch.planning.known import known_step, note_step
from remat.torch.planning.planner import Backend
from remat.torch.step.branches import Values
from remat.torch.step.capture import TrainingGraph, capture_module
from remat.torch.step.refusals import causes, check_given_tensors, check_history, check_momentum, check_own_tensors
from remat.torch.step.state import State
from remat.torch.step.training_graph import CapturedStep, split_graph_of
from remat.torch.step.work import tensors_of

AUTO = "auto"
_numbers = itertools.count()
_settings: weakref.WeakKeyDictionary[nn.Module, TraceSettings] = weakref.WeakKeyDictionary()


def trace_settings(model: nn.Module) -> TraceSettings:
    """How a model has to be traced, see `capture.compiling`."""
    return _settings.setdefault(model, TraceSettings())


def captured_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], backend: Backend, name: str = ""
) -> CapturedStep:
    """The step on these arguments, equal to the one that the compiled call captures; nothing is computed.

    Args:
        name: of the graph; by default the model's class.
    """
    check_momentum(model)
    check_own_tensors(model)
    check_given_tensors(model, args, kwargs)
    inputs = describe_inputs((args, kwargs))
    if backend.captures_alike:
        known = known_step(model, args, kwargs, inputs)
        step = None if known is None else known.with_arguments(tree_leaves((args, dict(kwargs))))
        if step is not None:
            return replace(step, graph=replace(step.graph, name=name or type(model).__name__))

    def captured() -> TrainingGraph:
        values = Values(model, args, kwargs, inputs)
        return capture_module(call_of(model), args, kwargs, backend.runner, trace_settings(model), values)

    with causes(model, args, kwargs), torch.enable_grad():
        try:
            training_graph = captured()
        except InvalidInput:
            before = State(model)
            if not _is_set_up(model, args, kwargs):
                raise
            try:
                training_graph = captured()
            except InvalidInput:
                before.put_back()
                raise
    step = backend.step_of(training_graph, name or type(model).__name__, model)
    if backend.captures_alike:
        note_step(model, args, kwargs, inputs, step)
    return step


def _is_set_up(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the model runs on tensors without contents: what it sets up in its first call is then set up.

    transformers' models install hooks then, for example, in a way that cannot be traced.
    """
    try:
        plain_step(model, args, kwargs, sets_up=True)
    except Exception:  # whatever stops it here: the compiler's refusal is what the user reads
        return False
    return True


def call_of(model: nn.Module) -> Callable[..., Any]:
    """The model's call as a function with its own code, because the compiler counts compilations per code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = call.__code__.replace(co_name=f"rematerialized_{next(_numbers)}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def whole_step(training_graph: TrainingGraph, name: str, model: nn.Module) -> CapturedStep:
    """The step of a training graph, with all tensors of the model resident."""
    check_history(model, training_graph.primals, training_graph.tangents)
    return split_graph_of(training_graph, name, (*model.parameters(), *model.buffers()))


def describe_inputs(args: Any) -> str:
    """Shapes and dtypes of tensors in a structure of arguments, e.g. ``float32[32, 3, 224, 224]``."""
    return ", ".join(map(_described, tree_leaves(args))) or "no inputs"


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        place = f"@{x.device.type}" if x.device.type != "cpu" else ""
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{place}"
    plain = isinstance(x, (bool, int, float, complex, str, torch.dtype, type(None)))
    return repr(x)[:40] if plain else type(x).__name__  # other representations may hold an address


def device_of(model: nn.Module, args: Any) -> str:
    """``cpu`` or ``cuda``: the device of all tensors; arguments on ``meta`` go there.

    Raises:
        InvalidInput: there are several devices, or one on which remat cannot measure.
    """
    tensors = [*model.parameters(), *model.buffers(), *(x for x in tensors_of(args) if not x.is_meta)]
    kinds = {x.device.type for x in tensors}
    if len({x.device for x in tensors if x.device.type != "cpu"}) > 1 or kinds - {"cpu", "cuda"}:
        places = ", ".join(sorted({str(x.device) for x in tensors}))
        raise InvalidInput(f"model and sample_args are on {places}; move both to the CPU or to one CUDA device")
    return "cuda" if "cuda" in kinds else "cpu"


def default_gpu(device: str) -> Gpu:
    """The device of the roofline: this machine's GPU if it is known, else a V100; the CPU for a model on the CPU."""
    return load_gpu("cpu") if device == "cpu" else _this_gpu() or load_gpu(DEFAULT_GPU)


def _this_gpu() -> Gpu | None:
    """This machine's GPU, if it is known."""
    name = torch.cuda.get_device_name().lower().replace(" ", "")
    alike = [load_gpu(known) for known in gpu_names() if known.split("_")[0] in name]  # may differ in memory
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return min(alike, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=None)


def link_of(offload: str | Link | bool | None, device: str) -> Link | None:
    """The link that values may be copied over; None for no copies.

    ``auto`` is the link of this machine's GPU. A model on the CPU has its values in the host's memory, so that there
    ``auto`` copies nothing; a link that is given is imitated.

    Raises:
        InvalidInput: no link, or this GPU's is not known.
    """
    if offload is False or offload is None:
        return None
    if offload is not True and offload != AUTO:
        return parse_link(offload)
    if device == "cpu":
        return None
    gpu = _this_gpu()
    if gpu is None or not gpu.link:
        raise InvalidInput(
            f"offload='{AUTO}': the rate between {torch.cuda.get_device_name()} and its host is not known; give it, "
            "e.g. offload='25GB/s'"
        )
    return parse_link(gpu.link)


def keywords(sample_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keyword arguments as a dict.

    Raises:
        InvalidInput: they are no mapping from names.
    """
    given = {} if sample_kwargs is None else sample_kwargs
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidInput("sample_kwargs must hold the model's keyword arguments by name, e.g. {'mask': mask}")
    return dict(given)


def with_storages(arguments: Any, device: str) -> Any:
    """The arguments, with storages on `device` for tensors without contents, because the compiler needs storages.

    Integers are 0, a valid index.
    """

    def real(x: Any) -> Any:
        if not isinstance(x, Tensor) or not is_fake(x):
            return x
        empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device if x.is_meta else x.device)
        return empty.requires_grad_(x.requires_grad) if x.is_floating_point() or x.is_complex() else empty.zero_()

    return tree_map(real, arguments)
