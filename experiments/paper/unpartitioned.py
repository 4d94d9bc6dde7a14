"""Checkmate's MILP as published, with and without frontier-advancing stages, for graphs of a few operations.

Equations (1) to (7) and (9) over stages x operations; with (8) stage t ends with the first run of operation t, without
it any operation may run in any stage and only the last one must have run at the end. Solved by SciPy's HiGHS, so
that both forms meet the same solver. One value per operation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy.optimize import Bounds, LinearConstraint, milp

from remat.errors import InvalidInput
from remat.graph import Graph


@dataclass(frozen=True, slots=True)
class Answer:
    """What a form of the MILP gave within its time.

    Attributes:
        columns, rows: of the model.
        lp: value of the relaxation, in the graph's cost unit; None if it was not solved.
        cost, bound: of the MILP; None if there is none.
        proven: the MILP was solved.
    """

    columns: int
    rows: int
    lp: float | None
    lp_s: float
    cost: float | None
    bound: float | None
    seconds: float
    proven: bool


class _Program:
    """Rows ``lower <= a x <= upper`` under construction, as triplets."""

    def __init__(self, n_columns: int) -> None:
        self.n_columns = n_columns
        self.triplets: list[tuple[int, int, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, terms: list[tuple[int, float]], lower: float, upper: float = np.inf) -> None:
        """Terms are (column, factor)."""
        row = len(self.lower)
        self.triplets += [(row, column, factor) for column, factor in terms]
        self.lower.append(lower)
        self.upper.append(upper)

    def constraint(self) -> LinearConstraint:
        rows, columns, entries = (np.array(part) for part in zip(*self.triplets, strict=True))
        matrix = sp.csr_array((entries, (rows, columns)), shape=(len(self.lower), self.n_columns))
        return LinearConstraint(matrix, np.array(self.lower), np.array(self.upper))  # pyright: ignore[reportArgumentType]


def solve_published(graph: Graph, budget_bytes: int, *, frontier_advancing: bool, time_limit_s: float) -> Answer:
    """Solve the relaxation and the MILP of `graph` within the budget, half of the time for each at most.

    Raises:
        InvalidInput: an operation has not exactly one output.
    """
    if any(len(op.outputs) != 1 for op in graph.operations):
        raise InvalidInput("the published MILP as written here takes one value per operation")
    n = len(graph)
    size = np.array([graph.values[op.outputs[0]].bytes for op in graph.operations], dtype=float)
    scale = max(size.max(), 1.0)
    size, budget = size / scale, (budget_bytes - graph.fixed_bytes) / scale
    reads = [sorted({graph.producer[v] for v in op.inputs}) for op in graph.operations]
    users = [[k for k in range(n) if i in reads[k]] for i in range(n)]
    frees = [(i, k) for k in range(n) for i in (*reads[k], k)]  # i may be freed right after k
    at = {pair: number for number, pair in enumerate(frees)}
    n_R = n_S = n_U = n * n
    first_S, first_F = n_R, n_R + n_S
    first_U = first_F + n * len(frees)

    def R(t: int, k: int) -> int:
        return t * n + k

    def S(t: int, i: int) -> int:
        return first_S + t * n + i

    def F(t: int, i: int, k: int) -> int:
        return first_F + t * len(frees) + at[i, k]

    def U(t: int, k: int) -> int:
        return first_U + t * n + k

    program = _Program(first_U + n_U)
    lower, upper = np.zeros(program.n_columns), np.ones(program.n_columns)
    upper[first_U:] = budget  # (9)
    for i in range(n):
        upper[S(0, i)] = 0  # (1d)
    for t in range(n):
        for k in range(n):
            for i in reads[k]:  # (1b)
                program.add([(R(t, i), 1), (S(t, i), 1), (R(t, k), -1)], 0)
        if t:
            for i in range(n):  # (1c)
                program.add([(R(t - 1, i), 1), (S(t - 1, i), 1), (S(t, i), -1)], 0)
        for i, k in frees:  # (5) to (7)
            later = [j for j in users[i] if j > k]
            hazards = [(R(t, k), -1.0), *([(S(t + 1, i), 1.0)] if t + 1 < n else []), *((R(t, j), 1.0) for j in later)]
            kappa = 1 + (t + 1 < n) + len(later)
            program.add([*hazards, (F(t, i, k), 1)], 0)  # 1 - FREE <= hazards, whose constant is 1
            program.add(
                [*((c, -f) for c, f in hazards), (F(t, i, k), -kappa)], 1 - kappa
            )  # kappa (1 - FREE) >= hazards
        held = [(S(t, i), size[i]) for i in range(n)]
        program.add([(U(t, 0), 1), (R(t, 0), -size[0]), *((c, -m) for c, m in held)], 0, 0)  # (2)
        for k in range(1, n):  # (3)
            freed = [(F(t, i, k - 1), size[i]) for i in (*reads[k - 1], k - 1)]
            program.add([(U(t, k), 1), (U(t, k - 1), -1), (R(t, k), -size[k]), *freed], 0, 0)
    if frontier_advancing:  # (8)
        for t in range(n):
            lower[R(t, t)] = 1
            for k in range(n):
                if k > t:
                    upper[R(t, k)] = 0
                if k >= t:
                    upper[S(t, k)] = 0
    else:
        program.add([(R(t, n - 1), 1) for t in range(n)], 1)  # (1e)
    cost = np.zeros(program.n_columns)
    for t in range(n):
        cost[t * n : t * n + n] = graph.costs
    constraint, bounds = program.constraint(), Bounds(lower, upper)  # pyright: ignore[reportArgumentType]
    integer = np.ones(program.n_columns)
    integer[first_U:] = 0
    began = time.monotonic()
    relaxed = milp(cost, constraints=constraint, bounds=bounds, options={"time_limit": time_limit_s / 2})
    lp_s = time.monotonic() - began
    began = time.monotonic()
    solved = milp(
        cost, integrality=integer, constraints=constraint, bounds=bounds, options={"time_limit": time_limit_s / 2}
    )
    return Answer(
        program.n_columns, len(program.lower), relaxed.fun if relaxed.status == 0 else None, lp_s,
        None if solved.x is None else solved.fun, solved.mip_dual_bound, time.monotonic() - began, solved.status == 0,
    )  # fmt: skip
