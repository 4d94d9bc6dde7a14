"""Good topological orders, constructed without search, and graphs and plans in another order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat.errors import InvalidInput
from remat.graph import Graph
from remat.plan import COMPUTE, Plan


def constructive_orders(graph: Graph) -> list[list[int]]:
    """Distinct topological orders: the graph's own, breadth first, depth first, greedy, backward."""
    orders = [list(range(len(graph))), _breadth_first(graph), _depth_first(graph, last_first=True)]
    orders += [_depth_first(graph, last_first=False), _greedy(graph), _late(graph)]
    return list({tuple(order): order for order in orders}.values())


def _list_schedule(graph: Graph, rank: Callable[[int], tuple[int, ...]]) -> list[int]:
    """Always run the ready operation of least rank; the rank is fixed when the operation becomes ready."""
    waiting = [len(op.inputs) for op in graph.operations]
    ready = [(*rank(k), k) for k, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        k = heapq.heappop(ready)[-1]
        order.append(k)
        for v in graph.operations[k].outputs:
            for user in graph.users[v]:
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, (*rank(user), user))
    return order


def _breadth_first(graph: Graph) -> list[int]:
    depth = [0] * len(graph)
    for k in range(len(graph)):
        depth[k] = 1 + max((depth[p] for p in graph.predecessors(k)), default=-1)
    return _list_schedule(graph, lambda k: (depth[k],))


def _late(graph: Graph) -> list[int]:
    """Backward from the sinks: run each operation as late as its longest path to the end allows."""
    height = [0] * len(graph)
    for k in range(len(graph) - 1, -1, -1):
        users = (user for v in graph.operations[k].outputs for user in graph.users[v])
        height[k] = 1 + max((height[user] for user in users), default=-1)
    return _list_schedule(graph, lambda k: (-height[k],))


def _depth_first(graph: Graph, *, last_first: bool) -> list[int]:
    """Run each sink right after its ancestors (post-order); without recursion, because graphs can be deep."""
    order: list[int] = []
    seen = bytearray(len(graph))
    sinks = [k for k, op in enumerate(graph.operations) if not any(graph.users[v] for v in op.outputs)]
    for sink in sinks:
        todo = [(sink, False)]
        while todo:
            k, ready = todo.pop()
            if ready:
                order.append(k)
            elif not seen[k]:
                seen[k] = 1
                todo.append((k, True))
                inputs = graph.predecessors(k)
                todo += [(p, False) for p in (inputs if last_first else inputs[::-1]) if not seen[p]]
    # A producer that was marked further up the stack may still wait, so the order must be repaired.
    place = {k: i for i, k in enumerate(order)}
    return _list_schedule(graph, lambda k: (place[k],))


def _greedy(graph: Graph) -> list[int]:
    """Always run the ready operation that leaves the fewest bytes resident; ties go to the least peak."""
    left = [len(users) for users in graph.users]
    waiting = [len(op.inputs) for op in graph.operations]
    ready = {k for k, count in enumerate(waiting) if count == 0}
    born = [sum(graph.values[v].bytes for v in op.outputs) for op in graph.operations]
    order: list[int] = []
    while ready:

        def growth(k: int) -> tuple[int, int, int]:
            op = graph.operations[k]
            freed = sum(graph.values[v].bytes for v in op.inputs if left[v] == 1 and not graph.values[v].keep)
            return born[k] - freed, op.workspace_bytes + born[k], k

        k = min(ready, key=growth)
        ready.discard(k)
        order.append(k)
        for v in graph.operations[k].inputs:
            left[v] -= 1
        for v in graph.operations[k].outputs:
            for user in graph.users[v]:
                waiting[user] -= 1
                if not waiting[user]:
                    ready.add(user)
    return order


def reordered(graph: Graph, order: Sequence[int]) -> Graph:
    """The same graph with its operations listed in `order`; values keep their ids.

    Operation i of the result is operation ``order[i]`` of `graph`.

    Raises:
        InvalidInput: `order` does not name every operation once.
        InvalidGraph: a user comes before a producer.
    """
    order = [int(k) for k in order]
    if sorted(order) != list(range(len(graph))):
        raise InvalidInput(f"an order must name each of the {len(graph)} operations once")
    loss = None if graph.loss is None else order.index(graph.loss)
    return replace(graph, operations=tuple(graph.operations[k] for k in order), loss=loss)


def plan_in_original(graph: Graph, order: Sequence[int], plan: Plan) -> Plan:
    """Restate a plan of ``reordered(graph, order)`` as a plan of `graph`; its scope is derived again."""
    steps = [
        (kind, int(order[i]) if kind == COMPUTE else i, name)
        for kind, i, name in zip(
            plan.kinds.tolist(), plan.ids.tolist(), plan.implementations or [""] * len(plan.ids), strict=True
        )
    ]
    return Plan.from_steps(graph, steps, plan.budget_bytes)
