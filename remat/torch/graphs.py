"""Graphs of PyTorch models: the graph of a step's forward and backward pass of a training step.

A graph's values are the storages that the step creates: activations, gradients (kept: they are there
when the step ends) and the loss. `fixed_bytes` holds parameters, buffers, inputs and targets.
Gradients that exist before the step and optimizer state do not exist when a graph is extracted and
are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from remat.errors import InvalidInput
from remat.frontends.spec import ModelSpec, load_target
from remat.graph import Graph
from remat.torch import build
from remat.torch.capture import capture
from remat.torch.flop_rules import is_counted
from remat.torch.step_graph import CapturedStep, graph_of


def extract(spec: ModelSpec) -> Graph:
    """The training graph of the model that ``spec.target`` builds; costs are 0.

    The factory is called with ``spec.options``, and with ``batch_size`` and ``input_size`` if it takes
    them. It returns a module, ``(module, sample_args)`` or ``(module, sample_args, loss_fn)``; with
    a module alone the input is one float tensor (batch, *input_size). The option ``loss`` is not
    the factory's: it is `training_graph_of`'s `loss_fn` by name. Parameters, buffers and inputs keep the types that the
    factory gave them unless ``spec.dtype`` names another. Parameters get no memory and no initial
    values where the factory can be run on the meta device.

    Raises:
        InvalidInput: the factory, its options or its model cannot be used.
    """
    model, sample_args, loss_fn = build.build(spec, load_target(spec.target))
    return training_graph_of(model, sample_args, name=spec.graph_name, loss_fn=loss_fn)


def training_graph_of(
    model: nn.Module, sample_args: tuple[Any, ...], *, name: str, loss_fn: Callable[..., Tensor] | str | None = None
) -> Graph:
    """The graph of one training step of `model`, forward and backward pass. Nothing is computed.

    Args:
        model: in the mode (train or eval) and with the `requires_grad` flags it will be run with.
        sample_args: positional arguments of the model; only shapes, dtypes and devices matter.
        loss_fn: makes a scalar of the model's output; or ``mean``, ``cross_entropy`` or ``bce`` (the
            last two against targets that count as inputs). By default an output that is a scalar
            or has a ``loss`` is the loss, (batch, classes) takes ``cross_entropy``, others ``mean``.

    Raises:
        InvalidInput: the step cannot be captured as one graph, or needs no gradient.
    """
    return captured_step(model, sample_args, name=name, loss_fn=loss_fn).graph


def captured_step(
    model: nn.Module, sample_args: tuple[Any, ...], *, name: str, loss_fn: Callable[..., Tensor] | str | None = None
) -> CapturedStep:
    """As `training_graph_of`, with the traced calls behind every operation, for executing plans."""
    if not isinstance(sample_args, tuple):
        raise InvalidInput("sample_args must be a tuple of the model's positional arguments, e.g. (x,)")
    step, args = build.loss_step(model, sample_args, loss_fn)
    resident = (*model.parameters(), *model.buffers(), *args)
    return graph_of(capture(step, args), name, resident)


def remember(step: CapturedStep, graph: Graph) -> None:
    """Let `step_behind` find `step` for its graph with costs and workspaces, `graph`, while the step lives."""
    _behind[graph.sha256()] = step


def step_behind(graph: Graph) -> CapturedStep | None:
    """The captured step that `graph` was made from in this process; None if there is none (any more)."""
    return _behind.get(graph.sha256())


_behind: weakref.WeakValueDictionary[str, CapturedStep] = weakref.WeakValueDictionary()


def counted_flops(graph: Graph) -> int:
    """FLOPs of the operations that PyTorch's own counter counts: matrix products, convolutions, attention."""
    return sum(op.work.flops or 0 for op in graph.operations if op.work and is_counted(op.kind))
