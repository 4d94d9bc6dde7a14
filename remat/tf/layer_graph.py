"""Keras-layer graphs as Checkmate's artifact makes them (Jain et al., MLSys 2020, section 6).

The operations are the calls of layers (input layers dropped), then the loss (4 bytes per sample), then one gradient
per call in reverse order. grad(i) reads the output of i, the outputs and gradients of its consumers, and the loss
if i is an output of the model. It is as large as the output of i.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from remat.errors import InvalidInput
from remat.graph import Graph, Operation, Value
from remat.tf.layer_work import Call, backward_work, forward_work, loss_work

LOSS_BYTES_PER_SAMPLE = 4


def layer_graph(
    model: Any, *, batch_size: int, name: str, accounting: str = "exact", dtype: str | None = None
) -> Graph:
    """The uncosted training graph of a functional or sequential Keras model.

    `fixed_bytes` is 2P, for parameters (moving statistics included) and gradients; under exact accounting also
    the input batch. Nested models are inlined. A layer called several times is several operations. Several outputs
    of a layer are several values.

    Args:
        model: a built `keras.Model`, functional or sequential.
        batch_size: replaces the open batch axis.
        name: of the graph.
        accounting: ``exact`` or ``published`` (inputs not counted).
        dtype: type as which every floating-point tensor and parameter counts; None: the model's own.

    Raises:
        InvalidInput: a subclassed model, an open axis other than the batch, a fixed batch of another size.
    """
    if accounting not in ("exact", "published"):
        raise InvalidInput(f"accounting must be exact or published, not '{accounting}'")
    walk = _Walk(batch_size, dtype)
    network = _functional(model)
    if network is None:
        raise InvalidInput(
            f"{name}: {type(model).__name__} is a subclassed model without a layer graph; use granularity=operation"
        )
    values: dict[int, int | None] = {id(tensor): None for tensor in network.inputs}
    walk.visit(network, values, prefix="")
    outputs = list(dict.fromkeys(v for v in (values[id(t)] for t in network.outputs) if v is not None))
    fixed = 2 * sum(walk.weight_bytes(weight) for weight in model.weights)
    if accounting == "exact":
        fixed += sum(map(walk.tensor_bytes, network.inputs))
    return _training_graph(walk, outputs, name, fixed)


@dataclass(slots=True)
class _Node:
    """A call of a layer, with the ids of its input and output values."""

    name: str
    call: Call
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(slots=True)
class _Walk:
    """Collects the calls of a model and of the models inside it, in Keras' order of execution."""

    batch_size: int
    dtype: str | None
    nodes: list[_Node] = field(default_factory=list)
    value_bytes: list[int] = field(default_factory=list)
    value_shapes: list[tuple[int, ...]] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)  # per value: whether anything before it is trainable
    names: Counter[str] = field(default_factory=Counter)

    def visit(self, network: Any, values: dict[int, int | None], prefix: str) -> None:
        """Append the calls of `network`; `values` maps tensors (by id) to values, None for network inputs."""
        for node in _calls(network):
            inner = _functional(node.operation)
            if inner is None:
                self._append(node, values, prefix)
                continue
            given = node.input_tensors
            if len(given) != len(inner.inputs):
                raise InvalidInput(f"{prefix}{inner.name} takes {len(inner.inputs)} inputs, but is given {len(given)}")
            inside = {id(a): values[id(b)] for a, b in zip(inner.inputs, given, strict=True)}
            self.visit(inner, inside, f"{prefix}{node.operation.name}/")
            for ours, theirs in zip(node.outputs, inner.outputs, strict=True):
                values[id(ours)] = inside[id(theirs)]

    def _append(self, node: Any, values: dict[int, int | None], prefix: str) -> None:
        layer, read = node.operation, [values[id(t)] for t in node.input_tensors]
        outputs = tuple(map(self.shape, node.outputs))
        output_bytes = list(map(self.tensor_bytes, node.outputs))
        weights = {id(w): w for w in getattr(layer, "weights", ())}
        trainable = sum(self.weight_bytes(w) for w in getattr(layer, "trainable_weights", ()))
        known = sorted({v for v in read if v is not None})
        before = any(self.trained[v] for v in known)
        call = Call(
            layer=layer,
            inputs=tuple(map(self.shape, node.input_tensors)),
            outputs=outputs,
            input_bytes=sum(map(self.tensor_bytes, node.input_tensors)),
            output_bytes=sum(output_bytes),
            weight_bytes=sum(map(self.weight_bytes, weights.values())),
            trainable_bytes=trainable,
            needs_input_gradient=before,
            dtype=self._type_of(node.outputs[0]),
        )
        written = range(len(self.value_bytes), len(self.value_bytes) + len(outputs))
        values.update({id(tensor): v for tensor, v in zip(node.outputs, written, strict=True)})
        self.value_bytes += output_bytes
        self.value_shapes += outputs
        self.trained += [before or trainable > 0] * len(outputs)
        self.nodes.append(_Node(self._unique(prefix + layer.name), call, tuple(known), tuple(written)))

    def _unique(self, name: str) -> str:
        """The layer's name; from its second call on with the number of the call."""
        self.names[name] += 1
        return name if self.names[name] == 1 else f"{name}#{self.names[name]}"

    def shape(self, tensor: Any) -> tuple[int, ...]:
        """Shape with the batch size filled in."""
        shape = tuple(tensor.shape)
        if shape and shape[0] is None:
            shape = (self.batch_size, *shape[1:])
        if None in shape:
            raise InvalidInput(f"tensor '{tensor.name}' has an open axis, shape {tensor.shape}; give input_size")
        if any(n <= 0 for n in shape):
            raise InvalidInput(f"tensor '{tensor.name}' would be empty, shape {shape}; the input is too small")
        return tuple(int(n) for n in shape)

    def tensor_bytes(self, tensor: Any) -> int:
        return prod(self.shape(tensor)) * self.item_bytes(tensor)

    def weight_bytes(self, weight: Any) -> int:
        return prod(int(n) for n in weight.shape) * self.item_bytes(weight)

    def item_bytes(self, tensor: Any) -> int:
        dtype = self._type_of(tensor)
        if dtype == "bool":
            return 1
        bits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
        if not bits.isdigit():
            raise InvalidInput(f"tensor '{tensor.name}' has type {dtype}, whose size is not known")
        return int(bits) // 8

    def _type_of(self, tensor: Any) -> str:
        own = getattr(tensor.dtype, "name", tensor.dtype)
        return self.dtype if self.dtype and "float" in own else own


def _functional(model: Any) -> Any:
    """The functional model behind `model` (a sequential model wraps one); None for anything else."""
    network = getattr(model, "_functional", None) or model
    return network if hasattr(network, "_nodes_by_depth") else None


def _calls(network: Any) -> Iterator[Any]:
    """The layer calls of a functional model, as Keras' nodes: by depth, at equal depth in the order of layers."""
    rank = {id(operation): i for i, operation in enumerate(network.operations)}
    for depth in sorted(network._nodes_by_depth, reverse=True):
        for node in sorted(network._nodes_by_depth[depth], key=lambda node: rank.get(id(node.operation), -1)):
            if not node.is_input:
                yield node


def _training_graph(walk: _Walk, outputs: list[int], name: str, fixed_bytes: int) -> Graph:
    """Forward operations, loss, mirrored gradients; value ids follow the operations."""
    nodes, n_forward = walk.nodes, len(walk.value_bytes)
    if not outputs:
        raise InvalidInput(f"{name}: the model has no layer between its inputs and outputs")
    operations = [
        Operation(node.name, node.call.kind, node.inputs, node.outputs, work=forward_work(node.call)) for node in nodes
    ]
    values = [Value(part, walk.value_bytes[v]) for node in nodes for part, v in _labelled(node.name, node.outputs)]
    loss_bytes = LOSS_BYTES_PER_SAMPLE * walk.batch_size
    shapes = tuple(walk.value_shapes[v] for v in outputs)
    work = loss_work(shapes, sum(walk.value_bytes[v] for v in outputs), loss_bytes, nodes[-1].call.dtype)
    operations.append(Operation("Loss", "Loss", tuple(sorted(outputs)), (n_forward,), work=work))
    values.append(Value("Loss", loss_bytes))

    consumers: list[list[_Node]] = [[] for _ in range(n_forward)]
    for node in nodes:
        for v in node.inputs:
            consumers[v].append(node)
    gradient: dict[int, int] = {}  # value -> value of its gradient
    for node in reversed(nodes):
        label, read = f"{node.name}_backward", set(node.outputs)
        for v in node.outputs:
            if v in outputs:
                read.add(n_forward)
            for consumer in consumers[v]:
                read.update(consumer.outputs)
                read.update(gradient[u] for u in consumer.outputs)
        written = tuple(range(len(values), len(values) + len(node.outputs)))
        gradient.update(zip(node.outputs, written, strict=True))
        values += [Value(part, walk.value_bytes[v]) for part, v in _labelled(label, node.outputs)]
        operations.append(
            Operation(label, f"{node.call.kind}Grad", tuple(sorted(read)), written, is_backward=True,
                      work=backward_work(node.call))
        )  # fmt: skip
    return Graph(
        name,
        tuple(operations),
        tuple(values),
        fixed_bytes,
        cost_unit="",
        loss=len(nodes),
        source="Keras layers, gradients mirrored",
    )


def _labelled(name: str, outputs: tuple[int, ...]) -> list[tuple[str, int]]:
    """(label, output) pairs: the name alone, or numbered where there are several outputs."""
    return [(name if len(outputs) == 1 else f"{name}:{j}", v) for j, v in enumerate(outputs)]
