"""A graph without implementations whose plans cost no more than any plan of one with them: for lower bounds."""

from __future__ import annotations

from dataclasses import replace

from remat.graph import Graph


def relaxed(full: Graph) -> Graph:
    """Every operation at its least: cost, workspace, and only the inputs that all of its implementations read.

    A value that some implementation of its producer does not make, or that some implementation writes over, weighs
    nothing. Extra values are left out. A graph without implementations is returned as it is.

    A bound on the cost or the peak of the result's plans holds for every plan of `full`, in each scope. Take the
    computations of a plan of `full`, in order, with frees at last use (`Plan.from_order`):

    - It is a plan of the result. An operation reads there a subset of what it reads in `full`, so its inputs have
      been computed. Order, scope and repeats are the same, so run-once operations run once, and kept values are
      made.
    - It costs no more, operation by operation.
    - It holds no more. A value with a weight is made by every run of its producer and never written over. Where the
      result still needs it, an operation reads it later, or it is kept, with no run of its producer between: so it is
      resident in `full` as well. The same holds for what an operation reads and makes. A value written over
      counts nothing here and once, in its successor's storage, there.
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
