"""One implementation of each operation: a graph with several becomes one without, and its plans come back.

An operation that writes over the output of the operation just before it is merged with it, for
the two then never hold both; everything else stays as it is. A solver for graphs without implementations so
serves one choice at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat.graph import Graph, Operation, Value
from remat.implementation import DEFAULT, Implementation
from remat.plan import Plan
from remat.simulator import simulate

Call = tuple[int, str]  # operation of the joint graph, name of its implementation ('' for the default one)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A graph in which every operation runs in one way.

    Attributes:
        joint: where the implementations come from.
        graph: for a solver.
        choice: [N] index into each joint operation's `ways`.
        calls: [N'] what each operation of `graph` stands for; several where one writes over another's output.
        place: [N] operation of `graph` that holds each joint operation.
    """

    joint: Graph
    graph: Graph
    choice: tuple[int, ...]
    calls: tuple[tuple[Call, ...], ...]
    place: tuple[int, ...]

    def lift(self, plan: Plan, budget_bytes: int | None = None) -> Plan:
        """The plan of the joint graph that a plan of `graph` stands for; it needs no more memory."""
        calls = [call for k in plan.order.tolist() for call in self.calls[k]]
        return Plan.from_order(self.joint, [k for k, _ in calls], budget_bytes, [name for _, name in calls])

    def order_of(self, joint_order: Sequence[int]) -> np.ndarray:
        """[C] int32, computations of `graph` where `joint_order` computes the last operation of each."""
        last = [calls[-1][0] for calls in self.calls]
        return np.array([self.place[k] for k in joint_order if last[self.place[k]] == k], dtype=np.int32)


def choose(joint: Graph, wanted: Sequence[int]) -> Chosen | None:
    """The graph in which operation k runs as `wanted[k]` of its `ways` says, or in the nearest way that serves.

    What reads a value decides which outputs are made: an operation is given a way that makes all that is
    read, nothing more where it can be helped, and that writes over its input only if nobody reads that later.

    Returns:
        None if no way of some operation makes all that is read.
    """
    choice = _consistent(joint, wanted)
    if choice is None:
        return None
    ways = [op.ways[i] if op.implementations else None for op, i in zip(joint.operations, choice, strict=True)]
    groups: list[list[int]] = []
    for k, way in enumerate(ways):
        if way is not None and way.overwrites is not None:
            groups[-1].append(k)  # its producer is the operation before, see `_serves`
        else:
            groups.append([k])
    made: set[int] = set()
    gone: set[int] = set()
    for k, way in enumerate(ways):
        made.update((joint.operations[k] if way is None else way).outputs)
        if way is not None and way.overwrites is not None:
            gone.add(way.overwrites)
    number = {v: i for i, v in enumerate(v for v in range(len(joint.values)) if v in made and v not in gone)}
    operations, calls, place = [], [], [0] * len(joint)
    for group in groups:
        for k in group:
            place[k] = len(operations)
        operations.append(_merged(joint, group, ways, number, gone))
        calls.append(tuple((k, "" if way is None or way.name == DEFAULT else way.name)
                           for k, way in ((k, ways[k]) for k in group)))  # fmt: skip
    values = tuple(joint.values[v] for v in number)
    graph = Graph(
        joint.name, tuple(operations), tuple(Value(v.name, v.bytes, v.keep) for v in values), joint.fixed_bytes,
        joint.cost_unit, None if joint.loss is None else place[joint.loss], joint.source,
    )  # fmt: skip
    return Chosen(joint, graph, tuple(choice), tuple(calls), tuple(place))


def _consistent(joint: Graph, wanted: Sequence[int]) -> list[int] | None:
    choice = list(wanted)
    read = [value.keep for value in joint.values]  # by what comes later
    for k in range(len(joint) - 1, -1, -1):
        op = joint.operations[k]
        if not op.implementations:
            needs: Sequence[int] = op.inputs
        else:
            ways = op.ways
            needed = {v for way in ways for v in way.outputs if read[v]}
            serving = [
                i for i, way in enumerate(ways)
                if _serves(joint, k, way, needed, read) and (i == choice[k] or not way.is_lossy)
            ]  # fmt: skip
            if not serving:
                return None
            like = ways[choice[k]]

            def rank(i: int, ways: Sequence[Implementation] = ways, like: Implementation = like) -> tuple[int, ...]:
                way = ways[i]
                unread = sum(joint.values[v].bytes for v in way.outputs if not read[v])
                return (unread, way.inputs != like.inputs, way.overwrites != like.overwrites, way is not like, way.cost)

            choice[k] = min(serving, key=rank)
            needs = ways[choice[k]].inputs
        for v in needs:
            read[v] = True
    return choice


def _serves(joint: Graph, k: int, way: Implementation, needed: set[int], read: Sequence[bool]) -> bool:
    if not needed.issubset(way.outputs):
        return False
    x = way.overwrites
    return x is None or (joint.producer[x] == k - 1 and not read[x])


def _merged(
    joint: Graph, group: Sequence[int], ways: Sequence[Implementation | None], number: dict[int, int], gone: set[int]
) -> Operation:
    """One operation for those of `group`, each of which but the first writes over an output of the one before."""
    last = joint.operations[group[-1]]
    calls = [way or joint.operations[k].ways[0] for k, way in ((k, ways[k]) for k in group)]
    inside = {v for call in calls for v in call.outputs}
    inputs = {v for call in calls for v in call.inputs} - inside
    outputs = inside - gone
    size = joint.values
    held, most = sum(size[v].bytes for v in inputs), 0
    counted = held + sum(size[v].bytes for v in outputs)
    for call in calls:
        if call.overwrites is not None:
            held -= size[call.overwrites].bytes
        held += sum(size[v].bytes for v in call.outputs)
        most = max(most, held + call.workspace_bytes)
    return Operation(
        name=last.name,
        kind=last.kind,
        inputs=tuple(sorted(number[v] for v in inputs)),
        outputs=tuple(number[v] for v in sorted(outputs)),
        cost=sum(call.cost for call in calls),
        workspace_bytes=max(0, most - counted),
        is_backward=last.is_backward,
        run_once=any(joint.operations[k].run_once for k in group),
    )


def with_fastest_that_fit(joint: Graph, plan: Plan, budget_bytes: int) -> Plan:
    """The plan with each computation in the cheapest way that reads and makes the same and fits as it stands.

    Such ways (convolution algorithms) differ in cost and workspace only, so each computation is its own question.
    """
    trace = simulate(joint, plan)
    if trace.peak_bytes > budget_bytes:
        return plan
    order, chosen = plan.order.tolist(), list(plan.chosen) or [""] * plan.n_computations
    before = list(chosen)
    for at, (k, name, running) in enumerate(zip(order, before, trace.running_bytes.tolist(), strict=True)):
        op = joint.operations[k]
        if not op.implementations:
            continue
        way = joint.way(k, name)
        room = budget_bytes - running + way.workspace_bytes
        alike = [
            w for w in op.ways
            if (w.inputs, set(w.outputs), w.overwrites, w.is_lossy)
            == (way.inputs, set(way.outputs), way.overwrites, way.is_lossy) and w.workspace_bytes <= room
        ]  # fmt: skip
        best = min(alike, key=lambda w: w.cost, default=way)
        chosen[at] = "" if best.name == DEFAULT else best.name
    return plan if chosen == before else Plan.from_order(joint, order, plan.budget_bytes, chosen)
