"""The window relaxation in integers: HiGHS raises the bound that its LP leaves, and points at a plan.

Columns that no plan better than the best one known can use are fixed by their reduced costs. Each solution is carried
out as late as possible: where it fits the budget it is a plan, otherwise the stage that it exceeds most is the next
boundary. The bounds hold within HiGHS's tolerances only; there is no certificate. Memory rows get more
room, because HiGHS may take a row that is met exactly for one that is missed: half a unit, which no integer point can
use, or a ten-millionth of the budget where that is more. A bound for a larger budget holds for the smaller one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from remat.bounds.windows import WindowBound, next_boundary, solve_windows
from remat.incumbent import Incumbent
from remat.plan import Plan
from remat.programs.highs import solve_program
from remat.programs.program import TOLERANCE, least_whole
from remat.programs.windows import MEMORY, WindowModel

MOST_COLUMNS = 20_000  # a larger program does not end in minutes
GAP = 2e-5  # of a program, below the gap that counts as optimal
ROOM = 100 * TOLERANCE  # beside a scaled budget of 1000: a solver can tell it from its tolerance
SMALL = 1e-5  # scaled bytes, a hundred-millionth of the budget: a value below it may always be held
CERTAIN = 0.5  # a column of an integer solution is 1 above it


def raise_bound(
    windows: WindowBound, known: Incumbent, deadline: float, *, on_bound: Callable[[int], object],
    on_plan: Callable[[Plan], object], should_stop: Callable[[], bool],
) -> int:  # fmt: skip
    """Programs with one more boundary each, until one fits the budget or the deadline (monotonic); their number."""
    boundaries, rounds = list(windows.boundaries), 0
    while boundaries and not should_stop() and time.monotonic() < deadline:
        model = windows.model(boundaries)
        if len(model.cost) > MOST_COLUMNS:
            break
        solved = solve_windows(model, deadline, should_stop)
        if solved is None:
            break
        x, bound, ended = _solve(model, solved[1], known.cost, deadline, should_stop)
        rounds += 1
        if bound is not None:
            on_bound(bound)
        if x is None or not ended:
            break
        on_plan(plan_of(model, x))
        stage = next_boundary(model, x)
        if stage is None:
            break
        boundaries = sorted([*boundaries, stage])
    return rounds


def _solve(
    model: WindowModel, y: np.ndarray, best: int | None, deadline: float, should_stop: Callable[[], bool]
) -> tuple[np.ndarray | None, int | None, bool]:
    """([n] the best point or None, the bound or None, whether it was solved to the end)."""
    total = model.arrays.graph.total_cost
    program, row_scale, cost_scale = model.scaled()
    reduced = model.cost - model.matrix.T @ y
    least = total + float(y @ model.row_lower + np.minimum(0.0, reduced).sum())
    too_much = np.full(len(reduced), False)
    if best is not None:
        too_much = least + np.abs(reduced) > best * (1 + TOLERANCE)
    room = np.where(model.row_kind == MEMORY, np.maximum(0.5 * model.unit_bytes * row_scale, ROOM), 0.0)
    matrix = program.matrix.copy()
    matrix.data[np.abs(matrix.data) < SMALL] = 0.0
    matrix.eliminate_zeros()
    program = replace(
        program, matrix=matrix, row_lower=program.row_lower - room, is_integer=np.ones(len(reduced), dtype=bool),
        upper=np.where(too_much & (reduced > 0), 0.0, 1.0), lower=np.where(too_much & (reduced < 0), 1.0, 0.0),
    )  # fmt: skip
    options = {"threads": 1, "mip_rel_gap": GAP, "time_limit": max(0.1, deadline - time.monotonic())}
    answer = solve_program(program, options, should_stop=should_stop)
    if answer.infeasible:
        return None, best, True  # no plan is cheaper than the best one
    bound = None
    if np.isfinite(answer.bound):
        bound = total + least_whole(answer.bound / cost_scale, cost_scale)
        bound = bound if best is None else min(bound, best)
    return answer.x, bound, answer.optimal


def plan_of(model: WindowModel, x: np.ndarray) -> Plan:
    """The plan that holds at each boundary what an integer point `x` [n] says, and repeats as late as possible."""
    graph = model.arrays.graph
    order: list[int] = []
    resident: set[int] = set()

    def run(k: int) -> None:
        """Run operation k, after the runs that make what it lacks."""
        todo = [k]
        while todo:
            lacks = [v for v in graph.operations[todo[-1]].inputs if v not in resident]
            if lacks:
                todo += [graph.producer[v] for v in lacks]
                continue
            k = todo.pop()
            if todo and resident.issuperset(graph.operations[k].outputs):  # another operation asked for it too
                continue
            order.append(k)
            resident.update(graph.operations[k].outputs)

    start = 0
    for k, end in enumerate(model.boundaries):
        for operation in range(start, end):
            run(operation)
        start = end + 1
        held = _held(model, x, k)
        for v in sorted(held - resident):
            run(graph.producer[v])
        run(end)
        resident &= held | set(model.arrays.at[end].tolist())
    for operation in range(start, len(graph)):
        run(operation)
    for v, value in enumerate(graph.values):
        if value.keep and v not in resident:
            run(graph.producer[v])
    return Plan.from_order(graph, order)


def _held(model: WindowModel, x: np.ndarray, k: int) -> set[int]:
    """Values that the point holds at boundary k."""
    columns = model.S[k]
    return {v for v in np.nonzero(columns >= 0)[0].tolist() if x[columns[v]] > CERTAIN}
