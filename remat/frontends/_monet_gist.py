"""What Gist (Jain et al., ISCA 2018) adds to a training graph: encoded copies of what the backward pass reads."""

from __future__ import annotations

from math import ceil

from remat.cost import load_gpu
from remat.cost.gpu import Gpu
from remat.errors import InvalidInput
from remat.frontends._monet_implementations import (
    ACTIVATIONS,
    Pair,
    WaysBuilder,
    backward_users,
    elements,
    gradients_read,
    in_place,
    keep_indices,
    keep_mask,
    pairs,
)
from remat.frontends.monet_networks import FLOAT_BYTES
from remat.graph import Graph

ASSUMED_SPARSITY = 0.5  # of ReLU outputs: half of what is symmetric about 0 is negative; not measured
COLUMNS = 256  # of the matrix stored as CSR, so that a column index takes a byte
_RECTIFIERS = tuple(kind for kind in ACTIVATIONS if kind != "aten::leaky_relu_")  # those that make zeros
_CONVOLUTIONS = ("aten::_convolution_param_grad", "aten::_convolution_ip_grad")  # the second is depthwise
_EXACT = ("sparse", "indices", "mask")
_REDUCIBLE = ("aten::batch_norm_", "aten::_convolution_", "aten::addmm_")


def with_gist(
    graph: Graph, sparsity: float = ASSUMED_SPARSITY, *, lossy: bool = False, gpu: str | Gpu = "p100"
) -> Graph:
    """A training graph of `monet_graph` with the implementations that the strategy ``gist`` takes.

    Those of `add_implementations` that it needs (``in_place``, ``mask``, ``indices``), and:

    - ``sparse``, ``in_place_sparse`` (f): ReLU and ReLU6 whose output a convolution reads also make a sparse copy of
      it: CSR of a matrix with 256 columns, one byte for a column, four for a value, four for the start of a row.
    - ``sparse`` (b): the convolution's gradient of its weights decodes that copy, into scratch memory of the size of
      the dense tensor; ReLU's own backward reads the copy as it is.
    - ``half`` (f, b; `lossy`, and marked as such): delayed precision reduction, a float16 copy of what else batch
      normalizations, convolutions and products read in the backward pass, decoded into scratch memory.

    Args:
        sparsity: share of zeros in the output of a ReLU, a property of the data; the default is an assumption.
    """
    if not 0 <= sparsity <= 1:
        raise InvalidInput(f"sparsity must be between 0 and 1, not {sparsity}")
    builder = WaysBuilder(graph, load_gpu(gpu) if isinstance(gpu, str) else gpu)
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


def _sparse(builder: WaysBuilder, pair: Pair, readers: list[int], sparsity: float) -> None:
    graph, k = builder.graph, pair.forward
    y = graph.operations[k].outputs[0]
    n, dense = elements(graph, y), graph.values[y].bytes
    size = (FLOAT_BYTES + 1) * ceil(n * (1 - sparsity)) + FLOAT_BYTES * (-(-n // COLUMNS) + 1)
    copy = builder.extra(k, "sparse", size)
    builder.add_twice(k, "sparse", copy, dense + size)
    back = pair.ip_grad
    builder.add(back, "sparse", reads=(*gradients_read(graph, back), copy), moved=size - dense)
    for reader in readers:
        if graph.operations[reader].kind in _CONVOLUTIONS:
            reads = (*gradients_read(graph, reader), copy)
            builder.add(reader, "sparse", reads=reads, workspace_bytes=dense, moved=size + dense)


def _half(builder: WaysBuilder, pair: Pair) -> None:
    """For what only gradients read that have no exact encoding: batch normalization, convolutions, products."""
    graph, k = builder.graph, pair.forward
    y = graph.operations[k].outputs[0]
    dense = graph.values[y].bytes
    readers = [r for r in backward_users(graph, y) if not any(w.name in _EXACT for w in builder.found[r])]
    readers = [r for r in readers if graph.operations[r].kind.startswith(_REDUCIBLE)]
    if readers:
        copy = builder.extra(k, "half", dense // 2)
        builder.add(k, "half", makes=[copy], moved=dense + dense // 2, is_lossy=True)
        for reader in readers:
            builder.add(
                reader, "half", reads=(*gradients_read(graph, reader), copy), workspace_bytes=dense,
                moved=dense // 2 + dense, is_lossy=True,
            )  # fmt: skip
