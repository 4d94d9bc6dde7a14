"""The optimizer's updates as operations of the backward pass, and plans in which nothing is read after its update.

An update changes its parameter in place. A graph does not say so: parameters are no values of it. Values of 0 bytes let
each update wait for the first run of every reader of its parameter. A plan may repeat a reader later; the update is
then moved behind it, and if that takes too much memory, the step is planned again with further values of 0 bytes.
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from remat.errors import InvalidInput, InvalidPlan
from remat.graph import Graph, Operation, Value, Work
from remat.plan import Plan
from remat.simulator import simulate
from remat.torch.internals.autograd import storage_key
from remat.torch.internals.operators import tree_iter
from remat.torch.step.training_graph import END_KIND, CapturedStep, Update, values_in
from remat.torch.step.work import tensor_bytes
from remat.units import format_size

UPDATE_KIND = "remat.update_parameter"
MOST_TRIES = 5  # of planning
ONCE = 2  # the try in which readers run once


def with_updates(step: CapturedStep, workspaces: Mapping[int, int], by: str = "") -> CapturedStep:
    """The step with an operation for the update of each parameter in `workspaces`, as early as it may run.

    The update reads the gradient, which is therefore no longer kept to the end. It runs once and makes nothing.

    Args:
        step: with default implementations.
        workspaces: [index of a parameter among the primals] bytes that its update needs; those without a gradient are
            left out.
        by: whose updates they are; a part of the step's fingerprint.
    """
    return _Adding(step, workspaces, by).added()


class _Adding:
    def __init__(self, step: CapturedStep, workspaces: Mapping[int, int], by: str):
        self.step, self.graph, self.by = step, step.graph, by
        training_graph = step.training_graph
        self.primals = training_graph.primals
        gradients = training_graph.outputs[training_graph.n_forward_outputs :]
        self.gradients = {i: node for i in workspaces if (node := gradients[i]) is not None}
        self.workspaces = workspaces
        self.readers = _readers(step)
        self.before = _ancestors(self.graph)
        self.tokens: dict[int, int] = {}  # operation -> its value of 0 bytes

    def added(self) -> CapturedStep:
        placed = defaultdict[int, list[tuple[int, Operation]]](list)  # operation -> the updates behind it
        for i in self.gradients:
            k, update = self._update(i)
            placed[k].append((i, update))
        operations, nodes, new, of_primal = list[Operation](), [], dict[int, int](), dict[int, int]()
        for k, op in enumerate(self.graph.operations):
            new[k] = len(operations)
            token = (self.tokens[k],) if k in self.tokens else ()
            operations.append(replace(op, outputs=(*op.outputs, *token)))
            nodes.append(self.step.nodes[k])
            for i, update in placed[k]:
                of_primal[i] = len(operations)
                operations.append(update)
                nodes.append(())
        updates = {
            of_primal[i]: Update(i, node, frozenset(new[k] for k in self._readers_of(i)))
            for i, node in self.gradients.items()
        }
        loss = None if self.graph.loss is None else new[self.graph.loss]
        graph = replace(self.graph, operations=tuple(operations), values=self._values(), loss=loss)
        return replace(self.step, graph=graph, nodes=tuple(nodes), updates=updates)

    def _update(self, i: int) -> tuple[int, Operation]:
        """(the operation behind which it runs, the update of primal `i`)."""
        gradient = {*values_in(self.step.storage[self.gradients[i]])}
        producers = {self.graph.producer[v] for v in gradient}
        end = (k for k, op in enumerate(self.graph.operations) if op.kind == END_KIND)  # no update runs in forward
        earlier = {*self._readers_of(i), *end}
        known = functools.reduce(operator.or_, (self.before[k] | 1 << k for k in producers), 0)
        waits = {self._token(k) for k in sorted(earlier) if not known >> k & 1}
        parameter = self.primals[i]
        update = Operation(
            f"update_{i}", UPDATE_KIND, tuple(sorted(gradient | waits)), (), 0, self.workspaces[i], is_backward=True,
            run_once=True,
            work=Work(0, 3 * tensor_bytes(parameter), is_free=True, signature=f"{self.by} {self.workspaces[i]}"),
        )  # fmt: skip
        return max(producers | earlier), update

    def _readers_of(self, i: int) -> set[int]:
        return self.readers[storage_key(self.primals[i])]

    def _token(self, k: int) -> int:
        return self.tokens.setdefault(k, len(self.graph.values) + len(self.tokens))

    def _values(self) -> tuple[Value, ...]:
        training_graph = self.step.training_graph
        updated = {training_graph.n_forward_outputs + i for i in self.gradients}
        outputs = [node for at, node in enumerate(training_graph.outputs) if at not in updated and node is not None]
        held = {v for node in outputs[training_graph.n_mutations :] for v in tree_iter(self.step.storage[node])}
        values = [replace(value, keep=value.keep and v in held) for v, value in enumerate(self.graph.values)]
        return (*values, *(Value(f"{self.graph.operations[k].name}.done", 0) for k in self.tokens))


def _readers(step: CapturedStep) -> defaultdict[int, set[int]]:
    """[storage of a primal] operations that read it, through views too."""
    training_graph, of = step.training_graph, dict[fx.Node, set[int]]()
    for i, node in training_graph.places.items():
        primal = training_graph.primals[i]
        of[node] = {storage_key(primal)} if isinstance(primal, torch.Tensor) else set()
    for node in training_graph.module.graph.nodes:
        if node.op == "call_function" and not any(True for _ in values_in(step.storage.get(node))):  # a view
            of[node] = set[int]().union(*(of.get(source, ()) for source in node.all_input_nodes))
    readers = defaultdict[int, set[int]](set)
    for k, nodes in enumerate(step.nodes):
        for source in (source for node in nodes for source in node.all_input_nodes):
            for storage in of.get(source, ()):
                readers[storage].add(k)
    return readers


def _ancestors(graph: Graph) -> list[int]:
    """[N] the operations that run before each one in every plan, as bits of an integer."""
    found = list[int]()
    for k in range(len(graph)):
        direct = graph.predecessors(k)
        found.append(functools.reduce(operator.or_, (found[j] | 1 << j for j in direct), 0))
    return found


def postponed(order: Sequence[int], updates: Mapping[int, Update]) -> list[int]:
    """The order with each update behind the last computation that reads its parameter."""
    last = {k: at for at, k in enumerate(order)}
    behind = defaultdict[int, list[int]](list)
    for k, update in updates.items():
        behind[max(last[k], *(last[reader] for reader in update.readers))].append(k)
    found = list[int]()
    for at, k in enumerate(order):
        found += [] if k in updates else [k]
        found += sorted(behind[at]) if at in behind else []
    return found


def check_order(order: Sequence[int], step: CapturedStep) -> None:
    """Refuse an order that reads a parameter after its update.

    Raises:
        InvalidPlan: naming the operation.
    """
    last = {k: at for at, k in enumerate(order)}
    for k, update in step.updates.items():
        late = [reader for reader in update.readers if last[reader] > last[k]]
        if late:
            name, reader = (step.graph.operations[j].name for j in (k, late[0]))
            raise InvalidPlan(f"'{reader}' reads a parameter after its update '{name}'")


def plan_in_order(
    graph: Graph, updates: Mapping[int, Update], budget_bytes: int, find: Callable[[Graph], tuple[Plan, str]]
) -> tuple[Plan, str]:
    """A plan within the budget that reads no parameter after its update, and the name of its strategy.

    If updates that are moved behind the readers exceed the budget, the step is planned again: with updates that wait
    for the operations for whose sake readers were repeated; with these readers run once; with more updates that wait.
    In the last try all updates wait for all operations: that is the step whose gradients are held to the end.

    Args:
        graph: with costs and workspaces.
        find: gives a plan of a graph with the same operations; raises `InvalidInput` if it finds none.

    Raises:
        InvalidInput: no such plan was found.
    """
    ends = [k for k, op in enumerate(graph.operations) if k not in updates and not _is_read(graph, op)]
    late, needed = set[tuple[int, int, int]](), list[int]()
    for attempt in range(MOST_TRIES):
        waits = {(cause, k) for cause, _, k in late} if attempt != ONCE else set[tuple[int, int]]()
        if attempt == MOST_TRIES - 1:
            waits = {(end, k) for end in ends for k in updates}
        once = {reader for _, reader, _ in late} if attempt == ONCE else set[int]()
        tied, number = _tied(graph, waits, once)
        try:
            found, strategy = find(tied)
        except InvalidInput:
            if attempt == 0:
                raise
            continue
        order = [number[k] for k in found.order.tolist()]
        plan = Plan.from_order(graph, postponed(order, updates), budget_bytes)
        peak_bytes = _peak_bytes(graph, plan)
        if peak_bytes is not None and peak_bytes <= budget_bytes:
            return plan, strategy
        late |= set(_late(order, updates))
        needed += [] if peak_bytes is None else [peak_bytes]
    found_bytes = f": {format_size(min(needed))} were found to suffice" if needed else ""
    raise InvalidInput(
        f"no plan of '{graph.name}' within {format_size(budget_bytes)} updates each parameter after its last use"
        f"{found_bytes}; give a larger budget"
    )


def _peak_bytes(graph: Graph, plan: Plan) -> int | None:
    """None for a plan that became invalid because a gradient is held for longer, and computed once more meanwhile."""
    try:
        return simulate(graph, plan).peak_bytes
    except InvalidPlan:
        return None


def _late(order: Sequence[int], updates: Mapping[int, Update]) -> Iterator[tuple[int, int, int]]:
    """(the operation for whose sake it was repeated, a reader that was repeated after an update, that update)."""
    places = defaultdict[int, list[int]](list)
    for at, k in enumerate(order):
        places[k].append(at)
    firsts = sorted(at[0] for k, at in places.items() if k not in updates)
    for k, update in updates.items():
        for reader in update.readers:
            for at in (at for at in places[reader] if at > places[k][0]):
                i = bisect_left(firsts, at)
                if i < len(firsts):  # else the repetition served nothing
                    yield order[firsts[i]], reader, k


def _is_read(graph: Graph, op: Operation) -> bool:
    return any(graph.users[v] for v in op.outputs)


def _tied(graph: Graph, waits: Collection[tuple[int, int]], once: Collection[int]) -> tuple[Graph, list[int]]:
    """The graph with restrictions, and [N] the ids of its operations in `graph`.

    Args:
        waits: pairs of operations of which the second waits for the first.
        once: operations that run once.
    """
    token = {k: len(graph.values) + i for i, k in enumerate(sorted({first for first, _ in waits}))}
    tokens, behind = defaultdict[int, list[int]](list), {k: (k, 0, k) for k in range(len(graph))}
    for first, k in sorted(waits):
        tokens[k].append(token[first])
        behind[k] = max(behind[k], (first, 1, k))
    number = sorted(range(len(graph)), key=behind.__getitem__)

    def changed(k: int) -> Operation:
        op = graph.operations[k]
        outputs = (*op.outputs, token[k]) if k in token else op.outputs
        return replace(op, inputs=(*op.inputs, *tokens[k]), outputs=outputs, run_once=op.run_once or k in once)

    values = (*graph.values, *(Value(f"{graph.operations[k].name}.done", 0) for k in token))
    loss = None if graph.loss is None else number.index(graph.loss)
    return replace(graph, operations=tuple(map(changed, number)), values=values, loss=loss), number
