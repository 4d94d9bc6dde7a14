"""A step as Inductor runs it: groups of fused calls are the operations, and buffers are the values.

Inductor fuses most calls of a training graph into few kernels, and only what a kernel leaves in a buffer takes memory.
A plan on single calls would count bytes that never exist. The groups are those of the step as `torch.compile` cuts it.
A group of the forward pass can be computed again in the backward pass; its calls are then written there once more.

Inductor copies weights of convolutions into another layout, all at the start, and saves the copies for the backward
pass instead of the weights. No plan can drop them; they are the results of a first group without calls of the step.
"""

from __future__ import annotations

import contextlib
import graphlib
import heapq
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from remat.graph import Graph, Operation, Value, Work, reached
from remat.torch.internals.inductor import LoweredHalf
from remat.torch.step.emit import SAVED
from remat.torch.step.training_graph import CapturedStep, end_of, values_in

FORWARD, BACKWARD = 0, 1
COPY_KIND = "remat.copy_arguments"
NO_VALUE = -1  # in place of the step's value, for a copy of an argument
_TAKES = re.compile(r"^ *(\w+) = (?:reinterpret_tensor\()?(\w+)\b[^;]*; del \2  # reuse$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FusedGroups:
    """The groups of a step.

    Attributes:
        step: of single calls.
        graph: of groups; costs are 0.
        values: [values of `graph`] value of ``step.graph`` that each is; `NO_VALUE` for a copy of an argument.
        members: [groups] operations of ``step.graph`` that a group computes, in their order.
        made: [groups] those of them whose results the group leaves in buffers.
        buffers: [groups] (half, names of its buffers in the generated code).
        end: the group between both halves.
        in_place: [groups] bytes of inputs whose storage an output takes.
        temporary: [groups] bytes of copies of arguments in other layouts.
    """

    step: CapturedStep
    graph: Graph
    values: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    made: tuple[frozenset[int], ...]
    buffers: tuple[tuple[int, frozenset[str]], ...]
    is_extern: tuple[bool, ...]
    end: int
    in_place: tuple[int, ...]
    temporary: tuple[int, ...]

    def calls_in(self, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """(an order of groups as an order of operations of ``step.graph``, [groups] how many of them each group has).

        A call that is a part of several groups is written once in each half, and again once an input was computed
        again, so that the kernel that reads it does not keep the earlier copy of the input alive.
        """
        operations = self.step.graph.operations
        calls, version, read = list[int](), dict[int, int](), dict[int, tuple[int, ...]]()
        sizes = list[int]()
        for group in order:
            before = len(calls)
            for k in self.members[group]:
                inputs = tuple(version.get(v, 0) for v in operations[k].inputs)
                if k not in self.made[group] and read.get(k) == inputs:
                    continue
                calls.append(k)
                read[k] = inputs
                for v in operations[k].outputs:
                    version[v] = len(calls)
            if group == self.end:
                read.clear()
            sizes.append(len(calls) - before)
        return calls, [size for size in sizes if size]


def _copies_saved(halves: Sequence[LoweredHalf]) -> dict[str, str]:
    """{buffer that the forward half returns in place of an argument: the argument's name}."""
    forward, backward = halves
    saved = [name.removeprefix(SAVED) for name in backward.inputs if name.startswith(SAVED)]
    returned = forward.outputs[len(forward.outputs) - len(saved) :]
    pairs = zip(returned, saved, strict=True)
    return {buffer: name for buffer, name in pairs if name in forward.inputs and buffer != name}


def fused(step: CapturedStep, halves: Sequence[LoweredHalf]) -> FusedGroups:
    """The groups of a step.

    Args:
        halves: what Inductor makes of the step as `torch.compile` cuts it.
    """
    return _Fuser(step, halves).fused()


@dataclass(slots=True)
class _Group:
    half: int
    targets: set[int]  # values of the step that it leaves in buffers
    names: set[str]
    is_extern: bool = False


class _Row(NamedTuple):
    """A group in the columns of `FusedGroups`."""

    operation: Operation
    members: tuple[int, ...]
    made: frozenset[int]
    buffers: tuple[int, frozenset[str]]
    is_extern: bool
    in_place: int
    temporary: int


def _row_of_copies(buffers: Iterable[str], values: Sequence[Value]) -> _Row:
    """The group that fills the first values of the graph, `values`."""
    work = Work(flops=0, bytes_moved=2 * sum(value.bytes for value in values))
    outputs = tuple(range(len(values)))
    operation = Operation("copy_arguments", COPY_KIND, (), outputs, run_once=True, work=work)
    return _Row(operation, (), frozenset(), (FORWARD, frozenset(buffers)), False, 0, 0)


class _Fuser:
    def __init__(self, step: CapturedStep, halves: Sequence[LoweredHalf]):
        self.step, self.fine = step, step.graph
        self.by_name = {node.name: node for node in step.training_graph.module.graph.nodes}
        self.end = end_of(self.fine)
        self.held: list[dict[str, set[int]]] = [{}, {}]  # buffer -> values
        self.temporary: list[dict[int, int]] = [{}, {}]  # operation -> bytes of arguments in another layout
        self.copied = _copies_saved(halves)  # buffer -> name of the argument that it is a copy of
        self.sizes = {each.name: each.bytes for buffers in halves[FORWARD].groups for each in buffers}
        groups = list[_Group]()
        for half, lowered in enumerate(halves):
            self._read_buffers(half, lowered)
            for buffers, is_extern in zip(lowered.groups, lowered.is_extern, strict=True):
                targets = set[int]().union(*(self.held[half][each.name] for each in buffers))
                if targets:
                    groups.append(_Group(half, targets, {each.name for each in buffers}, is_extern))
        self.groups = [*self._merged(groups, FORWARD), *self._merged(groups, BACKWARD)]
        self.taken = self._storages_taken(halves)
        self.realized = [
            {v for group in self.groups if group.half == half for v in group.targets} for half in (FORWARD, BACKWARD)
        ]
        self._add_what_must_exist()

    def _values(self, name: str) -> Iterator[int]:
        """Values of the step behind a node of a half; none for nodes that only Inductor knows."""
        node = self.by_name.get(name)
        if node in self.step.storage:
            yield from values_in(self.step.storage[node])

    def _read_buffers(self, half: int, lowered: LoweredHalf) -> None:
        """Find the values that buffers hold."""
        held, results, library = self.held[half], set[int](), set[int]()
        for buffers, is_extern in zip(lowered.groups, lowered.is_extern, strict=True):
            for each in buffers:
                if each.is_result or is_extern:
                    held[each.name] = set(self._values(each.node))
                    results |= held[each.name]
                    library |= self._producers(held[each.name]) if is_extern else set()
        if half == BACKWARD:
            results.update(*self.held[FORWARD].values())
        for each in (each for buffers in lowered.groups for each in buffers if each.name not in held):
            values = set(self._values(each.node))
            if not values & {v for k in library for v in self.fine.operations[k].outputs}:
                held[each.name] = values
                continue
            # An argument of a library's call: of a fused call, or a copy in another layout.
            arguments = [v for x in self.by_name[each.node].all_input_nodes for v in self._values(x.name)]
            new = [v for v in arguments if v not in results and self.fine.values[v].bytes == each.bytes]
            held[each.name] = set(new[:1])
            results.update(new[:1])
            if not new and each.name not in self.copied:
                (k,) = self._producers(values)
                self.temporary[half][k] = self.temporary[half].get(k, 0) + each.bytes

    def _storages_taken(self, halves: Sequence[LoweredHalf]) -> set[tuple[int, int, int]]:
        """(half, value, value whose storage it takes) where the generated code says so."""
        taken = set[tuple[int, int, int]]()
        for half, lowered in enumerate(halves):
            for new, old in _TAKES.findall(lowered.source):
                one, other = (
                    self.held[half].get(name) or set(self._values(name.removeprefix(SAVED))) for name in (new, old)
                )
                taken |= {(half, v, w) for v in one for w in other}
        return taken

    def _merged(self, groups: Iterable[_Group], half: int) -> list[_Group]:
        """The groups of a half; those that take their buffers from the same call are one."""
        merged, owner = list[_Group](), dict[int, _Group]()
        for group in groups:
            if group.half != half:
                continue
            producers = {self.fine.producer[v] for v in group.targets}
            others = {id(owner[k]): owner[k] for k in producers if k in owner}.values()
            for other in others:
                group.targets |= other.targets
                group.names |= other.names
                group.is_extern |= other.is_extern
                merged.remove(other)
            merged.append(group)
            owner.update({self.fine.producer[v]: group for v in group.targets})
        return merged

    def _add_what_must_exist(self) -> None:
        """Groups for values that stay, or that the end of the forward pass reads, if no group is known to make them."""
        maker = {(group.half, k): group for group in self.groups for k in self._producers(group.targets)}
        for k, op in enumerate(self.fine.operations):
            if k == self.end:
                continue
            must = {v for v in op.outputs if self.fine.values[v].keep or self.end in self.fine.users[v]}
            if op.run_once:
                must |= set(op.outputs)
            half = BACKWARD if op.is_backward else FORWARD
            missing = must - self.realized[half]
            if missing:
                if (half, k) not in maker:
                    self.groups.append(_Group(half, set(), set()))
                maker.get((half, k), self.groups[-1]).targets.update(missing)
                self.realized[half] |= missing

    def fused(self) -> FusedGroups:
        forward, backward = (self._ordered(half) for half in (FORWARD, BACKWARD))
        return self._graph([*forward, None, *backward], len(forward) + bool(self.copied))

    def _producers(self, values: Iterable[int]) -> frozenset[int]:
        return frozenset(self.fine.producer[v] for v in values)

    def _members(self, group: _Group) -> tuple[list[int], set[int]]:
        """(operations that compute the group's targets from buffers, the values of these buffers)."""
        known = self.realized[FORWARD] | set(self.fine.operations[self.end].outputs)
        if group.half == BACKWARD:
            known |= self.realized[BACKWARD]
        members, read = set(self._producers(group.targets)), set[int]()
        todo = list(members)
        while todo:
            for v in self.fine.operations[todo.pop()].inputs:
                k = self.fine.producer[v]
                if k in members:
                    continue
                if v in known:
                    read.add(v)
                else:
                    members.add(k)
                    todo.append(k)
        return sorted(members), read - {v for k in members for v in self.fine.operations[k].outputs}

    def _ordered(self, half: int) -> list[_Group]:
        """The groups of a half, producers first, else in Inductor's order; groups in a circle are taken apart."""
        groups = [group for group in self.groups if group.half == half]
        while True:
            order = self._sorted(groups)
            if len(order) == len(groups):
                return order
            stuck = [group for group in groups if all(group is not other for other in order)]
            groups = [*order, *(single for group in stuck for single in self._apart(group))]

    def _apart(self, group: _Group) -> list[_Group]:
        of_producer = dict[int, set[int]]()
        for v in group.targets:
            of_producer.setdefault(self.fine.producer[v], set()).add(v)
        return [_Group(group.half, targets, group.names, group.is_extern) for targets in of_producer.values()]

    def _sorted(self, groups: Sequence[_Group]) -> list[_Group]:
        """Producers first, else as given; without the groups that depend on a circle."""
        maker = {v: i for i, group in enumerate(groups) for v in group.targets}
        needs = {i: {maker[v] for v in self._members(group)[1] if v in maker} - {i} for i, group in enumerate(groups)}
        sorter, order = graphlib.TopologicalSorter(needs), list[_Group]()
        with contextlib.suppress(graphlib.CycleError):  # it then sorts what it can
            sorter.prepare()
        ready = [*sorter.get_ready()]
        heapq.heapify(ready)
        while ready:
            i = heapq.heappop(ready)
            order.append(groups[i])
            sorter.done(i)
            for user in sorter.get_ready():
                heapq.heappush(ready, user)
        return order

    def _graph(self, groups: Sequence[_Group | None], end: int) -> FusedGroups:
        """The graph of groups; None stands for the end of the forward pass."""
        fine, values, rows, of = self.fine, list[Value](), list[_Row](), list[int]()
        ids: list[dict[int, int]] = [{}, {}]
        reads_copies = self._readers({name: v for v, name in enumerate(self.copied.values())})
        if self.copied:
            values += [Value(f"{name}, copied", self.sizes[buffer]) for buffer, name in self.copied.items()]
            of += [NO_VALUE] * len(values)
            rows.append(_row_of_copies(self.copied, values))
        for group in groups:
            half = FORWARD if group is None else group.half
            if group is None:
                own, read = [self.end], set(fine.operations[self.end].inputs)
                targets = set(fine.operations[self.end].outputs)
            else:
                (own, read), targets = self._members(group), group.targets
            inputs = {ids[BACKWARD if half and v in ids[BACKWARD] else FORWARD][v] for v in read}
            inputs.update(*(reads_copies[k] for k in own if k in reads_copies))
            first = len(values)
            for v in sorted(targets):
                ids[half][v] = len(values)
                values.append(fine.values[v])
                of.append(v)
            outputs, made = tuple(range(first, len(values))), self._producers(targets)
            pairs = {(v, w) for v in targets for w in read if (half, v, w) in self.taken}
            rows.append(_Row(
                self._operation(own, made, inputs, outputs, values, half), tuple(own), made,
                (half, frozenset() if group is None else frozenset(group.names)),
                group is not None and group.is_extern,
                sum(min(fine.values[v].bytes, fine.values[w].bytes) for v, w in pairs),
                sum(self.temporary[half].get(k, 0) for k in made),
            ))  # fmt: skip
        operations, members, made, buffers, is_extern, in_place, temporary = zip(*rows, strict=True)
        graph = replace(fine, operations=operations, values=tuple(values), loss=end)
        return FusedGroups(self.step, graph, tuple(of), members, made, buffers, is_extern, end, in_place, temporary)

    def _readers(self, arguments: Mapping[str, int]) -> dict[int, set[int]]:
        """[operation] numbers of the arguments that it reads, of those with a number."""
        op_of = {node: k for k, nodes in enumerate(self.step.nodes) for node in nodes}
        read = dict[int, set[int]]()
        for name, number in arguments.items():
            for user in reached([self.by_name[name]], lambda x: () if x in op_of else x.users):  # through views
                if user in op_of:
                    read.setdefault(op_of[user], set()).add(number)
        return read

    def _operation(
        self, members: Sequence[int], made: Collection[int], inputs: Collection[int], outputs: Sequence[int],
        values: Sequence[Value], half: int,
    ) -> Operation:  # fmt: skip
        """The operation of a group; its work is that of its calls, but it moves only the bytes of its buffers."""
        operations = [self.fine.operations[k] for k in members]
        last = self.fine.operations[max(made, default=members[-1])]
        if members == [self.end]:
            return replace(last, inputs=tuple(sorted(inputs)), outputs=tuple(outputs))
        works = [op.work for op in operations if op.work]
        work = Work(
            flops=sum(each.flops or 0 for each in works),
            bytes_moved=sum(values[v].bytes for v in (*inputs, *outputs)),
        )
        return Operation(
            last.name, last.kind, tuple(sorted(inputs)), tuple(outputs), is_backward=half == BACKWARD,
            run_once=any(op.run_once for op in operations), work=work,
        )  # fmt: skip
