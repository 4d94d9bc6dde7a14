"""Exact optima with copies to the host on tiny graphs, from the definitions alone; they share no code with the judge.

`strict_optimum` searches the plans of the project's language: one order of steps, peaks on that order. `loose_optimum`
lets anything happen at any moment that memory and streams allow, and gives memory back in real time. Both keep the
graph's order of first computations; repeats are free.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from remat import Graph, Link, Plan

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
    graph = Graph.from_nodes(
        "tiny", [sorted(v for v in own if v < i) for i, own in enumerate(reads)], rng.integers(1, 6, n).tolist(),
        rng.integers(1, 7, n).tolist(), workspace_bytes=rng.choice([0, 0, 1], n).tolist(),
        keep=[n - 1] if rng.random() < 0.5 else [], cost_unit="ns",
    )  # fmt: skip
    return graph


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
    begin = (0, None, None, None, nothing, nothing, nothing)
    ends: Callable[[State], bool] = lambda s: s[0] == n and s[1] is None and kept <= s[5]  # noqa: E731
    return _least(begin, follow, ends, most_states)[0]


def strict_optimum(graph: Graph, budget: int, link: Link) -> tuple[float | None, list[tuple[str, int]]]:
    """(least makespan, the steps of such a plan) in the language of plans.

    A state: operations computed; values on the device; [value on the host] when its copy ends; [value fetched] when it
    arrives; when each stream of copies is free. Times count from when the computations have ended.
    """
    n, ops, size = len(graph), graph.operations, [value.bytes for value in graph.values]
    kept = [v for v, value in enumerate(graph.values) if value.keep]

    def later(state: State, by: int, **changes: Any) -> tuple[int, State]:
        new = dict(zip(("first", "device", "host", "comes", "out", "come"), state, strict=True)) | changes
        for name in ("host", "comes"):
            new[name] = tuple(sorted((v, max(0, at - by)) for v, at in dict(new[name]).items()))
        return by, (new["first"], new["device"], new["host"], new["comes"], max(0, new["out"] - by),
                    max(0, new["come"] - by))  # fmt: skip

    def follow(state: State) -> Iterator[tuple[int, State, tuple[str, int]]]:
        first, device, host, comes, out, come = state
        on_host, arrives = dict(host), dict(comes)
        held = graph.fixed_bytes + sum(size[v] for v in device)
        for i in range(min(first, n - 1) + 1):
            fits = held + size[i] + ops[i].workspace_bytes <= budget
            if i not in device and device.issuperset(ops[i].inputs) and fits:
                wait = max([arrives.get(v, 0) for v in ops[i].inputs], default=0) + ops[i].cost
                yield *later(state, wait, first=max(first, i + 1), device=device | {i}), ("compute", i)
        for v in device:
            wait = max(on_host.get(v, 0), arrives.get(v, 0))
            rest = tuple(arrives.items() - {(v, arrives.get(v))})
            yield *later(state, wait, device=device - {v}, comes=rest), ("free", v)
            room = link.host_bytes is None or sum(size[u] for u in on_host) + size[v] <= link.host_bytes
            if v not in on_host and room:
                end = max(out, arrives.get(v, 0)) + link.out_ns(size[v])
                yield *later(state, 0, host=(*host, (v, end)), out=end), ("offload", v)
        for v in on_host:
            if v not in device and held + size[v] <= budget:
                end = max(come, on_host[v]) + link.in_ns(size[v])
                yield *later(state, 0, device=device | {v}, comes=(*comes, (v, end)), come=end), ("prefetch", v)
            if link.host_bytes is not None:
                wait = max(on_host[v], arrives.get(v, 0))
                yield *later(state, wait, host=tuple(x for x in host if x[0] != v)), ("drop", v)
        if first == n and device.issuperset(kept) and any(arrives.get(v, 0) for v in kept):
            yield *later(state, max(arrives.get(v, 0) for v in kept)), ("", -1)

    begin = (0, frozenset[int](), (), (), 0, 0)

    def ends(state: State) -> bool:
        arrives = dict(state[3])
        return state[0] == n and state[1].issuperset(kept) and not any(arrives.get(v, 0) for v in kept)

    least, steps = _least(begin, follow, ends)
    return least, [step for step in steps if step[0]]


def _least(
    begin: State,
    follow: Callable[[State], Iterable[Any]],
    ends: Callable[[State], bool],
    most_states: int = MOST_STATES,
) -> tuple[float | None, list[Any]]:
    """(least time, what leads there) from a state to one that ends, by Dijkstra's algorithm."""
    times: dict[State, int] = {begin: 0}
    came: dict[State, tuple[State, Any]] = {}
    todo, seen, number = [(0, 0, begin)], set[State](), 0
    while todo:
        at, _, state = heapq.heappop(todo)
        if state in seen:
            continue
        seen.add(state)
        if len(seen) > most_states:
            return None, []
        if ends(state):
            path, end = [], state
            while end in came:
                end, step = came[end]
                path.append(step)
            return at, path[::-1]
        for lasts, new, *step in follow(state):
            if new not in seen and times.get(new, at + lasts + 1) > at + lasts:
                times[new], number = at + lasts, number + 1
                came[new] = (state, step[0] if step else None)
                heapq.heappush(todo, (at + lasts, number, new))
    return float("inf"), []


def plan_of(graph: Graph, steps: list[tuple[str, int]], budget: int, link: Link) -> Plan:
    """The plan of such steps."""
    return Plan.from_steps(graph, steps, budget, link)
