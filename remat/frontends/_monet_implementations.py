"""Implementations for training graphs whose operations have the kinds of MONeT's traces.

`add_implementations` lists them and their names. Their costs are modelled: the cost of the default implementation times
the ratio of the two roofline times on a P100, which is the best that a kernel bound by traffic can do. MONeT's own
costs, measured on a P100, are those of `remat.frontends.monet.load_costs`.

Scratch memory counts only beyond the default's own, which the published graphs do not give: for example, int64 indices
of a max pooling exist for a moment in each of its implementations. Kernels that pack and read masks need none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat.cost import load_gpu
from remat.cost.gpu import operation_class
from remat.cost.roofline import operation_ns
from remat.errors import InvalidInput
from remat.frontends.monet_networks import FLOAT_BYTES, INDEX_BYTES, Layer
from remat.graph import Graph, Operation, Value, Work
from remat.implementation import Implementation

DEVICE = "p100"

ACTIVATIONS = ("aten::relu_", "aten::relu", "aten::hardtanh_", "aten::leaky_relu_")
_IN_PLACE = (*ACTIVATIONS, "aten::add_", "aten::dropout")
_INVERTIBLE = ("aten::leaky_relu_",)

# `Work` has one roofline, whose time is the slower of arithmetic and traffic. Where one kernel moves data before or
# after another computes, the times add. So the moved bytes are entered as arithmetic, at this many FLOP per byte, which
# is the P100's balance by its achieved rates (0.76 * 9.3e12 / (0.70 * 732e9)).
BALANCE_FLOPS_PER_BYTE = 14

_TILE, _TAPS = 4, 3  # F(4x4, 3x3): tiles of 6 x 6, 36 products where the direct form has 144
_POINTS = (_TILE + _TAPS - 1) ** 2


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward operation and its backward operations; `param_grad` is None where there is only one."""

    forward: int
    param_grad: int | None
    ip_grad: int


def pairs(graph: Graph) -> list[Pair]:
    """Each forward operation with its gradients, which come in reverse order.

    Raises:
        InvalidInput: the graph is not of that form.
    """
    if graph.loss is None:
        raise InvalidInput(f"graph '{graph.name}' has no loss; it is no training graph with the kinds of MONeT")
    found, at, operations = [], graph.loss + 1, graph.operations
    for k in range(graph.loss - 1, -1, -1):
        kinds = [op.kind for op in operations[at : at + 2]]
        own = operations[k].kind
        param = at if kinds[:1] == [f"{own}_param_grad"] else None
        at += param is not None
        if at >= len(graph) or operations[at].kind != f"{own}_ip_grad":
            raise InvalidInput(
                f"graph '{graph.name}': operation {min(at, len(graph) - 1)} should be the gradient of operation {k} "
                f"({own}), as in MONeT's training graphs"
            )
        found.append(Pair(k, param, at))
        at += 1
    return found[::-1]


def elements(graph: Graph, v: int) -> int:
    return graph.values[v].bytes // FLOAT_BYTES


class Builder:
    """Collects implementations and extra values for a graph of single-output operations; `done` returns the graph."""

    def __init__(self, graph: Graph):
        self.graph, self.gpu = graph, load_gpu(DEVICE)
        self.values = list(graph.values)
        self.found = [list(op.implementations) for op in graph.operations]

    def done(self) -> Graph:
        operations = tuple(
            replace(op, implementations=tuple(implementations)) if implementations else op
            for op, implementations in zip(self.graph.operations, self.found, strict=True)
        )
        return replace(self.graph, operations=operations, values=tuple(self.values))

    def named(self, k: int, name: str) -> Implementation | None:
        return next((implementation for implementation in self.found[k] if implementation.name == name), None)

    def extra(self, k: int, name: str, size: int) -> int:
        """The extra value that implementation `name` of operation `k` produces; a new one where there is none."""
        implementation = self.named(k, name)
        if implementation is not None:
            return implementation.outputs[-1]
        self.values.append(Value(f"{self.graph.operations[k].name}:{name}", size))
        return len(self.values) - 1

    def add(
        self, k: int, name: str, *, reads: Sequence[int] | None = None, makes: Sequence[int] = (),
        overwrites: int | None = None, workspace_bytes: int = 0, moved: int = 0, work: Work | None = None,
        is_lossy: bool = False,
    ) -> None:  # fmt: skip
        """Add an implementation of operation `k`, unless it has one of that name.

        Args:
            reads: by default the inputs of the operation.
            makes: extra values.
            moved: bytes that it moves beyond the default implementation (fewer, if negative).
            work: its whole work, in place of `moved`.
        """
        if self.named(k, name) is not None:
            return
        op = self.graph.operations[k]
        inputs = op.inputs if reads is None else tuple(sorted(set(reads)))
        work = work or moving(op, moved)
        cost = self._cost(op, work)
        self.found[k].append(
            Implementation(name, inputs, (*op.outputs, *makes), cost, workspace_bytes, overwrites, is_lossy, work)
        )

    def add_backward(self, k: int, name: str, saved: Sequence[int], **more: Any) -> None:
        """`add` an implementation of a backward operation that reads gradients and the forward values `saved` alone."""
        self.add(k, name, reads=(*gradients_read(self.graph, k), *saved), **more)

    def add_twice(self, k: int, name: str, makes: int, moved: int) -> None:
        """Add an implementation that also makes an extra value, and the same in place where that is allowed."""
        self.add(k, name, makes=[makes], moved=moved)
        x = overwritable(self.graph, k)
        if x is not None:
            self.add(k, f"in_place_{name}", makes=[makes], overwrites=x, moved=moved)

    def _cost(self, op: Operation, work: Work | None) -> int:
        if work is None or op.work is None:
            return op.cost
        new, own = (operation_ns(op.kind, each, self.gpu, op.is_backward) for each in (work, op.work))
        return round(op.cost * new / own) if own else new


def moving(op: Operation, more: int) -> Work | None:
    """The work of `op` and of a second kernel, before or after it, that moves `more` bytes."""
    if op.work is None or not more:
        return op.work
    if operation_class(op.kind) in ("convolution", "matmul"):
        return replace(op.work, flops=(op.work.flops or 0) + BALANCE_FLOPS_PER_BYTE * more)
    return replace(op.work, bytes_moved=max(0, op.work.bytes_moved + more))


def overwritable(graph: Graph, k: int) -> int | None:
    """The input in whose storage operation `k` may write: made right before it, read by no later forward operation."""
    op = graph.operations[k]
    if op.kind not in _IN_PLACE:
        return None
    for x in op.inputs:
        alone = all(user == k for user in forward_users(graph, x))
        if alone and graph.producer[x] == k - 1 and graph.values[x].bytes == graph.values[op.outputs[0]].bytes:
            return x
    return None


def gradients_read(graph: Graph, k: int) -> tuple[int, ...]:
    """The inputs of a backward operation that the loss or the backward pass makes."""
    assert graph.loss is not None
    return tuple(v for v in graph.operations[k].inputs if graph.producer[v] >= graph.loss)


def add_implementations(graph: Graph, layers: Sequence[Layer]) -> Graph:
    """MONeT's implementations for a graph of those layers.

    Names (f: forward, b: backward):

    - ``in_place`` (f): activations, ``add_`` and ``dropout`` overwrite the output of the operation before.
    - ``winograd`` (f, b): non-fused F(4x4, 3x3) for dense 3x3 convolutions of stride 1, all three passes.
      Scratch: the whole transformed input, output and filters. The default stands for implicit GEMM, without scratch.
      Time is modelled: a quarter of the arithmetic, more where the tiles overhang, plus the traffic of the
      transforms, both at the rates that the default achieves. On VGG-16 that is 0.31 to 0.69 of the default; the log
      of MONeT's program has 0.31 to 0.72 of its non-fused Winograd on a P100. PyTorch itself runs such algorithms
      where they fit, which plain steps by the default's costs do not.
      (FFT is left out, because it is for 5x5 and larger windows of stride 1, which none of the five networks has.)
    - ``output`` (b): the gradient from the operation's own output, for ReLU and leaky ReLU. Also for batch
      normalization, whose output then must outlive a ReLU that may not overwrite it. ``hardtanh_`` does this by
      default, as published; its other implementation is ``input``.
    - ``activated`` (b): batch normalization from the output of a leaky ReLU after it, which is invertible
      (in-place activated batch normalization); ReLU is not.
    - ``mask``, ``in_place_mask`` (f), ``mask`` (b): ReLU, hardtanh, leaky ReLU and dropout keep one
      bit per element.
    - ``indices`` (f, b): max pooling keeps its place in the window, one byte per output (MONeT packs two
      in a byte), and its backward does not read the input. The default pools the input again, as MONeT's does.
    - ``indices_int64`` (f, b): the same with eight bytes, as in PyTorch.
    """
    builder = Builder(graph)
    for pair in pairs(graph):
        in_place(builder, pair)
        _winograd(builder, pair, layers[pair.forward + 1], layers)
        _output_activated(builder, pair)
        keep_mask(builder, pair)
        keep_indices(builder, pair)
        keep_indices(builder, pair, packed=False)
    return builder.done()


def in_place(builder: Builder, pair: Pair) -> None:
    x = overwritable(builder.graph, pair.forward)
    if x is not None:
        builder.add(pair.forward, "in_place", overwrites=x)


def _winograd(builder: Builder, pair: Pair, layer: Layer, layers: Sequence[Layer]) -> None:
    """All three passes have the same tiles, because F(3x3, 4x4), for the weights' gradient, has 36 points as well."""
    if layer.kind != "aten::_convolution" or (layer.kernel, layer.stride, layer.groups) != (_TAPS, 1, 1):
        return
    n, c, h, w = layers[layer.inputs[0]].shape
    k = layer.shape[1]
    tiles = n * -(-h // _TILE) * -(-w // _TILE)
    of_input, of_output, of_filters = (FLOAT_BYTES * _POINTS * size for size in (tiles * c, tiles * k, c * k))
    scratch = of_input + of_output + of_filters
    flops = 2 * _POINTS * tiles * c * k + BALANCE_FLOPS_PER_BYTE * 2 * scratch  # scratch is written, then read
    for at in (pair.forward, pair.param_grad, pair.ip_grad):
        own = None if at is None else builder.graph.operations[at].work
        if at is not None and own is not None and not own.is_free:
            builder.add(at, "winograd", workspace_bytes=scratch, work=replace(own, flops=flops))


def _output_activated(builder: Builder, pair: Pair) -> None:
    graph = builder.graph
    op, back = graph.operations[pair.forward], pair.ip_grad
    if op.kind in ("aten::hardtanh_", "aten::hardtanh"):
        builder.add_backward(back, "input", op.inputs)
    elif op.kind in ACTIVATIONS:
        builder.add_backward(back, "output", op.outputs)
    elif op.kind == "aten::batch_norm":
        y = op.outputs[0]
        own = graph.operations[back].work
        # One FLOP per element: the normalized input is y, shifted and scaled back.
        work = None if own is None else replace(own, flops=(own.flops or 0) + elements(graph, y))
        builder.add_backward(back, "output", [y], work=work)
        forward = [graph.operations[user] for user in forward_users(graph, y)]
        if len(forward) == 1 and forward[0].kind in _INVERTIBLE:
            builder.add_backward(back, "activated", forward[0].outputs, work=work)


def keep_mask(builder: Builder, pair: Pair) -> None:
    """Offer to keep a mask of one bit per element for the backward operation, in place of what it reads by default."""
    graph, k = builder.graph, pair.forward
    op = graph.operations[k]
    if op.kind in (*ACTIVATIONS, "aten::dropout"):
        y = op.outputs[0]
        n = elements(graph, y)
        size = -(-n // 8)
        mask = builder.extra(k, "mask", size)
        written, replaced = size, FLOAT_BYTES * n
        if op.kind == "aten::dropout":  # the default implementations write and read a mask of one byte per element
            written, replaced = size - n, n
        builder.add_twice(k, "mask", mask, written)
        builder.add_backward(pair.ip_grad, "mask", [mask], moved=size - replaced)


def keep_indices(builder: Builder, pair: Pair, *, packed: bool = True) -> None:
    """Offer to keep the indices of a max pooling for its backward operation, in place of its input.

    Args:
        packed: keep one byte per output, which costs a pass to pack and one to unpack; otherwise ATen's int64 indices.
    """
    graph, k = builder.graph, pair.forward
    op = graph.operations[k]
    if op.kind == "aten::max_pool2d":
        name, n = "indices" if packed else "indices_int64", elements(graph, op.outputs[0])
        indices = builder.extra(k, name, n if packed else INDEX_BYTES * n)
        moved = (INDEX_BYTES + 1) * n if packed else 0
        builder.add(k, name, makes=[indices], moved=moved)
        builder.add_backward(pair.ip_grad, name, [indices], moved=moved - graph.values[op.inputs[0]].bytes)


def forward_users(graph: Graph, v: int) -> Iterator[int]:
    return (user for user in graph.users[v] if not graph.operations[user].is_backward)


def backward_users(graph: Graph, v: int) -> Iterator[int]:
    return (user for user in graph.users[v] if graph.operations[user].is_backward)
