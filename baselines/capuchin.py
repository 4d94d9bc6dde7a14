"""Copy what can be copied unseen, compute the rest again by memory saved per second (Capuchin)."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator

from baselines._offload import Activations, required_link, search_of
from remat import Candidate, Problem, strategy
from remat.context import Context


@strategy("capuchin", baseline=True, copies="own")
def capuchin(problem: Problem, context: Context) -> Iterator[Candidate]:
    """Swap by free time, then recompute by memory saved per second.

    Capuchin (Peng et al., ASPLOS 2020). An activation's free time is what is left between its last use in the forward
    pass and its first in the backward pass after it was copied out and in; those with most go first, as long as it is
    not negative. Then activations are dropped by their bytes over the time to compute them again, which grows with what
    was dropped before. The paper learns from steps when copies no longer hide. Here several numbers of copies are
    tried, each with the fewest further drops that fit, and the judge decides. A plan of more than about four repeats an
    operation counts as one that does not fit.
    """
    search, link, graph = search_of(problem), required_link(problem), problem.graph
    activations = Activations.of(problem)
    begins = [0]
    for operation in graph.operations:
        begins.append(begins[-1] + operation.cost)
    free = {
        v: begins[activations.first[v]] - begins[last + 1] - link.out_ns(size) - link.in_ns(size)
        for v, last in activations.last.items() for size in [graph.values[v].bytes]
    }  # fmt: skip
    by_free_time = sorted(free, key=lambda v: -free[v])
    unseen = sum(time >= 0 for time in free.values())
    enough = len(free) + 1  # copies with which nothing is dropped
    # None fits with the unseen copies and all drops: copies that make the step wait are the last resort.
    for n_copied in dict.fromkeys((*(unseen * k // 8 for k in range(8, -1, -1)), len(free))):
        if n_copied >= enough:
            continue  # the same plan
        copied = by_free_time[:n_copied]
        sequence = [*copied]

        def fits(n: int, copied: list[int] = copied, sequence: list[int] = sequence) -> bool:
            if context.is_over():
                return True  # to the end of the search at once
            count = min(n, len(copied))
            return activations.load(search, set(sequence[count:n]), copied[:count]) and not search.excess()

        if not fits(len(copied)):
            sequence += _by_saving(activations, set(copied))
        n = bisect_left(range(len(sequence) + 1), True, key=fits)
        if n <= len(sequence) and fits(n) and not context.is_over():
            count = min(n, len(copied))
            enough = min(enough, n) if count == n else enough
            yield Candidate(search.plan(), {"copied": count, "rebuilt": n - count})


def _by_saving(activations: Activations, copied: set[int]) -> list[int]:
    """What is left, in the order in which it is dropped: most bytes for the time to compute it again."""
    graph = activations.forward.graph
    left = {v for v in activations.last if v not in copied and activations.may_rebuild(v)}
    there = set(activations.last)  # values that the backward pass finds on the device

    def time_again(v: int) -> int:
        needed, todo, cost = set[int](), [graph.producer[v]], 0
        while todo:
            k = todo.pop()
            if k not in needed:
                needed.add(k)
                cost += graph.operations[k].cost
                missing = (u for u in graph.operations[k].inputs if u not in there)
                todo += [graph.producer[u] for u in missing if activations.forward.position[graph.producer[u]] >= 0]
        return cost

    order = list[int]()
    heap = [(-graph.values[v].bytes / max(1, time_again(v)), v) for v in sorted(left)]
    heapq.heapify(heap)
    while heap:  # times only grow: a value whose saving is still the largest is the next one
        _, v = heapq.heappop(heap)
        saving = -graph.values[v].bytes / max(1, time_again(v))
        if heap and saving > heap[0][0]:
            heapq.heappush(heap, (saving, v))
            continue
        order.append(v)
        there.discard(v)
    return order
