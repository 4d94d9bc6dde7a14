"""Loops of a traced TensorFlow function (recurrent layers) as single opaque operations.

A loop's outputs are tensors and tensor lists. The storage of a list is its elements, one for each turn of the
loop. The number of turns is read from the loop's condition: a counter, compared with a constant. Keras compares with
the sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat.errors import InvalidInput
from remat.tf import _nodes as nodes
from remat.tf._nested import graphs_of, peak_bytes, source

_LIST_WRITES = {"TensorListSetItem": 2, "TensorListPushBack": 1}  # position of the written element
_REFERENCES = frozenset({"ReadVariableOp", "TensorListGetItem"})  # their output shares the storage of their input


@dataclass(frozen=True, slots=True)
class Loop:
    """Memory and work of a loop.

    Attributes:
        counters: for each output that counts turns its last value, else None.
        alias_of: for each output the input whose storage it shares (a loop invariant, or a list of
            references to a variable or to another list's elements), or None.
        output_bytes: of each output; 0 for aliases.
        workspace_bytes: peak of one turn without the loop's inputs and outputs.
        flops: of all turns, of the largest number possible if the loop may end earlier; None where an operation of the
            body has no rule or no static shape.
        bytes_moved: of all turns.
    """

    counters: tuple[int | None, ...]
    alias_of: tuple[int | None, ...]
    output_bytes: tuple[int, ...]
    workspace_bytes: int
    flops: int | None
    bytes_moved: int


def read_loop(op: Any, constant: Callable[[int], int | None], input_bytes: Callable[[int], int]) -> Loop:
    """Read a ``While`` operation.

    Args:
        op: the loop.
        constant: the value of the loop's input i where that is an integer known before the step.
        input_bytes: storage of the loop's input i, tensor lists included.

    Raises:
        InvalidInput: the number of turns is not a constant.
    """
    cond, body = graphs_of(op)
    counting = _Counting(cond, body, constant)
    turns = counting.most_turns(cond.outputs[0])
    if turns is None:
        raise InvalidInput(
            f"loop '{op.name}' has no number of turns that is known before the step; give tf.while_loop (or "
            "keras.ops.while_loop) maximum_iterations="
        )
    given = {t.name: i for i, t in enumerate(body.inputs)}
    written = [source(t) for t in body.outputs]

    def alias_of(i: int) -> int | None:
        result = written[i]
        if result.op.type in _LIST_WRITES:
            element = source(result.op.inputs[_LIST_WRITES[result.op.type]])
            if element.op.type not in _REFERENCES:
                return None
            j = given.get(source(element.op.inputs[0]).name)
            return j if j is not None and written[j] is body.inputs[j] else None
        return given.get(result.name) if result is body.inputs[i] else None

    aliases = tuple(map(alias_of, range(len(body.outputs))))

    def output_bytes(i: int) -> int:
        if aliases[i] is not None:
            return 0
        if op.outputs[i].dtype.name != "variant":
            return nodes.bytes_of(op.outputs[i])
        result = written[i]
        if result.op.type in _LIST_WRITES:
            return turns * nodes.bytes_of(result.op.inputs[_LIST_WRITES[result.op.type]])
        return 0 if result.op.type == "TensorListPopBack" else input_bytes(i)

    operations = tuple(o for o in body.get_operations() if o.type not in ("Placeholder", "Const", "NoOp"))
    flops, bytes_moved = _turn_work(operations, nodes.fold_all(body.get_operations()))
    return Loop(
        tuple(counting.last(i, turns) for i in range(len(op.outputs))), aliases,
        tuple(map(output_bytes, range(len(op.outputs)))), peak_bytes(operations),
        None if flops is None else turns * flops, turns * bytes_moved,
    )  # fmt: skip


class _Counting:
    """Counters of a loop: variables to which a turn adds a constant.

    Args:
        constant: see `read_loop`.
    """

    def __init__(self, cond: Any, body: Any, constant: Callable[[int], int | None]) -> None:
        self.body, self.constant = body, constant
        self.of_cond, self.of_body = (nodes.fold_all(graph.get_operations()) for graph in (cond, body))
        self.position = {t.name: i for i, t in enumerate(cond.inputs)}

    def most_turns(self, condition: Any) -> int | None:
        """The most turns before `condition`, a tensor of the loop's condition, is false; None if unknown."""
        op = source(condition).op
        if op.type == "LogicalAnd":
            return min((n for n in map(self.most_turns, op.inputs) if n is not None), default=None)
        if op.type not in ("Less", "LessEqual", "Greater", "GreaterEqual"):
            return None
        smaller, larger = op.inputs if op.type.startswith("Less") else reversed(op.inputs)
        for counter, limit, sign in ((smaller, larger, 1), (larger, smaller, -1)):
            i, end = self.position.get(source(counter).name), self._limit(limit)
            step = 0 if i is None else sign * self._step(i)
            start = None if i is None else self.constant(i)
            if step > 0 and start is not None and end is not None:
                distance = sign * (end - start) + op.type.endswith("Equal")
                return max(0, -(-distance // step))
        return None

    def last(self, i: int, turns: int) -> int | None:
        """Value of counter `i` after the last turn; None if it is no counter."""
        start, step = self.constant(i), self._step(i)
        return start + turns * step if start is not None and step else None

    def _limit(self, tensor: Any) -> int | None:
        tensor = source(tensor)
        if tensor.name in self.of_cond:
            return nodes.integer_of(self.of_cond[tensor.name])
        i = self.position.get(tensor.name)
        is_kept = i is not None and source(self.body.outputs[i]) is self.body.inputs[i]
        return self.constant(i) if i is not None and is_kept else None

    def _step(self, i: int) -> int:
        """What a turn adds to variable `i`; 0 if that is not a constant."""
        op = source(self.body.outputs[i]).op
        if op.type not in ("Add", "AddV2", "Sub"):
            return 0
        left, right = map(source, op.inputs)
        if left is not self.body.inputs[i] and op.type != "Sub":
            left, right = right, left
        step = nodes.integer_of(self.of_body.get(right.name)) if left is self.body.inputs[i] else None
        return 0 if step is None else -step if op.type == "Sub" else step


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
