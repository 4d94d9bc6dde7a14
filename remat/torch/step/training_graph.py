"""From a captured training graph to a `Graph`: values are storages, operations are ATen calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from remat.errors import InvalidInput, warn
from remat.graph import Graph, Operation, Value, Work, reached
from remat.implementation import Implementation
from remat.torch.implementations.logits import scaled_gradient
from remat.torch.internals import notes
from remat.torch.internals.autograd import storage_key
from remat.torch.internals.notes import is_in_backward
from remat.torch.internals.operators import schema_of, tree_iter, tree_map
from remat.torch.step.aot import is_sum, partly_undefined, undefined_calls
from remat.torch.step.capture import TrainingGraph, with_inputs
from remat.torch.step.loss import Needs
from remat.torch.step.runners import draws, is_random
from remat.torch.step.work import dense_bytes, kind_of, storage_bytes, tensor_bytes, tensors_of, users_of, work_of

aten = torch.ops.aten
UPDATE_KIND = "remat.update_buffers"
END_KIND = "remat.end_forward"
# Batch norm in training reads the running statistics only to make the next ones, and a repetition does not need
# these. Position of its `training` argument; -1 if it has none because it always trains.
_STATISTICS_ONLY = {"aten._native_batch_norm_legit_functional": 5, "aten._batch_norm_with_update_functional": -1}
_UNDECLARED_VIEWS = {"_unsafe_view"}  # alias their input, although their schema does not declare it


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's update of a parameter in the backward pass.

    Attributes:
        primal: index of the parameter among the primals.
        gradient: node of the training graph.
        readers: operations that read the parameter's storage.
    """

    primal: int
    gradient: fx.Node
    readers: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CapturedStep:
    """A graph and its traced calls, for executing its plans.

    Attributes:
        graph: for planning.
        training_graph: as captured.
        nodes: [N] calls of each operation; one, except for the last forward operation (`remat.update_buffers` or
            `remat.end_forward`), which computes small buffer contents and writes all of them back.
        storage: for every node its value id, None if it lives in fixed memory; a structure of these for a call with
            several outputs. A view has the id of its base.
        recipes: how (operation, implementation) is computed, for implementations other than the default one.
        updates: [operation] the update of a parameter that it is, see `remat.torch.resident.updates`.
    """

    graph: Graph
    training_graph: TrainingGraph
    nodes: tuple[tuple[fx.Node, ...], ...]
    storage: dict[fx.Node, Any]
    recipes: Mapping[tuple[int, str], Any] = field(default_factory=dict)
    updates: Mapping[int, Update] = field(default_factory=dict)


def graph_of(training_graph: TrainingGraph, name: str, fixed_tensors: tuple[torch.Tensor, ...] = ()) -> CapturedStep:
    """Build the graph of a captured step; costs are 0 and `Operation.work` is filled.

    Args:
        fixed_tensors: further tensors that are resident throughout, e.g. parameters that the step never reads.
    """
    return _Builder(training_graph, splits=False).build(name, fixed_tensors)


def split_graph_of(
    training_graph: TrainingGraph, name: str, fixed_tensors: tuple[torch.Tensor, ...] = ()
) -> CapturedStep:
    """As `graph_of`, for a module whose caller computes the loss from its outputs; operations may run in any order.

    One operation `remat.end_forward` represents everything between forward and backward: it reads the outputs, writes
    buffers back and produces the gradients of the outputs. The caller holds the outputs to the end of the step. They
    are therefore kept and their operations run once: freeing an output would free nothing, and recomputing it would
    make a second one. Values of 0 bytes tie operations that must keep their relative order (random and state-changing
    ones, readers of buffers before their update), so that every plan of scope ``free`` can be executed. A buffer whose
    old contents the backward pass reads is copied first. So is a gradient that PyTorch would copy itself,
    because two parameters share it or its layout is not the parameter's.
    """
    _warn_of_checkpointed_norms(training_graph)
    _copy_what_backward_reads(training_graph)
    _copy_what_accumulation_would(training_graph)
    return _Builder(training_graph, splits=True).build(name, fixed_tensors)


def end_of(graph: Graph) -> int:
    """The operation between the forward and the backward pass."""
    return next(k for k, op in enumerate(graph.operations) if op.kind == END_KIND)


def values_in(storage: Any) -> Iterator[int]:
    """Ids of the values in a part of `CapturedStep.storage`."""
    return (v for v in tree_iter(storage) if isinstance(v, int))


class _Builder:
    def __init__(self, training_graph: TrainingGraph, splits: bool):
        self.training_graph, self.splits, self.runner = training_graph, splits, training_graph.runner
        self.ordered: int | None = None  # token of the last operation that must keep its order
        self.before_end: list[int] = []  # tokens of readers of tensors that the end of the forward pass overwrites
        self.graph = training_graph.module.graph
        self.storage: dict[fx.Node, Any] = {}
        places = training_graph.places
        self.stale = {places[i] for i in training_graph.mutated}  # tensors that the step overwrites, and their views
        self.beside: dict[fx.Node, set[int]] = {}  # [view] values that it reads beside its base
        self.operations: list[Operation] = []
        self.calls: list[tuple[fx.Node, ...]] = []
        self.values: list[Value] = []

    def build(self, name: str, fixed_tensors: tuple[torch.Tensor, ...]) -> CapturedStep:
        needed = self._needed()
        updates = self._update_nodes()
        outputs = self.training_graph.outputs
        # Buffers are written back after the forward pass, or at the end if the backward pass reads their old contents.
        updated = not self.training_graph.mutated and not self.splits
        last = not self.splits and any(is_in_backward(user) for place in self.stale for user in place.users)
        for node in self._in_order():
            if node.op in ("placeholder", "get_attr"):
                self.storage[node] = None
            if node.op != "call_function" or node not in needed:
                continue
            if not updated and not last and is_in_backward(node):
                self._add_update(updates)
                updated = True
            if node.target is operator.getitem:
                (whole,) = node.all_input_nodes
                self.storage[node] = self.storage[whole][node.args[1]]
                if whole in self.stale:
                    self.stale.add(node)
            elif (base := _base(node)) is not None:
                root = self.storage[base]
                if base in self.stale:
                    self.stale.add(node)
                self.storage[node] = tree_map(lambda _, root=root: root, node.meta["val"])
                others = {v for source in node.all_input_nodes if source is not base for v in self._roots(source)}
                self.beside[node] = others | self.beside.get(base, set())
            elif node not in updates:
                self._add_call(node)
        if not updated:
            self._add_update(updates)
        kept = {self._root(node) for node in outputs[self.training_graph.n_mutations :] if node is not None} - {None}
        values = tuple(Value(v.name, v.bytes, i in kept) for i, v in enumerate(self.values))
        if self.splits:
            self._run_once_for_outputs(kept)
            loss = next(k for k, op in enumerate(self.operations) if op.kind == END_KIND)
        else:
            loss_value = self._root(outputs[self.training_graph.n_mutations])
            loss = next((k for k, op in enumerate(self.operations) if loss_value in op.outputs), None)
        graph = Graph(
            name=name,
            operations=tuple(self.operations),
            values=values,
            fixed_bytes=self._fixed_bytes(fixed_tensors),
            cost_unit="",
            loss=loss,
            source=f"joint training step captured by PyTorch {torch.__version__}",
        )
        return CapturedStep(graph, self.training_graph, tuple(self.calls), self.storage)

    def _run_once_for_outputs(self, kept: set[int | None]) -> None:
        """Let operations that make outputs run once, because the caller holds these; nobody holds gradients yet."""
        self.operations = [
            replace(op, run_once=True) if not op.is_backward and not kept.isdisjoint(op.outputs) else op
            for op in self.operations
        ]

    def _in_order(self) -> list[fx.Node]:
        """The nodes as traced, but with all that forward outputs depend on before the backward pass.

        The compiler makes views of outputs again at the very end of its trace.
        """
        forward = with_inputs(self.training_graph.outputs[: self.training_graph.n_forward_outputs])
        nodes = list(self.graph.nodes)
        first_backward = next((i for i, node in enumerate(nodes) if is_in_backward(node)), len(nodes))
        early = forward.union(nodes[:first_backward])
        return [n for n in nodes if n in early] + [n for n in nodes if n not in early]

    def _needed(self) -> set[fx.Node]:
        """Nodes on which an output depends, and random ones, because dropping a draw would shift the rest."""
        always = [node for node in self.graph.nodes if is_random(node) or _is_mutable(node)]
        return with_inputs([*self.training_graph.outputs, *always])

    def _update_nodes(self) -> set[fx.Node]:
        """Calls that read only fixed tensors and make only new buffer contents (batch norm's counter).

        Draws are left out: these keep their place among the other draws.
        """
        fresh = set(self.training_graph.outputs[: self.training_graph.n_mutations])
        rest = set(self.training_graph.outputs[self.training_graph.n_mutations :])
        return {
            node
            for node in fresh
            if node is not None
            and node.op == "call_function"
            and node.target is not operator.getitem
            and not is_random(node)
            and node not in rest
            and all(source.op == "placeholder" for source in node.all_input_nodes)
            and all(user.op == "output" for user in node.users)
        }

    def _add_update(self, updates: set[fx.Node]) -> None:
        """One operation that writes all new buffer contents back, at the end of the forward pass."""
        n_mutations = self.training_graph.n_mutations
        fresh = [node for node in self.training_graph.outputs[:n_mutations] if node is not None]
        calls = [node for node in self.graph.nodes if node in updates]
        read = {v for node in fresh if node not in updates for v in self._roots(node)}
        scratch = sum(tensor_bytes(t) for node in calls for t in tensors_of(node.meta["val"]))
        moved = 2 * sum(tensor_bytes(t) for node in fresh for t in tensors_of(node.meta["val"]))
        work = Work(flops=0, bytes_moved=moved, is_free=self.splits)
        for node in calls:
            self.storage[node] = None
        name, kind, tangents = "update_buffers", UPDATE_KIND, ()
        if self.splits:
            name, kind, tangents = "end_forward", END_KIND, self.training_graph.tangents
            returned = self.training_graph.outputs[n_mutations : self.training_graph.n_forward_outputs]
            read |= {v for node in returned if node is not None for v in self._roots(node)}
            read |= {*self.before_end, *([] if self.ordered is None else [self.ordered])}
        first = len(self.values)
        for node in tangents:
            self.storage[node] = len(self.values)
            self.values.append(Value(node.name, dense_bytes(node.meta["val"])))
        outputs = tuple(range(first, len(self.values)))
        self.operations.append(
            Operation(name, kind, tuple(sorted(read)), outputs, 0, scratch, run_once=True, work=work)
        )
        self.calls.append(tuple(calls))

    def _add_call(self, node: fx.Node) -> None:
        first = len(self.values)
        by_storage: dict[int, int] = {}

        def add(tensor: Any) -> int | None:
            if not isinstance(tensor, torch.Tensor):
                return None
            if tensor.layout is not torch.strided:
                raise InvalidInput(f"'{node.name}' makes a sparse tensor; let gradients be dense (sparse=False)")
            key = storage_key(tensor)
            if key not in by_storage:
                by_storage[key] = len(self.values)
                label = node.name if len(self.values) == first else f"{node.name}.{len(self.values) - first}"
                self.values.append(Value(label, storage_bytes(tensor)))
            return by_storage[key]

        self.storage[node] = tree_map(add, node.meta["val"])
        inputs = {v for source in node.all_input_nodes for v in (*self._roots(source), *self.beside.get(source, ()))}
        reads_stale = self._reads_stale(node)
        if self.splits:
            inputs |= self._tie(node, reads_stale)
        kind = kind_of(node)
        self.operations.append(
            Operation(
                name=node.name,
                kind=kind,
                inputs=tuple(sorted(inputs)),
                outputs=tuple(range(first, len(self.values))),
                is_backward=is_in_backward(node),
                run_once=_is_mutable(node) or reads_stale or (draws(node) and not self.runner.is_replayed(node)),
                work=work_of(node, kind),
            )
        )
        self.calls.append((node,))

    def _tie(self, node: fx.Node, reads_stale: bool) -> set[int]:
        """Give a call that must keep its place an output of 0 bytes; returns the ids that it must read to keep it."""
        keeps_order = self.runner.keeps_order(node) or _is_mutable(node)
        if not keeps_order and not reads_stale:
            return set()
        token, before = len(self.values), self.ordered
        self.values.append(Value(f"{node.name}.order", 0))
        if reads_stale:
            self.before_end.append(token)
        if not keeps_order:
            return set()
        self.ordered = token
        return set() if before is None else {before}

    def _reads_stale(self, node: fx.Node) -> bool:
        """Whether a repetition after the buffers are written back would give another result."""
        return not _moves_statistics(node) and not self.stale.isdisjoint(node.all_input_nodes)

    def _roots(self, node: fx.Node) -> Iterator[int]:
        return values_in(self.storage[node])

    def _root(self, node: fx.Node | None) -> int | None:
        return None if node is None else next(self._roots(node), None)

    def _fixed_bytes(self, tensors: tuple[torch.Tensor, ...]) -> int:
        """Parameters, buffers, inputs, constants of the graph and the tangent of the loss, each storage once."""
        constants = tuple(
            getattr(self.training_graph.module, str(node.target)) for node in self.graph.find_nodes(op="get_attr")
        )
        sizes = {}
        for tensor in (*tensors, *self.training_graph.primals, *constants):
            if isinstance(tensor, torch.Tensor):
                sizes[storage_key(tensor)] = storage_bytes(tensor)
        tangents = () if self.splits else self.training_graph.tangents
        return sum(sizes.values()) + sum(storage_bytes(n.meta["val"]) for n in tangents)


def _warn_of_checkpointed_norms(training_graph: TrainingGraph) -> None:
    """Warn if batch norms are inside of a checkpoint of the model's: PyTorch moves their statistics twice."""
    if any(_moves_statistics(node) and notes.is_checkpointed(node) for node in training_graph.module.graph.nodes):
        warn(
            "batch norms inside of the model's torch.utils.checkpoint move their statistics once in a planned step, "
            "and twice in PyTorch's own: leave these checkpoints out, which a plan does not need"
        )


def _moves_statistics(node: fx.Node) -> bool:
    """Whether a call is a batch norm in training."""
    at = _STATISTICS_ONLY.get(kind_of(node))
    return at is not None and (at < 0 or node.args[at] is True)


def _copy_what_backward_reads(training_graph: TrainingGraph) -> None:
    """Let readers of an overwritten buffer read a copy, if one of them is in the backward pass."""
    graph = training_graph.module.graph
    places = training_graph.places
    for index in training_graph.mutated:
        place = places[index]
        if not any(map(is_in_backward, reached(place.users, _users_of_view))):
            continue
        last = graph.find_nodes(op="placeholder")[-1]
        copy = _call_after(last, notes.FORWARD, aten.clone.default, place)
        place.replace_all_uses_with(
            copy, delete_user_cb=lambda user, copy=copy: user is not copy and user.op != "output"
        )


def _users_of_view(node: fx.Node) -> Iterable[fx.Node]:
    """What reads a view, which is made again in the backward pass; nothing of a call."""
    return node.users if _base(node) is not None or node.target is operator.getitem else ()


def _copy_what_accumulation_would(training_graph: TrainingGraph) -> None:
    """Clone gradients of leaves that `AccumulateGrad` would clone, by calls that a plan sees.

    It takes a gradient over if nobody else has it and its strides are those of a dense leaf, or contiguous.
    """
    first, (end,) = training_graph.n_forward_outputs, training_graph.module.graph.find_nodes(op="output")
    outputs, seen = list(training_graph.outputs), set[fx.Node]()
    for i, leaf in enumerate(training_graph.primals):
        node = outputs[first + i]
        if node is None or not isinstance(leaf, torch.Tensor) or not leaf.is_leaf:
            continue
        if node.meta["val"].layout is not torch.strided:
            continue  # refused later
        if node in seen or not _is_taken_over(node.meta["val"], leaf):
            outputs[first + i] = node = _copy_like(node, leaf)
        seen.add(node)
    end.args = (tuple(outputs),)


def _is_taken_over(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    if not _is_dense(leaf):
        return gradient.is_contiguous()
    sizes = zip(gradient.shape, gradient.stride(), leaf.stride(), strict=True)
    return all(size == 1 or own == wanted for size, own, wanted in sizes)


def _is_dense(tensor: torch.Tensor) -> bool:
    return aten.is_non_overlapping_and_dense.default(tensor)


def _copy_like(node: fx.Node, leaf: torch.Tensor) -> fx.Node:
    """A copy whose dimensions have the leaf's order in memory."""
    order = list(range(leaf.dim()))
    if _is_dense(leaf):
        order.sort(key=leaf.stride, reverse=True)
    back = [order.index(dim) for dim in range(leaf.dim())]
    ordered = _call_after(node, notes.BACKWARD, aten.permute.default, node, order)
    copy = _call_after(ordered, notes.BACKWARD, aten.clone.default, ordered, memory_format=torch.contiguous_format)
    return _call_after(copy, notes.BACKWARD, aten.permute.default, copy, back)


def _call_after(node: fx.Node, tag: str, target: Any, source: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    """A call on `source` in the pass `tag`, written after `node`."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(target, (source, *args), kwargs)
    made.meta = {"val": target(source.meta["val"], *args, **kwargs), **notes.in_pass(tag)}
    return made


def with_loss_outside(step: CapturedStep, needs: Callable[[list[torch.Tensor]], Needs]) -> tuple[Graph, Needs]:
    """(the graph with what a loss outside of the module needs, these needs).

    The end of the forward pass needs them as workspace, and makes a value of what the loss holds to the end of the
    step. For outputs that are views of one storage the backward pass takes one gradient; autograd adds it up from those
    of the views.

    Args:
        needs: of a loss of these outputs.
    """
    graph, several = step.graph, _views_of_outputs(step.training_graph)
    returned = [tangent for tangent in step.training_graph.tangents if _is_returned(tangent)]
    views = [view for nodes in several.values() for view in nodes]
    outside = needs([node.meta["val"] for node in (*returned, *views)])
    of_views = sum(dense_bytes(node.meta["val"]) for node in views)
    bases = [dense_bytes(base.meta["val"]) for base in several]
    only_bases = sum(dense_bytes(base.meta["val"]) for base in several if not _is_returned(base))
    end, operations = end_of(graph), list(graph.operations)
    left_out, held = ([], {}) if views else _left_out(step, returned, outside)
    unread = {step.storage[node]: dense_bytes(node.meta["val"]) for node in left_out}
    graph = replace(graph, values=tuple(replace(x, bytes=0) if v in unread else x for v, x in enumerate(graph.values)))
    for k, values in held.items():
        operations[k] = _reading(operations[k], values)
    most = max(
        operations[end].workspace_bytes, outside.most_bytes + of_views - only_bases + sum(unread.values()),
        outside.held_bytes + of_views + 2 * max(bases, default=0),
    )  # fmt: skip
    operations[end] = replace(operations[end], workspace_bytes=max(0, most - outside.held_bytes))
    graph = replace(graph, operations=tuple(operations))
    kept = Value("loss", outside.held_bytes, keep=True)
    return (_with_output(graph, end, kept) if outside.held_bytes else graph), outside


def _left_out(step: CapturedStep, tangents: list[fx.Node], outside: Needs) -> tuple[list[fx.Node], dict[int, set[int]]]:
    """(gradients of outputs that the loss does not differentiate, [operation] values that stand for copies there).

    Such gradients are zeros that are dropped when the backward pass begins. A sum of such a gradient and another one
    is the other one, whose layout may differ from the sum's. Kernels behind it may then copy it: the missing gradient
    is held as long. The same where a call reads zeros in its place.
    """
    missing = [node for node in tangents if outside.leaves_out(node.meta["val"])]
    if not missing:
        return [], {}
    training_graph = step.training_graph
    of_gradients, undefined = undefined_calls(training_graph.module.graph, training_graph.tangents, missing)
    pairs = [pair for pair in partly_undefined(of_gradients, undefined) if not _passes_through(*pair)]
    held: dict[int, set[int]] = {}
    for node, absent in pairs:
        behind = users_of(node)
        values = {v for x in absent if isinstance(v := step.storage[x], int)}
        for k in (k for k, nodes in enumerate(step.nodes) if behind.intersection(nodes)):
            held.setdefault(k, set()).update(values)
    return ([] if pairs else missing), held


def _reading(operation: Operation, values: set[int]) -> Operation:
    """The operation with further inputs, which are there while any of its implementations runs."""

    def more(one: Any) -> Any:
        return replace(one, inputs=tuple(sorted({*one.inputs, *(values - {*one.outputs})})))

    return more(replace(operation, implementations=tuple(map(more, operation.implementations))))


def _passes_through(node: fx.Node, absent: list[fx.Node]) -> bool:
    """Whether a call is a sum that one of its two gradients can stand for."""
    others: Any = [x for x in node.args if x is not absent[0]]
    return is_sum(node) and others[0].meta["val"].stride() == node.meta["val"].stride()


def _with_output(graph: Graph, k: int, value: Value) -> Graph:
    """The graph where operation `k` makes one more value; extra values of implementations stay the last ones."""
    at = len(graph.values) - graph.n_extra

    def moved(implementation: Implementation) -> Implementation:
        inputs, outputs = (tuple(v + (v >= at) for v in ids) for ids in (implementation.inputs, implementation.outputs))
        return replace(implementation, inputs=inputs, outputs=outputs)  # what it overwrites is no extra value

    operations = [replace(op, implementations=tuple(map(moved, op.implementations))) for op in graph.operations]
    operations[k] = replace(operations[k], outputs=(*operations[k].outputs, at))
    return replace(graph, operations=tuple(operations), values=(*graph.values[:at], value, *graph.values[at:]))


def _views_of_outputs(training_graph: TrainingGraph) -> dict[fx.Node, list[fx.Node]]:
    """The gradient of an output or of a base of outputs -> further outputs whose gradients are added to it."""
    outputs = training_graph.outputs[training_graph.n_mutations : training_graph.n_forward_outputs]
    descriptions = notes.descriptions_of_outputs(training_graph.module.graph)[training_graph.n_mutations :]
    output_of = dict(zip(descriptions, outputs, strict=False))
    differentiated = {
        output_of.get(notes.differentiated_output(tangent)): tangent for tangent in training_graph.tangents
    }
    tangent_of = {_differentiable_base(node): tangent for node, tangent in differentiated.items() if node is not None}
    views: dict[fx.Node, list[fx.Node]] = {}
    for node in outputs:
        base = None if node is None or node in differentiated else _differentiable_base(node)
        if node is not None and base in tangent_of:
            views.setdefault(tangent_of[base], []).append(node)
    return views


def _differentiable_base(node: fx.Node | None) -> fx.Node | None:
    """The base of a view, if gradients flow through the view to it; the node itself if it is no view."""
    while node is not None and (base := _base(node)) is not None:
        node = None if node.target is aten.detach.default else base
    return node


def _is_returned(tangent: fx.Node) -> bool:
    """Whether a gradient is of a tensor that the module returns itself, not only in views of it."""
    return notes.is_plain_output(notes.differentiated_output(tangent))


def _is_mutable(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _base(node: fx.Node) -> fx.Node | None:
    """The node whose storage this call's output is a view of; None for a real computation."""
    schema = schema_of(node.target)
    if node.target is scaled_gradient:  # in place
        return node.all_input_nodes[0]
    if schema is None or node.op != "call_function":
        return None
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    if views or schema.name.partition("::")[2] in _UNDECLARED_VIEWS:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    return None
