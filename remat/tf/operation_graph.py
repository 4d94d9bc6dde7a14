"""Operation granularity for Keras 3 on TensorFlow: trace one training step, read its operations and storages.

The step is the forward pass in training mode, the loss, and the gradients of the trainable
variables. It has no optimizer, so `fixed_bytes` counts no optimizer state.
Nothing of the network is executed: the trace has symbolic inputs of a static batch size.

How the trace is read:

* A value is a storage. Reshape, Squeeze, ExpandDims, Identity, StopGradient and the like are
  aliases, not values; their users depend on the base.
* Variable reads and constants are no operations: they are free, never repeated and part of `fixed_bytes`.
  Pure functions of small constants (the shape arithmetic that becomes static with the batch) are
  folded when their result is at most 4 KiB, as TensorFlow's own constant folding does.
* A variable that is read after it was assigned is an alias of the assigned tensor.
* Operations that change state (variable assignment, stateful random numbers) run once.
  Keras 3's dropout draws from a seed that it reads first, so it can be repeated.
* Nested functions are inlined. A loop (a recurrent layer) is one opaque operation with the FLOPs of
  all its turns. The tensor lists that it fills are values of their full length. Branches (`tf.cond`) are
  one opaque operation with the memory of the largest branch.
* Operations that neither the loss, nor a gradient, nor a state update needs are pruned.

TensorFlow is imported on first use. Checked with TensorFlow 2.21.0 and Keras 3.15.1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from remat.errors import InvalidInput
from remat.graph import Graph, Operation, Value, Work, reached
from remat.tf import _nodes as nodes
from remat.tf._keras import check_backend
from remat.tf._loops import Loop, read_loop
from remat.tf._nested import BRANCHES, LOOPS, Branches, changes_state, read_branches, written

_LARGE_CONSTANT_BYTES = 1024
_SOURCE = "TensorFlow training step: forward, loss and gradients, no optimizer"
_COMPUTE_POLICY = {"float32": "float32", "float16": "mixed_float16", "bfloat16": "mixed_bfloat16", "float64": "float64"}


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A traced training step and the graph read from it.

    Attributes:
        graph: operations and values.
        function: the ``ConcreteFunction``. Its arguments are the input batches, then one label batch per
            model output; its results are the loss, then the tensors of the gradients.
        nodes: [N] the ``tf.Operation`` behind each operation.
        tensors: [V] the ``tf.Tensor`` behind each value.
    """

    graph: Graph
    function: Any
    nodes: tuple[Any, ...]
    tensors: tuple[Any, ...]


def operation_graph(model: Any, batch_size: int, name: str | None = None, dtype: str | None = None) -> Graph:
    """The graph of one training step of a Keras model, one operation per TensorFlow operation.

    The step differentiates sparse categorical cross-entropy over the last axis (integer labels), or the mean squared
    error where that axis has one element.

    Costs are 0 and `Operation.work` is filled; gradients and the loss are `keep` values;
    `fixed_bytes` holds variables, the batch with its labels, and large constants (no optimizer state).

    Args:
        model: a built Keras model with symbolic inputs, on the TensorFlow backend.
        batch_size: samples per step.
        name: of the graph; by default ``{model.name}_b{batch_size}_ops``.
        dtype: type that the activations must have, by default the model's own. float16 and bfloat16 need a
            model built under the policy ``mixed_float16`` or ``mixed_bfloat16``.

    Raises:
        InvalidInput: batch size, dtype, or a model without static shapes.
        MissingPackage: TensorFlow or Keras is not installed.
    """
    return trace_step(model, batch_size, name, dtype).graph


def trace_step(model: Any, batch_size: int, name: str | None = None, dtype: str | None = None) -> TracedStep:
    """As `operation_graph`, with the trace itself; same arguments and errors."""
    _check(model, batch_size, dtype)
    function = _trace(model, batch_size)
    name = f"{model.name}_b{batch_size}_ops" if name is None else name
    variable_bytes = sum(math.prod(v.shape) * v.value.dtype.size for v in model.variables)
    return StepReader(function, name, variable_bytes).read()


def _check(model: Any, batch_size: int, dtype: str | None) -> None:
    check_backend()
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidInput(f"batch_size must be a positive integer, not {batch_size!r}")
    if dtype is not None and dtype not in _COMPUTE_POLICY:
        raise InvalidInput(f"dtype '{dtype}' is not supported; use {', '.join(_COMPUTE_POLICY)}")
    if not getattr(model, "inputs", None) or not getattr(model, "outputs", None):
        raise InvalidInput("the Keras model has no symbolic inputs: build it as a functional or Sequential model")
    found = {layer.compute_dtype for layer in model.layers if layer.weights}
    if dtype is not None and found and found != {dtype}:
        raise InvalidInput(
            f"the model computes in {'/'.join(sorted(found))}, not {dtype}: build it after "
            f"keras.config.set_dtype_policy('{_COMPUTE_POLICY[dtype]}')"
        )


@contextmanager
def nested_functions_inlined():
    """Make nested `tf.function`s run their Python bodies, so that the trace holds operations instead of calls."""
    import tensorflow as tf

    before = tf.config.functions_run_eagerly()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _trace(model: Any, batch_size: int) -> Any:
    import keras
    import tensorflow as tf

    from remat.tf._objective import differentiate, total_loss

    inputs = [tf.TensorSpec(_shape(t, batch_size, "input"), t.dtype, name=f"input_{t.name}") for t in model.inputs]
    labels = [_label_spec(t, batch_size) for t in model.outputs]
    structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input

    def step(inputs: Sequence[Any], labels: Sequence[Any]) -> tuple[Any, list[Any]]:
        _, total, gradients = differentiate(
            model, tf.nest.pack_sequence_as(structure, inputs),
            lambda prediction: total_loss(model, _loss, labels, tf.nest.flatten(prediction)),
        )  # fmt: skip
        return total, [g for g in gradients if g is not None]

    with nested_functions_inlined():
        return tf.function(step, autograph=False).get_concrete_function(inputs, labels)


def _shape(tensor: Any, batch_size: int, what: str) -> tuple[int, ...]:
    shape = (batch_size, *tensor.shape[1:])
    if None in shape:
        raise InvalidInput(f"{what} '{tensor.name}' has unknown sizes {shape[1:]}: build the model with an input size")
    return shape


def _label_spec(tensor: Any, batch_size: int) -> Any:
    import tensorflow as tf

    shape = _shape(tensor, batch_size, "output")
    if len(shape) > 1 and shape[-1] > 1:
        return tf.TensorSpec(shape[:-1], "int32", name="labels")
    return tf.TensorSpec(shape, "float32", name="labels")


def _loss(labels: Any, prediction: Any) -> Any:
    import keras
    import tensorflow as tf

    if prediction.shape.rank < 2 or prediction.shape[-1] == 1:
        return keras.losses.mean_squared_error(labels, prediction)
    source = prediction.op
    while source.type in nodes.ALIASES or source.type == "Cast":
        source = source.inputs[0].op
    prediction = tf.cast(prediction, "float32") if prediction.dtype.size < 4 else prediction
    return keras.losses.sparse_categorical_crossentropy(labels, prediction, from_logits=source.type != "Softmax")


class StepReader:
    """Turns one traced function into a `Graph`; used once.

    Attributes:
        order: live operations in the order of creation, the free ones included.
        constants: tensor name -> folded value.
        forwarded: name of the result of a ``ReadVariableOp`` after an assignment -> the assigned tensor.
        loops, branches: by name of the operation.
    """

    def __init__(self, function: Any, name: str, variable_bytes: int):
        """Read the operations; `variable_bytes` are those of variables (and optimizer state, if any)."""
        self.function, self.name, self.variable_bytes = function, name, variable_bytes
        self.trace = function.graph
        self.constants = nodes.fold_all(self.trace.get_operations())
        self.loops: dict[str, Loop] = {}
        self.branches: dict[str, Branches] = {}
        self.forwarded: dict[str, Any] = {}
        writes = [op for op in self.trace.control_outputs if changes_state(op)]
        live = self.with_ancestors([*(t.op for t in self.function.outputs), *writes])
        self.order = _producers_first([op for op in self.trace.get_operations() if op in live])
        for op in self.order:
            if op.type in LOOPS:
                self.loops[op.name] = read_loop(
                    op, lambda i, op=op: self._integer(op.inputs[i]),
                    lambda i, op=op: self._bytes(self.base(op.inputs[i])),
                )  # fmt: skip
            elif op.type in BRANCHES:
                self.branches[op.name] = read_branches(op)
        self.forwarded = self._forwarded()

    def read(self, order: Sequence[Any] | None = None, loss: Any = None, source: str = _SOURCE) -> TracedStep:
        """The graph.

        Args:
            order: another executable order of `self.order`, for the operations of the graph.
            loss: the loss, by default the first result; operations after its producer are ``is_backward``.
        """
        traced = tuple(op for op in (self.order if order is None else order) if not self.is_free(op))
        tensors = tuple(t for op in traced for t in op.outputs)
        value_of = {t.name: v for v, t in enumerate(tensors)}
        kept = {self.base(t).name for t in self.function.outputs}
        values = tuple(Value(t.name, self._bytes(t), keep=t.name in kept) for t in tensors)
        loss_op = self.base(self.function.outputs[0] if loss is None else loss).op
        if loss_op not in traced:
            raise InvalidInput("the loss does not depend on the network's operations: nothing to trace")
        loss_at = traced.index(loss_op)
        operations = tuple(self._operation(op, value_of, k > loss_at) for k, op in enumerate(traced))
        read = {base.name for op in traced for t in op.inputs for base in self.storages(t)}
        constants = [self.constants[name].nbytes for name in read & self.constants.keys()]
        fixed_bytes = self.variable_bytes + sum(map(nodes.bytes_of, self._placeholders()))
        fixed_bytes += sum(size for size in constants if size > _LARGE_CONSTANT_BYTES)
        graph = Graph(self.name, operations, values, fixed_bytes, "", loss_at, source=source)
        return TracedStep(graph, self.function, traced, tensors)

    def _operation(self, op: Any, value_of: Mapping[str, int], is_backward: bool) -> Operation:
        bases = [base.name for t in op.inputs for base in self.storages(t)]
        read = {value_of[name] for name in bases if name in value_of}
        opaque = self.loops.get(op.name) or self.branches.get(op.name)
        return Operation(
            op.name, op.type, tuple(sorted(read)), tuple(value_of[t.name] for t in op.outputs),
            is_backward=is_backward, workspace_bytes=opaque.workspace_bytes if opaque else 0,
            run_once=changes_state(op), work=self._work(op),
        )  # fmt: skip

    def with_ancestors(self, operations: Iterable[Any]) -> set[Any]:
        """The operations and all operations that lead to them; constants lead nowhere."""
        return {*reached(operations, lambda op: [t.op for t in self.inputs(op) if t.name not in self.constants])}

    def _forwarded(self) -> dict[str, Any]:
        assigned: dict[str, Any] = {}  # by handle; None after a change that is no plain assignment
        found = {}
        for op in self.order:
            if op.type == "AssignVariableOp":
                assigned[op.inputs[0].name] = op.inputs[1]
            elif op.type == "ReadVariableOp" and assigned.get(op.inputs[0].name) is not None:
                found[op.outputs[0].name] = assigned[op.inputs[0].name]
            else:
                assigned.update(dict.fromkeys(t.name for t in written(op)))
        return found

    def inputs(self, op: Any) -> Sequence[Any]:
        """Tensors that `op` reads; for a read after an assignment the assigned tensor."""
        result = op.outputs[0].name if op.outputs else ""
        return [self.forwarded[result]] if result in self.forwarded else op.inputs

    def is_free(self, op: Any) -> bool:
        """Whether `op` is an alias, a read, a constant or an argument, and so no operation of the graph."""
        if op.type in nodes.ALIASES or op.type in ("Placeholder", "ReadVariableOp", "NoOp"):
            return True
        return bool(op.outputs) and all(t.name in self.constants for t in op.outputs)

    def written(self, op: Any) -> set[str]:
        """Names of the handles of variables that `op` changes, or that one of its branches changes."""
        return {self.base(t).name for t in written(op)}

    def handles(self, op: Any) -> set[str]:
        """Names of the handles of variables among the inputs of `op`."""
        return {self.base(t).name for t in self.inputs(op) if t.dtype.name == "resource"}

    def contents(self, op: Any) -> set[str]:
        """Names of the handles of variables whose contents are inputs of `op`."""
        sources = [t.op for t in map(self.base, self.inputs(op)) if t.op.type == "ReadVariableOp"]
        return {self.base(source.inputs[0]).name for source in sources}

    def base(self, tensor: Any) -> Any:
        """The tensor whose storage `tensor` is."""
        return self.storages(tensor)[-1]

    def _step_to_base(self, tensor: Any) -> Any:
        if tensor.name not in self.constants:
            op, i = tensor.op, tensor.value_index
            if tensor.name in self.forwarded:
                return self.forwarded[tensor.name]
            if op.type in nodes.ALIASES:
                return op.inputs[i if op.type == "IdentityN" else 0]
            if op.name in self.loops and self.loops[op.name].alias_of[i] is not None:
                return op.inputs[self.loops[op.name].alias_of[i]]
        return tensor

    def storages(self, tensor: Any) -> list[Any]:
        """The outputs of loops (of 0 bytes) that lead to the tensor whose storage `tensor` is, then that tensor."""
        found = []
        while (base := self._step_to_base(tensor)) is not tensor:
            if tensor.op.name in self.loops:
                found.append(tensor)
            tensor = base
        return [*found, tensor]

    def _bytes(self, tensor: Any) -> int:
        """Storage of a tensor or a tensor list; 0 for handles of variables."""
        op = tensor.op
        opaque = self.loops.get(op.name) or self.branches.get(op.name)
        if opaque:
            return opaque.output_bytes[tensor.value_index]
        if tensor.dtype.name != "variant" or op.type in nodes.EMPTY_LISTS:
            return nodes.bytes_of(tensor)
        return max((self._bytes(self.base(t)) for t in op.inputs), default=0)

    def _integer(self, tensor: Any) -> int | None:
        """A scalar that is known before the step; for a loop's counter its value after the last turn."""
        base = self.base(tensor)
        if base.op.name in self.loops:
            return self.loops[base.op.name].counters[base.value_index]
        return nodes.integer_of(self.constants.get(base.name))

    def _placeholders(self) -> list[Any]:
        """The batch, and the outer tensors other than variables that the step reads; small ones are constants."""
        captured, live = self.trace.internal_captures, set(self.order)
        ids = set(map(id, captured))
        batch = [t for t in self.trace.inputs if id(t) not in ids]
        return batch + [t for t in captured if t.op.type == "Placeholder" and t.op in live]

    def _work(self, op: Any) -> Work:
        loop = self.loops.get(op.name)
        if loop is None:
            return nodes.work_of(op, self.constants, lambda t: self._bytes(self.base(t)))
        floating = [t.dtype.name for t in op.outputs if t.dtype.is_floating]
        return Work(loop.flops, loop.bytes_moved, floating[0] if floating else "float32")


def _producers_first(operations: Sequence[Any]) -> list[Any]:
    """In the given order, except that the producers of an operation's inputs come before it.

    The gradient of a loop adds inputs to the loop. Their producers are younger than the loop.
    """
    wanted, done, ordered = set(operations), set(), []
    for op in operations:
        todo = [op]
        while todo:
            late = [t.op for t in todo[-1].inputs if t.op in wanted and t.op not in done]
            if late:
                todo += late
                continue
            op = todo.pop()
            if op not in done:
                done.add(op)
                ordered.append(op)
    return ordered
