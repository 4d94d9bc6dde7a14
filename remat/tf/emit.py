"""A plan as a TensorFlow graph: every computation a node, each waiting for the one before it.

TensorFlow frees a tensor after its last use, so the order alone executes the plan's frees. Aliases, constants and
variable reads are written at each use, because they hold no memory of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from remat.errors import InvalidInput
from remat.tf._nested import BRANCHES, LOOPS
from remat.tf.adapter import capture, executed_as_written, register_functions
from remat.tf.capture import CapturedStep
from remat.tf.operation_graph import StepReader


@dataclass(frozen=True, slots=True)
class EmittedStep:
    """A step as a GraphDef.

    Attributes:
        graph_def: nodes in the order of execution.
        arguments: placeholder of each argument and its ``tf.TensorSpec``, in the order of the traced function.
        captures: placeholder of each captured tensor, and the tensor (usually the handle of a variable).
        results: names of the result tensors.
        is_plan: the nodes form a chain that runs as written, in one thread if it has no loop.
    """

    graph_def: Any
    arguments: tuple[tuple[str, Any], ...]
    captures: tuple[tuple[str, Any], ...]
    results: tuple[str, ...]
    is_plan: bool = False

    def function(self) -> Callable[..., list[Any]]:
        """A `tf.function` of flat arguments that returns the flat results."""
        register_functions(self.graph_def)
        specs = [spec for _, spec in self.arguments]
        names = [name for name, _ in self.arguments]

        @tf.function(input_signature=specs, autograph=False)
        def planned_step(*values: Any) -> list[Any]:
            tensors = {f"{name}:0": value for name, value in zip(names, values, strict=True)}
            tensors |= {f"{name}:0": capture(tensor) for name, tensor in self.captures}
            wanted = [name for name in self.results if name not in tensors]
            imported = tf.graph_util.import_graph_def(self.graph_def, tensors, wanted, name="remat")
            tensors |= dict(zip(wanted, imported, strict=True))
            return [tensors[name] for name in self.results]

        function: Any = planned_step
        concrete = function.get_concrete_function()
        if not self.is_plan:
            return concrete
        one_by_one = not any(node.op in BRANCHES | LOOPS for node in self.graph_def.node)

        def run(*values: Any) -> list[Any]:
            with executed_as_written(one_by_one=one_by_one):
                return concrete(*values)

        return run


def emit_plain(function: Any) -> EmittedStep:
    """The traced function as it is."""
    arguments, captures = _inputs(function)
    results = tuple(t.name for t in function.outputs)
    return EmittedStep(function.graph.as_graph_def(), arguments, captures, results)


def emit(step: CapturedStep, order: Iterable[int]) -> EmittedStep:
    """The step with the operations of its graph computed in `order`, repeats included.

    Raises:
        InvalidInput: the order reads a value before it is computed, or a variable after it has changed.
    """
    writer = _Writer(step)
    for k in order:
        writer.run(step.nodes[k])
    arguments, captures = _inputs(step.function)
    results = tuple(writer.tensor(t) for t in step.function.outputs)
    _order_branches(writer.graph_def)
    return EmittedStep(writer.graph_def, arguments, captures, results, is_plan=True)


def _inputs(function: Any) -> tuple[tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]]:
    """Placeholders of the arguments with their specs, and of the captured tensors with the tensors.

    TensorFlow captures a small eager tensor as a constant of the trace. Such a constant is no placeholder.
    """
    captured = {inner.op.name for _, inner in function.graph.captures}
    captures = tuple(
        (inner.op.name, outer) for outer, inner in function.graph.captures if inner.op.type == "Placeholder"
    )
    arguments = tuple(
        (t.op.name, tf.TensorSpec(t.shape, t.dtype)) for t in function.graph.inputs if t.op.name not in captured
    )
    return arguments, captures


class _Writer:
    """Appends nodes to a GraphDef; `current` maps each traced tensor to the name of its newest copy."""

    def __init__(self, step: CapturedStep) -> None:
        self.reader = step.reader
        source = step.function.graph.as_graph_def()
        self.source = {node.name: node for node in source.node}
        self.graph_def = tf.compat.v1.GraphDef(versions=source.versions, library=source.library)
        self.current: dict[str, str] = {}
        self.copies: Counter[str] = Counter()
        self.previous = ""  # node that the next computation waits for
        self.alias_source: dict[str, tuple[str, ...]] = {}
        self.written: Counter[str] = Counter()  # by handle
        self.version = _versions(step.reader)
        self.reads: dict[str, list[Any]] = {}  # by handle
        self.held_reads: dict[str, str] = {}
        for op in step.reader.order:
            if op.type == "ReadVariableOp":
                for handle in self.reader.handles(op):
                    self.reads.setdefault(handle, []).append(op)
        for op in step.function.graph.get_operations():
            if op.type == "Placeholder":
                self._append(op, ())
                self.current[op.outputs[0].name] = f"{op.name}:0"

    def run(self, op: Any) -> None:
        """Append a computation that waits for the one before it."""
        changed = self.reader.written(op)
        if changed:
            self._hold_reads(changed)
        if any(self.written[h] != count for h, count in self.version.get(op.name, {}).items()):
            raise InvalidInput(f"the plan runs '{op.name}' ({op.type}) after its variable has changed")
        name = self._append(op, [self.tensor(t) for t in op.inputs], after=self.previous)
        self.previous = name
        for i, t in enumerate(op.outputs):
            self.current[t.name] = f"{name}:{i}"
        self.written.update(changed)

    def tensor(self, tensor: Any) -> str:
        """Name of the current copy of a traced tensor; a free operation is written here."""
        op = tensor.op
        if tensor.name in self.reader.constants:
            return self._constant(tensor)
        if tensor.name in self.reader.forwarded:
            return self.tensor(self.reader.forwarded[tensor.name])
        if op.type == "ReadVariableOp":
            return self._read(op)
        if op.type == "IdentityN":  # a node of it would need the other inputs too, which may not exist yet
            return self.tensor(op.inputs[tensor.value_index])
        if self.reader.is_free(op) and op.type != "Placeholder":
            inputs = tuple(self.tensor(t) for t in op.inputs)
            if self.alias_source.get(op.name) != inputs:
                name = self._append(op, inputs)
                self.alias_source[op.name] = inputs
                for i, t in enumerate(op.outputs):
                    self.current[t.name] = f"{name}:{i}"
        if tensor.name not in self.current:
            raise InvalidInput(f"the plan needs '{tensor.name}' ({op.type}) before it is computed")
        return self.current[tensor.name]

    def _constant(self, tensor: Any) -> str:
        name = f"constant/{tensor.name.replace(':', '_')}"
        if name not in self.current:
            node = self.graph_def.node.add(name=name, op="Const")
            node.attr["dtype"].type = tensor.dtype.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(
                tf.make_tensor_proto(self.reader.constants[tensor.name], dtype=tensor.dtype)
            )
            self.current[name] = f"{name}:0"
        return self.current[name]

    def _read(self, op: Any) -> str:
        ((handle, count),) = self.version[op.name].items()
        if self.written[handle] == count:
            # a read for each use, because a tensor that is held makes the next assignment copy the variable
            return f"{self._append(op, [self.tensor(op.inputs[0])], after=self.previous)}:0"
        if op.name not in self.held_reads:
            raise InvalidInput(f"the plan reads '{handle}' after it has changed")
        return self.held_reads[op.name]

    def _hold_reads(self, handles: set[str]) -> None:
        """Read now the contents that later nodes need from before the write that follows."""
        for handle in handles:
            for op in self.reads.get(handle, ()):
                if self.version[op.name][handle] == self.written[handle]:
                    name = self._append(op, [self.tensor(op.inputs[0])], after=self.previous)
                    self.held_reads[op.name] = f"{name}:0"

    def _append(self, op: Any, inputs: Sequence[str], after: str = "") -> str:
        copy = self.copies[op.name]
        self.copies[op.name] += 1
        node = self.graph_def.node.add()
        node.CopyFrom(self.source[op.name])
        node.name = op.name if copy == 0 else f"{op.name}/again_{copy}"
        for attribute in ("_class", "_output_shapes"):  # colocation with a node by its traced name
            node.attr.pop(attribute, None)
        if "parallel_iterations" in node.attr:
            node.attr["parallel_iterations"].i = 1  # parallel turns would hold the tensors of a random number of turns
        del node.input[:]
        node.input.extend(inputs)
        if after:
            node.input.append(f"^{after}")
        return node.name


def _versions(reader: StepReader) -> dict[str, dict[str, int]]:
    """Name of each operation -> {handle that it is given and does not change: number of writes before it}."""
    written: Counter[str] = Counter()
    found = {}
    for op in reader.order:
        changed = reader.written(op)
        unchanged = reader.handles(op) - changed
        if unchanged:
            found[op.name] = {handle: written[handle] for handle in unchanged}
        written.update(changed)
    return found


def _order_branches(graph_def: Any) -> None:
    """Give every ``If`` and ``Case`` functions whose operations wait for each other; changes `graph_def`.

    TensorFlow writes a branch into the graph around it. There its operations would run side by side, and what waits for
    the branch would wait for its side effects only. Both would take more memory than the plan counts.
    """
    known = {function.signature.name: function for function in graph_def.library.function}
    for node in graph_def.node:
        _order(node, graph_def.library, known)


def _order(node: Any, library: Any, known: dict[str, Any]) -> None:
    if node.op not in BRANCHES:
        return
    attrs = [node.attr[name] for name in ("then_branch", "else_branch", "branches") if name in node.attr]
    for function in [f for attr in attrs for f in (attr.list.func or [attr.func])]:
        name = f"{function.name}_in_order"  # the process may know the function by its own name already
        if name not in known:
            known[name] = _in_order(known[function.name], name, library, known)
        function.name = name


def _in_order(function: Any, name: str, library: Any, known: dict[str, Any]) -> Any:
    ordered = library.function.add()
    ordered.CopyFrom(function)
    ordered.signature.name = name
    previous = ""
    for node in _producers_first(ordered.node_def):
        _order(node, library, known)
        if node.op != "NoOp":  # only control edges lead to it
            if previous:
                node.input.append(f"^{previous}")
            previous = node.name
    if previous:
        ordered.signature.control_output.append("in_order")
        ordered.control_ret["in_order"] = previous
    return ordered


def _producers_first(nodes: Any) -> list[Any]:
    by_name = {node.name: node for node in nodes}
    ordered: dict[str, Any] = {}

    def visit(node: Any) -> None:
        for source in node.input:
            found = by_name.get(source.removeprefix("^").partition(":")[0])
            if found is not None and found.name not in ordered:
                visit(found)
        ordered[node.name] = node

    for node in nodes:
        if node.name not in ordered:
            visit(node)
    return list(ordered.values())
