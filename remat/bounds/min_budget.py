"""The smallest budget: a proven lower bound and the smallest one with a plan in hand."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from remat.bounds.peak import PeakBound, peak_bound
from remat.errors import InvalidInput
from remat.eviction import greedy_eviction
from remat.exhaustive import exhaustive
from remat.graph import Graph, check_graph
from remat.incumbent import relative_gap
from remat.plan import Plan, Scope, parse_scope
from remat.simulator import simulate
from remat.units import check_time_limit, format_size

# Distances to evict by: rebuilding cost ignored, balanced, weighed fully.
_COST_POWERS = (0.0, 0.5, 1.0)
DESCRIBE_SECONDS = 1.0  # an error message may not take longer
MAX_EXACT_OPERATIONS = 24  # beyond this the exact search rarely ends
MAX_EXACT_STATES = 20_000  # at each budget tried
SEARCH_MOVES = 200_000  # of the annealing at each budget tried, about a second for 100 operations
SEARCH_BUDGETS = 12  # tried at most
ORDER_MOVES = 1_000_000
COMPILE_SECONDS = 60.0  # with less time, only what needs no compiled code, or already has it, is run
FINENESS = 1000  # a plan in hand is good to a part in this


@dataclass(frozen=True, slots=True)
class MinBudget:
    """What is known about the smallest feasible budget within a scope.

    Attributes:
        bytes: smallest budget with a plan in hand (an upper bound on the minimum).
        lower_bound_bytes: no plan of the scope asked for uses less.
        operation: the operation that gives the lower bound.
        plan: a plan of that scope (or of one that it contains) whose peak is `bytes`.
        scope: asked for.
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

    Lower side: `remat.bounds.peak`, and on small graphs exhausted budgets. Upper side: greedy eviction with
    the budget bisected, the exact search on small graphs, annealed retention intervals and, in the free
    scope, reordering. A time limit ends it early; what is returned then is still right, only less
    tight. Without one the work is limited (seconds to a minute), and two calls give the same. Of a graph whose
    operations have several implementations the plan has the default ones, and the bound holds for all.

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
    sides = _Sides(graph, wanted, began + time_limit_s)
    sides.bisect_greedy()
    if sides.is_open:
        sides.raise_bound(peak_bound(graph, deadline=began + 0.5 * time_limit_s, max_sets=2000))
    if sides.is_open and len(graph) <= MAX_EXACT_OPERATIONS:
        sides.exhaust(began + 0.8 * time_limit_s)
    if sides.is_open and (time_limit_s >= COMPILE_SECONDS or _is_compiled(wanted)):
        if wanted is Scope.FREE:
            sides.reorder(began + 0.8 * time_limit_s)
        sides.anneal()
    plan = replace(sides.plan, budget_bytes=sides.bytes)
    if joint is not graph:
        plan = replace(plan, graph_sha256=joint.sha256())
        sides.lower = peak_bound(joint, deadline=began + time_limit_s, max_sets=2000)
    return MinBudget(sides.bytes, sides.lower.bytes, sides.lower.operation, plan, wanted, sides.lower.reason)


class _Sides:
    """Both sides as they close in."""

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

    def reorder(self, deadline: float) -> None:
        """Other topological orders: each operation run once, then with repeats annealed in."""
        from remat.ordering import anneal_orders

        now = time.monotonic()
        orders = anneal_orders(self.graph, self.lower.bytes, 0, now + 0.3 * (deadline - now), ORDER_MOVES)
        for order in orders:
            self.offer(Plan.from_order(self.graph, order.operations))
        for i, order in enumerate(orders):
            now = time.monotonic()
            self.anneal(list(order.operations), now + (deadline - now) / (len(orders) - i))

    def anneal(self, firsts: list[int] | None = None, deadline: float = float("inf")) -> None:
        """Bisect the budget of the annealed search, each time from the best plan with these first computations.

        The search is staged, so it runs on the graph listed in that order; by default the best plan's.
        """
        from remat.ordering.relabel import plan_in_original, reordered
        from remat.search import minimise_cost
        from remat.search.anneal import NOTHING

        known = self.plan.order.tolist()
        same = firsts is None or firsts == list(dict.fromkeys(known))
        firsts = list(dict.fromkeys(known)) if firsts is None else firsts
        label = {k: i for i, k in enumerate(firsts)}
        graph = self.graph if firsts == sorted(firsts) else reordered(self.graph, firsts)
        start = np.array([label[k] for k in known] if same else range(len(firsts)), dtype=np.int32)
        deadline = min(deadline, self.deadline)
        low = self.lower.bytes
        for attempt in range(SEARCH_BUDGETS):
            now = time.monotonic()
            if self.lower.bytes >= self.bytes or now >= deadline or self.bytes - low <= self.bytes // FINENESS:
                return
            middle = (low + self.bytes) // 2
            best = minimise_cost(
                graph, middle, start, seed=attempt, deadline=now + (deadline - now) / (SEARCH_BUDGETS - attempt),
                target_cost=NOTHING, work_limit=SEARCH_MOVES,
            )  # fmt: skip
            if best.order is None or best.excess:
                low = middle
            else:
                start = best.order
                self.offer(plan_in_original(self.graph, firsts, Plan.from_order(graph, best.order.tolist())))


def _is_compiled(scope: Scope) -> bool:
    """Whether the compiled searches can be called without compiling them first."""
    from remat.search import is_warm

    if scope is Scope.FREE:
        from remat.ordering.anneal import is_warm as is_ordering_warm

        return is_warm() and is_ordering_warm()
    return is_warm()


def describe_minimum(
    graph: Graph, scope: Scope, *, with_operation: bool = True, time_limit_s: float = DESCRIBE_SECONDS,
    budget_bytes: int = 0,
) -> str:  # fmt: skip
    """The smallest known feasible budget and, unless said before, the operation that needs the most, for messages.

    Where it is within the budget asked for, the text says how to have that plan.
    """
    least = min_budget(graph, scope, time_limit_s=min(time_limit_s, DESCRIBE_SECONDS))
    if least.bytes <= budget_bytes:
        return f"remat.min_budget has a plan of {format_size(least.bytes)}: give it as warm_start"
    known = f"the smallest budget known feasible is {format_size(least.bytes, up=True)}"
    if graph.has_implementations:
        known += " with default implementations"
    if not with_operation:
        return known
    need, operation = graph.largest_working_set()
    name = graph.operations[operation].name
    return f"{known}; operation {operation} ({name}) needs the most, {format_size(need)}"
