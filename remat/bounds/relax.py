"""A graph without implementations whose plans cost no more than any plan of one with them: for lower bounds."""

from __future__ import annotations

from dataclasses import replace

from remat.graph import Graph


def relaxed(joint: Graph) -> Graph:
    """Every operation at its least: cost, workspace, and only the inputs that all of its ways read.

    A value that some way of its producer does not make, or that some way writes over, weighs nothing. Extra values
    are left out. A graph without implementations is returned as it is.

    A bound on the cost or the peak of the result's plans holds for every plan of `joint`, in each scope. Take the
    computations of a plan of `joint`, in order, with frees at last use (`Plan.from_order`):

    - It is a plan of the result. An operation reads there a subset of what it reads in `joint`, so its inputs have
      been computed. Order, scope and repeats are the same, so run-once operations run once, and kept values are
      made.
    - It costs no more, operation by operation.
    - It holds no more. A value with a weight is made by every run of its producer and never written over. Where the
      result still needs it, an operation reads it later, or it is kept, with no run of its producer between: so it is
      resident in `joint` as well. The same holds for what an operation reads and makes. A value written over
      counts nothing here and once, in its successor's storage, there.
    """
    if not joint.has_implementations:
        return joint
    light: set[int] = set()
    operations = []
    for op in joint.operations:
        common = set(op.inputs).intersection(*(way.inputs for way in op.ways))
        for way in op.ways:
            light.update(v for v in op.outputs if v not in way.outputs)
            if way.overwrites is not None:
                light.add(way.overwrites)
        operations.append(
            replace(
                op,
                inputs=tuple(sorted(common)),
                cost=min(way.cost for way in op.ways),
                workspace_bytes=min(way.workspace_bytes for way in op.ways),
                implementations=(),
            )
        )
    values = joint.values[: len(joint.values) - joint.n_extra]
    values = tuple(replace(value, bytes=0) if v in light else value for v, value in enumerate(values))
    return replace(joint, operations=tuple(operations), values=values)
