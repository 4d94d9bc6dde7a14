"""The smallest budget: a proven lower bound and the smallest one with a plan in hand."""

from __future__ import annotations

import time
from dataclasses import dataclass

from remat.errors import InvalidInput
from remat.eviction import greedy_eviction
from remat.graph import Graph
from remat.plan import Plan, Scope, parse_scope
from remat.simulator import simulate
from remat.units import format_size

# Distances to evict by: rebuilding cost ignored, balanced, weighed fully.
_COST_POWERS = (0.0, 0.5, 1.0)
DESCRIBE_SECONDS = 1.0  # an error message may not take longer


@dataclass(frozen=True, slots=True)
class MinBudget:
    """What is known about the smallest feasible budget within a scope.

    Attributes:
        bytes: smallest budget with a plan in hand (an upper bound on the minimum).
        lower_bound_bytes: no plan of any scope uses less.
        operation: the operation whose working set gives the lower bound.
        plan: a plan whose peak is `bytes`.
        scope: asked for; the plan is staged, which every scope contains.
    """

    bytes: int
    lower_bound_bytes: int
    operation: int
    plan: Plan
    scope: Scope

    @property
    def is_exact(self) -> bool:
        """Whether the two sides meet."""
        return self.bytes == self.lower_bound_bytes


def min_budget(graph: Graph, scope: str = "staged", *, time_limit_s: float = float("inf")) -> MinBudget:
    """The smallest budget for which a plan is known, with a proven lower bound.

    Bisects the greedy eviction's budget between the largest working set (lower bound) and the peak
    of running everything once. Staged plans serve every scope. A time limit ends the search early;
    what is returned then is still right, only less tight.

    Raises:
        InvalidInput: unknown scope, or a graph without operations.
    """
    wanted = parse_scope(scope)
    if not len(graph):
        raise InvalidInput(f"graph '{graph.name}' has no operations; there is nothing to plan")
    deadline = time.monotonic() + time_limit_s
    lower, operation = graph.largest_working_set()
    lower = max(lower, graph.fixed_bytes + sum(v.bytes for v in graph.values if v.keep))
    best = Plan.from_order(graph, range(len(graph)))
    best_bytes = simulate(graph, best).peak_bytes
    for power in _COST_POWERS:
        low = lower
        while low < best_bytes and time.monotonic() < deadline:
            # The answer is good to a thousandth; finer steps cost more than they tell.
            middle = low if best_bytes - low <= best_bytes // 1000 else (low + best_bytes - 1) // 2
            plan = greedy_eviction(graph, middle, cost_power=power, deadline=deadline)
            if plan is not None:
                peak = simulate(graph, plan).peak_bytes
                assert peak <= middle, f"greedy eviction promised {middle} bytes but needs {peak}"
                best, best_bytes = plan, peak
            elif middle == low:
                break
            else:
                low = middle
            if best_bytes - low <= best_bytes // 1000 and low != lower:
                break
    return MinBudget(best_bytes, lower, operation, best, wanted)


def describe_minimum(graph: Graph, scope: Scope, *, with_operation: bool = True) -> str:
    """The smallest known feasible budget and, unless said before, the operation that needs the most, for messages."""
    least = min_budget(graph, scope, time_limit_s=DESCRIBE_SECONDS)
    name = graph.operations[least.operation].name
    known = f"the smallest budget known feasible is {format_size(least.bytes)}"
    if not with_operation:
        return known
    return f"{known}; operation {least.operation} ({name}) needs the most, {format_size(least.lower_bound_bytes)}"
