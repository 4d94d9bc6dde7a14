"""Both sides of the smallest budget as they close in: a lower bound, and a plan in hand."""

from __future__ import annotations

import time

from remat.bounds.peak import PeakBound, peak_bound
from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.search.exhaustive import exhaustive
from remat.search.greedy import greedy_eviction
from remat.simulator import simulate
from remat.units import format_size

# Distances to evict by: rebuilding cost ignored, balanced, weighed fully.
_COST_POWERS = (0.0, 0.5, 1.0)
MAX_EXACT_STATES = 20_000  # at each budget tried
FINENESS = 1000  # a plan in hand is good to a part in this


class Sides:
    """A graph, a scope, and what is known of the smallest budget so far."""

    def __init__(self, graph: Graph, scope: Scope, deadline: float) -> None:
        self.graph, self.scope, self.deadline = graph, scope, deadline
        self.lower = peak_bound(graph, max_sets=0, deadline=0.0)
        self.plan = Plan.from_order(graph, range(len(graph)))
        self.bytes = simulate(graph, self.plan).peak_bytes

    @property
    def is_open(self) -> bool:
        return self.lower.bytes < self.bytes and time.monotonic() < self.deadline

    def offer(self, plan: Plan) -> bool:
        """Take the plan if its peak is lower; whether it was."""
        peak = simulate(self.graph, plan).peak_bytes
        if peak >= self.bytes or not self.scope.contains(plan.scope):
            return False
        self.plan, self.bytes = plan, peak
        return True

    def raise_bound(self, bound: PeakBound) -> None:
        if bound.bytes > self.lower.bytes:
            self.lower = bound

    def bisect_greedy(self) -> None:
        """Bisect the budget of the greedy eviction, which is staged and so serves every scope."""
        for power in _COST_POWERS:
            low = self.lower.bytes
            while low < self.bytes and time.monotonic() < self.deadline:
                # The answer is good to a thousandth; finer steps cost more than they tell.
                step = self.bytes // FINENESS
                middle = low if self.bytes - low <= step else (low + self.bytes - 1) // 2
                plan = greedy_eviction(self.graph, middle, cost_power=power, deadline=self.deadline)
                if plan is not None:
                    assert self.offer(plan), f"greedy eviction promised {middle} bytes but needs more"
                elif middle == low:
                    break
                else:
                    low = middle
                if self.bytes - low <= self.bytes // FINENESS and low != self.lower.bytes:
                    break

    def exhaust(self, deadline: float) -> None:
        """Bisect with the exact search; a budget that it refuses proves the next one that could do."""
        middle = self.lower.bytes  # the most likely minimum
        while self.lower.bytes < self.bytes:
            found = exhaustive(
                self.graph, middle, self.scope, max_states=MAX_EXACT_STATES, deadline=deadline, any_plan=True
            )
            if found.plan is not None:
                assert self.offer(found.plan), f"the exact search promised {middle} bytes but needs more"
            elif found.infeasible:
                proven = max(middle + 1, found.next_bytes or 0)
                assert proven <= self.bytes, f"refused {middle} bytes, but a plan needs {self.bytes}"
                reason = f"every {self.scope} plan within {format_size(proven - 1)} was ruled out"
                self.lower = PeakBound(proven, self.lower.operation, reason)
            else:
                return
            middle = (self.lower.bytes + self.bytes - 1) // 2
