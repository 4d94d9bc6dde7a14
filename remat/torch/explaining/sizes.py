"""A step at any batch size or length, from what is known of it at a few."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np

from remat.errors import InvalidInput
from remat.graph import Graph, with_numbers


@dataclass(frozen=True, slots=True)
class StepAtSize:
    """A step at one size.

    Attributes:
        graph: without costs.
        needs: [calls] bytes that the framework's own step holds during each of its calls, beside `graph.fixed_bytes`.
    """

    graph: Graph
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepAtSizes:
    """One step at two or more sizes, which differ in bytes and work only.

    Bytes, FLOPs and bytes moved are polynomials of the size: of degree 1 in the batch, 2 in the length (attention).
    Through one point more than the degree they are exact.

    Attributes:
        steps: [size] what is known.
        numbers: [size] what `_numbers` gives, as Python's integers, which do not overflow.
        apart: [size] the step at sizes, below all others, where it runs other operations.
    """

    steps: Mapping[int, StepAtSize]
    numbers: Mapping[int, np.ndarray]
    apart: Mapping[int, StepAtSize]

    @classmethod
    def of(
        cls, step_at: Callable[[int], StepAtSize], sizes: Sequence[int], apart: Mapping[int, StepAtSize] | None = None
    ) -> StepAtSizes:
        """The step from what it is at these sizes.

        Raises:
            InvalidInput: its operations differ between sizes.
        """
        steps = {size: step_at(size) for size in sizes}
        for (small, one), (large, other) in itertools.pairwise(steps.items()):
            if not are_alike(one, other):
                raise InvalidInput(f"the step's operations differ between size {small} and size {large}")
        numbers = {size: np.array([*_numbers(step)], dtype=object) for size, step in steps.items()}
        return cls(steps, numbers, apart or {})

    def check_needs(self, needs: Sequence[int], size: int) -> None:
        """Compare what is promised of the framework's own step at a size with what it needs.

        Raises:
            InvalidInput: bytes differ.
        """
        if tuple(needs) != self.without_graph(size)[1]:
            known = ", ".join(map(str, self.steps))
            raise InvalidInput(f"at size {size} the step is not what sizes {known} promise; the model changes with it")

    def at(self, size: int) -> StepAtSize:
        """The step at this size."""
        if (known := self._known(size)) is not None:
            return known
        numbers = iter(self._numbers_at(size))
        first = next(iter(self.steps.values())).graph
        fixed_bytes = next(numbers)
        values = tuple(with_numbers(value, bytes=next(numbers)) for value in first.values)
        operations = []
        for op in first.operations:
            workspace_bytes, flops, moved = next(numbers), next(numbers), next(numbers)
            work = op.work
            if work is not None:
                flops = None if work.flops is None else flops
                work = with_numbers(work, flops=flops, bytes_moved=moved, signature="")
            operations.append(with_numbers(op, workspace_bytes=workspace_bytes, work=work))
        return StepAtSize(first.resized(operations, values, fixed_bytes), tuple(numbers))

    def without_graph(self, size: int) -> tuple[int, tuple[int, ...]]:
        """(fixed bytes of the step's graph, its needs) at this size; takes a hundredth of the time of `at`."""
        if (known := self._known(size)) is not None:
            return known.graph.fixed_bytes, known.needs
        n_needs = len(next(iter(self.steps.values())).needs)
        n = len(next(iter(self.numbers.values())))
        return self._numbers_at(size, slice(1))[0], tuple(self._numbers_at(size, slice(n - n_needs, n)))

    def _known(self, size: int) -> StepAtSize | None:
        return self.apart.get(size) or self.steps.get(size)

    def _numbers_at(self, size: int, which: slice = slice(None)) -> list[int]:
        """What `_numbers` would give at this size, by Lagrange's polynomial."""
        weights = {own: _weight(size, own, [other for other in self.steps if other != own]) for own in self.steps}
        whole = lcm(*(weight.denominator for weight in weights.values()))
        total = sum(int(weight * whole) * self.numbers[own][which] for own, weight in weights.items())
        return np.maximum(0, (total + whole // 2) // whole).tolist()  # pyright: ignore[reportAttributeAccessIssue]


def are_alike(one: StepAtSize, other: StepAtSize) -> bool:
    """Whether two steps run the same operations."""
    operations = ([(op.kind, op.inputs, op.outputs) for op in step.graph.operations] for step in (one, other))
    return next(operations) == next(operations) and len(one.needs) == len(other.needs)


def _numbers(step: StepAtSize) -> Iterator[int]:
    graph = step.graph
    yield graph.fixed_bytes
    yield from (value.bytes for value in graph.values)
    for op in graph.operations:
        yield op.workspace_bytes
        yield (op.work and op.work.flops) or 0
        yield op.work.bytes_moved if op.work is not None else 0
    yield from step.needs


def _weight(size: int, own: int, others: Sequence[int]) -> Fraction:
    """Lagrange's weight of the graph at size `own`."""
    weight = Fraction(1)
    for other in others:
        weight *= Fraction(size - other, own - other)
    return weight
