"""Offline greedy eviction: run the stages in order, recompute missing values, evict under pressure.

A fast constructive heuristic that meets tight budgets. It gives searches and programs a plan to start from, and
`remat.min_budget` its upper bound. All its plans are staged. It uses NumPy, because compiled code takes half a second
to load, which is longer than most of its runs.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from remat.graph import Graph
from remat.plan import Plan

_NEVER = 1 << 60  # stage of the next use where there is none
SHORT_S = 0.5  # after which a solve that only begins with greedy eviction tries no other weight
COST_POWERS = (1.0, 1.25, 0.75, 1.5, 0.5, 0.25, 0.0)  # the first ones give the cheapest plans on most networks
LONGEST = 64  # computations per operation, on average; beyond that the greedy goes round in circles
MOST_LOOKS = 60_000_000  # at resident values, about a second: on some wide graphs evictions cascade


def greedy_eviction(
    graph: Graph, budget_bytes: int, *, cost_power: float = 0.5, deadline: float = float("inf")
) -> Plan | None:
    """A staged plan within `budget_bytes`, or None if the greedy gets stuck or meets a limit or the deadline.

    It evicts large values first that are used late and cheap to recompute: the lowest
    ``cost**cost_power / (bytes * distance to next use)``, as in GreedyDual caching and DTR
    (Kirisame et al., ICLR 2021), but with the future known. Among equals the value made first goes first.
    """
    order = _Eviction(graph, budget_bytes, cost_power).run(deadline)
    return None if order is None else Plan.from_order(graph, order, budget_bytes)


def greedy_plans(
    graph: Graph, budget_bytes: int, *, deadline: float = float("inf"), most_s: float = float("inf")
) -> Iterator[Plan]:
    """Plans of greedy eviction with several weights of the cost; none begins after the deadline or after `most_s`."""
    until = min(deadline, time.monotonic() + most_s)
    for power in COST_POWERS:
        plan = greedy_eviction(graph, budget_bytes, cost_power=power, deadline=deadline)
        if plan is not None:
            yield plan
        if time.monotonic() > until:
            return


class _Eviction:
    """State of the greedy while the stages run; arrays have one entry for each value."""

    def __init__(self, graph: Graph, budget_bytes: int, cost_power: float) -> None:
        self.graph, self.budget_bytes = graph, budget_bytes
        self.size = graph.value_bytes.tolist()
        operations, producer = graph.operations, list(graph.producer)
        self.may_go = np.array(
            [v.bytes > 0 and not v.keep and not operations[p].run_once
             for v, p in zip(graph.values, producer, strict=True)], dtype=bool,
        )  # fmt: skip
        weight = np.maximum(graph.costs, 1).astype(float)[producer] ** cost_power
        self.weight = weight / np.maximum(graph.value_bytes, 1)
        self.is_resident = np.zeros(len(self.size), dtype=bool)
        # The first user after the current stage; the first user of a value comes after its producer.
        self.next_use = np.array([users[0] if users else _NEVER for users in graph.users], dtype=np.int64)
        self.last_read = np.full(len(self.size), -1, dtype=np.int64)  # last operation of this stage that reads it
        self.held = graph.fixed_bytes
        self.looks = 0

    def run(self, deadline: float) -> list[int] | None:
        """The computations in order; None if the greedy gets stuck or meets a limit."""
        graph = self.graph
        order: list[int] = []
        for stage in range(len(graph)):
            if time.monotonic() > deadline:
                return None
            needed = sorted(with_missing_ancestors(graph, {stage}, self.is_resident))
            for v in graph.operations[stage].inputs:
                self.next_use[v] = next((u for u in graph.users[v] if u > stage), _NEVER)
            for k in needed:  # ascending, so that the last reader remains
                self.last_read[list(graph.operations[k].inputs)] = k
            for k in needed:
                if not self._make_room(k, stage):
                    return None
                for v in graph.operations[k].outputs:
                    self.held += 0 if self.is_resident[v] else self.size[v]
                    self.is_resident[v] = True
            order += needed
            if len(order) > LONGEST * len(graph) + 1000:
                return None
            for k in needed:
                self.last_read[list(graph.operations[k].inputs)] = -1
        return order

    def _make_room(self, k: int, stage: int) -> bool:
        """Evict until operation `k` fits; whether it does."""
        op = self.graph.operations[k]
        room = self.budget_bytes - op.workspace_bytes - sum(self.size[v] for v in op.outputs)
        if self.held <= room:
            return True
        candidates = np.nonzero(self.is_resident & self.may_go & (self.last_read < k))[0]
        scores = self.weight[candidates] / (self.next_use[candidates] - stage)
        while self.held > room:
            self.looks += len(candidates)
            first = int(np.argmin(scores)) if len(scores) else -1
            if first < 0 or scores[first] == np.inf or self.looks > MOST_LOOKS:
                return False
            v = int(candidates[first])
            scores[first] = np.inf
            self.is_resident[v] = False
            self.held -= self.size[v]
        return True


def with_missing_ancestors(
    graph: Graph, wanted: set[int], held: Sequence[bool] | np.ndarray | bytes | bytearray, known: Collection[int] = ()
) -> set[int]:
    """The operations `wanted` and the producers that they need, transitively, of values that are not `held` [V].

    What is `known` is not looked at.
    """
    todo, found = list(wanted), set(wanted)
    while todo:
        for v in graph.operations[todo.pop()].inputs:
            p = graph.producer[v]
            if not held[v] and p not in found and p not in known:
                found.add(p)
                todo.append(p)
    return found
