"""From a set of checkpoints to a staged plan: what is held when, and the least recomputation for it.

The rules are those of Checkmate's artifact (Jain et al., MLSys 2020) for Chen et al.'s segments, on any
training graph. Arrays: S_TV[t, v] says that value v is held at the start of stage t, R_TN[t, k] that
operation k is computed in stage t; T = N stages, stage t computes operation t for the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from baselines._forward import Forward
from remat import Candidate, Graph, Plan


def segment_plan(forward: Forward, checkpoints: Sequence[int], accounting: str) -> Plan:
    """The plan of `segment_plans` in which values that cross a segment's border are rebuilt when read."""
    return plan_of_residency(forward, _segment_residency(forward, checkpoints), accounting)


def segment_plans(forward: Forward, checkpoints: Sequence[int], accounting: str) -> list[Candidate]:
    """Plans that keep `checkpoints` (ascending forward positions) and rebuild each segment once.

    A segment starts at a checkpoint and ends before the next one. It stays resident until the forward pass has
    left it; it is rebuilt when the backward pass enters it and kept while the backward pass is in it. A value
    that a later segment reads (a skip connection) is rebuilt for that use by the least recomputation, in the
    forward pass too: so does the artifact (``skips: rebuilt``). Under ``exact``, where this matters, a second
    plan holds it until the forward pass has read it last (``skips: held``), as every user's forward pass does.
    """
    rebuilt = _segment_residency(forward, checkpoints)
    parameters: dict[str, Any] = {"checkpoints": len(checkpoints), "skips": "rebuilt"}
    plans = [Candidate(plan_of_residency(forward, rebuilt, accounting), parameters)]
    if accounting == "exact":
        held = hold_forward(forward, rebuilt.copy())
        if not np.array_equal(rebuilt, held):
            plans.append(Candidate(plan_of_residency(forward, held, accounting), parameters | {"skips": "held"}))
    return plans


def plan_of_residency(forward: Forward, S_TV: np.ndarray, accounting: str) -> Plan:
    """The plan with the least recomputation that makes residency `S_TV` possible.

    Under ``exact`` the same computations free each value at its last use; under ``published`` values stay
    as long as `S_TV` holds them.
    """
    graph = forward.graph
    stages = _computations(graph, S_TV)
    if accounting == "published":
        R_TN = np.zeros((len(graph), len(graph)), dtype=bool)
        for t, computed in enumerate(stages):
            R_TN[t, computed] = True
        return Plan.from_matrices(graph, R_TN, S_TV)
    return Plan.from_order(graph, [k for computed in stages for k in computed])


def base_residency(forward: Forward) -> np.ndarray:
    """S_TV with what every baseline holds, whatever its checkpoints are.

    That is what is never recomputed, as long as it may be read; what must be there at the end; and what a state
    update reads (batch statistics, say), until it has run: nobody rebuilds a layer for its side outputs.
    """
    graph, n = forward.graph, len(forward.graph)
    S_TV = np.zeros((n, len(graph.values)), dtype=bool)
    for v, p in enumerate(graph.producer):
        users = graph.users[v]
        if forward.position[p] < 0:
            # A recomputed reader may come at any time.
            lasting = graph.values[v].keep or any(forward.position[k] >= 0 for k in users)
            last = n - 1 if lasting else max(users, default=p)
        else:
            last = n - 1 if graph.values[v].keep else max(filter(forward.is_update, users), default=p)
        S_TV[p + 1 : last + 1, v] = True
    return S_TV


def hold_latest(forward: Forward, S_TV: np.ndarray) -> np.ndarray:
    """`S_TV` with the outputs of each forward operation held for the next stage, and no longer."""
    for k in forward.operations:
        S_TV[k + 1 : k + 2, list(forward.graph.operations[k].outputs)] = True
    return S_TV


def hold_forward(forward: Forward, S_TV: np.ndarray) -> np.ndarray:
    """`S_TV` with each forward value held until the forward pass has read it last."""
    for k in forward.operations:
        for v in forward.graph.operations[k].outputs:
            last = max((u for u in forward.graph.users[v] if u <= forward.region[-1]), default=k)
            S_TV[k + 1 : last + 1, v] = True
    return S_TV


def _segment_residency(forward: Forward, checkpoints: Sequence[int]) -> np.ndarray:
    graph = forward.graph
    S_TV = base_residency(forward)
    for v, users in enumerate(graph.users):
        S_TV[list(users), v] = True  # the inputs of a stage's own operation are there when it starts
    for c in checkpoints:
        k = forward.operations[c]
        S_TV[k + 1 :, list(graph.operations[k].outputs)] = True
    bounds = [0, *checkpoints, len(forward.operations)]
    for start, end in pairwise(bounds):
        inside = forward.operations[start:end]
        (window,) = np.nonzero((forward.anchor >= start) & (forward.anchor < end))
        if end < len(forward.operations):
            leave = forward.operations[end]
        else:  # the backward pass begins in the last segment, which stays for it
            leave = int(window[-1]) if len(window) else forward.region[-1]
        for k in inside:
            for v in graph.operations[k].outputs:
                S_TV[k + 1 : leave + 1, v] = True
                if len(window) and max(graph.users[v], default=0) >= max(window[0], forward.region[-1]):
                    S_TV[max(window[0], k + 1) : window[-1] + 1, v] = True
        if len(window):
            # Gradients made while the backward pass is in the segment stay until it leaves.
            for k in window.tolist():
                S_TV[k + 1 : window[-1] + 1, list(graph.operations[k].outputs)] = True
    return S_TV


def _computations(graph: Graph, S_TV: np.ndarray) -> list[list[int]]:
    """[T] lists of the operations computed in each stage, ascending: the least that `S_TV` needs.

    A stage computes its own operation, what the next stage holds and this one does not, and the missing
    ancestors of these (equations 1b and 1c of the paper, at equality).
    """
    operations, producer = graph.operations, graph.producer
    wanted: list[set[int]] = [{t} for t in range(len(graph))]
    for t, v in zip(*(axis.tolist() for axis in np.nonzero(S_TV[1:] & ~S_TV[:-1])), strict=True):
        wanted[t].add(producer[v])
    stages = []
    for t, computed in enumerate(wanted):
        held = S_TV[t].tobytes()
        todo = list(computed)
        while todo:
            for v in operations[todo.pop()].inputs:
                p = producer[v]
                if not held[v] and p not in computed:
                    computed.add(p)
                    todo.append(p)
        stages.append(sorted(computed))
    return stages
