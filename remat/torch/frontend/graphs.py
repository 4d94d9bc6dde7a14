"""Graphs of PyTorch models: one training step, forward and backward pass.

A graph's values are the storages that the step creates: activations, gradients (kept to the end of the step) and the
loss. `fixed_bytes` counts parameters, buffers, inputs and targets. It does not count gradients from before the step and
optimizer state, which do not exist when a graph is extracted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from remat.errors import InvalidInput
from remat.frontends.spec import ModelSpec, load_target
from remat.graph import Graph
from remat.torch.frontend import build
from remat.torch.frontend.repeated import Described, Repeated, Row, has_long_row
from remat.torch.internals.dynamo import TraceSettings
from remat.torch.internals.notes import module_path
from remat.torch.internals.operators import tree_leaves
from remat.torch.measuring.plain import FollowedStep
from remat.torch.step.capture import TrainingGraph, capture
from remat.torch.step.chunked_loss import with_one_call
from remat.torch.step.flop_rules import is_counted
from remat.torch.step.training_graph import CapturedStep, graph_of


def extract(spec: ModelSpec) -> Graph:
    """The training graph of the model that ``spec.target`` builds; costs are 0.

    The factory is called with ``spec.options``, and with ``batch_size`` and ``input_size`` if it takes them. It returns
    a module, ``(module, sample_args)`` or ``(module, sample_args, loss_fn)``; for a module alone the input is one float
    tensor (batch, *input_size). The factory does not get the option ``loss``: it names `training_graph_of`'s `loss_fn`.
    Parameters, buffers and inputs keep the factory's types unless ``spec.dtype`` names another. If the factory can run
    on the meta device, parameters get no memory and no initial values.

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
        model: in the mode (train or eval) and with the `requires_grad` flags of later runs.
        sample_args: positional arguments of the model; only shapes, dtypes and devices matter.
        loss_fn: computes a scalar from the model's output; or ``mean``, ``cross_entropy`` or ``bce`` (the last two
            against targets that count as inputs). By default a scalar output, or the ``loss`` in the output, is the
            loss; outputs (batch, classes) take ``cross_entropy``, others ``mean``.

    Raises:
        InvalidInput: the step cannot be captured as one graph, or needs no gradient.
    """
    return described_graph(model, sample_args, name=name, loss_fn=loss_fn).graph


@dataclass(frozen=True, slots=True)
class DescribedGraph:
    """The graph of a step, and where its values come from.

    Attributes:
        modules: [V] path of the module that makes each value, or whose gradient it is.
        captured: blocks of which one was captured and how many copies it has, or why not; '' if no blocks are in a row.
        repeated: the step of which blocks were copied; None: none were.
        step, args: what was captured: computes the loss.
        in_chunks: the graph with the logits in chunks, if that was asked for and its loss is such a one.
    """

    graph: Graph
    modules: tuple[str, ...]
    step: build.Step
    args: tuple[Any, ...]
    captured: str = ""
    repeated: Repeated | None = None
    in_chunks: Graph | None = None

    @property
    def followed(self) -> FollowedStep | None:
        """The framework's own step, if it was followed to see whether blocks repeat."""
        return None if self.repeated is None else self.repeated.followed


def described_graph(
    model: nn.Module, sample_args: tuple[Any, ...], *, name: str, loss_fn: Callable[..., Tensor] | str | None = None,
    repeats: bool | Repeated | None = None, autocast: torch.dtype | None = None, n_chunks: int = 0,
    settings: TraceSettings | None = None,
) -> DescribedGraph:  # fmt: skip
    """As `training_graph_of`. Of many equal blocks a few are captured, where that is sound: `repeated`.

    Args:
        repeats: whether blocks of this model may be repeated, or the step at another size; None finds out.
        autocast: type of matrix products.
        n_chunks: of the logits, for `DescribedGraph.in_chunks`.
        settings: how the model has to be traced, as far as other captures have found out.
    """
    settings = settings or TraceSettings()
    step, args = build.loss_step(model, sample_args, loss_fn, autocast)
    row = Row.of(model) if repeats is not False else None
    graphs = dict[int, TrainingGraph]()  # [blocks of the model] what was captured

    def described(training_graph: TrainingGraph) -> Described:
        found = graph_of(training_graph, name, (*model.parameters(), *model.buffers(), *args))
        return found.graph, _modules(found)

    def captured() -> Described:
        training_graph = capture(step, args, settings)
        if n_chunks:
            graphs[len(row.blocks) if row is not None else 0] = training_graph
        return described(training_graph)

    def in_chunks(n_blocks: int) -> Described | None:
        has_chunks = n_chunks and with_one_call(graphs[n_blocks], n_chunks) > 0
        return described(graphs[n_blocks]) if has_chunks else None

    why = "as a whole: its blocks are not alike" if row is None and repeats is None and has_long_row(model) else ""
    if row is not None:
        try:
            like = repeats if isinstance(repeats, Repeated) else None
            repeated = Repeated.of(row, captured, step, args) if repeats is None else Repeated(row, captured, like)
            n = len(row.blocks)
            how = f"{repeated.n_captured} of {n} equal blocks, the others as copies"
            made = DescribedGraph(*repeated.graph(n), step, args, how, repeated)
            with row.cut_to(repeated.n_captured):
                other = in_chunks(repeated.n_captured)
            return made if other is None else replace(made, in_chunks=repeated.with_turn(other).graph(n)[0])
        except InvalidInput as error:  # what is wrong with the model itself, the capture of the whole says
            why = f"as a whole: {error}"
    made = DescribedGraph(*captured(), step, args, why)
    other = in_chunks(len(row.blocks) if row is not None else 0)
    return replace(made, in_chunks=None if other is None else other[0])


def _modules(step: CapturedStep) -> tuple[str, ...]:
    """[V] path of the module that makes each value."""
    paths = [""] * len(step.graph.values)
    for node, values in step.storage.items():
        for v in tree_leaves(values):
            if isinstance(v, int) and not paths[v]:
                paths[v] = module_path(node)
    return tuple(paths)


def step_with_loss(
    model: nn.Module, sample_args: tuple[Any, ...], *, name: str, loss_fn: Callable[..., Tensor] | str | None = None
) -> CapturedStep:
    """As `training_graph_of`, with the traced calls of every operation, for executing plans."""
    step, args = build.loss_step(model, sample_args, loss_fn)
    resident = (*model.parameters(), *model.buffers(), *args)
    return graph_of(capture(step, args), name, resident)


def step_of_spec(spec: ModelSpec, graph: Graph) -> CapturedStep:
    """The captured step of the network behind `graph`, its graph with costs and workspaces; `step_behind` finds it.

    Raises:
        InvalidInput: the step has another graph now.
    """
    model, sample_args, loss_fn = build.build(spec, load_target(spec.target))
    step = step_with_loss(model, sample_args, name=graph.name, loss_fn=loss_fn)
    if _structure(step.graph) != _structure(graph):
        raise InvalidInput(f"{spec.name}'s step has another graph now: extract it again")
    remember(step, graph)
    return step


def _structure(graph: Graph) -> list[Any]:
    return [graph.values, [(op.inputs, op.outputs, op.run_once) for op in graph.operations]]


def remember(step: CapturedStep, graph: Graph) -> None:
    """Let `step_behind` find `step` by `graph`, its graph with costs and workspaces, while the step lives."""
    _behind[graph.sha256()] = step


def step_behind(graph: Graph) -> CapturedStep | None:
    """The captured step of `graph` in this process; None if it does not exist (any more)."""
    return _behind.get(graph.sha256())


_behind: weakref.WeakValueDictionary[str, CapturedStep] = weakref.WeakValueDictionary()


def counted_flops(graph: Graph) -> int:
    """FLOPs of the operations that PyTorch's own counter counts: matrix products, convolutions, attention."""
    return sum(op.work.flops or 0 for op in graph.operations if op.work and is_counted(op.kind))
