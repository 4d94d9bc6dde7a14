"""One implementation of each operation: a graph with several becomes one without, and its plans come back.

An operation that writes over the output of the operation just before it is merged with it, for
the two then never hold both; everything else stays as it is. A solver for graphs without implementations so
serves one choice at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from remat.graph import Graph, Operation, Value
from remat.implementation import DEFAULT, Implementation
from remat.plan import COMPUTE, Plan
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
    """The graph in which operation k runs as `wanted[k]` of its `ways` says; see `Choices.choose`."""
    return Choices(joint).choose(wanted)


class Choices:
    """Everything that there is to choose in a graph.

    Attributes:
        joint: the graph.
        ways: [N] the ways of each operation.
        switches: (operation, index of a way) that can be asked for: neither default nor lossy. A way with extra
            outputs is taken where those are read; it is asked for only if something else speaks for it as well.
    """

    def __init__(self, joint: Graph) -> None:
        self.joint = joint
        self.ways = [op.ways for op in joint.operations]
        self._size = [value.bytes for value in joint.values]
        self._keep = [value.keep for value in joint.values]
        # Operations with nothing to choose.
        self._settled = [not op.implementations for op in joint.operations]
        first_extra = len(joint.values) - joint.n_extra
        others = [
            (k, i, any(v >= first_extra for v in way.outputs))
            for k, op in enumerate(joint.operations)
            for i, way in enumerate(op.implementations, start=1)
            if not way.is_lossy
        ]
        # Those with extra outputs that may be worth it even if nobody reads them.
        self._for_itself = {(k, i) for k, i, has_extra in others if has_extra and self._is_best_in_some_way(k, i)}
        self.switches = [(k, i) for k, i, has_extra in others if not has_extra or (k, i) in self._for_itself]

    def choose(self, wanted: Sequence[int]) -> Chosen | None:
        """The graph in which operation k runs as `wanted[k]` of its `ways` says, or in the nearest way that serves.

        What reads a value decides which outputs are made: an operation is given a way that makes all that is
        read, and nothing more, unless the way asked for is better in some other respect. It writes over its input
        only if nobody reads that later.

        Returns:
            None if no way of some operation makes all that is read.
        """
        choice = self._consistent(wanted)
        if choice is None:
            return None
        joint, operations = self.joint, self.joint.operations
        calls = [ways[i] for ways, i in zip(self.ways, choice, strict=True)]
        groups: list[list[int]] = []
        made, gone = [False] * len(joint.values), set[int]()
        for k, call in enumerate(calls):
            if call.overwrites is None:
                groups.append([k])
            else:
                groups[-1].append(k)  # its producer is the operation before, see `_serves`
                gone.add(call.overwrites)
            for v in call.outputs:
                made[v] = True
        number = [-1] * len(joint.values)
        values: list[Value] = []
        for v, is_made in enumerate(made):
            if is_made and v not in gone:
                number[v] = len(values)
                values.append(joint.values[v])
        place = [0] * len(joint)
        merged: list[Operation] = []
        for at, group in enumerate(groups):
            for k in group:
                place[k] = at
            if len(group) > 1:
                merged.append(self._merged(group, calls, number, gone))
                continue
            (k,) = group
            op, call = operations[k], calls[k]
            merged.append(
                Operation(
                    op.name, op.kind, tuple([number[v] for v in call.inputs]), tuple([number[v] for v in call.outputs]),
                    call.cost, call.workspace_bytes, op.is_backward, op.run_once,
                )
            )  # fmt: skip
        graph = Graph(
            joint.name, tuple(merged), tuple(values), joint.fixed_bytes, joint.cost_unit,
            None if joint.loss is None else place[joint.loss], joint.source,
        )  # fmt: skip
        named = tuple(
            tuple([(k, "" if calls[k].name == DEFAULT else calls[k].name) for k in group]) for group in groups
        )
        return Chosen(joint, graph, tuple(choice), named, tuple(place))

    def _is_best_in_some_way(self, k: int, i: int) -> bool:
        """Whether no way of operation `k` that makes less is as cheap and lean as way `i`."""
        way = self.ways[k][i]
        return not any(
            set(other.outputs) < set(way.outputs)
            and set(other.inputs) <= set(way.inputs)
            and other.overwrites == way.overwrites
            and other.cost <= way.cost
            and other.workspace_bytes <= way.workspace_bytes
            for other in self.ways[k]
            if not other.is_lossy
        )

    def _consistent(self, wanted: Sequence[int]) -> list[int] | None:
        joint, size = self.joint, self._size
        choice = list(wanted)
        read = list(self._keep)  # by what comes later
        for k in range(len(joint) - 1, -1, -1):
            ways = self.ways[k]
            if not self._settled[k]:
                needed = {v for way in ways for v in way.outputs if read[v]}
                like = ways[choice[k]]

                def rank(
                    i: int, k: int = k, ways: Sequence[Implementation] = ways, like: Implementation = like
                ) -> tuple[int, ...]:
                    way = ways[i]
                    unread = sum([size[v] for v in way.outputs if not read[v]])
                    if way is like and (k, i) in self._for_itself:
                        unread = 0
                    other = way.inputs != like.inputs, way.overwrites != like.overwrites
                    return unread, *other, way is not like, way.cost

                serving = [
                    i for i, way in enumerate(ways)
                    if self._serves(k, way, needed, read) and (i == choice[k] or not way.is_lossy)
                ]  # fmt: skip
                if not serving:
                    return None
                choice[k] = min(serving, key=rank)
            for v in ways[choice[k]].inputs:
                read[v] = True
        return choice

    def _serves(self, k: int, way: Implementation, needed: set[int], read: Sequence[bool]) -> bool:
        if not needed.issubset(way.outputs):
            return False
        x = way.overwrites
        return x is None or (self.joint.producer[x] == k - 1 and not read[x])

    def _merged(
        self, group: Sequence[int], calls: Sequence[Implementation], number: Sequence[int], gone: set[int]
    ) -> Operation:
        """One operation for those of `group`, each of which but the first writes over an output of the one before."""
        operations, size = self.joint.operations, self._size
        last, own = operations[group[-1]], [calls[k] for k in group]
        inside = {v for call in own for v in call.outputs}
        inputs = {v for call in own for v in call.inputs} - inside
        outputs = inside - gone
        held, most = sum(size[v] for v in inputs), 0
        counted = held + sum(size[v] for v in outputs)
        for call in own:
            if call.overwrites is not None:
                held -= size[call.overwrites]
            held += sum(size[v] for v in call.outputs)
            most = max(most, held + call.workspace_bytes)
        return Operation(
            name=last.name,
            kind=last.kind,
            inputs=tuple(sorted(number[v] for v in inputs)),
            outputs=tuple(number[v] for v in sorted(outputs)),
            cost=sum(call.cost for call in own),
            workspace_bytes=max(0, most - counted),
            is_backward=last.is_backward,
            run_once=any(operations[k].run_once for k in group),
        )

    def with_fastest_that_fit(self, plan: Plan, budget_bytes: int) -> tuple[Plan, int, int]:
        """(plan, cost, peak) with each computation in the cheapest way that reads and makes the same and fits.

        Such ways (convolution algorithms) differ in cost and workspace only, so each computation is its own question.
        """
        joint = self.joint
        trace = simulate(joint, plan)
        if trace.peak_bytes > budget_bytes:
            return plan, trace.cost, trace.peak_bytes
        order = plan.order.tolist()
        chosen, before = list(plan.chosen) or [""] * len(order), tuple(plan.chosen) or ("",) * len(order)
        running, cost = trace.running_bytes.tolist(), trace.cost
        for at, k in enumerate(order):
            if self._settled[k]:
                continue
            way = next(w for w in self.ways[k] if w.name == (chosen[at] or DEFAULT))
            room = budget_bytes - running[at] + way.workspace_bytes
            best = way
            for other in self._alike(k, way):
                if other.workspace_bytes <= room and other.cost < best.cost:
                    best = other
            if best is not way:
                chosen[at] = "" if best.name == DEFAULT else best.name
                running[at] += best.workspace_bytes - way.workspace_bytes
                cost += best.cost - way.cost
        if tuple(chosen) == before:
            return plan, cost, trace.peak_bytes
        named = iter(chosen)
        ways = tuple(next(named) if kind == COMPUTE else "" for kind in plan.kinds.tolist())
        return replace(plan, ways=ways if any(ways) else ()), cost, max(running)

    def _alike(self, k: int, way: Implementation) -> list[Implementation]:
        """Ways of operation `k` that read, make and write over the same as `way`."""
        outputs = set(way.outputs)
        return [
            w for w in self.ways[k]
            if w.inputs == way.inputs and w.overwrites == way.overwrites and w.is_lossy == way.is_lossy
            and set(w.outputs) == outputs
        ]  # fmt: skip
