"""An empty state of the right sizes for the compiled search."""

from __future__ import annotations

import numpy as np

from remat.arrays import GraphArrays
from remat.search.kernel import BUDGET, N_REALS, N_SCALARS, State


def new_state(arrays: GraphArrays, room: int, list_room: int, budget: int, seed: int) -> State:
    """An empty state; `room` intervals per value and computations per operation."""
    n, n_values = len(arrays.cost), len(arrays.size_bytes)
    scalar = np.zeros(N_SCALARS, dtype=np.int64)
    scalar[BUDGET] = budget

    def ints(*shape: int) -> np.ndarray:
        return np.zeros(shape, dtype=np.int32)

    def longs(*shape: int) -> np.ndarray:
        return np.zeros(shape, dtype=np.int64)

    # A generator state of zero would stay zero.
    random = np.array([(seed * 0x9E3779B97F4A7C15 + 0x1234567) % 2**64 or 1], dtype=np.uint64)
    return State(
        arrays.in_start, arrays.in_ids, arrays.out_start, arrays.out_ids, arrays.use_start, arrays.use_ids,
        arrays.producer, arrays.size_bytes, arrays.cost, arrays.workspace_bytes, arrays.keep, arrays.run_once,
        intervals=ints(n_values, 2 * room), n_intervals=ints(n_values),
        computed=ints(n, room), n_computed=ints(n),
        list_start=longs(n), list_length=ints(n), list_room=ints(n), arena=ints(list_room),
        through=longs(n), peak=longs(n), stage_cost=longs(n),
        log=longs(64 * n + 100_000), queue=ints(n + 1), queued=np.zeros(n + 1, dtype=np.bool_),
        seeds=ints(2 * n + 64, 2), random=random, scalar=scalar, real=np.zeros(N_REALS), order=ints(list_room),
        scratch_stack=ints(n + 1), scratch_list=ints(n + 1), mark_op=longs(n), mark_value=longs(n_values),
        last_use=ints(n_values), residence=ints(n_values),
        logged_value=longs(n_values), logged_op=longs(n),
    )  # fmt: skip
