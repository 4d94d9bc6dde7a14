"""Slow references written from the definitions alone; they share no code with what they check.

`replay` is the judge with sets and dicts, `optimum` an exhaustive search over everything that a plan
of a scope can do, in any implementation, `small_graphs` and `step_lists` are what both are compared on.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np

from remat import Graph, Operation, Plan, Value
from remat.implementation import Implementation

COMPUTE, FREE = 0, 1
SCOPES = ("staged", "fixed_order", "free")
# What the operations of a `random_graph` may have.
KINDS: tuple[dict[str, float], ...] = (
    {}, {"multi_output": 0.5}, {"workspace": 3}, {"keep": 0.3}, {"once": 0.4},
    {"multi_output": 0.4, "workspace": 2, "keep": 0.2, "once": 0.2},
)  # fmt: skip


class Rejected(Exception):
    """The step list is not a plan; the first argument is the offending step, or None."""


class Replay(NamedTuple):
    """Cost, peak and what is held at the end."""

    cost: int
    peak_bytes: int
    final_bytes: int


def replay(graph: Graph, steps: Sequence[tuple[int, int] | tuple[int, int, str]]) -> Replay:
    """Cost and peak of a step list, each moment's memory added up from scratch.

    A third entry of a compute step names its implementation; '' is the default one.
    """
    copies: Counter[int] = Counter()
    moments = []
    computed: Counter[int] = Counter()
    cost = 0

    def held() -> int:
        return graph.fixed_bytes + sum(graph.values[v].bytes * n for v, n in copies.items())

    for at, (kind, i, *named) in enumerate(steps):
        if kind == FREE:
            if i not in range(len(graph.values)) or copies[i] == 0:
                raise Rejected(at)
            copies[i] = 0
            continue
        if i not in range(len(graph.operations)):
            raise Rejected(at)
        way = next(way for way in graph.operations[i].all_implementations if way.name == ("".join(named) or "default"))
        if not all(copies[v] for v in way.inputs):
            raise Rejected(at)
        if len(way.outputs) == 1 and copies[way.outputs[0]]:
            raise Rejected(at)
        if way.overwrites is not None:
            copies[way.overwrites] = 0
        copies.update(way.outputs)
        moments.append(held() + way.workspace_bytes)
        for v in way.outputs:
            copies[v] = 1
        computed[i] += 1
        cost += way.cost
    for i, op in enumerate(graph.operations):
        if computed[i] == 0 or (op.run_once and computed[i] != 1):
            raise Rejected(None)
    if any(value.keep and not copies[v] for v, value in enumerate(graph.values)):
        raise Rejected(None)
    return Replay(cost, max(moments, default=held()), held())


def replay_plan(graph: Graph, plan: Plan) -> Replay:
    """As `replay`, of a plan."""
    named = plan.implementations or [""] * len(plan.ids)
    return replay(graph, list(zip(plan.kinds.tolist(), plan.ids.tolist(), named, strict=True)))


def scope_by_definition(order: Sequence[int], n: int) -> str:
    """DESIGN's definition, read literally."""
    firsts = list(dict.fromkeys(order))
    if firsts != sorted(firsts) or firsts != list(range(len(firsts))):
        return "free"
    rest = list(order)
    for t in range(n):
        if t not in rest:
            break
        stage, rest = rest[: rest.index(t)], rest[rest.index(t) + 1 :]
        if stage != sorted(set(stage)) or not set(stage) <= set(range(t)):
            return "fixed_order"
    return "fixed_order" if rest else "staged"


def optimum(graph: Graph, budget_bytes: int, scope: str) -> int | None:
    """Least cost of any plan of `scope` within the budget, None if there is none.

    Dijkstra over (resident values, operations done, last repetition in the stage); a move frees one
    value or computes one operation.
    """
    n = len(graph)
    everything = frozenset(range(n))
    goal_values = {v for v, value in enumerate(graph.values) if value.keep}
    start = (frozenset(), frozenset(), -1)
    best = {start: 0}
    queue: list[tuple[int, int, tuple]] = [(0, 0, start)]
    pushed = 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        resident, done, last = state
        if done == everything and goal_values <= resident:
            return cost
        moves = [(0, (resident - {v}, done, last)) for v in resident]
        held = graph.fixed_bytes + sum(graph.values[v].bytes for v in resident)
        for k, op in enumerate(graph.operations):
            again = k in done
            if scope != "free" and not again and k != len(done):
                continue
            if scope == "staged" and again and (k <= last or len(done) == n):
                continue
            if again and op.run_once:
                continue
            position = k if scope == "staged" and again else -1
            for way in op.all_implementations:
                if not set(way.inputs) <= resident or (len(way.outputs) == 1 and way.outputs[0] in resident):
                    continue
                gone = set() if way.overwrites is None else {way.overwrites}
                more = sum(graph.values[v].bytes for v in way.outputs) - sum(graph.values[v].bytes for v in gone)
                if held + more + way.workspace_bytes > budget_bytes:
                    continue
                moves.append((way.cost, ((resident - gone) | set(way.outputs), done | {k}, position)))
        for price, after in moves:
            if cost + price < best.get(after, float("inf")):
                best[after] = cost + price
                pushed += 1
                heapq.heappush(queue, (cost + price, pushed, after))
    return None


def least_budget(graph: Graph, scope: str) -> int:
    """Smallest budget with a plan, by trying each."""
    budget = graph.fixed_bytes
    while optimum(graph, budget, scope) is None:
        budget += 1
    return budget


def training_chain(n: int) -> Graph:
    """`n` layers forward and backward: the gradient of layer i reads its output and the next gradient."""
    deps = [[i - 1] if i else [] for i in range(n)]
    deps += [[n + j - 1, n - 1 - j] if j else [n - 1] for j in range(n)]
    return Graph.from_nodes(
        "chain", deps, [1] * 2 * n, [1] * n + [2] * n, backward=[False] * n + [True] * n, loss=n - 1
    )


def random_graph(
    rng: np.random.Generator, n: int, *, multi_output: float = 0.0, workspace: int = 0, keep: float = 0.0,
    once: float = 0.0, max_bytes: int = 4, max_cost: int = 3, min_bytes: int = 0, min_cost: int = 0,
) -> Graph:  # fmt: skip
    """A random graph of `n` operations in which most operations read something recent."""
    operations, values = [], []
    for k in range(n):
        count = 2 if rng.random() < multi_output else 1
        reads = {int(v) for v in rng.integers(len(values), size=rng.integers(0, 3))} if values else set()
        if values and rng.random() < 0.7:
            reads.add(len(values) - 1)
        outputs = tuple(range(len(values), len(values) + count))
        operations.append(
            Operation(
                f"op{k}", "", tuple(sorted(reads)), outputs, int(rng.integers(min_cost, max_cost + 1)),
                int(rng.integers(0, workspace + 1)), run_once=bool(rng.random() < once),
            )
        )  # fmt: skip
        values += [
            Value(f"v{v}", int(rng.integers(min_bytes, max_bytes + 1)), bool(rng.random() < keep)) for v in outputs
        ]
    return Graph("random", tuple(operations), tuple(values), fixed_bytes=int(rng.integers(0, 3)), cost_unit="u")


def random_step(rng: np.random.Generator, n: int, **kinds: float) -> Graph:
    """A random forward and backward pass of `n` operations; as `random_graph`, it has what `kinds` say.

    Backward operations read what their forward operations read or made, so that tight budgets need repeats.
    """
    graph = random_graph(rng, n, **kinds)  # type: ignore[arg-type]
    forward = (n + 1) // 2
    operations = []
    for k, op in enumerate(graph.operations):
        reads = {v for v in op.inputs if rng.random() < 0.3}
        if k:
            reads.add(graph.operations[k - 1].outputs[0])
        if k >= forward:
            mirrored = graph.operations[n - 1 - k]
            reads |= {*mirrored.inputs, mirrored.outputs[0]} if rng.random() < 0.7 else {mirrored.outputs[0]}
        operations.append(replace(op, inputs=tuple(sorted(reads)), is_backward=k >= forward))
    return replace(graph, operations=tuple(operations), loss=forward - 1)


def random_case(rng: np.random.Generator, joint: bool, n: int) -> Graph:
    """A random graph of up to `n` operations and of any kind, with implementations if `joint`."""
    positive = int(rng.random() < 0.7)
    make = random_step if rng.random() < 0.7 else random_graph
    graph = make(
        rng, int(rng.integers(2, n + 1)), multi_output=float(rng.choice([0, 0, 0.4])), workspace=int(rng.integers(3)),
        keep=float(rng.choice([0, 0, 0.3])), once=float(rng.choice([0, 0, 0.3])), min_bytes=positive,
        min_cost=positive, max_cost=5, max_bytes=6,
    )  # fmt: skip
    return with_implementations(graph, rng) if joint else graph


def random_budget(rng: np.random.Generator, graph: Graph, scope: str) -> int:
    """A budget from just infeasible to comfortable, most often one of the smallest feasible ones."""
    budget = max(graph.largest_working_set()[0], graph.final_bytes)
    most = budget + sum(value.bytes for value in graph.values)
    while budget < most and optimum(graph, budget, scope) is None:
        budget += 1
    return max(0, budget + int(rng.choice([-1, 0, 0, 0, 1, 1, 2, 4])))


def random_problem(rng: np.random.Generator, scopes: Sequence[str]) -> tuple[Graph, int, str, int | None]:
    """(graph, budget, scope, optimum or None); more than half have implementations, most need repeats or choices."""
    for attempt in range(8):
        joint = bool(rng.random() < 0.6)
        graph, scope = random_case(rng, joint, 7 if joint else 9), str(rng.choice(scopes))
        budget = random_budget(rng, graph, scope)
        best = optimum(graph, budget, scope)
        if attempt == 7 or (best is not None and best > graph.least_cost) or rng.random() < 0.1:
            return graph, budget, scope, best
    raise AssertionError


def with_implementations(graph: Graph, rng: np.random.Generator, share: float = 0.6) -> Graph:
    """The graph with up to three implementations of some operations, of every kind.

    Other costs and workspace; fewer inputs or other ones; fewer outputs; extra outputs, and operations that read
    them; in place; lossy.
    """
    sizes = [value.bytes for value in graph.values]
    extras: list[int] = []  # bytes of the extra values
    operations: list[Operation] = []
    for op in graph.operations:
        ways: list[Implementation] = []
        before = op.outputs[0] if op.outputs else 0  # values made by earlier operations
        there = len(extras)  # extra values made by them
        for name in "uvw"[: rng.integers(1, 4)] if rng.random() < share else "":
            inputs, outputs = set(op.inputs), list(op.outputs)
            if inputs and rng.random() < 0.4:
                inputs.discard(int(rng.choice(sorted(inputs))))
            if before and rng.random() < 0.2:
                inputs.add(int(rng.integers(before)))
            if there and rng.random() < 0.5:
                inputs.add(len(sizes) + int(rng.integers(there)))
            if len(outputs) > 1 and rng.random() < 0.3:
                outputs.pop(int(rng.integers(len(outputs))))
            if len(extras) < 3 and rng.random() < 0.35:
                outputs.append(len(sizes) + len(extras))
                extras.append(int(rng.integers(0, 3)))
            first = sizes[outputs[0]] if outputs and outputs[0] < len(sizes) else None
            over = [v for v in sorted(inputs) if v < len(sizes) and sizes[v] == first]
            overwrites = int(rng.choice(over)) if over and rng.random() < 0.5 else None
            ways.append(
                Implementation(
                    name, tuple(sorted(inputs)), tuple(outputs), int(rng.integers(0, op.cost + 3)),
                    int(rng.integers(0, 3)), overwrites, bool(rng.random() < 0.05),
                )
            )  # fmt: skip
        operations.append(replace(op, implementations=tuple(ways)))
    values = (*graph.values, *(Value(f"extra{i}", size) for i, size in enumerate(extras)))
    return replace(graph, operations=tuple(operations), values=values)


@st.composite
def small_graphs(draw: st.DrawFn, max_operations: int = 6) -> Graph:
    """Graphs with everything a graph can have: several or no outputs, scratch memory, keep, run-once."""
    operations, values = [], []
    for k in range(draw(st.integers(1, max_operations))):
        reads = draw(st.sets(st.integers(0, len(values) - 1), max_size=3)) if values else set()
        outputs = tuple(range(len(values), len(values) + draw(st.sampled_from([1, 1, 1, 2, 2, 0]))))
        operations.append(
            Operation(
                f"op{k}", "", tuple(sorted(reads)), outputs, draw(st.integers(0, 4)),
                draw(st.sampled_from([0, 0, 1, 3])), run_once=draw(st.sampled_from([False, False, False, True])),
            )
        )  # fmt: skip
        values += [
            Value(f"v{v}", draw(st.integers(0, 5)), draw(st.sampled_from([False, False, False, True]))) for v in outputs
        ]
    return Graph("drawn", tuple(operations), tuple(values), fixed_bytes=draw(st.integers(0, 3)), cost_unit="u")


@st.composite
def step_lists(draw: st.DrawFn, graph: Graph) -> list[tuple[int, int]]:
    """A walk of valid moves that ends with everything computed, sometimes spoilt by a few mutations."""
    random = draw(st.randoms(use_true_random=False))
    resident: set[int] = set()
    done: set[int] = set()
    steps: list[tuple[int, int]] = []

    def compute(k: int) -> None:
        for v in graph.operations[k].inputs:
            if v not in resident:
                compute(next(p for p, op in enumerate(graph.operations) if v in op.outputs))
        op = graph.operations[k]
        if len(op.outputs) == 1 and op.outputs[0] in resident:
            steps.append((FREE, op.outputs[0]))
        steps.append((COMPUTE, k))
        resident.update(op.outputs)
        done.add(k)

    for k in range(len(graph)):
        if k not in done:
            compute(k)
        for v in sorted(resident):
            if random.random() < 0.3 and not graph.values[v].keep:
                resident.discard(v)
                steps.append((FREE, v))
        if random.random() < 0.2:
            compute(random.randrange(k + 1))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 4]))):
        at = random.randrange(len(steps) + 1)
        limit = 1 + max(len(graph), len(graph.values))
        change = random.randrange(3)
        if change == 0:
            steps.insert(at, (random.randrange(2), random.randrange(limit)))
        elif change == 1 and at < len(steps):
            del steps[at]
        elif at + 1 < len(steps):
            steps[at], steps[at + 1] = steps[at + 1], steps[at]
    return steps
