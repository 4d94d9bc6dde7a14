"""What executing a plan needs of PyTorch beside capturing a step: halves that run, random states, repetitions.

AOT autograd compiles a module's forward and backward pass; our partition function decides what each of them
computes. Its convention: the forward graph takes the primals and returns the module's outputs followed by what
the backward graph takes first; the backward graph then takes the gradients of outputs and returns one
gradient or None per primal. Graphs called with one list ("boxed") can drop their arguments at last use.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from remat.errors import InvalidInput
from remat.torch import _private
from remat.torch._private import tree_leaves
from remat.torch.capture import Backend, Partition, eager_backend

aten = torch.ops.aten


def eager(graph: fx.GraphModule, example_inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """A backend that runs the calls of both halves one by one."""
    return eager_backend(graph, example_inputs, partition, _boxed)


TANGENTS = "remat.output_of_tangents"  # in the meta of a backward half
_undefined = threading.local()  # forward outputs that the loss did not depend on, for the backward half that runs next


def _boxed(module: fx.GraphModule, _inputs: Any) -> Callable[[list[Any]], Any]:
    _private.forbid_overwriting()  # backward may run twice (retain_graph)
    output_of: dict[str, int] | None = module.meta.get(TANGENTS)
    variants = {frozenset[str](): _private.boxed(module)}

    def run(args: list[Any]) -> Any:
        unread = _undefined.__dict__.pop("outputs", ()) if output_of is not None else ()
        missing = frozenset(name for name, output in (output_of or {}).items() if output in unread)
        if missing not in variants:
            variants[missing] = _private.boxed(without_tangents(module, missing))
        return variants[missing](args)

    return _private.mark_boxed(run)


def without_tangents(module: fx.GraphModule, missing: Collection[str]) -> fx.GraphModule:
    """A backward half for a loss that does not depend on some outputs, which computes what eager mode does then.

    Eager mode runs nothing behind such an output and adds nothing for it; zeros in place of its gradient would differ
    where a derivative is infinite. What reads other gradients too gets zeros of its shape.

    Args:
        missing: placeholders of the gradients of those outputs.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    of_gradients, undefined = set[fx.Node](), set[fx.Node]()
    for node in list(graph.nodes):
        if node.name in module.meta[TANGENTS]:
            of_gradients.add(node)
            if node.name in missing:
                undefined.add(node)
        read = [x for x in node.all_input_nodes if x in of_gradients]
        absent = [x for x in read if x in undefined]
        if node.op != "call_function" or not read:
            continue
        of_gradients.add(node)
        if len(absent) == len(read):
            undefined.add(node)
        elif node.target is aten.add.Tensor and absent and not node.kwargs:
            node.replace_all_uses_with(next(x for x in node.args if x is not absent[0]))  # pyright: ignore[reportArgumentType]
        else:
            for x in absent:
                with graph.inserting_before(node):
                    val = x.meta["val"]
                    zeros = graph.call_function(
                        torch.zeros, (tuple(val.shape),), {"dtype": val.dtype, "device": val.device}
                    )
                node.replace_input_with(x, zeros)
    end = graph.find_nodes(op="output")[0]
    end.args = (tuple(None if x in undefined else x for x in end.args[0]),)  # pyright: ignore[reportGeneralTypeIssues]
    graph.eliminate_dead_code()
    unused = [node for node in graph.find_nodes(op="placeholder") if not node.users]
    if unused:  # the caller holds nothing of them: they are dropped at once, as generated code drops what it reads
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            graph.call_function(_drop, tuple(unused))
    graph.lint()
    return fx.GraphModule(module, graph)


def _drop(*_values: Any) -> None:
    pass


def leave_unread_gradients_out(outputs: Any) -> None:
    """What no gradient flows into must not get a gradient of zeros, as AOT autograd would make it: it gets none.

    Args:
        outputs: what a compiled module returned.
    """
    tensors = [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    todo, seen = [x.grad_fn for x in tensors], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _private.is_compiled_backward(node):
            node.register_prehook(_note_undefined)
        else:  # a view that was made again of an output
            todo.extend(before for before, _ in node.next_functions)


def _note_undefined(gradients: tuple[torch.Tensor | None, ...]) -> None:
    _undefined.outputs = frozenset(i for i, x in enumerate(gradients) if x is None)


def check_that_calls_are_compiled() -> None:
    """Refuse where `torch.compile` would silently run the plain model, whose memory is not the plan's.

    Raises:
        InvalidInput: the compiler is switched off, or a mode is active that it steps aside for.
    """
    if _private.compiler_is_disabled():
        raise InvalidInput("PyTorch's compiler is switched off, so no plan is followed: unset TORCHDYNAMO_DISABLE")
    stance = _private.compiler_stance()
    if stance not in ("default", "fail_on_recompile"):
        raise InvalidInput(f"torch.compiler.set_stance({stance!r}) follows no plan: set it to 'default'")
    mode = _private.current_dispatch_mode()
    if mode is not None:
        raise InvalidInput(f"under a {type(mode).__name__} nothing is compiled, so no plan is followed: leave it out")


def finish(graph: fx.Graph, outputs: list[fx.Node | None], descriptions: list[Any]) -> None:
    """Write the output of a half; what has no description is saved for backward."""
    end = graph.output(tuple(outputs))
    _private.with_descriptions(end, descriptions, len(outputs) - len(descriptions))
    graph.lint()


def device_of(node: fx.Node) -> torch.device:
    """Of a call's first result."""
    val = node.meta["val"]
    return (val[0] if isinstance(val, (tuple, list)) else val).device


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the default generator of a device, a CPU tensor of bytes."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def state_to_repeat(device: torch.device) -> torch.Tensor:
    """`random_state` in memory of the host that PyTorch's allocator does not count, as a GPU's state always is."""
    return torch.from_numpy(random_state(device).numpy().copy())


def random_states() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of the CPU's default generator and of every GPU's, where there are any in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_random_states(states: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Put back what `random_states` returned."""
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])


def with_random_state(state: torch.Tensor, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call that draws again what it drew from `state`; the generator is left as it was."""
    asked = torch.device(kwargs.get("device") or "cpu")  # of a call without a tensor
    device = next((x.device for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), asked)
    now = state_to_repeat(device)
    set_state = torch.set_rng_state if device.type == "cpu" else lambda s: torch.cuda.set_rng_state(s, device)
    set_state(state)
    try:
        return target(*args, **kwargs)
    finally:
        set_state(now)


@functools.cache
def drawing_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """`with_random_state` for one function; as an argument, generated code could not name it."""

    def again(state: torch.Tensor, *args: Any) -> Any:
        return with_random_state(state, function, *args)

    again.__name__ = again.__qualname__ = f"{function.__name__}_again"
    return again


def fake_state(node: fx.Node) -> torch.Tensor:
    """What a random call's generator state is to the compiler: shape and dtype without contents."""
    val = node.meta["val"]
    mode = (val[0] if isinstance(val, (tuple, list)) else val).fake_mode
    return mode.from_tensor(random_state(device_of(node)))


def repetition(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any], int | None]:
    """(target, args, kwargs, number of results) of a call that is made again, on the training graph's nodes.

    Batch norm reads the running statistics only to make the next ones; by the time of a repetition in the backward
    pass they have been overwritten. Without them it computes the same output, mean and deviation.
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


def backend_of(name: str) -> Backend:
    """The backend of that name, one of `BACKENDS`."""
    return _private.inductor if name == "inductor" else eager


BACKENDS = ("eager", "inductor")
