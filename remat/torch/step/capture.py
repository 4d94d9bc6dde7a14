"""Capture of the graph of a step's forward and backward pass, through PyTorch's own compiler.

AOT autograd runs as a `torch.compile` backend. Our partition function receives the functionalised training graph at
compile time, under fake tensors, and the compilation stops there: nothing is computed and no activation is allocated.
Once a plan is made, its two halves are compiled from the same training graph, so that a step is traced once for all
plans. docs/decisions/0004-training-graphs-from-pytorch.md gives the reasons.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import fx, nn

from remat.errors import InvalidInput, RematError
from remat.graph import reached
from remat.torch.internals import dynamo, notes
from remat.torch.internals.dynamo import BackendCompilerFailed, TorchDynamoException
from remat.torch.internals.notes import primals_of
from remat.torch.internals.operators import replaced
from remat.torch.step.aot import no_collection
from remat.torch.step.autocast import cast_once
from remat.torch.step.branches import NewBranches, Values
from remat.torch.step.features import Watched, detached_apart, used_features
from remat.torch.step.layouts import layouts_of_kernels
from remat.torch.step.numbers import NumbersChange, numbers_apart
from remat.torch.step.recurrent import replace_recurrent
from remat.torch.step.refusals import MOST_GRAPHS, check_functions, check_sizes, check_subgraphs, refusals
from remat.torch.step.runners import EAGER, Runner

T = TypeVar("T")
MOST_PLACES = 10  # places at which a model hears that it is traced, see `compiling`
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
        runner: of the step.
        known: steps by memory layout, and plain steps by `Outside`, kept as long as the graph.
    """

    module: fx.GraphModule
    n_forward_outputs: int
    mutated: tuple[int, ...]
    primals: tuple[torch.Tensor, ...]
    runner: Runner = EAGER
    known: dict[Any, Any] = field(default_factory=dict)

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


Halves = tuple[fx.GraphModule, fx.GraphModule]  # forward and backward


class Call(Protocol):
    """A call of a compiled model, or a capture."""

    def run(self, step: Halfway, args: list[Any]) -> Any:
        """Run a captured step on the tensors of its placeholders."""
        ...


class _Calling(threading.local):
    """The `call` that this thread makes now."""

    call: Call | None = None


calling = _Calling()


def called_by(call: Call) -> AbstractContextManager[None]:
    """Let models that are called in here be captured, or run, as `call` says."""
    return replaced(calling, call=call)


class Halfway:
    """A step that is compiled as far as its training graph: its halves come with a plan, and each plan has its own.

    Attributes:
        training_graph: without the tensors of its primals, which the compiler must not keep.
    """

    def __init__(self, finish: Callable[[Callable[..., Halves]], Callable[[list[Any]], Any]], read: Any):
        found = list[TrainingGraph]()

        def capture_only(module: fx.GraphModule, n_forward_outputs: int) -> Halves:
            found.append(read(module, n_forward_outputs))
            raise _Captured

        with contextlib.suppress(_Captured):
            finish(capture_only)
        self._finish, self._n_primals = finish, len(found[0].primals)
        self.training_graph = replace(found[0], primals=())

    def on(self, args: list[Any]) -> TrainingGraph:
        """The training graph with the tensors of a call."""
        return replace(self.training_graph, primals=tuple(args[len(args) - self._n_primals :]))

    def with_halves(self, halves: Halves) -> Callable[[list[Any]], Any]:
        with compiler_settings():
            return self._finish(lambda *_: halves)

    def __call__(self, args: list[Any]) -> Any:
        assert calling.call is not None
        return calling.call.run(self, args)


class _Captured(Exception):
    """Ends a compilation, or a call, whose training graph is captured."""


class _Capture:
    """A call that only captures."""

    def __init__(self) -> None:
        self.found = list[TrainingGraph]()

    def run(self, step: Halfway, args: list[Any]) -> Any:
        self.found.append(step.on(args))
        raise _Captured


def capture(
    step: nn.Module | Callable[..., torch.Tensor], args: Sequence[Any], settings: dynamo.TraceSettings | None = None
) -> TrainingGraph:
    """The training graph of ``step(*args)``, which returns a scalar loss. Nothing is executed.

    Args:
        settings: see `compiling`; those of an earlier capture of the model spare a second trace.

    Raises:
        InvalidInput: the step cannot be captured in one graph, or nothing in it needs a gradient.
    """
    training_graph = capture_module(step, args, {}, settings)
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
    module: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    settings: dynamo.TraceSettings | None = None,
) -> TrainingGraph:  # fmt: skip
    """The training graph of ``module(*args, **kwargs)`` and the backward pass from its outputs. Nothing is executed.

    Raises: as `capture`.
    """
    call = torch.compile(module, backend=functools.partial(compile_graph, runner=EAGER), fullgraph=True, dynamic=False)
    return captured(lambda: call(*args, **kwargs), settings or dynamo.TraceSettings())


def captured(call: Callable[[], Any], settings: dynamo.TraceSettings, values: Values | None = None) -> TrainingGraph:
    """The training graph of what a compiled function would run. Nothing is executed.

    Args:
        call: calls the compiled function, whose back-end is `compile_graph`.
        settings, values: see `compiling`.

    Raises: as `capture`.
    """
    own = _Capture()

    def ended() -> None:
        try:
            call()
        except BackendCompilerFailed:
            if not own.found:
                raise
        except _Captured:
            pass

    with refusals("the training step cannot be captured"), called_by(own), no_collection():
        compiling(ended, settings, values)
    if not own.found:
        raise InvalidInput("nothing in the model needs a gradient: set requires_grad on the parameters to train")
    return own.found.pop()


def compile_graph(graph: fx.GraphModule, example_inputs: Sequence[Any], runner: Runner) -> Callable[..., Any]:
    """A graph that Dynamo hands to its backend, compiled for the call that is made now, and for later ones."""
    check_functions(graph)
    graph, example_inputs, with_numbers = numbers_apart(graph, example_inputs)
    with_detached = detached_apart(graph)
    primals, used = primals_of(graph), used_features(graph)
    replace_recurrent(graph)
    own = runner.of(graph, example_inputs)

    def read(module: fx.GraphModule, n_forward_outputs: int) -> TrainingGraph:
        return read_training_graph(module, n_forward_outputs, primals, own)

    step = own.halfway(graph, example_inputs, lambda finish: Halfway(finish, read))
    return with_numbers(with_detached(Watched(step, used) if used else step))


@contextmanager
def compiler_settings(numbers: Collection[str] = ()) -> Iterator[None]:
    """The compiler's settings for capturing steps and compiling halves; layouts are those of the kernels.

    The settings let recurrent layers through; `replace_recurrent` replaces them.

    Args:
        numbers: in attributes, which are no constants.
    """
    # The layouts come first: they let one thread at a time in.
    with layouts_of_kernels(), dynamo.compiler_settings(MOST_GRAPHS), dynamo.numbers_open(numbers):
        yield


def compiling(call: Callable[[], T], settings: dynamo.TraceSettings, values: Values | None = None) -> T:
    """Make a call that may compile a model; the model hears that it is not traced, so that it does as in eager mode.

    Some models compute differently while they are traced, e.g. repeat the heads of attention where the kernel would
    group them, so that last bits would differ from eager mode's. Where a model cannot be compiled so, because it reads
    values next, it hears the truth. Branches on integer arguments are followed.

    Args:
        settings: where the model hears the truth, and its numbers that change; grows.
        values: of the arguments, if they are known.
    """
    heard = 0
    while True:
        places = settings.places if heard < MOST_PLACES else dynamo.EVERYWHERE
        with dynamo.as_in_eager_mode(places, values, lambda: compiler_settings(settings.numbers)):
            try:
                return call()
            except TorchDynamoException as error:
                cause = getattr(error, "inner_exception", None)
                if isinstance(cause, NewBranches):  # which the next call knows
                    continue
                if isinstance(cause, NumbersChange) and not cause.names <= settings.numbers:
                    settings.numbers |= cause.names
                elif dynamo.tracing.asked is None or isinstance(cause, RematError):
                    raise
                else:
                    settings.places.add(dynamo.tracing.asked)
                    heard += 1
                if values is not None:
                    values.found.clear()


def read_training_graph(
    module: fx.GraphModule, n_forward_outputs: int, primals: tuple[Any, ...], runner: Runner
) -> TrainingGraph:
    """The training graph that a partition function received, changed in place to follow eager mode.

    Raises:
        InvalidInput: sizes depend on values; or arguments overlap in memory, so that the compiler makes them views of
            a common base.
    """
    if any(map(notes.is_view_base, module.graph.find_nodes(op="placeholder"))):
        raise InvalidInput("arguments that overlap in memory are modified in place; pass copies of them")
    _drop_unread_statistics(module)
    _mark_backward(module.graph, n_forward_outputs, runner)
    check_sizes(module)
    check_subgraphs(module)
    runner.complete(module)
    mutated = map(notes.mutated_input, notes.descriptions_of_outputs(module.graph))
    training_graph = TrainingGraph(
        module, n_forward_outputs, tuple(i for i in mutated if i is not None), primals, runner
    )
    if torch.is_autocast_cache_enabled():
        places, gradients = training_graph.places, training_graph.outputs[n_forward_outputs:]
        cast_once(module.graph, {places[i]: gradient for i, gradient in enumerate(gradients) if gradient is not None})
    module.recompile()
    return training_graph


def with_inputs(nodes: Iterable[fx.Node | None]) -> set[fx.Node]:
    """The nodes and all nodes on which they depend."""
    return {*reached((node for node in nodes if node is not None), lambda node: node.all_input_nodes)}


def _mark_backward(graph: fx.Graph, n_forward_outputs: int, runner: Runner) -> None:
    """Mark the calls of the backward pass that PyTorch leaves unmarked: those of a `torch.autograd.Function`."""
    forward = with_inputs(graph.find_nodes(op="output")[0].args[0][:n_forward_outputs])
    for node in graph.nodes:
        is_unmarked = not (notes.is_in_forward(node) or notes.is_in_backward(node)) and node not in forward
        if is_unmarked and runner.belongs_to_backward(node):
            node.meta.update(notes.in_pass(notes.BACKWARD))


def _drop_unread_statistics(module: fx.GraphModule) -> None:
    """Take the running statistics from calls of batch norm's backward, which reads them in eval mode only."""
    for node in module.graph.nodes:
        at = _TRAIN_FLAG.get(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
        if node.op == "call_function" and at is not None and node.args[at]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
