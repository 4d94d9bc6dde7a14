"""Orders of computation that no solver would choose, for what executes plans."""

from __future__ import annotations

import numpy as np

import remat
from remat.graph import is_held_outside


def random_order(graph: remat.Graph, rng: np.random.Generator, drop: float) -> list[int]:
    """Operations in their order; every value that may be made again is dropped after each operation with probability
    `drop`, and made again where it is read."""
    order: list[int] = []
    resident: set[int] = set()

    def compute(k: int) -> None:  # without recursion: what is missing may be a chain as long as the graph
        todo = [k]
        while todo:
            op = graph.operations[todo[-1]]
            missing = [graph.producer[v] for v in op.inputs if v not in resident]
            if missing:
                todo += missing
                continue
            k = todo.pop()
            if not op.outputs or not resident.issuperset(op.outputs):
                order.append(k)
                resident.update(op.outputs)

    for k in range(len(graph)):
        compute(k)
        again = [v for v in sorted(resident) if not graph.operations[graph.producer[v]].run_once]
        again = [v for v in again if graph.values[v].bytes and not graph.values[v].keep]
        resident -= {v for v in again if rng.random() < drop}
    return order


def random_copies(
    graph: remat.Graph, order: list[int], rng: np.random.Generator, link: remat.Link, often: float = 0.1
) -> remat.Plan:  # fmt: skip
    """A valid plan with these computations, in which values are copied to the host and back at random moments.

    Before each computation, with probability `often` each: a value is copied out, one that is on both sides is freed
    on either, one that is away is fetched before it is needed.
    """
    steps = list[tuple[str, int]]()
    away, on_host, live = set[int](), set[int](), set[int]()

    def do(kind: str, v: int) -> None:
        steps.append((kind, v))
        for which, done in ((away, {"free": True, "prefetch": False}), (on_host, {"offload": True, "drop": False})):
            if kind in done:
                (which.add if done[kind] else which.discard)(v)

    def may(kind: str) -> set[int]:
        here = live - away
        if kind == "offload":
            return {v for v in here - on_host if graph.values[v].bytes}
        if kind == "free":
            return {v for v in here & on_host if not is_held_outside(graph, v)}
        return {*away} if kind == "prefetch" else on_host - away

    def at_random() -> None:
        for kind in ("offload", "free", "prefetch", "drop"):
            if (of := sorted(may(kind))) and rng.random() < often:
                do(kind, int(rng.choice(of)))

    for kind, i in remat.Plan.from_order(graph, order).steps:  # pyright: ignore[reportAssignmentType]
        if kind == "free":
            live.discard(i)
            steps += [] if i in away else [(kind, i)]
            away.discard(i)
            do("drop", i) if i in on_host else None
            continue
        at_random()
        for v in away.intersection(graph.operations[i].inputs):
            do("prefetch", v)
        steps.append((kind, i))
        live.update(graph.operations[i].outputs)
        away.difference_update(graph.operations[i].outputs)
    at_random()
    for v in sorted(away):
        do("prefetch", v)
    return remat.Plan.from_steps(graph, steps, None, link)
