"""The relaxed graph: it has no implementations, and a lower bound on its plans holds for every choice of them."""

from __future__ import annotations

from dataclasses import replace

from remat.graph import Graph


def relaxed(full: Graph) -> Graph:
    """Give each operation the least cost and workspace of its implementations, and the inputs that all of them read.

    A value has zero bytes if some implementation of its producer does not make it, or some implementation writes over
    it. Extra values are left out. A graph without implementations is returned unchanged.

    A bound on the cost or the peak of the result's plans holds for every plan of `full`, in each scope. Take the
    computations of a plan of `full`, in order, with frees at last use (`Plan.from_order`):

    - They are a plan of the result. In the result an operation reads a subset of its inputs in `full`, so these inputs
      have been computed. Order, scope and repeats are the same, so run-once operations run once, and kept values are
      made.
    - No operation costs more.
    - The plan holds no more. Every run of its producer makes a value of more than zero bytes, and nothing writes over
      it. While the result needs the value, an operation reads it later or it is kept, with no run of its producer
      between; so it is also resident in `full`. The same holds for inputs and outputs of a running operation. A value
      that is written over counts zero in the result, and once in `full`, in its successor's storage.
    """
    if not full.has_implementations:
        return full
    light: set[int] = set()
    operations = []
    for op in full.operations:
        common = set(op.inputs).intersection(*(implementation.inputs for implementation in op.all_implementations))
        for implementation in op.all_implementations:
            light.update(v for v in op.outputs if v not in implementation.outputs)
            if implementation.overwrites is not None:
                light.add(implementation.overwrites)
        operations.append(
            replace(
                op,
                inputs=tuple(sorted(common)),
                cost=min(implementation.cost for implementation in op.all_implementations),
                workspace_bytes=min(implementation.workspace_bytes for implementation in op.all_implementations),
                implementations=(),
            )
        )
    values = full.values[: len(full.values) - full.n_extra]
    values = tuple(replace(value, bytes=0) if v in light else value for v, value in enumerate(values))
    return replace(full, operations=tuple(operations), values=values)
