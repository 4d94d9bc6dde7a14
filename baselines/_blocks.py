"""Checkpoints that people set by hand: around whole blocks of a network, found where its graph repeats."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from baselines._forward import Forward
from baselines._segments import plan_of_residency, segment_residency
from remat import Candidate, Graph, Problem, Skip
from remat.search.repeats import find_repeats


def blocks_of(graph: Graph) -> list[range]:
    """Forward operations of each block of a row of equal ones.

    Raises:
        Skip: no blocks repeat.
    """
    repeats = find_repeats(graph)
    if repeats is None:
        raise Skip("the graph has no row of equal blocks, around which people would set checkpoints")
    return [repeats.forward_of(k) for k in range(repeats.n_blocks)]


def checkpoint_blocks(
    problem: Problem, blocks: Sequence[range], kept: Collection[int] = (), parameters: Mapping[str, Any] | None = None
) -> Candidate:
    """The plan that rebuilds each of these blocks once, when the backward pass enters it.

    Everything outside of the blocks stays, and so do values that another block reads, and those in `kept`.
    """
    forward = Forward.of(problem.graph)
    graph = forward.graph
    number = {k: i for i, block in enumerate(blocks) for k in block}
    borders = {k for block in blocks for k in (block.start, block.stop)}
    S_TV = segment_residency(forward, [i for i, k in enumerate(forward.operations) if k in borders])
    for k in forward.operations:
        for v in graph.operations[k].outputs:
            readers = {number.get(u) for u in graph.users[v] if forward.position[u] >= 0}
            if k not in number or v in kept or readers - {number[k]}:
                S_TV[k + 1 :, v] = True
    return Candidate(plan_of_residency(forward, S_TV, problem.accounting), dict(parameters or {}))
