"""A training step as TensorFlow traces it, split into what a plan may repeat and what runs once after it.

The *planned part* computes the loss, the gradients and what else follows from the network: nothing in it changes
a variable. The *epilogue* holds every state change (optimizer, moving averages, seeds, metrics) and what leads from
the gradients to them; `_epilogue` says where its operations run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from remat.errors import InvalidInput
from remat.graph import Graph
from remat.tf._epilogue import Epilogue
from remat.tf.operation_graph import StepReader, nested_functions_inlined

_SOURCE = "TensorFlow training step as traced"
_BRANCHES = ("If", "Case")


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A traced step.

    Attributes:
        graph: the whole step; operations and values of the planned part come first.
        planned: the planned part alone, what a strategy is given: ids are those of `graph`, and what the
            epilogue reads is kept.
        function: the ``ConcreteFunction``.
        nodes: [N] the ``tf.Operation`` behind each operation of `graph`.
        epilogue: where the operations of `graph` that are not planned run.
        reader: what is folded, aliased and free.
        in_order_only: operations with effects of their own (random numbers with state, prints, checks) must keep
            their order, so plans of scope ``free`` are not executed.
        fixed: parts of ``graph.fixed_bytes`` in bytes.
        value_of: id of the value in each traced tensor that is one.
    """

    graph: Graph
    planned: Graph
    function: Any
    nodes: tuple[Any, ...]
    epilogue: Epilogue
    reader: StepReader
    in_order_only: bool
    fixed: dict[str, int]
    value_of: dict[str, int]


def trace(step: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """The ``ConcreteFunction`` of `step` with nested functions inlined; `specs` has one structure per argument."""
    function: Any = step if hasattr(step, "get_concrete_function") else tf.function(step, autograph=False)
    with nested_functions_inlined():
        return function.get_concrete_function(*specs)


def capture_step(
    function: Any, name: str, fixed: dict[str, int], loss: Any = None, gradients: Sequence[Any] | None = None
) -> CapturedStep:
    """Read a traced step.

    Args:
        fixed: bytes of the variables by what they are for, e.g. ``{"parameters": .., "optimizer": ..}``.
        loss: the loss in the trace, by default the first result.
        gradients: tensors of the trace from which state changes start; by default all results are computed in
            the planned part.

    Raises:
        InvalidInput: an unknown shape, or a loss that depends on a variable that the step has changed before.
    """
    reader = StepReader(function, name, sum(fixed.values()))
    loss = function.outputs[0] if loss is None else loss
    targets = [loss, *(function.outputs if gradients is None else gradients)]
    in_plan = _planned_nodes(reader, targets, gradients or ())
    first = [op for op in reader.order if op in in_plan]
    epilogue = [op for op in reader.order if op not in in_plan]
    traced = reader.read([*first, *epilogue], loss, _SOURCE)
    n = sum(1 for op in first if not reader.is_free(op))
    effects = [op for op in traced.nodes[:n] if reader.changes_state(op)]
    return CapturedStep(
        traced.graph, _prefix(traced.graph, n), function, traced.nodes,
        Epilogue(traced.graph, n, traced.nodes, reader), reader,
        len(effects) > 1, fixed | {"batch and constants": traced.graph.fixed_bytes - sum(fixed.values())},
        {t.name: v for v, t in enumerate(traced.tensors)},
    )  # fmt: skip


def _planned_nodes(reader: StepReader, targets: Iterable[Any], boundary: Iterable[Any]) -> set[Any]:
    after_write = _after_writes(reader)
    needed: set[Any] = set()
    todo = [t.op for t in targets if t.name not in reader.constants]
    effects = [op for op in reader.order if reader.changes_state(op) and not reader.is_write(op)]
    todo += [op for op in effects if op not in after_write]
    while todo:
        op = todo.pop()
        if op not in needed:
            needed.add(op)
            todo += [t.op for t in reader.inputs(op) if t.name not in reader.constants]
    late = needed & after_write
    if late:
        named = next(op for op in reader.order if op in late)
        raise InvalidInput(f"the loss or a gradient depends on {_why_it_cannot_be_repeated(reader, named)}")
    # what follows from the network but not from a gradient (batch statistics, metrics) is computed with it:
    # held until the epilogue are then its few results, not the activations it starts from
    from_gradients = {t.name for t in boundary}
    follows: set[Any] = {op for op in needed if op.type not in ("Placeholder", "ReadVariableOp")}
    past: set[Any] = set()
    for op in reader.order:
        if op in needed or op in after_write:
            continue
        if any(t.name in from_gradients or t.op in past for t in reader.inputs(op)):
            past.add(op)
        elif any(t.op in follows for t in reader.inputs(op) if t.name not in reader.constants):
            follows.add(op)
    planned = needed | follows
    todo = list(follows)
    while todo:
        op = todo.pop()
        for t in reader.inputs(op):
            if t.name not in reader.constants and t.op not in planned:
                planned.add(t.op)
                todo.append(t.op)
    return planned


def _why_it_cannot_be_repeated(reader: StepReader, op: Any) -> str:
    named = f"'{op.name}' ({op.type})"
    if reader.is_write(op) and (op.type in _BRANCHES or op.name in reader.loops):
        return (
            f"{named}, which may change a variable in the forward pass and gives a result too, so nothing of it can be "
            "repeated; leave that layer out, or change the variable after the gradients"
        )
    if reader.is_write(op):
        return (
            f"{named}, which reads or changes a state that is no variable, so nothing of it can be repeated; compute "
            "it before the step, e.g. in the dataset"
        )
    return (
        f"a variable that the step has changed before ({named}), so nothing of it can be computed again; update that "
        "variable after the gradients"
    )


def _after_writes(reader: StepReader) -> set[Any]:
    """Writes, later reads of what they wrote, and everything that follows from either."""
    written: set[str] = set()
    after: set[Any] = set()
    for op in reader.order:
        handles = {t.name for t in reader.inputs(op) if t.dtype.name == "resource"}
        if reader.is_write(op):
            written |= handles
            after.add(op)
        elif handles & written or any(t.op in after for t in reader.inputs(op)):
            after.add(op)
    return after


def _prefix(graph: Graph, n: int) -> Graph:
    """The first `n` operations; values that later ones read are kept."""
    operations = graph.operations[:n]
    n_values = sum(len(op.outputs) for op in operations)
    read_later = {v for op in graph.operations[n:] for v in op.inputs}
    values = tuple(replace(v, keep=v.keep or i in read_later) for i, v in enumerate(graph.values[:n_values]))
    return Graph(graph.name, operations, values, graph.fixed_bytes, graph.cost_unit, graph.loss, graph.source)
