"""Lower bounds on the peak of any plan of any scope, by a search backward from each operation.

Let f(X) be the least peak of any plan that ever holds all values of the set X at once. If X is not
empty, one of its producers p ran last. The rest of X was already resident, so while p ran, at least
X + inputs(p) + outputs(p) + workspace(p) were held, and before that (X - outputs(p)) + inputs(p). Hence

    f(X) >= min over producers p of X of max(bytes(X + in(p) + out(p)) + workspace(p), f(X - out(p) + in(p)))

This is a bottleneck shortest path from the inputs of an operation to the empty set. Every operation runs at
least once, so the largest f over the operations bounds every plan. If the search stops early, the
least bottleneck of the open sets is also a bound.

If operations have several implementations, the working set of each counts in its least demanding one; the other bounds
are proven on the relaxed graph (`remat.bounds.relax`).
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, replace

from remat.bounds.relax import relaxed
from remat.graph import Graph
from remat.search.exhaustive import bit_set, members

MAX_SETS = 20_000  # most sets expanded for one operation
MAX_SEARCHES = 50  # the sets expanded for all operations together are at most those of so many that find no end


@dataclass(frozen=True, slots=True)
class PeakBound:
    """A proven lower bound on the peak.

    Attributes:
        bytes: no plan of any scope has a smaller peak; fixed bytes included.
        operation: the operation whose run proves it.
        reason: why, in one phrase.
    """

    bytes: int
    operation: int
    reason: str


def peak_bound(graph: Graph, *, deadline: float = float("inf"), max_sets: int = MAX_SETS) -> PeakBound:
    """The best of four bounds: working sets, kept values, values that cannot be recomputed, sets of inputs."""
    best = PeakBound(*graph.largest_working_set(), "its inputs, outputs and workspace are held at once")
    if graph.has_implementations:
        best = replace(best, reason="it holds at least that at once in every implementation")
    kept = graph.final_bytes
    if kept > best.bytes:
        best = PeakBound(kept, best.operation, "all kept values are held when the plan ends")
    graph = relaxed(graph)
    held, k = _irreplaceable(graph)
    if held > best.bytes:
        best = PeakBound(held, k, "while it runs, values that cannot be computed again wait for later users")
    return _held_together(graph, best, deadline, max_sets) if max_sets else best


def _irreplaceable(graph: Graph) -> tuple[int, int]:
    """(most bytes at the first run of an operation, that operation): its own values, and run-once values that wait.

    A run-once value waits if its producer is before the operation and a user is after it in every order, that is, if
    paths lead from the producer to the operation and from the operation to the user.
    """
    waiting = [v for v, p in enumerate(graph.producer) if graph.operations[p].run_once and graph.values[v].bytes]
    if not waiting:
        return graph.largest_working_set()
    ancestors = [0] * len(graph)  # bit sets, the operation itself included
    for k in range(len(graph)):
        ancestors[k] = 1 << k
        for p in graph.predecessors(k):
            ancestors[k] |= ancestors[p]
    most = graph.largest_working_set()
    for k, op in enumerate(graph.operations):
        own = {*op.inputs, *op.outputs}
        total = graph.working_set_bytes(k)
        for v in waiting:
            p = graph.producer[v]
            if v in own or not ancestors[k] >> p & 1:
                continue
            if graph.values[v].keep or any(ancestors[user] >> k & 1 for user in graph.users[v]):
                total += graph.values[v].bytes
        if total > most[0]:
            most = (total, k)
    return most


def _held_together(graph: Graph, best: PeakBound, deadline: float, max_sets: int) -> PeakBound:
    size = [value.bytes for value in graph.values]
    inputs = [bit_set(op.inputs) for op in graph.operations]
    outputs = [bit_set(op.outputs) for op in graph.operations]
    fixed = [graph.fixed_bytes + int(op.workspace_bytes) for op in graph.operations]
    left = MAX_SEARCHES * max_sets
    reachable: set[int] = {0}  # sets that can be held within the bound so far

    def weigh(values: int) -> int:
        return sum(size[v] for v in members(values))

    def producers(values: int) -> set[int]:
        return {graph.producer[v] for v in members(values)}

    for k in sorted(range(len(graph)), key=lambda k: (-graph.working_set_bytes(k), k)):
        floor = best.bytes
        start = inputs[k]
        parent = {start: start}
        queue = [(floor, len(producers(start)), start)]
        bottleneck = {start: floor}
        expanded = 0
        closed: set[int] = set()
        while queue:
            level, _, held = heapq.heappop(queue)
            if held in closed:
                continue
            closed.add(held)
            if level > best.bytes:
                best = PeakBound(level, k, "its inputs cannot be held at once with less")
            if held in reachable:
                while held != parent[held]:
                    held = parent[held]
                    reachable.add(held)
                reachable.add(start)
                break
            if expanded >= max_sets or (expanded % 64 == 0 and time.monotonic() >= deadline):
                break
            expanded += 1
            left -= 1
            weight = weigh(held)
            for p in producers(held):
                before = (held & ~outputs[p]) | inputs[p]
                added = weigh((inputs[p] | outputs[p]) & ~held)
                need = max(level, weight + added + fixed[p])
                if before not in closed and need < bottleneck.get(before, need + 1):
                    bottleneck[before] = need
                    parent[before] = held
                    # Of equal bottlenecks first the set of the earliest values: it is nearest to the empty set.
                    heapq.heappush(queue, (need, before.bit_length(), before))
        if left <= 0 or time.monotonic() >= deadline:
            break
    return best
