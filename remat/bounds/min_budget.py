"""The smallest budget: a proven lower bound, and the smallest budget with a known plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from importlib.util import find_spec

from remat.bounds._sides import Sides
from remat.bounds.peak import peak_bound
from remat.errors import InvalidInput
from remat.graph import Graph, check_graph
from remat.incumbent import relative_gap
from remat.plan import Plan, Scope, parse_scope
from remat.units import check_time_limit, format_size

DESCRIBE_SECONDS = 1.0  # most time for an error message
MAX_EXACT_OPERATIONS = 24  # on larger graphs the exact search rarely ends
COMPILE_SHARE = 0.6  # of the time, to wait for a search that is not compiled yet


@dataclass(frozen=True, slots=True)
class MinBudget:
    """Bounds on the smallest feasible budget within a scope.

    Attributes:
        bytes: smallest budget with a known plan (an upper bound on the minimum).
        lower_bound_bytes: no plan of `scope` uses less.
        operation: the operation that gives the lower bound.
        plan: a plan of `scope` (or of a scope that it contains) whose peak is `bytes`.
        reason: why no plan uses less, one phrase.
    """

    bytes: int
    lower_bound_bytes: int
    operation: int
    plan: Plan
    scope: Scope
    reason: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the two sides meet."""
        return self.bytes == self.lower_bound_bytes

    @property
    def gap(self) -> float:
        """(bytes - lower_bound_bytes) / bytes."""
        return relative_gap(self.bytes, self.lower_bound_bytes)

    def __str__(self) -> str:
        known = f"{format_size(self.bytes)}, {self.scope}"
        if self.is_exact:
            return f"{known}: proven the smallest"
        return f"{known}: no plan needs less than {format_size(self.lower_bound_bytes)} (gap {self.gap:.2%})"

    def __repr__(self) -> str:
        return f"<MinBudget {self}>"


def min_budget(graph: Graph, scope: str = "staged", *, time_limit_s: float = float("inf")) -> MinBudget:
    """The smallest budget for which a plan of `scope` is known, with a proven lower bound.

    Lower side: `remat.bounds.peak` and, on small graphs, budgets that the exact search rules out. Upper side: greedy
    eviction with a bisected budget, the exact search on small graphs, annealed retention intervals and, in scope free,
    other orders. A time limit ends it early; the result is then still right, but less tight. Without one the work is
    limited (seconds to a minute), and two calls return the same result. If operations have several implementations, the
    plan has the default ones, and the bound holds for all.

    Raises:
        InvalidInput: unknown scope, no graph, or one without operations.
    """
    check_graph(graph)
    joint, graph = graph, graph.default()
    wanted = parse_scope(scope)
    check_time_limit(time_limit_s, may_be_zero=True)
    if not len(graph):
        raise InvalidInput(f"graph '{graph.name}' has no operations; there is nothing to plan")
    began = time.monotonic()
    sides = Sides(graph, wanted, began + time_limit_s)
    sides.bisect_greedy()
    if sides.is_open:
        sides.lower = peak_bound(graph, deadline=began + 0.5 * time_limit_s, max_sets=2000)
    if sides.is_open and len(graph) <= MAX_EXACT_OPERATIONS:
        sides.exhaust(began + 0.8 * time_limit_s)
    if sides.is_open and find_spec("numba") is not None:  # a machine that only executes plans may lack it
        from remat.bounds import _annealed
        from remat.search.ready import ready_by

        if ready_by(began + COMPILE_SHARE * time_limit_s):
            if wanted is Scope.FREE:
                _annealed.reorder(sides, began + 0.8 * time_limit_s)
            _annealed.anneal(sides)
    plan = replace(sides.plan, budget_bytes=sides.bytes)
    if joint is not graph:
        plan = replace(plan, graph_sha256=joint.sha256())
        sides.lower = peak_bound(joint, deadline=began + time_limit_s, max_sets=2000)
    return MinBudget(sides.bytes, sides.lower.bytes, sides.lower.operation, plan, wanted, sides.lower.reason)


def describe_minimum(
    graph: Graph, scope: Scope, *, with_operation: bool = True, time_limit_s: float = DESCRIBE_SECONDS,
    budget_bytes: int = 0, how: str = "",
) -> str:  # fmt: skip
    """Text for messages: the smallest known feasible budget and, `with_operation`, the operation that needs the most.

    If that budget is at most `budget_bytes`, the text says that there is a plan, and `how` to use it.
    """
    least = min_budget(graph, scope, time_limit_s=min(time_limit_s, DESCRIBE_SECONDS))
    if least.bytes <= budget_bytes:
        return f"remat.min_budget has a plan of {format_size(least.bytes)}{how}"
    known = f"the smallest budget known feasible is {format_size(least.bytes, up=True)}"
    if graph.has_implementations:
        known += " with default implementations"
    if not with_operation:
        return known
    need, operation = graph.largest_working_set()
    name = graph.operations[operation].name
    return f"{known}; operation {operation} ({name}) needs the most, {format_size(need)}"
