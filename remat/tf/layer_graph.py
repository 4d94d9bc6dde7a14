"""Keras-layer graphs as Checkmate's artifact makes them (Jain et al., MLSys 2020, section 6).

One operation per call of a layer, input layers dropped, then the loss (4 bytes per sample), then one gradient per
operation in reverse order. grad(i) reads the output of i, the outputs and gradients of its consumers, and the
loss if i is an output of the model; it is as large as the output of i.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from remat.errors import InvalidInput
from remat.graph import Graph, Operation, Value
from remat.tf.layer_work import Call, backward_work, forward_work, loss_work

LOSS_BYTES_PER_SAMPLE = 4
_ITEM_BYTES = {"bool": 1, "int8": 1, "uint8": 1, "bfloat16": 2, "complex64": 8, "complex128": 16}


def layer_graph(
    model: Any, *, batch_size: int, name: str, accounting: str = "exact", dtype: str | None = None
) -> Graph:
    """The uncosted training graph of a functional or sequential Keras model.

    `fixed_bytes` is 2P: parameters (moving statistics included) and as much for gradients; under exact
    accounting also the input batch. Nested models are inlined, a layer called several times is several
    operations, several outputs of a layer are several values.

    Args:
        model: a built `keras.Model` whose layer graph is known (functional, or sequential).
        batch_size: replaces the open batch axis.
        name: of the graph.
        accounting: ``exact`` or ``published`` (inputs not counted).
        dtype: counts every floating-point tensor and parameter as this type; None: as the model has them.

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
        fixed += sum(prod(walk.shape(tensor)) * walk.item_bytes(tensor) for tensor in network.inputs)
    return _training_graph(walk, outputs, name, fixed)


@dataclass(slots=True)
class _Node:
    """A call of a layer: ids of the values it reads and makes."""

    name: str
    call: Call
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(slots=True)
class _Walk:
    """Collects the calls of a model and of the models inside it, in Keras' order of execution."""

    batch_size: int
    dtype: str | None
    nodes: list[_Node] = field(default_factory=list)
    value_bytes: list[int] = field(default_factory=list)
    value_shapes: list[tuple[int, ...]] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)  # per value: something trainable is before it
    names: dict[str, int] = field(default_factory=dict)

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
        layer, reads, makes = node.operation, [values[id(t)] for t in node.input_tensors], []
        inputs = tuple(self.shape(t) for t in node.input_tensors)
        outputs = tuple(self.shape(t) for t in node.outputs)
        weights = {id(w): w for w in getattr(layer, "weights", ())}
        trainable = sum(self.weight_bytes(w) for w in getattr(layer, "trainable_weights", ()))
        before = any(v is not None and self.trained[v] for v in reads)
        call = Call(
            layer=layer,
            inputs=inputs,
            outputs=outputs,
            input_bytes=tuple(prod(s) * self.item_bytes(t) for s, t in zip(inputs, node.input_tensors, strict=True)),
            output_bytes=tuple(prod(s) * self.item_bytes(t) for s, t in zip(outputs, node.outputs, strict=True)),
            weight_bytes=sum(map(self.weight_bytes, weights.values())),
            trainable_bytes=trainable,
            needs_input_gradient=before,
            dtype=self._type_of(node.outputs[0]),
        )
        for tensor, shape, size in zip(node.outputs, outputs, call.output_bytes, strict=True):
            values[id(tensor)] = len(self.value_bytes)
            makes.append(len(self.value_bytes))
            self.value_bytes.append(size)
            self.value_shapes.append(shape)
            self.trained.append(before or trainable > 0)
        known = tuple(sorted({v for v in reads if v is not None}))
        self.nodes.append(_Node(self._unique(prefix + layer.name), call, known, tuple(makes)))

    def _unique(self, name: str) -> str:
        """The layer's name; from its second call on with the number of the call."""
        times = self.names[name] = self.names.get(name, 0) + 1
        return name if times == 1 else f"{name}#{times}"

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

    def weight_bytes(self, weight: Any) -> int:
        return prod(int(n) for n in weight.shape) * self.item_bytes(weight)

    def item_bytes(self, tensor: Any) -> int:
        dtype = self._type_of(tensor)
        if dtype in _ITEM_BYTES:
            return _ITEM_BYTES[dtype]
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
    """Keras' nodes of a functional model in the order of `model.layers`: by depth, then by layer."""
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
        Operation(node.name, node.call.kind, node.reads, node.makes, work=forward_work(node.call)) for node in nodes
    ]
    values = [
        Value(node.name if len(node.makes) == 1 else f"{node.name}:{j}", walk.value_bytes[v])
        for node in nodes
        for j, v in enumerate(node.makes)
    ]
    loss_bytes = LOSS_BYTES_PER_SAMPLE * walk.batch_size
    shapes = tuple(walk.value_shapes[v] for v in outputs)
    work = loss_work(shapes, sum(walk.value_bytes[v] for v in outputs), loss_bytes, nodes[-1].call.dtype)
    operations.append(Operation("Loss", "Loss", tuple(sorted(outputs)), (n_forward,), work=work))
    values.append(Value("Loss", loss_bytes))

    consumers: list[list[_Node]] = [[] for _ in range(n_forward)]
    for node in nodes:
        for v in node.reads:
            consumers[v].append(node)
    gradient: dict[int, int] = {}  # value -> its gradient's value
    of_loss = set(outputs)
    for node in reversed(nodes):
        reads = set(node.makes)
        for v in node.makes:
            if v in of_loss:
                reads.add(n_forward)
            for consumer in consumers[v]:
                reads.update(consumer.makes)
                reads.update(gradient[u] for u in consumer.makes)
        makes = tuple(range(len(values), len(values) + len(node.makes)))
        for j, v in enumerate(node.makes):
            gradient[v] = makes[j]
            label = f"{node.name}_backward" if len(makes) == 1 else f"{node.name}_backward:{j}"
            values.append(Value(label, walk.value_bytes[v]))
        work = backward_work(node.call)
        operations.append(
            Operation(
                f"{node.name}_backward",
                f"{node.call.kind}Grad",
                tuple(sorted(reads)),
                makes,
                is_backward=True,
                work=work,
            )
        )
    return Graph(
        name,
        tuple(operations),
        tuple(values),
        fixed_bytes,
        cost_unit="",
        loss=len(nodes),
        source="Keras layers, gradients mirrored",
    )
