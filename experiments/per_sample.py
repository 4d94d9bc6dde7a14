"""Networks per sample: the graph of any batch size, from those of one and of two samples.

The layer graph of a Keras network is affine in the batch: activations and the input grow with it, parameters do not.
Two extractions therefore give all others, and one sample decides the largest batch b:
fixed + b * peak(1 sample) <= memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.build import CACHE_FOLDER
from remat.cost import apply_cost
from remat.errors import InvalidInput
from remat.extraction import extract, extract_in_child
from remat.frontends.spec import ModelSpec
from remat.graph import Graph, Work


@dataclass(frozen=True, slots=True)
class PerSample:
    """One sample of a network with FLOP costs.

    Attributes:
        graph: one sample; its fixed bytes are 0, so that every byte in it is multiplied by the batch.
        parameter_bytes: parameters and their gradients, 2P.
        input_bytes: of one sample.
    """

    name: str
    graph: Graph
    parameter_bytes: int
    input_bytes: int

    @property
    def forward_cost(self) -> int:
        """Cost of one forward pass, including the loss."""
        return sum(op.cost for op in self.graph.operations if not op.is_backward)

    @property
    def unit_bytes(self) -> int:
        """The greatest common divisor of all sizes; every peak is a multiple of it."""
        sizes = (*(v.bytes for v in self.graph.values), *(op.workspace_bytes for op in self.graph.operations))
        return math.gcd(*sizes) or 1

    @property
    def cost_cap(self) -> int:
        """Checkmate's limit: at most one more forward pass, 2 * forward + backward."""
        return self.graph.total_cost + self.forward_cost


def per_sample(spec: ModelSpec, cache_folder: Path = CACHE_FOLDER) -> PerSample:
    """One sample of `spec`, for any batch size and accounting in it.

    A synthetic graph has no batch: it counts as one sample, and its fixed bytes count as parameters.

    Raises:
        InvalidInput: memory or cost of the network are not linear in the batch.
    """
    if spec.framework == "synthetic":
        graph = extract(spec)
        return PerSample(spec.name, replace(graph, fixed_bytes=0), graph.fixed_bytes, 0)
    if spec.framework != "keras" or spec.granularity != "layer":
        raise InvalidInput(f"{spec.name}: the largest batch can be found for Keras models with layer granularity only")
    one, two = pair(spec, cache_folder)
    costs = [apply_cost(graph, "flops", None) for graph in (one, two)]
    for a, b in zip(costs[0].values, costs[1].values, strict=True):
        if b.bytes != 2 * a.bytes:
            raise InvalidInput(f"{spec.name}: value '{a.name}' has {a.bytes} bytes at batch 1 and {b.bytes} at batch 2")
    for a, b in zip(costs[0].operations, costs[1].operations, strict=True):
        if b.cost != 2 * a.cost or a.workspace_bytes or b.workspace_bytes:
            raise InvalidInput(f"{spec.name}: the cost of '{a.name}' is {a.cost} at batch 1 and {b.cost} at batch 2")
    input_bytes = two.fixed_bytes - one.fixed_bytes
    sample = replace(costs[0], fixed_bytes=0, name=f"{spec.name}_sample")
    return PerSample(spec.name, sample, one.fixed_bytes - input_bytes, input_bytes)


def pair(spec: ModelSpec, cache_folder: Path = CACHE_FOLDER) -> tuple[Graph, Graph]:
    """The graphs of one and of two samples without costs, inputs counted.

    Raises:
        InvalidInput: their operations differ.
    """
    sizes = (replace(spec, batch_size=b, accounting="exact") for b in (1, 2))
    one, two = (extract_in_child(size, cache_folder / "graphs") for size in sizes)
    if [op.inputs for op in one.operations] != [op.inputs for op in two.operations]:
        raise InvalidInput(f"{spec.name}: its operations depend on the batch size")
    return one, two


def of_batch(one: Graph, two: Graph, batch: int) -> Graph:
    """The graph of `batch` samples without costs, on the line through those of one and of two samples."""

    def at(first: int, second: int) -> int:
        return first + (batch - 1) * (second - first)

    def work(a: Work | None, b: Work | None) -> Work | None:
        if a is None or b is None:
            return None
        flops = None if a.flops is None or b.flops is None else at(a.flops, b.flops)
        return replace(a, flops=flops, bytes_moved=at(a.bytes_moved, b.bytes_moved), published_flops=None, signature="")

    operations = tuple(
        replace(a, workspace_bytes=at(a.workspace_bytes, b.workspace_bytes), work=work(a.work, b.work))
        for a, b in zip(one.operations, two.operations, strict=True)
    )
    values = tuple(replace(a, bytes=at(a.bytes, b.bytes)) for a, b in zip(one.values, two.values, strict=True))
    return replace(
        one, name=f"{one.name.removesuffix('1')}{batch}", operations=operations, values=values,
        fixed_bytes=at(one.fixed_bytes, two.fixed_bytes),
    )  # fmt: skip
