"""The graph of a step at any batch size or length, from its graphs at a few."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from remat.errors import InvalidInput
from remat.graph import Graph, Operation


@dataclass(frozen=True, slots=True)
class SizedStep:
    """Graphs of one step at two or more sizes, which differ in bytes and work only.

    Bytes, FLOPs and bytes moved are polynomials of the size: of degree 1 in the batch, 2 in the length (attention).
    Through one point more than the degree they are exact.

    Attributes:
        graphs: [size] without costs.
    """

    graphs: dict[int, Graph]

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
        return cls(graphs)

    def check(self, graph: Graph, size: int) -> None:
        """Compare what is promised at a size with its captured graph.

        Raises:
            InvalidInput: bytes or work differ.
        """
        if _facts(graph) != _facts(self.at(size)):
            known = ", ".join(map(str, self.graphs))
            raise InvalidInput(f"at size {size} the step is not what sizes {known} promise; the model changes with it")

    def at(self, size: int) -> Graph:
        """The graph at this size, without costs."""
        if size in self.graphs:
            return self.graphs[size]
        weights = [
            (graph, _weight(size, own, [other for other in self.graphs if other != own]))
            for own, graph in self.graphs.items()
        ]

        def number(of: Callable[[Graph], int]) -> int:
            return max(0, round(sum(weight * of(graph) for graph, weight in weights)))

        first = next(iter(self.graphs.values()))
        operations = tuple(_operation(op, k, number) for k, op in enumerate(first.operations))
        values = tuple(
            replace(value, bytes=number(lambda graph, v=v: graph.values[v].bytes))
            for v, value in enumerate(first.values)
        )
        fixed_bytes = number(lambda graph: graph.fixed_bytes)
        return replace(first, operations=operations, values=values, fixed_bytes=fixed_bytes)


def _facts(graph: Graph) -> tuple[object, ...]:
    works = [(op.work.flops, op.work.bytes_moved) for op in graph.operations if op.work is not None]
    return graph.fixed_bytes, [value.bytes for value in graph.values], works


def _weight(size: int, own: int, others: Sequence[int]) -> Fraction:
    """Lagrange's weight of the graph at size `own`."""
    weight = Fraction(1)
    for other in others:
        weight *= Fraction(size - other, own - other)
    return weight


def _operation(op: Operation, k: int, number: Callable[[Callable[[Graph], int]], int]) -> Operation:
    workspace_bytes = number(lambda graph: graph.operations[k].workspace_bytes)
    if op.work is None:
        return replace(op, workspace_bytes=workspace_bytes)
    flops = None if op.work.flops is None else number(lambda graph: graph.operations[k].work.flops or 0)  # pyright: ignore[reportOptionalMemberAccess]
    moved = number(lambda graph: graph.operations[k].work.bytes_moved)  # pyright: ignore[reportOptionalMemberAccess]
    return replace(
        op, workspace_bytes=workspace_bytes, work=replace(op.work, flops=flops, bytes_moved=moved, signature="")
    )
