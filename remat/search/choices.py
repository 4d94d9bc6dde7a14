"""Reduce a graph with several implementations to one implementation per operation, and lift its plans back.

A solver for graphs without implementations can then solve one choice at a time. An operation that writes over an
output of the operation just before it is merged with it, because the two never hold both tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from remat.graph import Graph, Operation
from remat.implementation import DEFAULT, Implementation
from remat.plan import COMPUTE, Plan
from remat.simulator import simulate

Call = tuple[int, str]  # operation, name of its implementation ('' for the default one)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A graph in which every operation has one implementation.

    Attributes:
        full: the graph with all implementations.
        graph: the reduced graph, for a solver.
        indices: [N] index into `all_implementations` of each full operation.
        calls: [N'] the full operations in each operation of `graph`; several where one writes over another's output.
        place: [N] operation of `graph` that holds each full operation.
        values: [V'] full value of each value of `graph`.
    """

    full: Graph
    graph: Graph
    indices: tuple[int, ...]
    calls: tuple[tuple[Call, ...], ...]
    place: tuple[int, ...]
    values: tuple[int, ...]

    def lift(self, plan: Plan, budget_bytes: int | None = None) -> Plan:
        """A plan of `graph` as a plan of the full graph; it needs no more memory."""
        if plan.has_copies:
            steps = list[tuple[int, int] | tuple[int, int, str]]()
            for kind, i in zip(plan.kinds.tolist(), plan.ids.tolist(), strict=True):
                steps += [(COMPUTE, *call) for call in self.calls[i]] if kind == COMPUTE else [(kind, self.values[i])]
            return Plan.from_steps(self.full, steps, budget_bytes, plan.link)
        calls = [call for k in plan.order.tolist() for call in self.calls[k]]
        return Plan.from_calls(self.full, calls, budget_bytes)

    def order_of(self, full_order: Sequence[int]) -> np.ndarray:
        """[C] int32, computations of `graph`: one wherever `full_order` computes the last operation of its group.

        A group that may run only once, because one of its operations may, runs the first time and is held.
        """
        last = [calls[-1][0] for calls in self.calls]
        order = [self.place[k] for k in full_order if last[self.place[k]] == k]
        first = {k: at for at, k in reversed(list(enumerate(order)))}
        operations = self.graph.operations
        kept = [k for at, k in enumerate(order) if at == first[k] or not operations[k].run_once]
        return np.array(kept, dtype=np.int32)


class Choices:
    """All choices of implementations in a graph.

    Attributes:
        full: the graph.
        implementations: [N] all implementations of each operation.
        switches: (operation, index of an implementation) that a caller can ask for: neither default nor lossy.
            One with extra outputs is used anyway where these are read; it is a switch only if it is also better
            in another respect.
    """

    def __init__(self, full: Graph) -> None:
        self.full = full
        self.implementations = [op.all_implementations for op in full.operations]
        self._size = [value.bytes for value in full.values]
        self._keep = [value.keep for value in full.values]
        self._last_forward = max((k for k, op in enumerate(full.operations) if not op.is_backward), default=-1)
        # Operations with nothing to choose.
        self._settled = [not op.implementations for op in full.operations]
        first_extra = len(full.values) - full.n_extra
        others = [
            (k, i, any(v >= first_extra for v in implementation.outputs))
            for k, op in enumerate(full.operations)
            for i, implementation in enumerate(op.implementations, start=1)
            if not implementation.is_lossy
        ]
        # Implementations whose extra outputs may be worth it even if nothing reads them.
        self._for_itself = {(k, i) for k, i, has_extra in others if has_extra and self._is_best_somewhere(k, i)}
        self.switches = [(k, i) for k, i, has_extra in others if not has_extra or (k, i) in self._for_itself]

    def choose(self, wanted: Sequence[int]) -> Choice | None:
        """The graph in which operation k runs by implementation `wanted[k]`, or by the nearest one that serves.

        Readers decide the outputs: an operation gets an implementation that makes every output that is read and no
        other, unless the wanted one is better in some other respect. It writes over its input only if nothing
        reads that later.

        Returns:
            None if some operation has no implementation that makes all outputs that are read.
        """
        indices = self._consistent(wanted)
        if indices is None:
            return None
        full, operations = self.full, self.full.operations
        calls = [implementations[i] for implementations, i in zip(self.implementations, indices, strict=True)]
        groups: list[list[int]] = []
        for k, call in enumerate(calls):
            if call.overwrites is None:
                groups.append([k])
            else:
                groups[-1].append(k)  # its producer is the operation before, see `_serves`
        gone = {call.overwrites for call in calls}
        remaining = sorted({v for call in calls for v in call.outputs} - gone)
        number = {v: i for i, v in enumerate(remaining)}
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
        graph = replace(
            full, operations=tuple(merged), values=tuple([full.values[v] for v in remaining]),
            loss=None if full.loss is None else place[full.loss],
        )  # fmt: skip
        named = tuple(tuple([(k, _label(calls[k])) for k in group]) for group in groups)
        return Choice(full, graph, tuple(indices), named, tuple(place), tuple(remaining))

    def _is_best_somewhere(self, k: int, i: int) -> bool:
        """Whether no implementation of operation `k` with fewer outputs is as cheap and lean as implementation `i`."""
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
        """[N] index of each operation's nearest implementation that serves all readers; None if one has none."""
        indices = list(wanted)
        read = list(self._keep)  # whether a later operation, or the end, needs the value
        for k in range(len(self.full) - 1, -1, -1):
            implementations = self.implementations[k]
            if not self._settled[k]:
                needed = {v for implementation in implementations for v in implementation.outputs if read[v]}
                serving = [
                    i for i, other in enumerate(implementations)
                    if self._serves(k, other, needed, read) and (i == indices[k] or not other.is_lossy)
                ]  # fmt: skip
                if not serving:
                    return None
                indices[k] = min(serving, key=lambda i: self._distance(k, i, wanted[k], read))
            for v in implementations[indices[k]].inputs:
                read[v] = True
        return indices

    def _distance(self, k: int, i: int, wanted: int, read: Sequence[bool]) -> tuple[int, ...]:
        """How far implementation `i` of operation `k` is from the `wanted` one; unread bytes count first."""
        implementation, like = self.implementations[k][i], self.implementations[k][wanted]
        unread = sum([self._size[v] for v in implementation.outputs if not read[v]])
        if i == wanted and (k, i) in self._for_itself:
            unread = 0
        other = implementation.inputs != like.inputs, implementation.overwrites != like.overwrites
        return unread, *other, i != wanted, implementation.cost

    def _serves(self, k: int, implementation: Implementation, needed: set[int], read: Sequence[bool]) -> bool:
        """Whether an implementation of operation `k` makes all `needed` values and overwrites none that is read later.

        A value that it overwrites must also come from the operation just before, so that `_merged` can join the two.
        """
        if not needed.issubset(implementation.outputs):
            return False
        x = implementation.overwrites
        return x is None or (self.full.producer[x] == k - 1 and not read[x])

    def _merged(
        self, group: Sequence[int], calls: Sequence[Implementation], number: Mapping[int, int], gone: set[int | None]
    ) -> Operation:
        """One operation that replaces `group`: a chain in which each operation overwrites an output of the one before.

        Args:
            calls: [operation] the implementation that it runs.
            number: [value] its id in the new graph.
            gone: values that are overwritten inside chains; they are no outputs of the new graph.
        """
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
        """(plan, cost, peak) in which each computation has the cheapest implementation that serves and fits.

        It serves if it reads the same, overwrites the same or an input that was made in the same pass and that nobody
        reads later (autograd holds what it saved for the backward pass), and makes what is read of this computation: a
        mask is needed only from the last run before a reader of the mask. Such implementations
        differ in cost and in the memory of their own computation only, so each one can be decided independently.
        """
        full = self.full
        trace = simulate(full, plan)
        if trace.peak_bytes > budget_bytes:
            return plan, trace.cost, trace.peak_bytes
        order = plan.order.tolist()
        before = list(plan.choices) or [""] * len(order)
        choice, running, cost = list(before), trace.running_bytes.tolist(), trace.cost
        read, ends = self._read_of_each(order, before)
        frees_less = False
        for at, k in enumerate(order):
            if self._settled[k]:
                continue
            implementation = full.implementation(k, choice[at])
            room = budget_bytes - running[at] + self._own_bytes(implementation, read[at])
            best = implementation
            for other in self._serving(k, implementation, read[at], ends[at]):
                if self._own_bytes(other, read[at]) <= room and other.cost < best.cost:
                    best = other
            if best is not implementation:
                choice[at] = _label(best)
                running[at] = budget_bytes - room + self._own_bytes(best, read[at])
                cost += best.cost - implementation.cost
                frees_less |= len(best.outputs) < len(implementation.outputs)
                frees_less |= best.overwrites != implementation.overwrites
        if choice == before:
            return plan, cost, trace.peak_bytes
        if frees_less:  # steps that free what is no longer made, or is now overwritten, are gone too
            return Plan.from_order(full, order, plan.budget_bytes, choice), cost, max(running)
        named = iter(choice)
        implementations = tuple(next(named) if kind == COMPUTE else "" for kind in plan.kinds.tolist())
        return replace(plan, implementations=implementations if any(implementations) else ()), cost, max(running)

    def _read_of_each(self, order: Sequence[int], names: Sequence[str]) -> tuple[list[set[int]], list[set[int]]]:
        """[C] outputs of each computation that are read, or kept to the end, before they are made again; its inputs
        that are not, and were made in the same pass."""
        calls = [self.full.implementation(k, name) for k, name in zip(order, names, strict=True)]
        needed, read, ends = list(self._keep), list[set[int]](), list[set[int]]()
        for call in reversed(calls):
            read.append({v for v in call.outputs if needed[v]})
            ends.append({v for v in call.inputs if not needed[v]})
            for v in call.outputs:
                needed[v] = False
            for v in call.inputs:
                needed[v] = True
        turn = order.index(self._last_forward) if self._last_forward in order else len(order)
        made_after = dict[int, bool]()
        for at, call in enumerate(calls):
            ends[-1 - at] = {v for v in ends[-1 - at] if made_after[v] == (at > turn)}
            made_after |= dict.fromkeys(call.outputs, at > turn)
        return read[::-1], ends[::-1]

    def _own_bytes(self, implementation: Implementation, read: set[int]) -> int:
        """Bytes that a computation needs for itself alone: workspace, unread outputs, less what it overwrites."""
        unread = sum([self._size[v] for v in implementation.outputs if v not in read])
        over = implementation.overwrites
        return implementation.workspace_bytes + unread - (0 if over is None else self._size[over])

    def _serving(self, k: int, implementation: Implementation, read: set[int], ends: set[int]) -> list[Implementation]:
        """Those of operation `k` that read the same, make at least `read`, and overwrite the same or one of `ends`."""
        outputs, over = set(implementation.outputs), implementation.overwrites
        return [
            other for other in self.implementations[k]
            if other.inputs == implementation.inputs
            and (other.overwrites == over or (over is None and other.overwrites in ends))
            and other.is_lossy == implementation.is_lossy and read <= set(other.outputs) <= outputs
        ]  # fmt: skip


def choice_of(full: Graph, plan: Plan) -> list[int]:
    """[N] index of the first implementation but the default one in which a plan runs each operation; 0 without one."""
    wanted = [0] * len(full)
    for k, name in plan.calls:
        if name and not wanted[k]:
            wanted[k] = [implementation.name for implementation in full.operations[k].all_implementations].index(name)
    return wanted


def _label(implementation: Implementation) -> str:
    """The name that plans use: '' for the default implementation."""
    return "" if implementation.name == DEFAULT else implementation.name


def drop_unread_repeats(graph: Graph, calls: Sequence[Call]) -> list[Call]:
    """Remove repeats whose outputs nobody reads from (operation, implementation) computations in order."""
    is_needed = [value.keep for value in graph.values]
    first = {k: at for at, (k, _) in reversed(list(enumerate(calls)))}
    kept: list[Call] = []
    for at, (k, name) in reversed(list(enumerate(calls))):
        implementation = graph.implementation(k, name)
        if at != first[k] and not any(is_needed[v] for v in implementation.outputs):
            continue
        kept.append((k, name))
        for v in implementation.outputs:
            is_needed[v] = False
        for v in implementation.inputs:
            is_needed[v] = True
    return kept[::-1]
