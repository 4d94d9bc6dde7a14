"""Loops of a traced TensorFlow function (recurrent layers) as single opaque operations.

A loop's outputs are tensors and tensor lists. The storage of a list is its elements, one for each turn of the
loop. The number of turns is the loop's `maximum_iterations`, which Keras sets to the sequence length.

Private TensorFlow API in use (checked with 2.21.0): `Operation._body_graph`, the loop's body as traced; where that is
missing, `Graph._get_function` and `function_def_to_graph` rebuild it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat.errors import InvalidInput
from remat.tf import _nodes as nodes

LOOPS = frozenset({"While", "StatelessWhile"})
_LIST_WRITES = {"TensorListSetItem": 2, "TensorListPushBack": 1}  # position of the written element
_REFERENCES = frozenset({"ReadVariableOp", "TensorListGetItem"})  # their output shares the storage of their input


@dataclass(frozen=True, slots=True)
class Loop:
    """Memory and work of a loop.

    Attributes:
        turns: number of iterations.
        alias_of: for each output the input whose storage it shares (a loop invariant, or a list of
            references to a variable or to another list's elements), or None.
        output_bytes: of each output; 0 for aliases.
        workspace_bytes: peak of one turn without the loop's inputs and outputs.
        flops: of all turns; None where an operation of the body has no rule or no static shape.
        bytes_moved: of all turns.
        changes_state: an iteration has an effect other than its outputs.
    """

    turns: int
    alias_of: tuple[int | None, ...]
    output_bytes: tuple[int, ...]
    workspace_bytes: int
    flops: int | None
    bytes_moved: int
    changes_state: bool


def read_loop(op: Any, maximum_iterations: Any, input_bytes: Callable[[int], int]) -> Loop:
    """Read a ``While`` operation.

    Args:
        op: the loop.
        maximum_iterations: folded value of the loop's second input, or None.
        input_bytes: storage of the loop's input i, tensor lists included.

    Raises:
        InvalidInput: the number of turns is not a constant.
    """
    turns = -1 if maximum_iterations is None else int(maximum_iterations)
    if turns < 0:
        raise InvalidInput(f"loop '{op.name}' has no constant number of iterations; unroll it or bound it")
    body = _body(op)
    given = {t.name: i for i, t in enumerate(body.inputs)}
    written = [_source(t) for t in body.outputs]

    def alias_of(i: int) -> int | None:
        source = written[i]
        if source.op.type in _LIST_WRITES:
            element = _source(source.op.inputs[_LIST_WRITES[source.op.type]])
            if element.op.type not in _REFERENCES:
                return None
            j = given.get(_source(element.op.inputs[0]).name)
            return j if j is not None and written[j] is body.inputs[j] else None
        return given.get(source.name) if source is body.inputs[i] else None

    aliases = tuple(map(alias_of, range(len(body.outputs))))

    def output_bytes(i: int) -> int:
        if aliases[i] is not None:
            return 0
        if op.outputs[i].dtype.name != "variant":
            return nodes.bytes_of(op.outputs[i])
        source = written[i]
        if source.op.type in _LIST_WRITES:
            return turns * nodes.bytes_of(source.op.inputs[_LIST_WRITES[source.op.type]])
        return 0 if source.op.type == "TensorListPopBack" else input_bytes(i)

    operations = tuple(o for o in body.get_operations() if o.type not in ("Placeholder", "Const", "NoOp"))
    flops, bytes_moved = _turn_work(operations, nodes.fold_all(body.get_operations()))
    return Loop(
        turns, aliases, tuple(map(output_bytes, range(len(op.outputs)))), _turn_bytes(operations),
        None if flops is None else turns * flops, turns * bytes_moved,
        any(nodes.is_stateful(o) for o in operations),
    )  # fmt: skip


def _body(op: Any) -> Any:
    # the tracer's graph knows more shapes than one rebuilt from the function's definition
    if hasattr(op, "_body_graph"):
        return op._body_graph
    from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

    definition = op.graph._get_function(op.get_attr("body").name).cached_definition
    return function_def_to_graph(definition, input_shapes=[t.shape for t in op.inputs])


def _source(tensor: Any) -> Any:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _turn_bytes(operations: tuple[Any, ...]) -> int:
    """Peak of one turn's own tensors, each freed after its last use."""
    last: dict[str, int] = {}
    for k, op in enumerate(operations):
        last |= dict.fromkeys([t.name for t in (*op.inputs, *op.outputs)], k)
    held = peak = 0
    size: dict[str, int] = {}
    for k, op in enumerate(operations):
        for t in op.outputs:
            known = op.type not in nodes.ALIASES and t.shape.num_elements() is not None
            size[t.name] = nodes.bytes_of(t) if known else 0
            held += size[t.name]
        peak = max(peak, held)
        for name in {t.name for t in (*op.inputs, *op.outputs)}:
            if last[name] == k:
                held -= size.get(name, 0)
    return peak


def _turn_work(operations: tuple[Any, ...], constants: dict[str, Any]) -> tuple[int | None, int]:
    """FLOPs and bytes moved by one turn; reading or writing a list counts as reading or writing one element."""
    flops: int | None = 0
    bytes_moved = 0
    for op in operations:
        if op.type in nodes.ALIASES or all(t.name in constants for t in op.outputs):
            continue
        tensors = (t for t in (*op.inputs, *op.outputs) if t.dtype.name not in ("resource", "variant"))
        if any(t.shape.num_elements() is None for t in tensors):
            flops = None
            continue
        work = nodes.work_of(op, constants, nodes.bytes_of)
        flops = None if flops is None or work.flops is None else flops + work.flops
        bytes_moved += work.bytes_moved
    return flops, bytes_moved
