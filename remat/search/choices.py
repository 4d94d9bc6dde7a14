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

Call = tuple[int, str]  # operation of the full graph, name of its implementation ('' for the default one)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A graph in which every operation has one implementation.

    Attributes:
        full: where the implementations come from.
        graph: for a solver.
        indices: [N] index into each full operation's `implementations`.
        calls: [N'] what each operation of `graph` stands for; several where one writes over another's output.
        place: [N] operation of `graph` that holds each full operation.
    """

    full: Graph
    graph: Graph
    indices: tuple[int, ...]
    calls: tuple[tuple[Call, ...], ...]
    place: tuple[int, ...]

    def lift(self, plan: Plan, budget_bytes: int | None = None) -> Plan:
        """The plan of the full graph that a plan of `graph` stands for; it needs no more memory."""
        calls = [call for k in plan.order.tolist() for call in self.calls[k]]
        return Plan.from_order(self.full, [k for k, _ in calls], budget_bytes, [name for _, name in calls])

    def order_of(self, full_order: Sequence[int]) -> np.ndarray:
        """[C] int32, computations of `graph` where `full_order` computes the last operation of each."""
        last = [calls[-1][0] for calls in self.calls]
        return np.array([self.place[k] for k in full_order if last[self.place[k]] == k], dtype=np.int32)


def choose(full: Graph, wanted: Sequence[int]) -> Choice | None:
    """The graph in which operation k runs as `wanted[k]` of its `implementations` says; see `Choices.choose`."""
    return Choices(full).choose(wanted)


class Choices:
    """Everything that there is to choose in a graph.

    Attributes:
        full: the graph.
        implementations: [N] those of each operation.
        switches: (operation, index of an implementation) that can be asked for: neither default nor lossy. One with
            extra outputs is taken where those are read; it is asked for only if something else speaks for it as well.
    """

    def __init__(self, full: Graph) -> None:
        self.full = full
        self.implementations = [op.all_implementations for op in full.operations]
        self._size = [value.bytes for value in full.values]
        self._keep = [value.keep for value in full.values]
        # Operations with nothing to choose.
        self._settled = [not op.implementations for op in full.operations]
        first_extra = len(full.values) - full.n_extra
        others = [
            (k, i, any(v >= first_extra for v in implementation.outputs))
            for k, op in enumerate(full.operations)
            for i, implementation in enumerate(op.implementations, start=1)
            if not implementation.is_lossy
        ]
        # Those with extra outputs that may be worth it even if nobody reads them.
        self._for_itself = {(k, i) for k, i, has_extra in others if has_extra and self._is_best_somewhere(k, i)}
        self.switches = [(k, i) for k, i, has_extra in others if not has_extra or (k, i) in self._for_itself]

    def choose(self, wanted: Sequence[int]) -> Choice | None:
        """The graph in which operation k runs by implementation `wanted[k]`, or by the nearest one that serves.

        Readers decide which outputs are made: an operation gets an implementation that makes all that is read, and
        nothing more, unless the one asked for is better in some other respect. It writes over its input only if
        nobody reads that later.

        Returns:
            None if no implementation of some operation makes all that is read.
        """
        indices = self._consistent(wanted)
        if indices is None:
            return None
        full, operations = self.full, self.full.operations
        calls = [implementations[i] for implementations, i in zip(self.implementations, indices, strict=True)]
        groups: list[list[int]] = []
        made, gone = [False] * len(full.values), set[int]()
        for k, call in enumerate(calls):
            if call.overwrites is None:
                groups.append([k])
            else:
                groups[-1].append(k)  # its producer is the operation before, see `_serves`
                gone.add(call.overwrites)
            for v in call.outputs:
                made[v] = True
        number = [-1] * len(full.values)
        values: list[Value] = []
        for v, is_made in enumerate(made):
            if is_made and v not in gone:
                number[v] = len(values)
                values.append(full.values[v])
        place = [0] * len(full)
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
            full.name, tuple(merged), tuple(values), full.fixed_bytes, full.cost_unit,
            None if full.loss is None else place[full.loss], full.source,
        )  # fmt: skip
        named = tuple(
            tuple([(k, "" if calls[k].name == DEFAULT else calls[k].name) for k in group]) for group in groups
        )
        return Choice(full, graph, tuple(indices), named, tuple(place))

    def _is_best_somewhere(self, k: int, i: int) -> bool:
        """Whether no implementation of operation `k` that makes less is as cheap and lean as implementation `i`."""
        implementation = self.implementations[k][i]
        return not any(
            set(other.outputs) < set(implementation.outputs)
            and set(other.inputs) <= set(implementation.inputs)
            and other.overwrites == implementation.overwrites
            and other.cost <= implementation.cost
            and other.workspace_bytes <= implementation.workspace_bytes
            for other in self.implementations[k]
            if not other.is_lossy
        )

    def _consistent(self, wanted: Sequence[int]) -> list[int] | None:
        full, size = self.full, self._size
        indices = list(wanted)
        read = list(self._keep)  # by what comes later
        for k in range(len(full) - 1, -1, -1):
            implementations = self.implementations[k]
            if not self._settled[k]:
                needed = {v for implementation in implementations for v in implementation.outputs if read[v]}
                like = implementations[indices[k]]

                def rank(
                    i: int,
                    k: int = k,
                    implementations: Sequence[Implementation] = implementations,
                    like: Implementation = like,
                ) -> tuple[int, ...]:
                    implementation = implementations[i]
                    unread = sum([size[v] for v in implementation.outputs if not read[v]])
                    if implementation is like and (k, i) in self._for_itself:
                        unread = 0
                    other = implementation.inputs != like.inputs, implementation.overwrites != like.overwrites
                    return unread, *other, implementation is not like, implementation.cost

                serving = [
                    i for i, other in enumerate(implementations)
                    if self._serves(k, other, needed, read) and (i == indices[k] or not other.is_lossy)
                ]  # fmt: skip
                if not serving:
                    return None
                indices[k] = min(serving, key=rank)
            for v in implementations[indices[k]].inputs:
                read[v] = True
        return indices

    def _serves(self, k: int, implementation: Implementation, needed: set[int], read: Sequence[bool]) -> bool:
        if not needed.issubset(implementation.outputs):
            return False
        x = implementation.overwrites
        return x is None or (self.full.producer[x] == k - 1 and not read[x])

    def _merged(
        self, group: Sequence[int], calls: Sequence[Implementation], number: Sequence[int], gone: set[int]
    ) -> Operation:
        """One operation for those of `group`: each but the first writes over an output of the one before."""
        operations, size = self.full.operations, self._size
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
        """(plan, cost, peak), each computation by the cheapest implementation that reads and makes the same and fits.

        Such implementations (convolution algorithms) differ in cost and workspace only, so each computation is
        decided by itself.
        """
        full = self.full
        trace = simulate(full, plan)
        if trace.peak_bytes > budget_bytes:
            return plan, trace.cost, trace.peak_bytes
        order = plan.order.tolist()
        choice, before = list(plan.choices) or [""] * len(order), tuple(plan.choices) or ("",) * len(order)
        running, cost = trace.running_bytes.tolist(), trace.cost
        for at, k in enumerate(order):
            if self._settled[k]:
                continue
            implementation = next(w for w in self.implementations[k] if w.name == (choice[at] or DEFAULT))
            room = budget_bytes - running[at] + implementation.workspace_bytes
            best = implementation
            for other in self._alike(k, implementation):
                if other.workspace_bytes <= room and other.cost < best.cost:
                    best = other
            if best is not implementation:
                choice[at] = "" if best.name == DEFAULT else best.name
                running[at] += best.workspace_bytes - implementation.workspace_bytes
                cost += best.cost - implementation.cost
        if tuple(choice) == before:
            return plan, cost, trace.peak_bytes
        named = iter(choice)
        implementations = tuple(next(named) if kind == COMPUTE else "" for kind in plan.kinds.tolist())
        return replace(plan, implementations=implementations if any(implementations) else ()), cost, max(running)

    def _alike(self, k: int, implementation: Implementation) -> list[Implementation]:
        """Implementations of operation `k` that read, make and write over the same as `implementation`."""
        outputs = set(implementation.outputs)
        return [
            other for other in self.implementations[k]
            if other.inputs == implementation.inputs and other.overwrites == implementation.overwrites
            and other.is_lossy == implementation.is_lossy and set(other.outputs) == outputs
        ]  # fmt: skip
