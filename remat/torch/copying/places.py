"""Where a plan's copies lie on the host, and between which computations the plan copies and frees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remat.graph import Graph
from remat.plan import COMPUTE, DROP, OFFLOAD, Plan

Piece = tuple[int, int]  # (first byte, number of bytes)


class Move(NamedTuple):
    """A step of a plan that is no computation.

    Attributes:
        kind: `OFFLOAD`, `PREFETCH`, `FREE` or `DROP`.
        copy: number of the host's copy that an offload makes, -1 for other kinds.
    """

    kind: int
    value: int
    copy: int = -1


@dataclass(frozen=True, slots=True)
class Places:
    """The host's side of a plan.

    Attributes:
        n_bytes: of the host's memory, exactly the most that the plan's copies take at once.
        pieces: [copy] where each copy lies.
        moves: [C + 1] steps before each computation, and behind the last one.
    """

    n_bytes: int
    pieces: tuple[tuple[Piece, ...], ...]
    moves: tuple[tuple[Move, ...], ...]

    @classmethod
    def of(cls, graph: Graph, plan: Plan) -> Places:
        """The places of a plan's copies.

        A copy lies in one piece if a hole has room for it, else in several; so no memory beyond the peak is needed.
        """
        holes, n_bytes = list[Piece](), 0
        pieces, of_value = list[tuple[Piece, ...]](), dict[int, int]()
        moves: list[list[Move]] = [[]]
        for kind, i in zip(plan.kinds.tolist(), plan.ids.tolist(), strict=True):
            if kind == COMPUTE:
                moves.append([])
                continue
            if kind == OFFLOAD:
                of_value[i] = len(pieces)
                taken, holes, n_bytes = _taken(holes, graph.values[i].bytes, n_bytes)
                pieces.append(taken)
            elif kind == DROP:
                holes = _joined([*holes, *pieces[of_value.pop(i)]])
            moves[-1].append(Move(kind, i, of_value[i] if kind == OFFLOAD else -1))
        return cls(n_bytes, tuple(pieces), tuple(map(tuple, moves)))


def _taken(holes: Sequence[Piece], size: int, end: int) -> tuple[tuple[Piece, ...], list[Piece], int]:
    """(pieces for `size` bytes, the holes that are left, the end of the memory)."""
    fitting = min((hole for hole in holes if hole[1] >= size), key=lambda hole: hole[1], default=None)
    taken, left = list[Piece](), list[Piece]()
    for hole in holes:
        n = min(hole[1], size) if fitting is None or hole is fitting else 0
        if n:
            taken.append((hole[0], n))
        if hole[1] > n:
            left.append((hole[0] + n, hole[1] - n))
        size -= n
    if size:
        taken.append((end, size))
    return tuple(taken), left, end + size


def _joined(holes: Sequence[Piece]) -> list[Piece]:
    """The holes in their order; those side by side are one."""
    joined = list[Piece]()
    for start, n in sorted(holes):
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + n
        else:
            joined.append((start, n))
    return joined
