"""What several test modules share: nothing here is a test."""

from __future__ import annotations

from typing import Any

from remat.context import Context
from remat.graph import Graph
from remat.problem import Problem, SolveOptions
from remat.solving.dispatch import new_context


def context_of(graph: Graph, budget_bytes: int, *, seconds: float = 60.0, **more: Any) -> Context:
    """A solve that starts now; `more` are fields of the `Problem` or of the `SolveOptions`."""
    question = {name: more.pop(name) for name in ("scope", "accounting", "cost_cap") if name in more}
    return new_context(Problem(graph, budget_bytes, **question), SolveOptions(time_limit_s=seconds, **more))
