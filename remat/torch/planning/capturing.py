"""Capture of the step of a model's call, as the compiled call captures it, and its sample arguments."""

from __future__ import annotations

import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from remat.cost.gpu import DEFAULT_GPU, Gpu, gpu_names, load_gpu
from remat.errors import InvalidInput
from remat.link import AUTO, Link, is_auto, parse_link
from remat.torch.internals.autograd import hooks_of_all_modules, parameters_of, storage_key
from remat.torch.internals.dynamo import TraceSettings
from remat.torch.internals.operators import is_fake, with_tensors
from remat.torch.measuring.plain import plain_step
from remat.torch.planning.planner import Backend
from remat.torch.step.branches import Arguments, NewBranches, Values
from remat.torch.step.capture import TrainingGraph, captured, compile_graph
from remat.torch.step.numbers import check_containers
from remat.torch.step.refusals import causes, check_given_tensors, check_history, check_momentum, check_own_tensors
from remat.torch.step.runners import Runner
from remat.torch.step.state import State
from remat.torch.step.training_graph import CapturedStep, split_graph_of
from remat.torch.step.work import storage_bytes, tensors_of

_numbers = itertools.count()
_settings: weakref.WeakKeyDictionary[nn.Module, TraceSettings] = weakref.WeakKeyDictionary()


def trace_settings(model: nn.Module) -> TraceSettings:
    """How a model has to be traced, see `capture.compiling`."""
    return _settings.setdefault(model, TraceSettings())


class Calls:
    """The compiled functions of a model's call by one runner, with what they depend on and the compiler does not see.

    Attributes:
        compiled: [that] a function of the model and its arguments. The keys say which parameters need a gradient:
            PyTorch 2.11's compiler does not notice when that changes. They also have the outcomes of the model's
            branches on values, hooks of all modules, and settings of kernels, of which the compiler does not know.
    """

    def __init__(self, runner: Runner):
        self.runner = runner
        self.compiled: dict[Any, Callable[..., Any]] = {}
        self._states: dict[tuple[str, str], set[Any]] = {}

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Values,
        parameters: Sequence[nn.Parameter], trained: tuple[bool, ...] = (),
    ) -> Any:  # fmt: skip
        """Call the compiled model, as the present call (`remat.torch.step.capture.calling`) says.

        Args:
            parameters: the model's, in any order.
            trained: whether each of them is updated in the step.
        """
        trained = (*[p.requires_grad for p in parameters], *trained)
        unseen = hooks_of_all_modules(), _settings_of_kernels()
        key = trained, unseen, values.key()
        is_new = key not in self.compiled

        def compile_now(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            if values.learn():
                if not is_new:  # the function belongs to calls without these branches
                    raise NewBranches
                self.compiled[trained, unseen, values.key()] = self.compiled.pop(key)
            check_containers(self._states, values.known[0])
            return compile_graph(graph, example_inputs, self.runner)

        if is_new:
            self.compiled[key] = torch.compile(call_of_models(), backend=_compile, fullgraph=True, dynamic=False)
        compiled = self.compiled[key]
        before, _compiling.now = getattr(_compiling, "now", None), compile_now
        try:
            return compiled(model, *args, **kwargs)
        finally:
            _compiling.now = before


def _settings_of_kernels() -> tuple[Any, ...]:
    """PyTorch's settings that decide which kernels a step calls."""
    cuda = torch.backends.cuda
    return (
        torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled,
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        torch.is_autocast_cache_enabled(),
    )  # fmt: skip


_compiling = threading.local()  # its `now` compiles for the call that this thread makes
_of_models: weakref.WeakKeyDictionary[nn.Module, dict[Any, Calls]] = weakref.WeakKeyDictionary()


def _compile(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return _compiling.now(graph, example_inputs)


def calls_of(model: nn.Module, backend: Backend) -> Calls:
    """A model's compiled calls. Plans for one runner share them, unless they rewrite the graph."""
    runner, own = backend.runner, _of_models.setdefault(model, {})
    return own.setdefault((runner, backend.rewrites), Calls(runner))


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
    arguments, calls = Arguments(args, kwargs), calls_of(model, backend)

    def training_graph() -> TrainingGraph:
        values = Values(model, arguments)
        return captured(
            lambda: calls(model, args, kwargs, values, parameters_of(model), backend.updates.trained()),
            trace_settings(model),
            values,
        )

    with causes(model, args, kwargs), torch.enable_grad():
        try:
            found = training_graph()
        except InvalidInput:
            before = State(model)
            if not _is_set_up(model, args, kwargs):
                raise
            try:
                found = training_graph()
            except InvalidInput:
                before.put_back()
                raise
    return backend.step_of(found, name or type(model).__name__, model)


def _is_set_up(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the model runs on tensors without contents: what it sets up in its first call is then set up.

    transformers' models install hooks then, for example, in a way that cannot be traced.
    """
    try:
        plain_step(model, args, kwargs, sets_up=True)
    except Exception:  # whatever stops it here: the compiler's refusal is what the user reads
        return False
    return True


def call_of_models() -> Callable[..., Any]:
    """A function (model, arguments) -> outputs. Each has code of its own: the compiler counts compilations per code."""

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = call.__code__.replace(co_name=f"rematerialized_{next(_numbers)}")
    return types.FunctionType(code, call.__globals__, code.co_name)


def whole_step(training_graph: TrainingGraph, name: str, model: nn.Module) -> CapturedStep:
    """The step of a training graph, with all tensors of the model resident; made once for each training graph."""
    resident = (*model.parameters(), *model.buffers())
    key = _memory_of((*training_graph.primals, *resident))
    if key not in training_graph.known:
        check_history(model, training_graph.primals, training_graph.tangents)
        step = split_graph_of(training_graph, name, resident)
        training_graph.known[key] = replace(step, training_graph=replace(training_graph, primals=(), known={}))
    step = training_graph.known[key]
    return replace(step, training_graph=training_graph, graph=replace(step.graph, name=name))


def _memory_of(tensors: Iterable[Any]) -> Any:
    """Sizes of the tensors' storages, and which of them are the same."""
    first = dict[Any, int]()
    return tuple(
        (first.setdefault(storage_key(x), len(first)), storage_bytes(x)) if isinstance(x, Tensor) else None
        for x in tensors
    )


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


def offload_link(offload: str | Link | bool | None, device: str) -> Link | None:
    """The link that values may be copied over; None for no copies.

    ``auto`` is the link of this machine's GPU. A model on the CPU has its values in the host's memory, so that there
    ``auto`` copies nothing; a link that is given is imitated.

    Raises:
        InvalidInput: no link, or this GPU's is not known.
    """
    if offload is False or offload is None:
        return None
    if offload is not True and not is_auto(offload):
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

    def real(x: Tensor) -> Tensor:
        if not is_fake(x):
            return x
        empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device if x.is_meta else x.device)
        return empty.requires_grad_(x.requires_grad) if x.is_floating_point() or x.is_complex() else empty.zero_()

    return with_tensors(real, arguments)
