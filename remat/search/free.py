"""Plans of the free scope: choose orders, search their recomputations, then improve order and plan together."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.search.anneal import COLD, WARM, Annealer, Best, Calls, minimise_cost
from remat.search.ordering.anneal import anneal_orders
from remat.search.ordering.construct import plan_in_original, reordered
from remat.simulator import simulate

ORDER_SHARE = 0.3  # of the time or moves, to search orders alone
HALVING_SHARE = 0.6  # of the rest, to search recomputations on each order; what remains improves both together
IMPROVE_MOVES = 5_000  # of the search, after each change of the order
MOST_SHIFTS = 4  # operations moved in one change


def free_plan(
    graph: Graph,
    budget_bytes: int,
    *,
    seed: int = 0,
    threads: int = 1,
    deadline: float = float("inf"),
    work_limit: int | None = None,
    on_plan: Callable[[Plan, int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    start: Plan | None = None,
) -> Plan | None:
    """The cheapest free plan found within the budget, or None; nothing is proven.

    If an order fits without recomputation, its plan costs `graph.total_cost` and is optimal in every scope.
    Otherwise the recomputations of each order are searched in rounds, and the better half of the orders survives
    each round. Finally single operations of the best order are shifted, and annealing continues from its plan.

    Args:
        deadline: of `time.monotonic()`; give this or `work_limit`.
        work_limit: moves in all; runs then repeat exactly.
        on_plan: called with each better plan and its cost.
        start: a plan to begin with on the graph's own order, if it is staged.
    """
    search = _OrderSearch(graph, budget_bytes, seed, threads, on_plan, should_stop)
    # With a work limit the shares are of moves, because a share of the time would make runs differ.
    limited = work_limit is not None or deadline == float("inf")
    until = deadline if limited else time.monotonic() + ORDER_SHARE * (deadline - time.monotonic())
    moves = None if work_limit is None else int(ORDER_SHARE * work_limit)
    orders = anneal_orders(graph, budget_bytes, seed, until, moves, should_stop=should_stop)
    if orders and orders[0].peak_bytes <= budget_bytes:
        search.offer(Plan.from_order(graph, orders[0].operations, budget_bytes), graph.total_cost)
        return search.best
    own = tuple(range(len(graph)))
    if start is not None and start.scope is Scope.STAGED:
        search.begin(own, start)
    candidates = list(dict.fromkeys([*(order.operations for order in orders), own]))
    left = None if work_limit is None else work_limit - (moves or 0)
    now = time.monotonic()
    share = deadline if limited else now + HALVING_SHARE * (deadline - now)
    search.halve(candidates, share, None if left is None else int(HALVING_SHARE * left))
    search.improve(deadline, None if left is None else int((1 - HALVING_SHARE) * left))
    return search.best


class _OrderSearch:
    """The best plan so far, in the graph's own labels, and the best annealed plan of each candidate order."""

    def __init__(
        self, graph: Graph, budget_bytes: int, seed: int, threads: int,
        on_plan: Callable[[Plan, int], None] | None, should_stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.graph, self.budget_bytes, self.seed, self.threads = graph, budget_bytes, seed, threads
        self.on_plan, self.should_stop = on_plan, should_stop
        self.best: Plan | None = None
        self.best_cost = float("inf")
        self.found: dict[tuple[int, ...], Best] = {}  # by order; computations in the labels of that order

    def offer(self, plan: Plan, cost: int) -> None:
        if cost < self.best_cost:
            self.best, self.best_cost = plan, cost
            if self.on_plan is not None:
                self.on_plan(plan, cost)

    def begin(self, operations: tuple[int, ...], plan: Plan) -> None:
        """Take a plan on the graph's own order as the best one of it."""
        trace = simulate(self.graph, plan)
        self.found[operations] = found = Best()
        found.offer(plan.order, trace.cost, max(0, trace.peak_bytes - self.budget_bytes))
        if not found.excess:
            self.best, self.best_cost = plan, trace.cost

    def halve(self, candidates: list[tuple[int, ...]], deadline: float, moves: int | None) -> None:
        """Search all orders, then again and again the better half of them, in rounds of equal length."""
        rounds = max(1, (len(candidates) - 1).bit_length())
        for index in range(rounds):
            for i, operations in enumerate(candidates):
                if self._over(deadline):
                    return
                now = time.monotonic()
                shares = (len(candidates) - i) + (rounds - index - 1) * len(candidates)
                limited = moves is not None or deadline == float("inf")
                until = deadline if limited else now + (deadline - now) / shares
                part = None if moves is None else moves // (rounds * len(candidates))
                known = self.found.get(operations)
                relabelled = reordered(self.graph, operations)
                found = minimise_cost(
                    relabelled, self.budget_bytes, None if known is None else known.order, seed=self.seed + index,
                    threads=self.threads, deadline=until, work_limit=part, target_cost=self.graph.total_cost,
                    calls=Calls(should_stop=self.should_stop),
                )  # fmt: skip
                self.found[operations] = found
                self._offer_found(operations, relabelled, found)
            candidates = sorted(candidates, key=self._rank)[: (len(candidates) + 1) // 2]

    def improve(self, deadline: float, moves: int | None) -> None:
        """Shift operations of the best order, anneal its plan further, keep the change if it is not worse."""
        if not self.found:
            return
        random = np.random.default_rng(abs(self.seed))
        operations = min(self.found, key=self._rank)
        current = self.found[operations]
        spent = 0
        while current.order is not None and not self._over(deadline) and (moves is None or spent < moves):
            spent += IMPROVE_MOVES
            shifted = _shifted(self.graph, operations, int(random.integers(1, MOST_SHIFTS + 1)), random)
            start = _restarted(operations, shifted, current.order)
            relabelled = reordered(self.graph, shifted)
            annealer = Annealer(relabelled, self.budget_bytes, int(random.integers(2**31)))
            if not annealer.load(start):
                continue
            found = Best()
            annealer.round(
                IMPROVE_MOVES, WARM, COLD, found, lambda: self._over(deadline), lambda: None, fixed=moves is not None
            )
            if (found.excess, found.cost) <= (current.excess, current.cost):
                operations, current = shifted, found
                self._offer_found(operations, relabelled, found)

    def _offer_found(self, operations: tuple[int, ...], relabelled: Graph, found: Best) -> None:
        plan = found.plan(relabelled, self.budget_bytes) if found.cost < self.best_cost else None
        if plan is not None:
            self.offer(plan_in_original(self.graph, operations, plan), found.cost)

    def _rank(self, operations: tuple[int, ...]) -> tuple[int, int]:
        return self.found[operations].excess, self.found[operations].cost

    def _over(self, deadline: float) -> bool:
        return self.should_stop() or time.monotonic() >= deadline or self.best_cost <= self.graph.total_cost


def _shifted(
    graph: Graph, operations: tuple[int, ...], count: int, random: np.random.Generator
) -> tuple[int, ...]:  # fmt: skip
    """Move `count` random operations of the order, each to a random place that its neighbours allow."""
    order = list(operations)
    place = {k: i for i, k in enumerate(order)}
    for _ in range(count):
        k = order[int(random.integers(len(order)))]
        op, at = graph.operations[k], place[k]
        first = max((place[graph.producer[v]] + 1 for v in op.inputs), default=0)
        last = min((place[u] - 1 for v in op.outputs for u in graph.users[v]), default=len(order) - 1)
        to = int(random.integers(first, last + 1))
        order.insert(to, order.pop(at))
        for i in range(min(at, to), max(at, to) + 1):
            place[order[i]] = i
    return tuple(order)


def _restarted(before: tuple[int, ...], after: tuple[int, ...], order: np.ndarray) -> np.ndarray:
    """Restate a staged plan's computations on the order `before` for the order `after`.

    A repeat stays with the first computation that it precedes, unless its operation now comes later.
    """
    label = {k: i for i, k in enumerate(after)}
    repeats: dict[int, list[int]] = {}  # by the operation whose stage they are in
    waiting: list[int] = []
    stage = 0
    for i in order.tolist():
        if i == stage:
            repeats[before[i]] = waiting
            waiting, stage = [], stage + 1
        else:
            waiting.append(before[i])
    moved: list[int] = []
    for t, k in enumerate(after):
        moved += sorted({label[j] for j in repeats[k] if label[j] < t})
        moved.append(t)
    return np.array(moved, dtype=np.int32)
