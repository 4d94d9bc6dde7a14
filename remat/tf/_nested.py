"""Operations with functions of their own: loops and branches.

Private TensorFlow API in use (checked with 2.21.0): the graphs that the tracer leaves on such an operation
(`Operation._body_graph` and the like), which know more shapes than those rebuilt from a function's definition; where
they are missing, `control_flow_util_v2.get_func_graph` rebuilds them. There (in the CTC loss), the kind of an operation
may be the name of a function that it calls; `Graph._get_function` finds it, and `FuncGraph` holds what it computes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from remat.tf import _nodes as nodes

LOOPS = frozenset({"While", "StatelessWhile"})
BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
_WITHOUT_STORAGE = nodes.ALIASES | {"OptionalGetValue"}


@dataclass(frozen=True, slots=True)
class Branches:
    """Memory of an ``If`` or ``Case``, whichever branch is taken.

    Attributes:
        output_bytes: of each output, the larger one; what a branch hands to its gradient is in a variant.
        workspace_bytes: the largest peak of a branch, without inputs and outputs.
    """

    output_bytes: tuple[int, ...]
    workspace_bytes: int


def graphs_of(op: Any) -> tuple[Any, ...]:
    """Condition and body of a loop, or the branches; none for other operations."""
    if op.type in LOOPS:
        return _graph(op, op.get_attr("cond"), "_cond_graph"), _graph(op, op.get_attr("body"), "_body_graph")
    if op.type in ("If", "StatelessIf"):
        return (
            _graph(op, op.get_attr("then_branch"), "_true_graph"),
            _graph(op, op.get_attr("else_branch"), "_false_graph"),
        )
    if op.type in BRANCHES:
        return tuple(_graph(op, f, f"_branch_graph_{i}") for i, f in enumerate(op.get_attr("branches")))
    return ()


def _graph(op: Any, function: Any, attribute: str) -> Any:
    if hasattr(op, attribute):
        return getattr(op, attribute)
    from tensorflow.python.ops.control_flow_util_v2 import get_func_graph

    graph = _calls_inlined(get_func_graph(op, [t.shape for t in _given(op)], function.name))
    setattr(op, attribute, graph)
    return graph


def _calls_inlined(graph: Any) -> Any:
    """`graph` with the operations of the functions that it calls by their names."""
    if not any(graph._get_function(op.type) for op in graph.get_operations()):
        return graph
    import tensorflow as tf
    from tensorflow.python.framework.func_graph import FuncGraph
    from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

    inlined: Any = FuncGraph(graph.name)
    whole = graph.as_graph_def()
    tensors: dict[str, Any] = {}
    for op in graph.get_operations():
        inputs, called = [tensors[t.name] for t in op.inputs], graph._get_function(op.type)
        if called:
            with graph.as_default():
                inner = function_def_to_graph(called.cached_definition, input_shapes=[t.shape for t in inputs])
            inner = _calls_inlined(inner)
            definition, given, results = inner.as_graph_def(), inner.inputs, [t.name for t in inner.outputs]
        else:
            definition = tf.compat.v1.GraphDef(node=[op.node_def], versions=whole.versions, library=whole.library)
            given, results = op.inputs, [t.name for t in op.outputs]
        with inlined.as_default():
            if op.type == "Placeholder":
                found = [tf.compat.v1.placeholder(op.outputs[0].dtype, op.outputs[0].shape)]
            else:
                found = tf.graph_util.import_graph_def(
                    definition, {t.name: new for t, new in zip(given, inputs, strict=True)}, results, name=op.name
                )
        tensors |= {t.name: new for t, new in zip(op.outputs, found, strict=True)}
    inlined.inputs = [tensors[t.name] for t in graph.inputs]
    inlined.outputs = [tensors[t.name] for t in graph.outputs]
    return inlined


def _given(op: Any) -> Sequence[Any]:
    """The inputs of an operation that its functions get: without the choice of a branch."""
    return op.inputs[1:] if op.type in BRANCHES else op.inputs


def changes_state(op: Any) -> bool:
    """Whether running `op` twice differs from running it once; functions that only read variables are harmless."""
    graphs = graphs_of(op)
    if graphs:
        return any(changes_state(inner) for graph in graphs for inner in graph.get_operations())
    return nodes.is_stateful(op)


def written(op: Any) -> list[Any]:
    """The inputs of `op` that are handles of what it changes."""
    graphs = graphs_of(op)
    if not graphs:
        return [t for t in op.inputs if t.dtype.name == "resource"] if nodes.is_stateful(op) else []
    found: set[int] = set()
    for graph in graphs:
        position = {t.name: i for i, t in enumerate(graph.inputs)}
        handles = [source(t).name for inner in graph.get_operations() for t in written(inner)]
        found.update(position[name] for name in handles if name in position)
    given = _given(op)
    return [given[i] for i in sorted(found)]


def source(tensor: Any) -> Any:
    """The tensor that `tensor` passes on."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def read_branches(op: Any) -> Branches:
    """Read an ``If`` or ``Case``."""
    graphs = graphs_of(op)

    def output_bytes(i: int) -> int:
        if op.outputs[i].dtype.name != "variant":
            return nodes.bytes_of(op.outputs[i])
        return max(sum(map(nodes.bytes_of, _wrapped(graph.outputs[i]))) for graph in graphs)

    workspaces = [
        peak_bytes(graph.get_operations(), {t.name for out in graph.outputs for t in (source(out), *_wrapped(out))})
        for graph in graphs
    ]
    return Branches(tuple(map(output_bytes, range(len(op.outputs)))), max(workspaces))


def _wrapped(tensor: Any) -> Sequence[Any]:
    op = source(tensor).op
    return op.inputs if op.type == "OptionalFromValue" else ()


def peak_bytes(operations: Sequence[Any], returned: Collection[str] = ()) -> int:
    """Peak of a function's own tensors but those `returned`, in the order of its operations, each freed at last use.

    A tensor whose size is not known counts as 0.
    """
    operations = [op for op in operations if op.type not in ("Placeholder", "Const", "NoOp")]
    last: dict[str, int] = {}
    for k, op in enumerate(operations):
        last |= dict.fromkeys([t.name for t in (*op.inputs, *op.outputs)], k)
    held = peak = 0
    size: dict[str, int] = {}
    for k, op in enumerate(operations):
        for t in op.outputs:
            known = op.type not in _WITHOUT_STORAGE and t.name not in returned and t.shape.num_elements() is not None
            size[t.name] = nodes.bytes_of(t) if known else 0
            held += size[t.name]
        inner = [peak_bytes(graph.get_operations()) for graph in graphs_of(op)]
        peak = max(peak, held + max(inner, default=0))
        for name in {t.name for t in (*op.inputs, *op.outputs)}:
            if last[name] == k:
                held -= size.get(name, 0)
    return peak
