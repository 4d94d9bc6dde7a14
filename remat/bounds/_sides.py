"""The two sides of the smallest budget: a lower bound and a known plan, which approach each other."""

from __future__ import annotations

import time

from remat.bounds.peak import PeakBound, peak_bound
from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.search.exhaustive import exhaustive
from remat.search.greedy import greedy_eviction
from remat.simulator import simulate
from remat.units import format_size

_COST_POWERS = (0.0, 0.5, 1.0)  # of greedy eviction: it ignores, balances or fully weighs the cost of recomputing
MAX_EXACT_STATES = 20_000  # at each budget
FINENESS = 1000  # a bisection ends when the plan's peak is known to one part in this


class Sides:
    """The best lower bound and the best plan for the smallest budget of a graph in a scope."""

    def __init__(self, graph: Graph, scope: Scope, deadline: float) -> None:
        self.graph, self.scope, self.deadline = graph, scope, deadline
        self.lower = peak_bound(graph, max_sets=0)
        self.plan = Plan.from_order(graph, range(len(graph)))
        self.bytes = simulate(graph, self.plan).peak_bytes

    @property
    def is_open(self) -> bool:
        return self.lower.bytes < self.bytes and time.monotonic() < self.deadline

    def offer(self, plan: Plan) -> bool:
        """Take the plan if its peak is lower; whether it is."""
        peak = simulate(self.graph, plan).peak_bytes
        if peak >= self.bytes or not self.scope.contains(plan.scope):
            return False
        self.plan, self.bytes = plan, peak
        return True

    def bisect_greedy(self) -> None:
        """Bisect the budget of greedy eviction; its plans are staged, so they count in every scope."""
        for power in _COST_POWERS:
            low = self.lower.bytes
            while low < self.bytes and time.monotonic() < self.deadline:
                # Closer than one part in FINENESS, further steps are not worth their time: try only the lower side.
                middle = low if self.bytes - low <= self.bytes // FINENESS else (low + self.bytes - 1) // 2
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
        """Bisect with the exact search; when it rules out a budget, the bound rises to the next possible one."""
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
