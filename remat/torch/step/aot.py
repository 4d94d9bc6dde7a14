"""Execution of the two halves of a plan by PyTorch: functions that run them, and the calls that repeat a call.

AOT autograd compiles a module's forward and backward pass; our partition function decides what each of them
computes. AOT autograd's convention: the forward graph takes the primals; it returns the module's outputs, then the
first arguments of the backward graph. The backward graph takes these, then the gradients of outputs; it returns a
gradient or None for each primal. Graphs called with one list ("boxed") can drop their arguments at last use.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from remat.errors import InvalidInput
from remat.graph import reached
from remat.torch._random import random_state
from remat.torch.copying import copies
from remat.torch.internals import aot, autograd, dynamo, notes, operators
from remat.torch.step.work import tensors_of

aten = torch.ops.aten


TANGENTS = "remat.output_of_tangents"  # in the meta of a backward half
# Its `gradients`, if there are such, identify those that a backward half of this thread has made last.
made_last = threading.local()
_undefined = threading.local()  # for the backward half that runs next: outputs on which the loss did not depend


def boxed(module: fx.GraphModule, _inputs: Any) -> Callable[[list[Any]], Any]:
    """A half as a function of one list, for AOT autograd."""
    aot.forbid_overwriting()  # backward may run twice (retain_graph)
    output_of: dict[str, int] | None = module.meta.get(TANGENTS)
    whole = aot.boxed(module)
    variants = dict[frozenset[str], aot.Boxed]()
    has_copies = any(getattr(node.target, "__module__", "") == copies.__name__ for node in module.graph.nodes)

    def run(args: list[Any]) -> Any:
        unread = _undefined.__dict__.pop("outputs", ()) if output_of is not None else ()
        half = whole
        if unread and (missing := frozenset(name for name, output in (output_of or {}).items() if output in unread)):
            if missing not in variants:
                variants[missing] = aot.boxed(without_tangents(module, missing))
            half = variants[missing]
        if has_copies:
            with copies.ended_on_error():
                made = half(args)
        else:
            made = half(args)
        if output_of is not None and "gradients" in made_last.__dict__:
            made_last.gradients = {autograd.identity(x) for x in made if isinstance(x, torch.Tensor)}
        return made

    return aot.mark_boxed(run)


def without_tangents(module: fx.GraphModule, missing: Collection[str]) -> fx.GraphModule:
    """A backward half that computes the same as eager mode for a loss that does not depend on some outputs.

    For such an output eager mode runs nothing and adds nothing; zeros in place of its gradient would differ where a
    derivative is infinite. A call that also reads other gradients gets zeros for the missing one.

    Args:
        missing: names of the placeholders of these outputs' gradients.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    gradients = [node for node in graph.find_nodes(op="placeholder") if node.name in module.meta[TANGENTS]]
    of_gradients, undefined = undefined_calls(graph, gradients, {x for x in gradients if x.name in missing})
    for node in of_gradients - undefined:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            # What is viewed may have another layout now, that of eager mode.
            node.target = aten.reshape.default
    for node, absent in partly_undefined(of_gradients, undefined):
        if is_sum(node):
            node.replace_all_uses_with(next(x for x in node.args if x is not absent[0]))  # pyright: ignore[reportArgumentType]
            continue
        for x in absent:
            with graph.inserting_before(node):
                val = x.meta["val"]
                zeros = graph.call_function(
                    torch.zeros, (tuple(val.shape),), {"dtype": val.dtype, "device": val.device}
                )
            node.replace_input_with(x, zeros)
    end = graph.find_nodes(op="output")[0]
    end.args = (tuple(None if x in undefined else x for x in end.args[0]),)  # pyright: ignore[reportGeneralTypeIssues]
    copied = {node for node in undefined if node.op != "placeholder"}  # no argument may go
    graph.eliminate_dead_code(lambda node: node.is_impure() and node not in copied)  # what is not made is not copied
    graph.lint()
    return fx.GraphModule(module, graph)


def undefined_calls(
    graph: fx.Graph, gradients: Iterable[fx.Node], missing: Collection[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """(calls that depend on gradients of outputs, those of them for which no gradient is there), gradients included."""
    of_gradients, undefined = set(gradients), set(missing)
    for node in graph.nodes:
        read = [x for x in node.all_input_nodes if x in of_gradients]
        if node.op == "call_function" and read:
            of_gradients.add(node)
            undefined |= {node} if all(x in undefined for x in read) else set()
    return of_gradients, undefined


def partly_undefined(of_gradients: set[fx.Node], undefined: set[fx.Node]) -> list[tuple[fx.Node, list[fx.Node]]]:
    """(call, gradients that it reads and that are missing) of calls for which other gradients are there."""
    pairs = ((node, [x for x in node.all_input_nodes if x in undefined]) for node in of_gradients - undefined)
    return [(node, absent) for node, absent in pairs if absent]


def is_sum(node: fx.Node) -> bool:
    """Whether a call adds two gradients, so that one alone passes through."""
    return node.target is aten.add.Tensor and not node.kwargs


def leave_unread_gradients_out(outputs: Any, watch: Callable[[Any], None] = lambda _: None) -> None:
    """Let outputs into which no gradient flows have none, where AOT autograd would make zeros.

    Args:
        outputs: of a compiled step.
        watch: gets the node of the autograd graph that stands for the backward half.
    """

    def made_of(node: Any) -> list[Any]:  # a view of an output, made again
        if node is None or autograd.is_compiled_backward(node):
            return []
        return [before for before, _ in node.next_functions]

    for node in reached((x.grad_fn for x in tensors_of(outputs)), made_of):
        if node is not None and autograd.is_compiled_backward(node):
            node.register_prehook(_note_undefined)
            watch(node)


def _note_undefined(gradients: tuple[torch.Tensor | None, ...]) -> None:
    if torch.is_grad_enabled():  # create_graph=True: what is made would look as if it did not depend on the inputs
        raise InvalidInput(
            "gradients of gradients (create_graph=True) follow no plan: use .model for the passes that need them"
        )
    _undefined.outputs = frozenset(i for i, x in enumerate(gradients) if x is None)


@contextmanager
def no_collection() -> Iterator[None]:
    """Moments without the garbage collector: a captured step is a million objects, and to look at them all takes longer
    than to plan the step."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check_that_calls_are_compiled() -> None:
    """Refuse to run where `torch.compile` would silently run the plain model, whose memory is not the plan's."""
    if dynamo.compiler_is_disabled():
        raise InvalidInput("PyTorch's compiler is switched off, so that no plan is followed: unset TORCHDYNAMO_DISABLE")
    stance = dynamo.compiler_stance()
    if stance not in ("default", "fail_on_recompile"):
        raise InvalidInput(f"torch.compiler.set_stance({stance!r}) follows no plan: set it to 'default'")
    if autograd.is_transformed():
        raise InvalidInput("torch.func and forward-mode differentiation follow no plan: use .model inside of them")
    mode = operators.current_dispatch_mode()
    if mode is not None:
        raise InvalidInput(f"nothing is compiled under a {type(mode).__name__}, and no plan is followed: leave it out")


def finish(graph: fx.Graph, outputs: list[fx.Node | None], descriptions: list[Any]) -> None:
    """Write the output of a half; outputs without a description are saved for backward."""
    end = graph.output(tuple(outputs))
    notes.with_descriptions(end, descriptions, len(outputs) - len(descriptions))
    graph.lint()


def device_of(node: fx.Node) -> torch.device:
    """The device of a call's first result."""
    return tensors_of(node.meta["val"])[0].device


def fake_state(node: fx.Node) -> torch.Tensor:
    """The state of a random call's generator for the compiler: shape and dtype without contents."""
    first: Any = tensors_of(node.meta["val"])[0]
    return first.fake_mode.from_tensor(random_state(first.device))


def fake_ticket(like: torch.Tensor) -> torch.Tensor:
    """The ticket of a step's copies for the compiler; `like` is any tensor of its graph."""
    made: Any = like
    return made.fake_mode.from_tensor(torch.zeros(8, dtype=torch.uint8))


def repetition(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any], int | None]:
    """(target, args, kwargs, number of results) of a repeated call, on the training graph's nodes.

    Batch norm reads the running statistics only to make the next ones; before a repetition in the backward pass they
    are overwritten. Without them it computes the same output, mean and deviation.
    """
    if node.target is aten._native_batch_norm_legit_functional.default and node.args[5] is True:
        x, weight, bias, _mean, _variance, training, momentum, eps = node.args
        return aten._native_batch_norm_legit.no_stats, (x, weight, bias, training, momentum, eps), {}, 3
    if node.target is aten._batch_norm_with_update_functional.default:
        x, weight, bias, _mean, _variance, momentum, eps = node.args
        return _batch_norm_again, (x, weight, bias, momentum, eps), {}, 4
    return node.target, node.args, node.kwargs, None


def _batch_norm_again(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, momentum: float, eps: float
) -> tuple[torch.Tensor, ...]:
    statistics = [torch.zeros(x.shape[1], dtype=weight.dtype, device=x.device) for _ in range(2)]
    return aten._batch_norm_with_update_functional.default(x, weight, bias, *statistics, momentum, eps)[:4]
