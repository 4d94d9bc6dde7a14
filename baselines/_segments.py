"""From checkpoints to a staged plan: which values each stage holds, and the least recomputation for that.

The rules are those of Checkmate's artifact (Jain et al., MLSys 2020) for Chen et al.'s segments, on any
training graph. Arrays: S_TV[t, v] says that value v is held at the start of stage t, R_TN[t, k] that
operation k is computed in stage t; T = N stages, stage t computes operation t for the first time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from baselines._forward import Forward
from remat import Candidate, Graph, Plan, Problem, Skip
from remat.search.greedy import with_missing_ancestors
from remat.search.repeats import find_repeats

MOST_COMPUTATIONS = 1_000_000  # a plan of this length takes about 4 s to build and replay


def segment_plan(forward: Forward, checkpoints: Sequence[int], accounting: str) -> Plan:
    """The plan of `segment_plans` that rebuilds values which cross a segment's border when they are read."""
    return plan_of_residency(forward, segment_residency(forward, checkpoints), accounting)


def segment_plans(forward: Forward, checkpoints: Sequence[int], accounting: str) -> list[Candidate]:
    """Plans that keep `checkpoints` (ascending forward positions) and rebuild each segment once.

    A segment starts at a checkpoint and ends before the next one. It stays resident until the forward pass has
    left it. It is rebuilt when the backward pass enters it, and kept while the backward pass is in it. Where a later
    segment reads a value (a skip connection), the artifact rebuilds it for that use by the least recomputation, in
    the forward pass too (``skips: rebuilt``). Under ``exact``, if this makes a difference, a second plan holds the
    value until its last read in the forward pass (``skips: held``), as every user's forward pass does.
    """
    rebuilt = segment_residency(forward, checkpoints)
    parameters: dict[str, Any] = {"checkpoints": len(checkpoints), "skips": "rebuilt"}
    plans = [Candidate(plan_of_residency(forward, rebuilt, accounting), parameters)]
    if accounting == "exact":
        held = hold_forward(forward, rebuilt.copy())
        if not np.array_equal(rebuilt, held):
            plans.append(Candidate(plan_of_residency(forward, held, accounting), parameters | {"skips": "held"}))
    return plans


def plan_of_residency(forward: Forward, S_TV: np.ndarray, accounting: str) -> Plan:
    """The plan with the least recomputation that makes residency `S_TV` possible.

    Under ``exact`` each value is freed at its last use and rebuilt right before the stage that needs it. Under
    ``published`` values stay as long as `S_TV` holds them and are rebuilt a stage earlier, as in the artifact.

    Raises:
        Skip: the plan would have more than `MOST_COMPUTATIONS`.
    """
    graph = forward.graph
    gained: list[list[int]] = [[] for _ in range(len(graph))]
    for t, v in zip(*(axis.tolist() for axis in np.nonzero(S_TV[1:] & ~S_TV[:-1])), strict=True):
        gained[t].append(graph.producer[v])
    stages = list(computations(graph, gained, (row.tobytes() for row in S_TV), late=accounting == "exact"))
    length = sum(map(len, stages))
    if length > MOST_COMPUTATIONS:
        raise Skip(f"its plan would have {length:,} computations; the limit is {MOST_COMPUTATIONS:,}")
    if accounting == "published":
        R_TN = np.zeros((len(graph), len(graph)), dtype=bool)
        for t, computed in enumerate(stages):
            R_TN[t, computed] = True
        return Plan.from_matrices(graph, R_TN, S_TV)
    return Plan.from_order(graph, [k for computed in stages for k in computed])


def base_residency(forward: Forward) -> np.ndarray:
    """S_TV with the values of `base_holds`."""
    graph = forward.graph
    S_TV = np.zeros((len(graph), len(graph.values)), dtype=bool)
    for v, until in enumerate(base_holds(forward)):
        S_TV[graph.producer[v] + 1 : until + 1, v] = True
    return S_TV


def base_holds(forward: Forward) -> list[int]:
    """[V] up to which stage every baseline holds a value, whatever its checkpoints are; its producer's without need.

    Held are the values that are never recomputed, as long as an operation may read them; the values to keep at the
    end; and the inputs of a state update (batch statistics, say) until it has run, because nobody rebuilds a layer
    for its side outputs.
    """
    graph, n = forward.graph, len(forward.graph)
    holds = list[int]()
    for v, p in enumerate(graph.producer):
        users = graph.users[v]
        if forward.position[p] < 0:
            # A recomputed reader may come at any time.
            lasting = graph.values[v].keep or any(forward.position[k] >= 0 for k in users)
            holds.append(n - 1 if lasting else max(users, default=p))
        else:
            holds.append(n - 1 if graph.values[v].keep else max(filter(forward.is_update, users), default=p))
    return holds


def hold_latest(forward: Forward, S_TV: np.ndarray) -> np.ndarray:
    """`S_TV` with the outputs of each forward operation held for the next stage only."""
    for k in forward.operations:
        S_TV[k + 1 : k + 2, list(forward.graph.operations[k].outputs)] = True
    return S_TV


def hold_forward(forward: Forward, S_TV: np.ndarray) -> np.ndarray:
    """`S_TV` with each forward value held until its last read in the forward pass."""
    for k in forward.operations:
        for v in forward.graph.operations[k].outputs:
            last = max((u for u in forward.graph.users[v] if u <= forward.region[-1]), default=k)
            S_TV[k + 1 : last + 1, v] = True
    return S_TV


def segment_residency(forward: Forward, checkpoints: Sequence[int]) -> np.ndarray:
    """S_TV of `segment_plans`, before values of skip connections are held."""
    graph, end_of_forward = forward.graph, forward.region[-1]
    S_TV = base_residency(forward)
    for v, users in enumerate(graph.users):
        S_TV[list(users), v] = True  # a stage starts with the inputs of its own operation
    for c in checkpoints:
        k = forward.operations[c]
        S_TV[k + 1 :, list(graph.operations[k].outputs)] = True
    bounds = [0, *checkpoints, len(forward.operations)]
    entered_before = end_of_forward  # stage in which the backward pass entered the segment before this one
    for start, end in reversed(list(pairwise(bounds))):
        values = [(k, v) for k in forward.operations[start:end] for v in graph.operations[k].outputs]
        reads = {v: [u for u in graph.users[v] if u > end_of_forward] for _, v in values}
        (window,) = np.nonzero((forward.anchor >= start) & (forward.anchor < end))
        if len(window):
            enter, leave = int(window[0]), int(window[-1])
            # A kernel may read across the border. The segment is then rebuilt for its first reader in the one before.
            early = [u for users in reads.values() for u in users if entered_before <= u < enter]
            entered_before, enter = enter, min(early, default=enter)
            # Gradients computed while the backward pass is in the segment stay until it leaves.
            for k in window.tolist():
                S_TV[k + 1 : leave + 1, list(graph.operations[k].outputs)] = True
        else:
            enter, leave = len(graph), end_of_forward
        # The backward pass begins in the last segment, which stays for it.
        left = forward.operations[end] if end < len(forward.operations) else max(end_of_forward, leave)
        for k, v in values:
            S_TV[k + 1 : left + 1, v] = True
            before = [u for u in reads[v] if u < enter]
            if before:  # a value that is read all the time (a mask, say) stays from its first reader on
                S_TV[max(before[0], k + 1) : min(before[-1], enter) + 1, v] = True
            if reads[v] and reads[v][-1] >= enter:
                first = before[0] if before else enter
                S_TV[max(first, k + 1) : leave + 1, v] = True
    return S_TV


def computations(
    graph: Graph, gained: Sequence[Sequence[int]], held: Iterable[bytes | bytearray], *, late: bool
) -> Iterator[list[int]]:
    """The operations computed in each stage, ascending: the fewest that make a residency possible.

    A stage computes its own operation, the values that the next stage holds and this one does not, and the missing
    ancestors of these (equations 1b and 1c of the paper, at equality). With `late`, the next stage computes those
    values itself, when this stage's operation no longer needs its inputs.

    Args:
        gained: [T] producers of the values that the next stage holds and this one does not.
        held: of each stage, [V] whether it begins with a value.
    """
    carried: set[int] = set()
    for t, (ahead, there) in enumerate(zip(gained, held, strict=True)):
        computed = with_missing_ancestors(graph, {t}, there)
        for_next = with_missing_ancestors(graph, set(ahead) - computed, there, computed)
        yield sorted(computed | carried if late else computed | for_next)
        carried = for_next


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
