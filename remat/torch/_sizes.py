"""The graph of a step at any batch size or length, from its graphs at a few."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm

import numpy as np

from remat.errors import InvalidInput
from remat.graph import Graph


@dataclass(frozen=True, slots=True)
class SizedStep:
    """Graphs of one step at two or more sizes, which differ in bytes and work only.

    Bytes, FLOPs and bytes moved are polynomials of the size: of degree 1 in the batch, 2 in the length (attention).
    Through one point more than the degree they are exact.

    Attributes:
        graphs: [size] without costs.
        numbers: [size] what `_numbers` gives, as Python's integers, which do not overflow.
    """

    graphs: Mapping[int, Graph]
    numbers: Mapping[int, np.ndarray]

    @classmethod
    def of(cls, graph_at: Callable[[int], Graph], sizes: Sequence[int]) -> SizedStep:
        """The step from its graphs at these sizes.

        Raises:
            InvalidInput: its operations differ between sizes.
        """
        graphs = {size: graph_at(size) for size in sizes}
        for (small, one), (large, other) in itertools.pairwise(graphs.items()):
            if [(op.kind, op.inputs, op.outputs) for op in one.operations] != [
                (op.kind, op.inputs, op.outputs) for op in other.operations
            ]:
                raise InvalidInput(f"the step's operations differ between size {small} and size {large}")
        return cls(graphs, {size: np.array([*_numbers(graph)], dtype=object) for size, graph in graphs.items()})

    def check(self, graph: Graph, size: int) -> None:
        """Compare what is promised at a size with its captured graph.

        Raises:
            InvalidInput: bytes or work differ.
        """
        if [*_numbers(graph)] != [*_numbers(self.at(size))]:
            known = ", ".join(map(str, self.graphs))
            raise InvalidInput(f"at size {size} the step is not what sizes {known} promise; the model changes with it")

    def at(self, size: int) -> Graph:
        """The graph at this size, without costs."""
        if size in self.graphs:
            return self.graphs[size]
        weights = {own: _weight(size, own, [other for other in self.graphs if other != own]) for own in self.graphs}
        whole = lcm(*(weight.denominator for weight in weights.values()))
        total = sum(int(weight * whole) * self.numbers[own] for own, weight in weights.items())
        numbers = iter(np.maximum(0, (total + whole // 2) // whole).tolist())  # pyright: ignore[reportAttributeAccessIssue]
        first = next(iter(self.graphs.values()))
        fixed_bytes = next(numbers)
        values = tuple(replace(value, bytes=next(numbers)) for value in first.values)
        operations = []
        for op in first.operations:
            workspace_bytes, flops, moved = next(numbers), next(numbers), next(numbers)
            work = op.work
            if work is not None:
                work = replace(work, flops=None if work.flops is None else flops, bytes_moved=moved, signature="")
            operations.append(replace(op, workspace_bytes=workspace_bytes, work=work))
        return replace(first, operations=tuple(operations), values=values, fixed_bytes=fixed_bytes)


def _numbers(graph: Graph) -> Iterator[int]:
    yield graph.fixed_bytes
    yield from (value.bytes for value in graph.values)
    for op in graph.operations:
        yield op.workspace_bytes
        yield (op.work and op.work.flops) or 0
        yield op.work.bytes_moved if op.work is not None else 0


def _weight(size: int, own: int, others: Sequence[int]) -> Fraction:
    """Lagrange's weight of the graph at size `own`."""
    weight = Fraction(1)
    for other in others:
        weight *= Fraction(size - other, own - other)
    return weight
