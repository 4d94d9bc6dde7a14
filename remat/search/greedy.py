"""Offline greedy eviction: run the stages in order, recompute what is missing, evict under pressure.

A fast constructive heuristic that meets tight budgets; it serves as a first plan and as the upper
side of `remat.min_budget`. All its plans are staged.
"""

from __future__ import annotations

import time
from bisect import bisect_right

from remat.graph import Graph
from remat.plan import Plan

_NEVER = 1 << 60


def greedy_eviction(
    graph: Graph, budget_bytes: int, *, cost_power: float = 0.5, deadline: float = float("inf")
) -> Plan | None:
    """A staged plan within `budget_bytes`, or None if the greedy gets stuck or meets the deadline.

    Evicts first what is large, used late and cheap to rebuild: the lowest
    ``cost**cost_power / (bytes * distance to next use)``, as in GreedyDual caching and DTR
    (Kirisame et al., ICLR 2021), but with the future known.
    """
    order = _evict(graph, budget_bytes, cost_power, deadline)
    return None if order is None else Plan.from_order(graph, order, budget_bytes)


def _evict(graph: Graph, budget_bytes: int, cost_power: float, deadline: float) -> list[int] | None:
    operations, users, producer = graph.operations, graph.users, graph.producer
    size = [value.bytes for value in graph.values]
    kept = [value.keep or operations[p].run_once for value, p in zip(graph.values, producer, strict=True)]
    weight = [float(max(operations[p].cost, 1)) ** cost_power for p in producer]
    resident: set[int] = set()
    held = graph.fixed_bytes
    order: list[int] = []
    for stage in range(len(graph)):
        if time.monotonic() > deadline:
            return None
        needed = _missing(graph, resident, stage)
        last_read = {v: k for k in needed for v in operations[k].inputs}
        for k in needed:
            op = operations[k]
            fresh = [v for v in op.outputs if v not in resident]
            room = budget_bytes - sum(size[v] for v in op.outputs) - op.workspace_bytes
            if held > room:
                reads = set(op.inputs)
                scored = []
                for v in resident:
                    if v in reads or last_read.get(v, -1) >= k or kept[v]:
                        continue
                    later = bisect_right(users[v], stage)
                    distance = users[v][later] - stage if later < len(users[v]) else _NEVER
                    scored.append((weight[v] / (max(size[v], 1) * distance), v))
                scored.sort(reverse=True)
                while held > room and scored:
                    v = scored.pop()[1]
                    resident.discard(v)
                    held -= size[v]
                if held > room:
                    return None
            order.append(k)
            resident.update(fresh)
            held += sum(size[v] for v in fresh)
    return order


def _missing(graph: Graph, resident: set[int], stage: int) -> list[int]:
    """Operations to compute in this stage, ascending: `stage` and its absent ancestors."""
    wanted, todo = {stage}, [stage]
    while todo:
        for v in graph.operations[todo.pop()].inputs:
            p = graph.producer[v]
            if v not in resident and p not in wanted:
                wanted.add(p)
                todo.append(p)
    return sorted(wanted)
