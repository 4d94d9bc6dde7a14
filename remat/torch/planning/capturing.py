"""Capture of the step of a model's call, as the compiled call captures it."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from remat.errors import InvalidInput
from remat.torch.internals.dynamo import TraceSettings
from remat.torch.measuring.plain import plain_step
from remat.torch.planning.planner import Backend
from remat.torch.planning.sample import describe_inputs
from remat.torch.step.branches import Values
from remat.torch.step.capture import TrainingGraph, capture_module
from remat.torch.step.refusals import causes, check_given_tensors, check_history, check_momentum, check_own_tensors
from remat.torch.step.state import State
from remat.torch.step.training_graph import CapturedStep, split_graph_of

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

    def captured() -> TrainingGraph:
        values = Values(model, args, kwargs, describe_inputs((args, kwargs)))
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
    return backend.step_of(training_graph, name or type(model).__name__, model)


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
