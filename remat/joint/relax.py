"""A graph without implementations whose plans cost no more than any plan of one with them: for lower bounds."""

from __future__ import annotations

from dataclasses import replace

from remat.graph import Graph


def relaxed(joint: Graph) -> Graph:
    """Every operation at its least: cost, workspace, and only the inputs that all of its ways read.

    A value that some way does not make, or writes over, weighs nothing. Every plan of `joint`, without its
    choices, is a plan of this graph that costs and holds no more; so a bound here is one there.
    """
    light: set[int] = set()
    operations = []
    for op in joint.default().operations:
        k = len(operations)
        ways = joint.operations[k].ways
        common = set(op.inputs).intersection(*(way.inputs for way in ways))
        for way in ways:
            light.update(v for v in op.outputs if v not in way.outputs)
            if way.overwrites is not None:
                light.add(way.overwrites)
        operations.append(
            replace(
                op,
                inputs=tuple(sorted(common)),
                cost=min(way.cost for way in ways),
                workspace_bytes=min(way.workspace_bytes for way in ways),
            )
        )
    values = joint.values[: len(joint.values) - joint.n_extra]
    values = tuple(replace(value, bytes=0) if v in light else value for v, value in enumerate(values))
    return replace(joint, operations=tuple(operations), values=values)
