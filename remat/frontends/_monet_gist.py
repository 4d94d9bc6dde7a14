"""Gist (Jain et al., ISCA 2018) in a training graph: encoded copies of values that the backward pass reads."""

from __future__ import annotations

from math import ceil

from remat.errors import InvalidInput
from remat.frontends._monet_implementations import (
    ACTIVATIONS,
    Builder,
    Pair,
    backward_users,
    elements,
    in_place,
    keep_indices,
    keep_mask,
    pairs,
)
from remat.frontends.monet_networks import FLOAT_BYTES
from remat.graph import Graph

ASSUMED_SPARSITY = 0.5  # of ReLU outputs, not measured: half of all values are negative if symmetric about 0
COLUMNS = 256  # of the matrix stored as CSR, so that a column index takes one byte
_RECTIFIERS = tuple(kind for kind in ACTIVATIONS if kind != "aten::leaky_relu_")  # activations that make zeros
_CONVOLUTIONS = ("aten::_convolution_param_grad", "aten::_convolution_ip_grad")  # the second only where depthwise
_EXACT = ("sparse", "indices", "mask")
_REDUCIBLE = ("aten::batch_norm_", "aten::_convolution_", "aten::addmm_")


def with_gist(graph: Graph, sparsity: float = ASSUMED_SPARSITY, *, lossy: bool = False) -> Graph:
    """A training graph of `monet_graph` with the implementations for the strategy ``gist``.

    These are ``in_place``, ``mask`` and ``indices`` of `add_implementations`, and:

    - ``sparse``, ``in_place_sparse`` (f): ReLU and ReLU6 whose output a convolution reads also make a sparse copy of
      it: CSR of a matrix with 256 columns, one byte for a column, four for a value, four for the start of a row.
    - ``sparse`` (b): the gradient of the convolution's weights decodes that copy into scratch memory of the size of
      the dense tensor; ReLU's own backward reads the copy without decoding.
    - ``half`` (f, b; `lossy`, and marked as such): delayed precision reduction, a float16 copy of the other values
      that batch normalizations, convolutions and products read in the backward pass, decoded into scratch memory.

    Args:
        sparsity: share of zeros in the output of a ReLU, a property of the data; the default is an assumption.
    """
    if not 0 <= sparsity <= 1:
        raise InvalidInput(f"sparsity must be between 0 and 1, not {sparsity}")
    builder = Builder(graph)
    for pair in pairs(graph):
        kind = graph.operations[pair.forward].kind
        if kind in _RECTIFIERS or kind == "aten::add_":
            in_place(builder, pair)
        if kind == "aten::max_pool2d":
            keep_indices(builder, pair)
        if kind in _RECTIFIERS:
            y = graph.operations[pair.forward].outputs[0]
            readers = [k for k in backward_users(graph, y) if k != pair.ip_grad]
            if any(graph.operations[k].kind in _CONVOLUTIONS for k in readers):
                _sparse(builder, pair, readers, sparsity)
            else:
                keep_mask(builder, pair)
        elif lossy:
            _half(builder, pair)
    return builder.done()


def _sparse(builder: Builder, pair: Pair, readers: list[int], sparsity: float) -> None:
    graph, k = builder.graph, pair.forward
    y = graph.operations[k].outputs[0]
    n, dense = elements(graph, y), graph.values[y].bytes
    size = (FLOAT_BYTES + 1) * ceil(n * (1 - sparsity)) + FLOAT_BYTES * (-(-n // COLUMNS) + 1)
    copy = builder.extra(k, "sparse", size)
    builder.add_twice(k, "sparse", copy, dense + size)
    builder.add_backward(pair.ip_grad, "sparse", [copy], moved=size - dense)
    for reader in readers:
        if graph.operations[reader].kind in _CONVOLUTIONS:
            builder.add_backward(reader, "sparse", [copy], workspace_bytes=dense, moved=size + dense)


def _half(builder: Builder, pair: Pair) -> None:
    """For gradients of batch normalizations, convolutions and products that have no exact encoding to read."""
    graph, k = builder.graph, pair.forward
    y = graph.operations[k].outputs[0]
    dense = graph.values[y].bytes
    readers = [
        reader for reader in backward_users(graph, y)
        if graph.operations[reader].kind.startswith(_REDUCIBLE)
        and not any(implementation.name in _EXACT for implementation in builder.found[reader])
    ]  # fmt: skip
    if readers:
        copy = builder.extra(k, "half", dense // 2)
        moved = dense + dense // 2
        builder.add(k, "half", makes=[copy], moved=moved, is_lossy=True)
        for reader in readers:
            builder.add_backward(reader, "half", [copy], workspace_bytes=dense, moved=moved, is_lossy=True)
