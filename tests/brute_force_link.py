"""Exact optima with copies to the host on tiny graphs, from the definitions alone; they share no code with the judge.

`loose_optimum` lets anything happen at any moment that memory and streams allow, and gives memory back in real time,
not as the plans of the project, which are one order of steps. The graph's order of first computations is kept; repeats
are free.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np

from remat import Graph, Link

State = tuple[Any, ...]
MOST_STATES = 200_000


def tiny_graph(rng: np.random.Generator, n: int) -> Graph:
    """A small training step, or a graph whose late operations read early ones."""
    if rng.random() < 0.6:
        forward = n // 2
        reads = [{i - 1} - {-1} | ({n - 1 - i} if i >= forward else set()) for i in range(n)]
    else:
        reads = [set(rng.choice(i, min(i, int(rng.integers(1, 3))), replace=False).tolist()) if i else set()
                 for i in range(n)]  # fmt: skip
        reads = [own | ({n - 1 - i} if i >= n // 2 and rng.random() < 0.7 else set()) for i, own in enumerate(reads)]
    return Graph.from_nodes(
        "tiny", [sorted(v for v in own if v < i) for i, own in enumerate(reads)], rng.integers(1, 6, n).tolist(),
        rng.integers(1, 7, n).tolist(), workspace_bytes=rng.choice([0, 0, 1], n).tolist(),
        keep=[n - 1] if rng.random() < 0.5 else [], cost_unit="ns",
    )  # fmt: skip


def tiny_link(rng: np.random.Generator, host: bool = False) -> Link:
    """A link that moves a byte in a quarter of a nanosecond to four."""
    rates = [int(rng.choice([1, 2, 4])) * 10**9 // int(rng.choice([1, 2, 4])) for _ in range(2)]
    return Link(*rates, latency_s=float(rng.choice([0, 0, 1e-9])), host_bytes=int(rng.integers(2, 9)) if host else None)


def loose_optimum(graph: Graph, budget: int, link: Link, most_states: int = MOST_STATES) -> float | None:
    """The least makespan; infinite if nothing fits, None if there are too many states.

    A state: operations begun for the first time; what each stream does and for how long, for computations with bytes
    that they make a second time; device bytes taken; values whole on the device, whole on the host.
    """
    n, ops, size = len(graph), graph.operations, [value.bytes for value in graph.values]
    kept = {v for v, value in enumerate(graph.values) if value.keep}

    def follow(state: State) -> Iterator[tuple[int, State]]:
        first, running, out, come, taken, ready, host = state
        held = graph.fixed_bytes + sum(size[v] for v in taken)
        held += ops[running[0]].workspace_bytes + running[2] if running else 0
        if running is None:
            for i in range(min(first, n - 1) + 1):
                made, again = ops[i].outputs, sum(size[v] for v in ops[i].outputs if v in taken)
                fits = held + sum(size[v] for v in made) + ops[i].workspace_bytes <= budget
                is_copied = any(copy is not None and copy[0] in made for copy in (out, come))
                is_twice = (ops[i].run_once and i < first) or (len(made) == 1 and made[0] in taken)
                if not is_copied and not is_twice and ready.issuperset(ops[i].inputs) and fits:
                    yield 0, (first, (i, ops[i].cost, again), out, come, taken.union(made), ready, host)
        for v in ready if out is None else ():
            room = link.host_bytes is None or sum(size[u] for u in host) + size[v] <= link.host_bytes
            if v not in host and room:
                yield 0, (first, running, (v, link.out_ns(size[v])), come, taken, ready, host)
        for v in host - taken if come is None else ():
            is_made = running is not None and v in ops[running[0]].outputs
            if not is_made and held + size[v] <= budget:
                yield 0, (first, running, out, (v, link.in_ns(size[v])), taken | {v}, ready, host)
        for v in ready:
            is_used = (out is not None and out[0] == v) or (running is not None and v in ops[running[0]].inputs)
            if not is_used:
                yield 0, (first, running, out, come, taken - {v}, ready - {v}, host)
        for v in host if link.host_bytes is not None else ():
            if come is None or come[0] != v:
                yield 0, (first, running, out, come, taken, ready, host - {v})
        busy = [stream[1] for stream in (running, out, come) if stream]
        if busy:
            after = min(busy)
            done = [stream[0] if stream and stream[1] == after else None for stream in (running, out, come)]
            left = [(s[0], s[1] - after, *s[2:]) if s and s[1] > after else None for s in (running, out, come)]
            made = () if done[0] is None else ops[done[0]].outputs
            ready2 = ready.union(made, () if done[2] is None else (done[2],))
            host2 = host | {v for v in done[1:2] if v is not None}
            first2 = first if done[0] is None else max(first, done[0] + 1)
            yield after, (first2, *left, taken.union(made), ready2, host2)

    nothing = frozenset[int]()
    begin: State = (0, None, None, None, nothing, nothing, nothing)
    times, todo, seen, number = {begin: 0}, [(0, 0, begin)], set[State](), 0
    while todo:
        at, _, state = heapq.heappop(todo)
        if state in seen:
            continue
        seen.add(state)
        if len(seen) > most_states:
            return None
        if state[0] == n and state[1] is None and kept <= state[5]:
            return at
        for lasts, new in follow(state):
            if new not in seen and times.get(new, at + lasts + 1) > at + lasts:
                times[new], number = at + lasts, number + 1
                heapq.heappush(todo, (at + lasts, number, new))
    return float("inf")
