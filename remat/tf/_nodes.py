"""Single TensorFlow operations as plain data: attributes, signatures, and running one from its signature.

Private TensorFlow API in use (checked with 2.21.0): `op_def_registry.get` for the argument names of an operation,
and `Tensor._handle_data` for the shape of a variable.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from remat.errors import InvalidInput
from remat.graph import Work
from remat.tf._rules import OperationFacts, TensorFacts, flops

# up to this size constants are folded and written into signatures; larger ones are tensors
SMALL_CONSTANT_BYTES = 4096
# output i shares the storage of input i (IdentityN), or output 0 that of input 0
ALIASES = frozenset(
    {"Reshape", "Squeeze", "ExpandDims", "Identity", "IdentityN", "StopGradient", "PreventGradient", "EnsureShape"}
    | {"Bitcast"}
)
EMPTY_LISTS = frozenset({"EmptyTensorList", "TensorListReserve"})
_OPAQUE = ("resource", "variant", "string")  # element types without a size
# these call Python: they run in this process only
PYTHON_CALLS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_SHAPE_KINDS = frozenset({"Shape", "ShapeN", "Size", "Rank", "VariableShape"})
# these read the rows that they return, not the whole table
_GATHERS = frozenset({"GatherV2", "Gather", "GatherNd", "ResourceGather", "ResourceGatherNd"})
# stateful to TensorFlow's scheduler, but a second run changes nothing
_HARMLESS = frozenset({"ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd", "Placeholder"})


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Static shape; raises `InvalidInput` if a dimension is unknown."""
    if tensor.shape.is_fully_defined():
        return tuple(tensor.shape)
    for op in tensor.consumers():
        if op.type == "EnsureShape" and op.outputs[0].shape.is_fully_defined():
            return tuple(op.outputs[0].shape)
    origin = tensor
    while unknown := [t for t in origin.op.inputs if t.dtype.name not in _OPAQUE and t.shape.num_elements() is None]:
        origin = unknown[0]
    named = f"'{origin.name}' ({origin.op.type}) has no static shape ({origin.shape})"
    if origin.op.type == "Placeholder":
        raise InvalidInput(f"{named} once the batch size is fixed; give the network's inputs fixed sizes")
    if origin.op.type in PYTHON_CALLS:
        raise InvalidInput(
            f"{named}: TensorFlow does not know what Python returns; give its shape with tf.ensure_shape, or compute "
            "it before the step, e.g. in the dataset"
        )
    raise InvalidInput(f"{named}: its size depends on data; compute it before the step, e.g. in the dataset")


def bytes_of(tensor: Any) -> int:
    """Size of a tensor's storage; 0 for handles."""
    if tensor.dtype.name in _OPAQUE:
        return 0
    return math.prod(shape_of(tensor)) * tensor.dtype.size


def is_stateful(op: Any) -> bool:
    """Whether running `op` twice differs from running it once."""
    return bool(op.op_def.is_stateful) and op.type not in _HARMLESS


def attrs_of(op: Any) -> dict[str, Any] | None:
    """Attributes that the inputs do not imply, as plain data; None if one of them is a function or a tensor."""
    implied = {name for arg in op.op_def.input_arg for name in (arg.type_attr, arg.type_list_attr)}
    plain: dict[str, Any] = {}
    for declared in op.op_def.attr:
        if declared.name in implied or declared.name.startswith("_"):
            continue
        if declared.type in ("func", "list(func)", "tensor", "list(tensor)"):
            return None
        plain[declared.name] = _plain(op.get_attr(declared.name), declared.type)
    return plain


def _plain(value: Any, kind: str) -> Any:
    if kind.startswith("list("):
        return [_plain(element, kind[5:-1]) for element in value]
    if kind == "type":
        return value.name
    if kind == "shape":
        return None if value.unknown_rank else [d.size for d in value.dim]
    if kind == "string":
        return value.decode("latin-1") if isinstance(value, bytes) else value
    return value


def operand(tensor: Any, constant: np.ndarray | None) -> dict[str, Any]:
    """One entry of a signature's inputs: ``{"c": ..}`` for a small finite constant, else ``{"t": shape}``."""
    if (
        constant is not None
        and constant.nbytes <= SMALL_CONSTANT_BYTES
        and constant.dtype.kind in "biuf"
        and np.isfinite(constant).all()
    ):
        return {"c": constant.tolist(), "d": tensor.dtype.name}
    return {"t": list(shape_of(tensor)), "d": tensor.dtype.name}


def signature(op: Any, attrs: dict[str, Any] | None, operands: Sequence[dict[str, Any]]) -> str:
    """Canonical JSON from which `run_signature` rebuilds the operation; '' if it cannot be rebuilt."""
    if attrs is None or op.type in PYTHON_CALLS or any(t.dtype.name in _OPAQUE for t in (*op.inputs, *op.outputs)):
        return ""
    description = {
        "fw": "tensorflow", "op": op.type, "attrs": attrs, "inputs": list(operands), "outputs": len(op.outputs)
    }  # fmt: skip
    return json.dumps(description, sort_keys=True, separators=(",", ":"))


def work_of(op: Any, constants: dict[str, np.ndarray], size: Callable[[Any], int]) -> Work:
    """FLOPs, bytes moved and signature of one operation.

    Args:
        constants: folded tensors by name; reading them moves no bytes.
        size: bytes of a tensor's storage.
    """
    attrs = attrs_of(op)
    facts = OperationFacts(
        op.type, tuple(_facts(t, constants) for t in op.inputs), tuple(_facts(t, constants) for t in op.outputs),
        attrs or {},
    )  # fmt: skip
    written = sum(map(size, op.outputs))
    sources = {t.name: t for t in op.inputs if t.name not in constants}
    if op.type in _GATHERS:
        sources.pop(op.inputs[0].name, None)
        written *= 2
    operands = [operand(t, constants.get(t.name)) for t in op.inputs]
    floating = [t.dtype.name for t in (*op.outputs, *op.inputs) if t.dtype.is_floating]
    return Work(
        flops=flops(facts),
        bytes_moved=written + sum(map(size, sources.values())),
        dtype=floating[0] if floating else (*op.outputs, *op.inputs)[0].dtype.name,
        signature=signature(op, attrs, operands),
        is_free=op.type in EMPTY_LISTS,
    )


def _facts(tensor: Any, constants: dict[str, np.ndarray]) -> TensorFacts:
    constant = constants.get(tensor.name)
    if constant is not None:
        is_small = constant.nbytes <= SMALL_CONSTANT_BYTES
        return TensorFacts(constant.shape, tensor.dtype.name, constant.tolist() if is_small else None)
    shape = () if tensor.dtype.name in ("resource", "variant") else shape_of(tensor)
    return TensorFacts(shape, tensor.dtype.name)


def run_signature(description: dict[str, Any], tensors: Sequence[Any]) -> list[Any]:
    """Run the operation of a parsed signature eagerly and return its outputs.

    Args:
        description: the parsed signature.
        tensors: one per entry of ``description["inputs"]``; None where the entry is a constant.
    """
    import tensorflow as tf
    from tensorflow.python.framework import op_def_registry

    values = [
        tf.constant(entry["c"], dtype=entry["d"]) if "c" in entry and tensor is None else tensor
        for entry, tensor in zip(description["inputs"], tensors, strict=True)
    ]
    return run(op_def_registry.get(description["op"]), description["attrs"], values)


def run(op_def: Any, attrs: dict[str, Any], values: Sequence[Any]) -> list[Any]:
    """Run one operation eagerly through `tf.raw_ops`; a list argument takes several of the flat `values`."""
    import tensorflow as tf

    arguments: dict[str, Any] = {}
    counts = {arg.number_attr for arg in op_def.input_arg if arg.number_attr}
    n_lists = sum(1 for arg in op_def.input_arg if arg.type_list_attr)
    at = 0
    for arg in op_def.input_arg:
        if arg.number_attr:
            n = attrs[arg.number_attr]
        elif arg.type_list_attr:
            if n_lists > 1:
                raise InvalidInput(f"{op_def.name} takes several lists of tensors and cannot be rebuilt")
            n = len(values) - (len(op_def.input_arg) - 1)
        else:
            arguments[arg.name] = values[at]
            at += 1
            continue
        arguments[arg.name] = list(values[at : at + n])
        at += n
    arguments |= {name: value for name, value in attrs.items() if name not in counts}
    call = getattr(tf.raw_ops, op_def.name)
    # a few arguments have another name in Python (ExpandDims: dim -> axis); their order is the same
    names = [name for name in inspect.signature(call).parameters if name != "name"]
    renamed = dict(
        zip((a for a in arguments if a not in names), (n for n in names if n not in arguments), strict=False)
    )
    result = call(**{renamed.get(name, name): value for name, value in arguments.items()})
    if result is None or isinstance(result, tf.Operation):
        return []
    return list(result) if isinstance(result, (list, tuple)) else [result]


def fold_all(operations: Iterable[Any]) -> dict[str, np.ndarray]:
    """Tensor name -> value of every constant and of all results of small constants and static shapes."""
    constants: dict[str, np.ndarray] = {}
    for op in operations:
        folded = fold(op, [constants.get(t.name) for t in op.inputs])
        if folded is not None:
            constants |= {t.name: c for t, c in zip(op.outputs, folded, strict=True)}
    return constants


def fold(op: Any, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray] | None:
    """The outputs of `op` if they are small constants: shapes, and pure functions of small constants."""
    import tensorflow as tf

    if op.type == "Const":
        return [tf.make_ndarray(op.get_attr("value"))]
    if op.type in _SHAPE_KINDS:
        return _shapes(op)
    known = [c for c in inputs if c is not None]
    if op.op_def.is_stateful or not op.inputs or len(known) < len(inputs):
        return None
    attrs = attrs_of(op)
    sizes = [_known_bytes(t) for t in op.outputs]
    if attrs is None or None in sizes or sum(s for s in sizes if s) > SMALL_CONSTANT_BYTES:
        return None
    with tf.init_scope(), tf.device("CPU:0"):
        tensors = [tf.constant(c, dtype=t.dtype) for c, t in zip(known, op.inputs, strict=True)]
        return [t.numpy() for t in run(op.op_def, attrs, tensors)]


def integer_of(constant: np.ndarray | None) -> int | None:
    """The number in a scalar of integers; None for another or unknown tensor."""
    return int(constant) if constant is not None and constant.shape == () and constant.dtype.kind in "iu" else None


def _known_bytes(tensor: Any) -> int | None:
    if tensor.dtype.name in _OPAQUE:
        return None
    # shape arithmetic (BroadcastGradientArgs, Where) may have outputs of unknown but tiny size
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def _shapes(op: Any) -> list[np.ndarray] | None:
    found = []
    for source, out in zip(op.inputs, op.outputs, strict=True):
        dtype = out.dtype.as_numpy_dtype
        shape = variable_shape(source)[0] if op.type == "VariableShape" else source.shape
        if op.type == "Rank" and shape.rank is not None:
            found.append(np.asarray(shape.rank, dtype))
        elif shape.num_elements() is None:
            return None
        elif op.type == "Size":
            found.append(np.asarray(shape.num_elements(), dtype))
        else:
            found.append(np.asarray(shape.as_list(), dtype))
    return found


def variable_shape(handle: Any) -> tuple[Any, str]:
    """(static shape, name of the element type) of the variable behind a handle; an unknown shape has no rank."""
    import tensorflow as tf

    known = getattr(handle, "_handle_data", None)
    if known is None or not known.is_set:
        return tf.TensorShape(None), ""  # pyright: ignore[reportArgumentType]  (unknown rank)
    facts = known.shape_and_type[0]
    return tf.TensorShape(facts.shape), tf.as_dtype(facts.dtype).name
