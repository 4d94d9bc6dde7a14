"""The plans of a model's steps."""

from __future__ import annotations

from typing import Any

from remat.execution import StepPlan
from remat.graph import Graph, Operation


class PlanBook(dict[str, StepPlan]):
    """[sha256 of a step's fingerprint] its plan."""

    def made_for(self, inputs: str) -> list[StepPlan]:
        """Plans of steps on such arguments: in several modes, or with several outcomes of branches."""
        return [plan for plan in self.values() if plan.fingerprint.inputs == inputs]

    def alike(self, graph: Graph) -> list[StepPlan]:
        """Plans of steps with the same calls on tensors of other sizes; an order of one is an order of the other."""
        return [plan for plan in self.values() if _calls(plan.graph) == _calls(graph)]

    def nearest(self, graph: Graph) -> StepPlan | None:
        """The one of `alike` that is nearest in size, if possible with costs; None if there is none."""

        def distance(plan: StepPlan) -> tuple[bool, int]:
            return not plan.costs, abs(_bytes_made(plan.graph) - _bytes_made(graph))

        return min(self.alike(graph), key=distance, default=None)


def _bytes_made(graph: Graph) -> int:
    return sum(value.bytes for value in graph.values)


def _calls(graph: Graph) -> list[Any]:
    """All but the sizes."""

    def described(op: Operation) -> tuple[Any, ...]:
        names = [implementation.name for implementation in op.implementations]
        return op.kind, op.inputs, op.outputs, op.run_once, names

    return [*map(described, graph.operations)]
