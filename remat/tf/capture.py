"""A training step as TensorFlow traces it, split into a part that a plan may repeat and a part that runs once.

The *planned part* computes the loss, the gradients and the other results of the network. Nothing in it changes a
variable. The *epilogue* holds every state change (optimizer, moving averages, seeds, metrics) and the operations that
lead from the gradients to them; `_epilogue` says where its operations run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from remat.errors import InvalidInput, warn
from remat.graph import Graph
from remat.tf._epilogue import Epilogue
from remat.tf._nested import BRANCHES, LOOPS, changes_state
from remat.tf.adapter import jit_compiled_calls
from remat.tf.operation_graph import StepReader, nested_functions_inlined

_SOURCE = "TensorFlow training step as traced"


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A traced step.

    Attributes:
        graph: the whole step; operations and values of the planned part come first.
        planned: the planned part alone, which a strategy is given. Ids are those of `graph`; values that the
            epilogue reads are ``keep`` values.
        function: the ``ConcreteFunction``.
        nodes: [N] the ``tf.Operation`` behind each operation of `graph`.
        epilogue: where the other operations of `graph` run.
        reader: which operations are folded, aliased and free.
        in_order_only: the step has operations with effects of their own (random numbers with state, prints, checks)
            that must keep their order; plans of scope ``free`` are not executed.
        fixed: parts of ``graph.fixed_bytes`` in bytes.
        value_of: name of each traced tensor that is a value -> its id.
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
    with nested_functions_inlined(), jit_compiled_calls() as jit_compiled:
        traced = function.get_concrete_function(*specs)
    if jit_compiled:
        named = ", ".join(sorted(set(jit_compiled)))
        warn(f"jit_compile=True of {named} is left out: a plan runs without XLA, which may change last bits")
    return traced


def capture_step(
    function: Any, name: str, fixed: dict[str, int], loss: Any = None, gradients: Sequence[Any] | None = None
) -> CapturedStep:
    """Read a traced step.

    Args:
        fixed: bytes of the variables by purpose, e.g. ``{"parameters": .., "optimizer": ..}``.
        loss: the loss in the trace, by default the first result.
        gradients: tensors of the trace from which state changes start; without them the planned part computes all
            results.

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
    n = sum(not reader.is_free(op) for op in first)
    effects = [op for op in traced.nodes[:n] if changes_state(op)]
    return CapturedStep(
        traced.graph, _prefix(traced.graph, n), function, traced.nodes,
        Epilogue(traced.graph, n, traced.nodes, reader), reader,
        len(effects) > 1, fixed | {"batch and constants": traced.graph.fixed_bytes - sum(fixed.values())},
        {t.name: v for v, t in enumerate(traced.tensors)},
    )  # fmt: skip


def _planned_nodes(reader: StepReader, targets: Iterable[Any], boundary: Iterable[Any]) -> set[Any]:
    after_write = _after_writes(reader)
    effects = [op for op in reader.order if changes_state(op) and not reader.written(op)]
    needed = reader.with_ancestors(
        [t.op for t in targets if t.name not in reader.constants] + [op for op in effects if op not in after_write]
    )
    late = needed & after_write
    if late:
        named = next(op for op in reader.order if op in late)
        raise InvalidInput(f"the loss or a gradient depends on {_why_it_cannot_be_repeated(reader, named)}")
    # The planned part also computes what follows from the network but not from a gradient (batch statistics, metrics).
    # Then its few results are held until the epilogue, and not the activations that it starts from.
    from_gradients = {t.name for t in boundary}
    follows: set[Any] = {op for op in needed if op.type not in ("Placeholder", "ReadVariableOp")}
    past_gradients: set[Any] = set()
    for op in reader.order:
        if op in needed or op in after_write:
            continue
        if any(t.name in from_gradients or t.op in past_gradients for t in reader.inputs(op)):
            past_gradients.add(op)
        elif any(t.op in follows for t in reader.inputs(op) if t.name not in reader.constants):
            follows.add(op)
    return needed | reader.with_ancestors(follows)


def _why_it_cannot_be_repeated(reader: StepReader, op: Any) -> str:
    named = f"'{op.name}' ({op.type})"
    if reader.written(op) and op.type in BRANCHES | LOOPS:
        return (
            f"{named}, which may change a variable in the forward pass and gives a result too, so it cannot be "
            "repeated; leave that layer out, or change the variable after the gradients"
        )
    if reader.written(op):
        return (
            f"{named}, which reads or changes a state that is no variable, so it cannot be repeated; compute it before "
            "the step, e.g. in the dataset"
        )
    return (
        f"a variable that the step has changed before ({named}), so it cannot be recomputed; update that variable "
        "after the gradients"
    )


def _after_writes(reader: StepReader) -> set[Any]:
    """Writes, later reads of the variables that they wrote, and everything that follows from either."""
    written: set[str] = set()
    after: set[Any] = set()
    for op in reader.order:
        changed = reader.written(op)
        if changed or reader.handles(op) & written or any(t.op in after for t in reader.inputs(op)):
            after.add(op)
        written |= changed
    return after


def _prefix(graph: Graph, n: int) -> Graph:
    """The first `n` operations; values that later ones read are ``keep`` values."""
    operations = graph.operations[:n]
    n_values = sum(len(op.outputs) for op in operations)
    read_later = {v for op in graph.operations[n:] for v in op.inputs}
    values = tuple(replace(v, keep=v.keep or i in read_later) for i, v in enumerate(graph.values[:n_values]))
    return replace(graph, operations=operations, values=values)
