"""Chen et al.'s two rules for choosing checkpoints, shared by the linearised and the AP variants."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import isqrt

from baselines._forward import Forward
from baselines._segments import segment_plan, segment_plans
from remat import Candidate, simulate

SWEEP = range(60)  # segment sizes in twentieths of sqrt(n)'s peak: 0 to 2.95 in steps of 0.05


def sqrt_checkpoints(candidates: Sequence[int]) -> list[int]:
    """Every k-th candidate, k = floor(sqrt(number of candidates))."""
    k = isqrt(len(candidates))
    return list(candidates[k - 1 :: k])


def greedy_checkpoints(forward: Forward, candidates: Collection[int], segment_twentieths: int) -> list[int]:
    """A checkpoint at each candidate where more than ``segment_twentieths / 20`` bytes have accumulated."""
    allowed = set(candidates)
    chosen, held = [], 0
    for position in range(len(forward.operations)):
        held += forward.bytes_at(position)
        if position in allowed and 20 * held > segment_twentieths:
            chosen.append(position)
            held = 0
    return chosen


def greedy_family(forward: Forward, candidates: Collection[int], accounting: str) -> Iterator[Candidate]:
    """One plan per segment size; sizes that choose the same checkpoints share it."""
    # Both variants sweep around the linearised sqrt(n)'s activation memory, as the artifact does.
    reference = segment_plan(forward, sqrt_checkpoints(range(len(forward.operations))), accounting)
    peak_bytes = simulate(forward.graph, reference).peak_bytes - forward.graph.fixed_bytes
    plans: dict[tuple[int, ...], list[Candidate]] = {}
    for i in SWEEP:
        chosen = tuple(greedy_checkpoints(forward, candidates, i * peak_bytes))
        if chosen not in plans:
            plans[chosen] = segment_plans(forward, chosen, accounting)
        for member in plans[chosen]:
            size = {"factor": i / 20, "segment_bytes": i * peak_bytes // 20}
            yield Candidate(member.plan, size | dict(member.parameters))
