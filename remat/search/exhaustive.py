"""Exact search on small graphs: A* over (operations done, resident values), in every scope.

A state has the operations done, the values resident and, in the staged scope, the last repeat of the stage.
A move computes one operation after evicting just enough. Four exact reductions keep the search small:

* A state that holds more values is never worse, because freeing is always allowed. So the search tries only
  inclusion-minimal evictions, and drops a state if another with the same operations done holds a superset
  at no greater cost.
* A value is useless once all its users are done and none of them can make anything useful again.
  The search frees useless values at once and never makes them again.
* The outputs of an operation that is computed again are freed before it runs.
* The bound of a state is the cost of all operations that must still be computed: those not done, and the
  producers of their absent inputs, transitively. A move lowers it by no more than its own cost, so the bound is
  consistent, and the least bound of the open states is a lower bound of the optimum at any time.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from remat.graph import Graph
from remat.plan import Plan, Scope, parse_scope

MAX_STATES = 200_000
_CLOCK_EVERY = 64  # expanded states between two looks at the clock


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Result of the search.

    Attributes:
        plan: an optimal plan within the budget, or None.
        bound: valid lower bound of the cost of every plan of the scope; None if infeasible is proven.
        infeasible: proven that no plan of the scope fits.
        next_bytes: with `infeasible`, a proven lower bound on the smallest feasible budget.
        states: number of states expanded.
    """

    plan: Plan | None
    bound: int | None
    infeasible: bool
    next_bytes: int | None
    states: int

    @property
    def is_decided(self) -> bool:
        """Whether the search ended with an optimum or a proof that there is no plan."""
        return self.plan is not None or self.infeasible


def exhaustive(
    graph: Graph,
    budget_bytes: int,
    scope: str = "staged",
    *,
    max_states: int = MAX_STATES,
    deadline: float = float("inf"),
    any_plan: bool = False,
) -> Exhausted:
    """The cheapest plan of `scope` within the budget, proven; or the best bound that the limits allow.

    Args:
        max_states: states to expand before the search gives up.
        deadline: of `time.monotonic()`.
        any_plan: ignore costs; the plan is any that fits and the bound is 0.
    """
    return _AStar(graph, budget_bytes, parse_scope(scope), any_plan).run(max_states, deadline)


_State = tuple[int, int, int]  # operations done, values resident (both bit sets), last repeat of the stage


class _AStar:
    def __init__(self, graph: Graph, budget_bytes: int, scope: Scope, any_plan: bool) -> None:
        self.graph, self.budget, self.scope = graph, budget_bytes, scope
        self.room = budget_bytes - graph.fixed_bytes
        self.n = len(graph)
        self.all_done = (1 << self.n) - 1
        self.size = [value.bytes for value in graph.values]
        self.cost = [0 if any_plan else op.cost for op in graph.operations]
        self.once = bit_set(k for k, op in enumerate(graph.operations) if op.run_once)
        self.inputs = [bit_set(op.inputs) for op in graph.operations]
        self.outputs = [bit_set(op.outputs) for op in graph.operations]
        self.needs = [sum(self.size[v] for v in op.outputs) + op.workspace_bytes for op in graph.operations]
        self.keep = bit_set(v for v, value in enumerate(graph.values) if value.keep)
        self.least_refused: int | None = None
        self.useful_cache: dict[int, int] = {}

    def run(self, max_states: int, deadline: float) -> Exhausted:
        start: _State = (0, 0, -1)
        cost_of: dict[_State, int] = {start: 0}
        parent: dict[_State, tuple[_State, int]] = {}
        expanded: dict[int, list[tuple[int, int, int]]] = {}  # done -> (resident, last, cost)
        first = self.required(0, 0)
        assert first is not None
        # (bound, number of operations left, minus the number of pushes, cost, state)
        queue: list[tuple[int, int, int, int, _State]] = [(self.total(first), 0, 0, 0, start)]
        pushed, states = 0, 0
        if self.room < 0:
            return Exhausted(None, None, True, self.graph.fixed_bytes, 0)
        while queue:
            bound, _, _, cost, state = heapq.heappop(queue)
            done, resident, last = state
            if cost_of[state] < cost:
                continue  # reached more cheaply since it was queued
            if done == self.all_done and not self.keep & ~resident:
                return Exhausted(self.plan(parent, state), cost, False, None, states)
            seen = expanded.setdefault(done, [])
            if any(not resident & ~r and before <= last and price <= cost for r, before, price in seen):
                continue
            out_of_time = states % _CLOCK_EVERY == 0 and time.monotonic() >= deadline
            if states >= max_states or out_of_time:
                return Exhausted(None, bound, False, None, states)
            seen.append((resident, last, cost))
            states += 1
            for k, after in self.moves(done, resident, last):
                price = cost + self.cost[k]
                if price >= cost_of.get(after, price + 1):
                    continue
                left = self.required(after[0], after[1])
                if left is None:
                    continue
                cost_of[after] = price
                parent[after] = (state, k)
                pushed += 1
                # Among equal bounds take the state with the least left to do, so that a plan is found early.
                heapq.heappush(queue, (price + self.total(left), left.bit_count(), -pushed, price, after))
        refused = None if self.least_refused is None else self.graph.fixed_bytes + self.least_refused
        return Exhausted(None, None, True, refused, states)

    def moves(self, done: int, resident: int, last: int) -> Iterator[tuple[int, _State]]:
        """(operation computed, state after it) of every move."""
        staged, stage = self.scope is Scope.STAGED, done.bit_count()
        first_repeat = 0
        if staged:
            if stage == self.n:
                return
            first_repeat = last + 1
            wanted = self.closure(1 << stage, resident)
            if wanted & ((1 << first_repeat) - 1):
                return  # this stage still needs an operation that it has passed
        useful = self.useful(done)
        for k in range(first_repeat, self.n):
            again = done >> k & 1
            if again:
                if self.once >> k & 1 or not self.outputs[k] & useful & ~resident:
                    continue
            elif self.scope is not Scope.FREE and k != stage:
                break
            if self.inputs[k] & ~resident:
                continue
            done_after = done | 1 << k
            useful_after = self.useful(done_after)
            position = k if staged and again else -1
            for held in self.evictions(resident & ~self.outputs[k], k):
                yield k, (done_after, (held | self.outputs[k]) & useful_after, position)

    def evictions(self, resident: int, k: int) -> Iterator[int]:
        """Values to hold while k runs, one set for each inclusion-minimal eviction, largest values first."""
        excess = self.needs[k] - self.room
        candidates = []
        for v in members(resident):
            excess += self.size[v]
            if self.size[v] and not self.inputs[k] >> v & 1:
                candidates.append((self.size[v], v))
        if excess <= 0:
            yield resident
            return
        candidates.sort(reverse=True)
        left = [0] * (len(candidates) + 1)
        for i in range(len(candidates) - 1, -1, -1):
            left[i] = left[i + 1] + candidates[i][0]
        # Sizes descend, so a set that needs its last member is minimal.
        todo = [(0, resident, excess)]
        while todo:
            i, kept, over = todo.pop()
            self.refuse(self.room + over)
            if left[i] < over:
                self.refuse(self.room + over - left[i])
                continue
            size, v = candidates[i]
            todo.append((i + 1, kept, over))
            if size >= over:
                yield kept & ~(1 << v)
            else:
                todo.append((i + 1, kept & ~(1 << v), over - size))

    def refuse(self, total: int) -> None:
        """Remember the least total that did not fit: with any smaller room the search would be the same."""
        if self.least_refused is None or total < self.least_refused:
            self.least_refused = total

    def required(self, done: int, resident: int) -> int | None:
        """Operations that must still be computed, as a bit set; None if one of them cannot be."""
        missing = members(self.keep & ~resident)
        wanted = self.closure(self.all_done & ~done | bit_set(self.graph.producer[v] for v in missing), resident)
        return None if wanted & done & self.once else wanted

    def closure(self, wanted: int, resident: int) -> int:
        """`wanted` and the producers of their absent inputs, transitively."""
        todo = wanted
        while todo:
            k = todo.bit_length() - 1
            todo &= ~(1 << k)
            missing = self.inputs[k] & ~resident
            while missing:  # the most frequent loop: faster than `members`
                p = 1 << self.graph.producer[(missing & -missing).bit_length() - 1]
                missing &= missing - 1
                if not wanted & p:
                    wanted |= p
                    todo |= p
        return wanted

    def useful(self, done: int) -> int:
        """Values that may still be read, or must be kept, once `done` is done."""
        known = self.useful_cache.get(done)
        if known is None:
            known = self.keep
            for k in range(self.n - 1, -1, -1):
                if not done >> k & 1 or (not self.once >> k & 1 and self.outputs[k] & known):
                    known |= self.inputs[k]
            self.useful_cache[done] = known
        return known

    def total(self, operations: int) -> int:
        return sum([self.cost[k] for k in members(operations)])

    def plan(self, parent: dict[_State, tuple[_State, int]], state: _State) -> Plan:
        order = []
        while state in parent:
            state, k = parent[state]
            order.append(k)
        return Plan.from_order(self.graph, order[::-1], self.budget)


def bit_set(ids: Iterable[int]) -> int:
    """The distinct `ids` as the bits of an integer."""
    bits = 0
    for i in ids:
        bits |= 1 << i
    return bits


def members(bits: int) -> Iterator[int]:
    """The ids in a bit set, ascending."""
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1
