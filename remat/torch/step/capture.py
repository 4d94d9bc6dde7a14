"""Capture of the graph of a step's forward and backward pass, through PyTorch's own compiler.

AOT autograd runs as a `torch.compile` backend with our partition function. This function receives the functionalised
training graph at compile time, under fake tensors, and ends the compilation there: nothing is computed and no
activation is allocated. docs/decisions/0004-training-graphs-from-pytorch.md gives the reasons.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import fx, nn

from remat.errors import InvalidInput, RematError
from remat.torch._random import bernoulli, bernoulli_like, rrelu, rrelu_
from remat.torch.internals import aot, dynamo, inductor, notes, operators
from remat.torch.internals.dynamo import BackendCompilerFailed, TorchDynamoException
from remat.torch.internals.notes import primals_of
from remat.torch.internals.operators import OpOverload
from remat.torch.step.autocast import cast_once
from remat.torch.step.branches import NewBranches, Values
from remat.torch.step.features import detached_apart
from remat.torch.step.layouts import layouts_of_kernels
from remat.torch.step.numbers import NumbersChange, numbers_apart
from remat.torch.step.recurrent import gru_cell, replace_recurrent
from remat.torch.step.refusals import MOST_GRAPHS, check_functions, check_sizes, refusals

T = TypeVar("T")
MOST_TOLD = 10  # places at which a model hears the truth, see `compiling`
_TRAIN_FLAG = {"native_batch_norm_backward": 7}  # position of `train`; running statistics are 3 and 4


@dataclass(frozen=True, slots=True, eq=False)
class TrainingGraph:
    """A training graph as captured.

    Attributes:
        module: functionalised forward and backward; its placeholders are `primals_*`, then `tangents_*`.
        n_forward_outputs: number of leading outputs that belong to the forward pass; the first `n_mutations` of them
            are the new contents of mutated buffers, the next one is the loss or the module's first output.
        mutated: [n_mutations] index into `primals` of the buffer that each of these outputs updates.
        primals: the tensors of the `primals_*` placeholders: parameters, buffers, inputs.
        lowering: shows what Inductor generates for a partition of the graph; None if the step is not for Inductor.
    """

    module: fx.GraphModule
    n_forward_outputs: int
    mutated: tuple[int, ...]
    primals: tuple[torch.Tensor, ...]
    lowering: inductor.Lowering | None = None

    @property
    def places(self) -> dict[int, fx.Node]:
        """The placeholder of each primal."""
        places = self.module.graph.find_nodes(op="placeholder")
        return {notes.primal_index(n): n for n in places if n.name.startswith("primals")}

    @property
    def tangents(self) -> tuple[fx.Node, ...]:
        """The placeholders of the outputs' gradients, with which the backward pass starts."""
        return tuple(filter(notes.is_tangent, self.module.graph.find_nodes(op="placeholder")))

    @property
    def n_mutations(self) -> int:
        return len(self.mutated)

    @property
    def outputs(self) -> tuple[fx.Node | None, ...]:
        """Nodes returned: new buffer contents, the loss, then one gradient (or None) per primal."""
        return tuple(self.module.graph.find_nodes(op="output")[0].args[0])


Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]
Backend = Callable[[fx.GraphModule, Sequence[Any], Partition], Callable[..., Any]]


class _Captured(Exception):
    """Ends the compilation once the training graph is captured."""


def capture(step: nn.Module | Callable[..., torch.Tensor], args: Sequence[Any]) -> TrainingGraph:
    """The training graph of ``step(*args)``, which returns a scalar loss. Nothing is executed.

    Raises:
        InvalidInput: the step cannot be captured in one graph, or nothing in it needs a gradient.
    """
    training_graph = capture_module(step, args, {})
    # Tensors that a step assigns to attributes are outputs after the loss; only the loss may be differentiated.
    differentiated = [notes.differentiated_output(n).idx for n in training_graph.tangents]
    loss = training_graph.outputs[training_graph.n_mutations]
    if differentiated != [0] or loss is None or loss.meta["val"].numel() != 1:
        made = "nothing" if loss is None else f"a tensor of shape {list(loss.meta['val'].shape)}"
        raise InvalidInput(
            f"the training step must return one scalar loss, but returns {made}; give a loss_fn that makes a scalar"
        )
    return training_graph


def capture_module(
    module: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], backend: Backend | None = None,
    told: dynamo.Told | None = None, values: Values | None = None,
) -> TrainingGraph:  # fmt: skip
    """The training graph of ``module(*args, **kwargs)`` and the backward pass from its outputs. Nothing is executed.

    Args:
        backend: that will execute the step, if not eager kernels.
        told, values: see `compiling`.

    Raises: as `capture`.
    """
    found: dict[str, Any] = {}

    def partition(training_graph: fx.GraphModule, n_forward_outputs: int) -> Any:
        found["joint"] = read_training_graph(training_graph, n_forward_outputs, found["primals"], found["lowering"])
        raise _Captured

    def compile_graph(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if values is not None:
            values.learn()
        check_functions(graph)
        graph, example_inputs, with_numbers = numbers_apart(graph, example_inputs)
        with_detached = detached_apart(graph)
        found["primals"] = primals_of(graph)
        replace_recurrent(graph)
        found["lowering"] = inductor.lowering(graph, example_inputs) if backend is inductor.inductor else None
        return with_numbers(with_detached((backend or eager_backend)(graph, example_inputs, partition)))

    def call() -> None:
        try:
            torch.compile(module, backend=compile_graph, fullgraph=True, dynamic=False)(*args, **kwargs)
        except BackendCompilerFailed:
            if "joint" not in found:
                raise
        except _Captured:
            pass

    with refusals("the training step cannot be captured"):
        compiling(call, told or dynamo.Told(), values)
    if "joint" not in found:
        raise InvalidInput("nothing in the model needs a gradient: set requires_grad on the parameters to train")
    joint = found["joint"]
    found.clear()  # the compiler keeps the functions above, which must not keep the arguments
    values = None
    return joint


def eager_backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], partition: Partition, compiler: Any = None
) -> Callable[..., Any]:
    """Trace the training graph of a graph that Dynamo captured, and split it; its calls are those of eager mode.

    Args:
        partition: (training graph, number of forward outputs) -> (forward graph, backward graph).
        compiler: of both graphs, (graph, inputs) -> callable; by default they stay graphs.
    """

    def partition_fn(training_graph: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        with operators.outside_modes():  # measurements must see real tensors
            return partition(training_graph, num_fwd_outputs)

    compiler = compiler or _unused
    # Operators that eager mode differentiates as a whole stay whole: PyTorch registers other formulas for tracing.
    # Others, which eager mode builds from in-place operations, are built from operations that give the same layouts.
    with operators.kernels_instead({**dict.fromkeys(_whole_operators()), **_LAID_OUT}):
        return dynamo.aot_autograd(
            fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition_fn, decompositions=_AS_IN_EAGER_MODE
        )(graph, example_inputs)


@functools.cache
def _whole_operators() -> tuple[OpOverload, ...]:
    names = ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d", "nearest1d", "nearest2d", "nearest3d",
             "bilinear2d_aa", "bicubic2d_aa", "nearest_exact1d", "nearest_exact2d", "nearest_exact3d")  # fmt: skip
    packets = [getattr(aten, f"{prefix}upsample_{name}", None) for name in names for prefix in ("", "_")]
    packets += [aten.softshrink, aten.hardshrink, aten.multi_margin_loss, aten.multilabel_margin_loss_forward]
    return tuple(getattr(packet, overload) for packet in packets if packet for overload in packet.overloads()
                 if overload in ("default", "vec"))  # fmt: skip


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Dropout as eager mode computes it on a CPU, where its rounding differs from the fused operator's."""
    if x.device.type != "cpu" or not train or p == 0:
        return NotImplemented
    if p == 1:  # no draw
        nothing = aten.zeros.default([], dtype=x.dtype, device=x.device)
        return aten.mul.Tensor(x, nothing), nothing
    exact = np.float32 if x.dtype is torch.float32 else np.float64
    if x.dtype in (torch.float32, torch.float64) and exact(1) / exact(1 - p) == exact(1 / (1 - p)):
        return NotImplemented  # one operation gives the same bits
    noise = aten.div.Scalar(bernoulli_like(x, 1 - p), 1 - p)
    return aten.mul.Tensor(x, noise), noise


def _dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    return NotImplemented if mask.dtype is torch.bool else aten.mul.Tensor(gradient, mask)


def _bernoulli(x: torch.Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> Any:
    """The functional form of `Tensor.bernoulli_`."""
    return NotImplemented if x.is_contiguous() or generator is not None else bernoulli_like(x, p)


aten = torch.ops.aten
_AS_IN_EAGER_MODE = {
    aten.native_dropout.default: _dropout, aten.native_dropout_backward.default: _dropout_backward,
    aten.bernoulli.p: _bernoulli,
}  # fmt: skip
_LAID_OUT = {
    aten.gru_cell.default: gru_cell, aten.bernoulli.p: bernoulli,
    aten.rrelu.default: rrelu, aten.rrelu_.default: rrelu_,
}  # fmt: skip


@contextmanager
def settings() -> Iterator[None]:
    """The compiler's settings for capturing and executing steps; layouts are those of the kernels.

    The settings let recurrent layers through; `replace_recurrent` replaces them.
    """
    with dynamo.compiler_settings(MOST_GRAPHS), layouts_of_kernels():
        yield


def compiling(call: Callable[[], T], told: dynamo.Told, values: Values | None = None) -> T:
    """Make a call that may compile a model; the model hears that it is not traced, so that it does as in eager mode.

    Some models do otherwise while they are traced, e.g. repeat the heads of attention instead of letting the kernel
    group them. Their results would then differ from eager mode's in the last bits. Where a model cannot be compiled so,
    because it reads values next, it hears the truth. Branches on integer arguments are followed.

    Args:
        told: where the model hears the truth, and its numbers that change; grows.
        values: of the arguments, if they are known.
    """
    heard = 0
    while True:
        places = told.places if heard < MOST_TOLD else dynamo.EVERYWHERE
        with settings(), dynamo.as_in_eager_mode(places, values), dynamo.numbers_open(told.numbers):
            try:
                return call()
            except TorchDynamoException as error:
                cause = getattr(error, "inner_exception", None)
                if isinstance(cause, NewBranches):  # which the next call knows
                    continue
                if isinstance(cause, NumbersChange) and not cause.names <= told.numbers:
                    told.numbers |= cause.names
                elif dynamo.tracing.asked is None or isinstance(cause, RematError):
                    raise
                else:
                    told.places.add(dynamo.tracing.asked)
                    heard += 1
                if values is not None:
                    values.found.clear()


def read_training_graph(
    module: fx.GraphModule, n_forward_outputs: int, primals: tuple[Any, ...], lowering: inductor.Lowering | None = None
) -> TrainingGraph:
    """The training graph that a partition function received, changed in place to follow eager mode.

    Raises:
        InvalidInput: sizes depend on values; or arguments overlap in memory, so that the compiler makes them views of
            a common base.
    """
    if any(map(notes.is_view_base, module.graph.find_nodes(op="placeholder"))):
        raise InvalidInput("arguments that overlap in memory are modified in place; pass copies of them")
    _drop_unread_statistics(module)
    _mark_backward(module.graph, n_forward_outputs, is_complete=lowering is None)
    check_sizes(module)
    if lowering is not None:
        aot.merge_equal_calls(module)
    mutated = map(notes.mutated_input, notes.descriptions_of_outputs(module.graph))
    training_graph = TrainingGraph(
        module, n_forward_outputs, tuple(i for i in mutated if i is not None), primals, lowering
    )
    if torch.is_autocast_cache_enabled():
        places, gradients = training_graph.places, training_graph.outputs[n_forward_outputs:]
        cast_once(module.graph, {places[i]: gradient for i, gradient in enumerate(gradients) if gradient is not None})
    module.recompile()
    return training_graph


def with_inputs(nodes: Iterable[fx.Node | None]) -> set[fx.Node]:
    """The nodes and all nodes on which they depend."""
    found, todo = set[fx.Node](), [node for node in nodes if node is not None]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def _mark_backward(graph: fx.Graph, n_forward_outputs: int, is_complete: bool) -> None:
    """Mark the calls of the backward pass that PyTorch leaves unmarked: those of a `torch.autograd.Function`.

    Args:
        is_complete: PyTorch has marked all calls of the forward pass; Inductor's passes make calls without a mark.
    """
    forward = with_inputs(graph.find_nodes(op="output")[0].args[0][:n_forward_outputs])
    for node in graph.nodes:
        is_unmarked = not (notes.is_in_forward(node) or notes.is_in_backward(node)) and node not in forward
        if is_unmarked and (is_complete or any(map(notes.is_in_backward, node.all_input_nodes))):
            node.meta.update(notes.in_pass(notes.BACKWARD))


def _unused(module: fx.GraphModule, _inputs: Any) -> Any:
    return module


def _drop_unread_statistics(module: fx.GraphModule) -> None:
    """Take the running statistics from calls of batch norm's backward, which reads them in eval mode only."""
    for node in module.graph.nodes:
        at = _TRAIN_FLAG.get(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
        if node.op == "call_function" and at is not None and node.args[at]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
