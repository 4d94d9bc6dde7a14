"""Round a point of the window relaxation with copies: what a plan repeats, and what it fetches from the host."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from remat.programs.link_windows import LinkModel
from remat.programs.windows import place_of


class Rounded(NamedTuple):
    """A plan's repeats and copies, as `remat.search.offload` has them.

    Attributes:
        repeats: sorted, stage * N + operation.
        away: (stage, value) of each value that is away before its next touch, which is in that stage.
    """

    repeats: list[int]
    away: list[tuple[int, int]]


def rounded(model: LinkModel, point: np.ndarray, least_held: np.ndarray, least_out: np.ndarray) -> Rounded:
    """Each value is held, fetched or made again before each touch, as the snapshots since the last touch say.

    It is held if all of them hold at least the share `least_held` [V] of it. Otherwise it is fetched if `least_out` [V]
    of it was copied to the host by the first snapshot that does not, and else made again. The plan may exceed the
    budget, and its copies may make the computations wait.
    """
    graph, n = model.arrays.graph, len(model.arrays.graph)
    starts, ends = zip(*map(place_of, model.boundaries), strict=True)  # an operation's own snapshot is between neither
    is_held = _shares(model.S, point, 1.0) >= least_held
    is_out = np.cumsum(_shares(model.copies.W, point, 0.0), axis=0)[:-1] > least_out
    last = np.zeros(len(graph.values), dtype=np.int64)  # [V] the stage of a value's last touch
    found = Rounded([], [])

    def first_missing(v: int, stage: int) -> int | None:
        """The first snapshot between the last touch and a stage that does not hold a value."""
        between = range(bisect_left(ends, int(last[v])), bisect_left(starts, stage))
        return next((k for k in between if not is_held[k, v]), None)

    for stage in range(n):
        todo, begun = [stage], {stage}
        while todo:
            i = todo.pop()
            for v in graph.operations[i].inputs:
                missing, again = first_missing(v, stage), int(graph.producer[v])
                last[v] = stage
                if missing is None:
                    continue
                if is_out[missing, v] or graph.operations[again].run_once:
                    found.away.append((stage, v))
                elif again not in begun:
                    begun.add(again)
                    todo.append(again)
                    last[list(graph.operations[again].outputs)] = stage
        last[list(graph.operations[stage].outputs)] = stage
        found.repeats.extend(stage * n + i for i in sorted(begun - {stage}))
    return found


def _shares(columns: np.ndarray | list[np.ndarray], point: np.ndarray, otherwise: float) -> np.ndarray:
    """[snapshots, V] the point's values in the columns, `otherwise` where there is none."""
    columns = np.asarray(columns)
    return np.where(columns >= 0, point[np.maximum(columns, 0)], otherwise)
