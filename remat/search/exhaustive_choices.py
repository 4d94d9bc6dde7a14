"""Very small graphs with implementations, solved by Dijkstra's algorithm over the resident values."""

from __future__ import annotations

import heapq
import itertools
import time

from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.search.exhaustive import bit_set

State = tuple[int, int, int]  # operations done (a bit set), last repeat in this stage, resident values (a bit set)
Step = tuple[int, str]


def exhaustive_choices(
    full: Graph, budget_bytes: int, max_states: int, deadline: float, scope: Scope = Scope.STAGED
) -> tuple[Plan | None, int | None, bool]:
    """(cheapest plan of the scope, its cost as a bound, whether none exists); (None, None, False) if undecided.

    A move computes one operation, or drops one value at no cost.
    """
    n, every, keep = len(full), (1 << len(full)) - 1, bit_set(v for v, value in enumerate(full.values) if value.keep)
    size = [value.bytes for value in full.values]
    implementations = [
        [
            (own.name, own.cost, bit_set(own.inputs), bit_set(own.outputs), len(own.outputs) == 1,
             own.workspace_bytes, own.overwrites, sum(size[v] for v in own.outputs))
            for own in op.all_implementations if not own.is_lossy
        ]
        for op in full.operations
    ]  # fmt: skip
    start: State = (0, -1, 0)
    counter = itertools.count()
    queue: list[tuple[int, int, State, int]] = [(0, next(counter), start, full.fixed_bytes)]
    came, done = dict[State, tuple[State, Step | None]](), set[State]()
    least: dict[State, int] = {start: 0}

    def go(state: State, new: State, price: int, bytes_held: int, step: Step | None) -> None:
        if price < least.get(new, 1 << 62):
            least[new] = price
            came[new] = state, step
            heapq.heappush(queue, (price, next(counter), new, bytes_held))

    while queue:
        cost, _, state, held = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        ran, last, resident = state
        if ran == every and not keep & ~resident:
            return _plan(full, came, state, budget_bytes), cost, False
        if len(done) > max_states or (len(done) % 1000 == 0 and time.monotonic() > deadline):
            return None, None, False
        following = (~ran & (ran + 1)).bit_length() - 1  # the first operation that has not run
        for k in range(last + 1, n):
            is_new = not ran >> k & 1
            may_run = k == following or scope is Scope.FREE if is_new else not full.operations[k].run_once
            if not may_run or (scope is Scope.STAGED and ran == every):
                continue
            for name, price, inputs, outputs, single, workspace, over, born in implementations[k]:
                if inputs & ~resident or (single and outputs & resident):
                    continue
                during = held + born - (0 if over is None else size[over])
                if during + workspace > budget_bytes:
                    continue
                doubled = sum(size[v] for v in range(len(size)) if outputs & resident & (1 << v))
                after = (resident | outputs) & ~(0 if over is None else 1 << over)
                repeated = k if scope is Scope.STAGED and not is_new else -1
                new = (ran | 1 << k, repeated, after)
                go(state, new, cost + price, during - doubled, (k, name))
        for v in range(len(size)):
            if resident & (1 << v):  # even a kept one, which can be made again
                go(state, (ran, last, resident & ~(1 << v)), cost, held - size[v], None)
    return None, None, True


def _plan(full: Graph, came: dict[State, tuple[State, Step | None]], state: State, budget_bytes: int) -> Plan:
    calls: list[Step] = []
    while state in came:
        state, step = came[state]
        if step is not None:
            calls.append(step)
    return Plan.from_calls(full, reversed(calls), budget_bytes)
