"""Who holds what while a plan runs, for all that explanations show."""

from __future__ import annotations

import re
from collections.abc import Iterator

from remat.graph import Graph
from remat.plan import FREE, Plan

STEP = "(the step)"  # stands for values that no module makes


def group_of(module: str) -> str:
    """The path with * for every number, so that blocks count together."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module) or STEP


def replayed(graph: Graph, plan: Plan) -> Iterator[tuple[int, list[int], list[int]]]:
    """The steps of a plan: (operation, values that it makes, values that it makes again while they are held).

    A free is (-1, [], [value]). What is made again is held twice while the operation runs, as `simulate` counts.
    """
    held = set[int]()
    for kind, i in zip(plan.kinds.tolist(), plan.ids.tolist(), strict=True):
        if kind == FREE:
            held.discard(i)
            yield -1, [], [i]
            continue
        outputs = graph.operations[i].outputs
        new, again = [v for v in outputs if v not in held], [v for v in outputs if v in held]
        held.update(new)
        yield i, new, again


def held_values(graph: Graph, plan: Plan, i: int) -> set[int]:
    """Values that are held while computation `i` of a plan runs, its outputs included."""
    held, computed = set[int](), -1
    for k, new, others in replayed(graph, plan):
        if k < 0:
            held.difference_update(others)
            continue
        computed += 1
        held.update(new)
        if computed == i:
            break
    return held
