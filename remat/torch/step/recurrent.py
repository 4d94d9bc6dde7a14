"""Recurrent layers as one operation each, forward and backward, on PyTorch's native kernels.

Tracing unrolls layers step by step into other kernels, whose results differ from eager mode's in the last bits. The
backward operation runs the native forward kernel again, because its inner states cannot pass from one operation to
another. It costs one forward pass more than eager mode's, and holds only inputs and weights between the passes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from remat.torch._random import random_state, set_random_state
from remat.torch.internals import autograd, notes, operators

Layout = tuple[tuple[int, ...], torch.dtype]  # dimensions from the outermost in memory to the innermost
_NATIVE = {operators.native_recurrent(kind): kind for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
_OPTIONS = (
    "str kind, Tensor input, Tensor[] hx, Tensor[] weights, bool has_biases, int num_layers, float dropout, "
    "bool train, bool bidirectional, bool batch_first, bool grad_mode, ScalarType? autocast, bool[] needs_grad"
)

_library = torch.library.Library("remat", "DEF")
_library.define(f"recurrent({_OPTIONS}) -> Tensor[]")
_library.define(
    f"recurrent_random({_OPTIONS}) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,)
)  # dropout between layers; its last result is the generator's state before it
_library.define(f"recurrent_backward(Tensor[] gradients, Tensor? state, {_OPTIONS}) -> Tensor[]")


def replace_recurrent(graph: fx.GraphModule) -> None:
    """Replace calls of native recurrent layers in a graph that Dynamo captured by these operations, in place.

    On a CPU the native kernels go layer by layer, and so do the operations; cuDNN takes all layers at once.
    """
    grad_mode = True  # where the model calls the layer: kernels depend on it
    for node in list(graph.graph.nodes):
        grad_mode = notes.grad_mode_after(node, grad_mode)
        kind = _NATIVE.get(node.target) if node.op == "call_function" else None
        if kind is None or not isinstance(node.args[2], (list, tuple)):
            continue  # packed sequences have shapes that depend on data; Dynamo refuses them before
        data, hx, weights, *options = node.args
        hx = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        needs_grad = [notes.example_of(x).requires_grad for x in (data, *hx, *weights)]
        call = _layer_by_layer if notes.example_of(node)[0].device.type == "cpu" else _one_call
        with graph.graph.inserting_before(node):
            made = call(graph.graph, kind, data, hx, list(weights), options, grad_mode, needs_grad)
        node.replace_all_uses_with(made)
        graph.graph.erase_node(node)
    graph.recompile()


def gru_cell(
    x: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """`aten.gru_cell` with the memory layouts of eager mode on a CPU, where it works in place on parts of a tensor.

    Kernels compute the rest of a row, or of a dense tensor, by another formula than whole vectors, so that layouts
    change last bits. CUDA has its own kernel.
    """
    if x.device.type != "cpu":
        return operators.composite_kernel(torch.ops.aten.gru_cell.default, x, hidden, w_ih, w_hh, b_ih, b_hh)
    sizes = (2 * hidden.shape[1], hidden.shape[1])
    x_gates, x_new = F.linear(x, w_ih, b_ih).unsafe_split_with_sizes(sizes, 1)
    h_gates, h_new = F.linear(hidden, w_hh, b_hh).unsafe_split_with_sizes(sizes, 1)
    reset, keep = (gate.sigmoid() for gate in (h_gates + x_gates).unsafe_chunk(2, 1))
    new = (x_new + h_new * reset).tanh()
    return (hidden - new) * keep + new


def _one_call(
    graph: fx.Graph, kind: str, data: fx.Node, hx: list[fx.Node], weights: list[fx.Node], options: Sequence[Any],
    grad_mode: bool, needs_grad: list[bool],
) -> fx.Node:  # fmt: skip
    _has_biases, num_layers, dropout, train, _bidirectional, _batch_first = options
    random = bool(dropout and train and num_layers > 1)
    target = _recurrent_random if random else _recurrent
    return graph.call_function(target, (kind, data, hx, weights, *options, grad_mode, needs_grad))


def _recurrent(kind: str, *tensors_and_options: Any) -> Any:
    return torch.ops.remat.recurrent.default(kind, *_as_cast(kind, *tensors_and_options))


def _recurrent_random(kind: str, *tensors_and_options: Any) -> Any:
    return torch.ops.remat.recurrent_random.default(kind, *_as_cast(kind, *tensors_and_options))


def _as_cast(kind: str, data: Tensor, hx: list[Tensor], weights: list[Tensor], *options: Any) -> tuple[Any, ...]:
    """The arguments with eager mode's casts, and the dtype to which the kernel itself must cast, or None.

    A CPU casts the input for each direction, and a GRU's states at each step, so that their gradients are added in the
    wide type: the kernel makes these casts. Weights are cast once for all calls that share them.
    """
    device, (*others, needs_grad) = data.device.type, options
    if not torch.is_autocast_enabled(device):
        return data, hx, weights, *others, None, needs_grad
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.dtype is torch.float32 else x

    weights, bidirectional = [cast(x) for x in weights], others[4]
    if device == "cpu" and (kind == "gru" or bidirectional):
        states = hx if kind == "gru" else [cast(x) for x in hx]
        return data, states, weights, *others, dtype, needs_grad
    return cast(data), [cast(x) for x in hx], weights, *others, None, needs_grad


def _layer_by_layer(
    graph: fx.Graph, kind: str, data: fx.Node, hx: list[fx.Node], weights: list[fx.Node], options: Sequence[Any],
    grad_mode: bool, needs_grad: list[bool],
) -> fx.Node:  # fmt: skip
    """One operation for each layer, with dropout between them; a tuple of the native call's results."""
    has_biases, num_layers, dropout, train, bidirectional, batch_first = options
    call, n_directions, n_weights = graph.call_function, 1 + bidirectional, len(weights) // num_layers
    swaps = batch_first and notes.example_of(data).dim() == 3  # inside, steps come first, as in the native kernels
    current = call(torch.transpose, (data, 0, 1)) if swaps else data
    last: list[list[fx.Node]] = []
    of_data, of_states, of_weights = needs_grad[:1], needs_grad[1 : 1 + len(hx)], needs_grad[1 + len(hx) :]
    for layer in range(num_layers):
        states = [call(torch.narrow, (h, 0, layer * n_directions, n_directions)) for h in hx]
        own = slice(layer * n_weights, (layer + 1) * n_weights)
        needs = [*of_data, *of_states, *of_weights[own]]
        once = (has_biases, 1, 0.0, train, bidirectional, False)
        made = _one_call(graph, kind, current, states, weights[own], once, grad_mode, needs)
        of_data = [grad_mode and any(needs)]
        current, *ends = (call(operator.getitem, (made, i)) for i in range(1 + len(hx)))
        last.append(ends)
        if dropout and train and layer + 1 < num_layers:
            current = call(torch.nn.functional.dropout, (current, dropout, True))
    output = call(torch.transpose, (current, 0, 1)) if swaps else current
    ends = [call(torch.cat, (list(parts), 0)) if num_layers > 1 else parts[0] for parts in zip(*last, strict=True)]
    return call(_as_tuple, (output, *ends))


def _as_tuple(*items: Any) -> tuple[Any, ...]:
    return items


def _run(kind: str, data: Tensor, hx: Sequence[Tensor], weights: Sequence[Tensor], options: Sequence[Any]) -> Any:
    *options, grad_mode, autocast = options
    states = tuple(hx) if kind == "lstm" else hx[0]
    # Eager mode keeps casts of leaves only, which the input is not.
    cast = torch.autocast(data.device.type, autocast, enabled=autocast is not None, cache_enabled=False)
    with cast, torch.set_grad_enabled(grad_mode):
        return operators.native_recurrent(kind)(data, states, list(weights), *options)


def _permutation(x: Tensor) -> tuple[int, ...]:
    """Dimensions of a dense tensor from the outermost in memory to the innermost."""
    return tuple(sorted(range(x.dim()), key=lambda i: -x.stride(i)))


def _empty(device: torch.device, shape: Sequence[int], layout: Layout) -> Tensor:
    """A dense tensor of this shape and layout."""
    order, dtype = layout
    bare = torch.empty([shape[i] for i in order], dtype=dtype, device=device)
    return bare.permute([order.index(i) for i in range(len(order))])


def _as_declared(x: Tensor, layout: Layout) -> Tensor:
    """`x` with the layout that the compiler expects."""
    declared = _empty(x.device, x.shape, layout)
    return x.detach() if declared.stride() == x.stride() and x.storage_offset() == 0 else declared.copy_(x)


@functools.cache
def _layouts(
    kind: str, device: str, dtypes: tuple[torch.dtype, ...], batched: bool, projected: bool, native: tuple[Any, ...]
) -> tuple[list[Layout], list[Layout]]:  # fmt: skip
    """The native kernel's (layouts of results, layouts of gradients of input, states and weights).

    Later operations choose their kernels by these memory layouts. A small layer of the same kind runs to find them.

    Args:
        native: options of the native kernel.
    """
    has_biases, num_layers, _dropout, train, bidirectional, batch_first, autocast = native
    options: dict[str, Any] = {"proj_size": 2} if projected else {}
    options |= {"nonlinearity": kind.removeprefix("rnn_")} if kind.startswith("rnn") else {}
    options |= {"bias": has_biases, "batch_first": batch_first, "bidirectional": bidirectional}

    def probe() -> tuple[list[Layout], list[Layout]]:
        layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(kind, torch.nn.RNN)
        weights = autograd.flat_weights(layer(5, 3, num_layers, device=device, dtype=dtypes[-1], **options))
        n, batch = num_layers * (1 + bidirectional), ((7 if batch_first else 6),) if batched else ()
        widths = [2 if projected else 3, 3][: 2 if kind == "lstm" else 1]
        shapes = [(7, 6, 5) if batched else (7, 5), *((n, *batch, width) for width in widths)]
        data, *hx = (
            torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
            for shape, dtype in zip(shapes, dtypes[:-1], strict=True)
        )
        given = (has_biases, num_layers, 0.0, train, bidirectional, batch_first, True, autocast)
        made = _run(kind, data, hx, weights, given)
        gradients = torch.autograd.grad(made, [data, *hx, *weights], [torch.ones_like(x) for x in made])
        return [(_permutation(x), x.dtype) for x in made], [(_permutation(x), x.dtype) for x in gradients]

    # Another thread, because this one may be inside the compiler, where nothing is real and nothing differentiable.
    with torch.random.fork_rng([device] if device != "cpu" else []), ThreadPoolExecutor(1) as other:
        return other.submit(probe).result()


def _layouts_of(
    kind: str, data: Tensor, hx: Sequence[Tensor], weights: Sequence[Tensor], options: Sequence[Any]
) -> tuple[list[Layout], list[Layout]]:
    has_biases, num_layers, _dropout, train, bidirectional, batch_first, _grad_mode, autocast = options
    per_layer = len(weights) // (num_layers * (1 + bidirectional))
    native = has_biases, num_layers, 0.0, train, bidirectional, batch_first, autocast
    return _layouts(
        kind, str(data.device), tuple(x.dtype for x in (data, *hx, weights[0])), data.dim() == 3, per_layer in (3, 5),
        native,
    )  # fmt: skip


def _run_on_leaves(
    kind: str, data: Tensor, hx: list[Tensor], weights: list[Tensor], options: Sequence[Any]
) -> tuple[list[Tensor], Any]:
    """(the tensors as leaves that need the same gradients as in eager mode, the layer's results).

    PyTorch's choice of kernels depends on which tensors need a gradient.
    """
    *own_options, needs_grad = options
    given = zip([data, *hx, *weights], needs_grad, strict=True)
    leaves = [x.detach().requires_grad_(flag) for x, flag in given]
    return leaves, _run(kind, leaves[0], leaves[1 : 1 + len(hx)], leaves[1 + len(hx) :], own_options)


def _forward(kind: str, data: Tensor, hx: list[Tensor], weights: list[Tensor], *options: Any) -> list[Tensor]:
    # Eager mode multiplies all steps of an input at once if the weights' gradients are needed, else one by one.
    with operators.views_need_gradients():
        _, made = _run_on_leaves(kind, data, hx, weights, options)
    layouts, _ = _layouts_of(kind, data, hx, weights, options[:-1])
    return [_as_declared(x, layout) for x, layout in zip(made, layouts, strict=True)]


def _forward_random(kind: str, data: Tensor, hx: list[Tensor], weights: list[Tensor], *options: Any) -> list[Tensor]:
    state = random_state(data.device)
    return [*_forward(kind, data, hx, weights, *options), state]


def _backward(
    gradients: list[Tensor], state: Tensor | None, kind: str, data: Tensor, hx: list[Tensor], weights: list[Tensor],
    *options: Any,
) -> list[Tensor]:  # fmt: skip
    devices = [data.device] if data.is_cuda else []
    with torch.random.fork_rng(devices, enabled=state is not None):
        if state is not None:
            set_random_state(state, data.device)
        leaves, made = _run_on_leaves(kind, data, hx, weights, options)
        wanted = [x for x in leaves if x.requires_grad]
        found = torch.autograd.grad(made, wanted, gradients, materialize_grads=True)
    layouts = _wanted(_layouts_of(kind, data, hx, weights, options[:-1])[1], options[-1])
    return [_as_declared(x, layout) for x, layout in zip(found, layouts, strict=True)]


def _wanted(each: Sequence[Any], needs_grad: Sequence[bool]) -> list[Any]:
    return [x for x, needed in zip(each, needs_grad, strict=True) if needed]


def _fake_forward(kind: str, data: Tensor, hx: list[Tensor], weights: list[Tensor], *options: Any) -> list[Tensor]:
    width = hx[0].shape[-1] * (2 if options[4] else 1)  # of a projected LSTM: the width of the projection
    shapes = [(*data.shape[:-1], width), *(x.shape for x in hx)]
    layouts, _ = _layouts_of(kind, data, hx, weights, options[:-1])
    return [_empty(data.device, shape, layout) for shape, layout in zip(shapes, layouts, strict=True)]


def _fake_forward_random(*args: Any) -> list[Tensor]:
    state = torch.empty(16 if args[1].device.type == "cuda" else 5056, dtype=torch.uint8)
    return [*_fake_forward(*args), state]


def _fake_backward(
    gradients: list[Tensor], state: Tensor | None, kind: str, data: Tensor, hx: list[Tensor], weights: list[Tensor],
    *options: Any,
) -> list[Tensor]:  # fmt: skip
    layouts = _layouts_of(kind, data, hx, weights, options[:-1])[1]
    every = [_empty(x.device, x.shape, layout) for x, layout in zip([data, *hx, *weights], layouts, strict=True)]
    return _wanted(every, options[-1])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    kind, data, hx, weights, *options = inputs
    n_states = len(hx)
    ctx.kind, ctx.options, ctx.n_states = kind, options[:-1], n_states
    state = output[1 + n_states :]
    ctx.has_state, ctx.needs = bool(state), [x.requires_grad for x in (data, *hx, *weights)]
    ctx.save_for_backward(data, *hx, *weights, *state)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> Any:
    saved = list(ctx.saved_tensors)
    state = saved.pop() if ctx.has_state else None
    data, hx, weights = saved[0], saved[1 : 1 + ctx.n_states], saved[1 + ctx.n_states :]
    kept = list(gradients)[: 1 + ctx.n_states]
    made = iter(torch.ops.remat.recurrent_backward(kept, state, ctx.kind, data, hx, weights, *ctx.options, ctx.needs))
    each = [next(made) if needed else None for needed in ctx.needs]
    rest = [None] * (len(ctx.options) + 1)
    return None, each[0], each[1 : 1 + ctx.n_states], each[1 + ctx.n_states :], *rest


for _name, _kernel, _fake in (
    ("recurrent", _forward, _fake_forward),
    ("recurrent_random", _forward_random, _fake_forward_random),
    ("recurrent_backward", _backward, _fake_backward),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"remat::{_name}", _fake, lib=_library)
for _name in ("recurrent", "recurrent_random"):
    torch.library.register_autograd(f"remat::{_name}", _differentiate, setup_context=_remember, lib=_library)
