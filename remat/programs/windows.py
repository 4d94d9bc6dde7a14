"""The window relaxation: a few boundary stages instead of all of them, and columns that say "at least once".

Stages are those of `remat.programs.staged`: stage t ends with the first run of operation t. Of all stages only a few,
the boundaries t_1 < ... < t_K, have memory rows. Interval k begins after the first run of t_k and ends with the first
run of t_(k+1); the last one ends with the plan. A window is a union of consecutive intervals k..m. Columns, all 0 or 1:

- S[k,v]: value v is resident while t_k runs for the first time, and is used later before it is computed again. Inputs
  and outputs of t_k are resident then in any case: they have no column, and count in the memory row. A value that
  does not fit beside them has no column either: it is 0.
- R[k,m,i]: operation i, first run at or before t_k, runs at least once in the window k..m. R[k,k,i] costs c_i, the
  others nothing.

Rows, for the window k..m, which lies between the boundaries t_k and t_(m+1), with p the producer of v:

- NEED: a first run in the window reads v, or v is kept and the window is the last: S[k,v] + R[k,m,p] >= 1.
- EDGE: operation i reads v: S[k,v] + R[k,m,p] - R[k,m,i] >= 0.
- CONTINUITY: S[k,v] + R[k,m,p] - S[m+1,v] >= 0, for v computed at or before t_k.
- JOIN: sum of R[j,j,i] for j = k..m - R[k,m,i] >= 0; EACH: R[k,m,i] - R[j,j,i] >= 0 for each j of them.
- MEMORY: the bytes of all S[k,v], of the inputs and outputs of t_k and of its workspace are within the budget.

**Every plan of the scopes staged and fixed_order gives a point of it that costs no more**, so that the least cost of
the relaxation is a bound. Take a plan without useless runs (a run is useless if its outputs are not read before they
are computed again, and are not kept at the end; leaving it out keeps the plan valid, at no more cost and memory). Set
the columns as their descriptions say.

- Cost: a repeated run of i counts in the one interval in which it happens. Several in one interval count once.
- NEED and EDGE: a reader in the window k..m of a value v that was first computed at or before t_k reads the result of
  some run of p. If that run is in the window, R[k,m,p] is 1: it is no first run, since p ran first at or before t_k.
  Otherwise v has been resident since before t_k ended, and is used after it without being computed again: S[k,v] is 1,
  or v is an input or output of t_k and its rows are left out.
- CONTINUITY: if S[m+1,v] is 1, the run of p that made it is in the window, or S[k,v] is 1.
- MEMORY: the values with S[k,v] = 1 are resident while t_k runs, beside its inputs, outputs and workspace.
- An operation with several outputs makes all of them in each run. One that must run once has no R.

No R[k,.,i] is needed where no run of i after t_k can serve anything, and no S[k,v] where no use of v can follow t_k
(`last_stages`). R[k,m,i] is the same as R[k,m-1,i] where no run of i after t_m can serve; then only the shorter one has
a column.

With K = 1 this is a knapsack over one stage. More boundaries without windows make it weaker where a full staged LP
spreads fractions of one run over many stages; the windows undo that: one run serves all of a window or none of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp

from remat.arrays import GraphArrays
from remat.graph import Graph
from remat.plan import Plan
from remat.programs.program import Program, Rows, scale_of
from remat.programs.staged import last_stages
from remat.simulator import simulate

NEED, EDGE, CONTINUITY, JOIN, EACH, MEMORY = range(6)  # kinds of rows
NAMES = ("need", "edge", "continuity", "join", "each", "memory")


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """A graph as the model reads it; N operations, V values, E pairs of a reader and an input.

    Attributes:
        producer, last_held: [V] of each value; last_run, repeatable: [N]; see `last_stages`.
        reader, read: [E] operation and the value that it reads.
        size: [V] bytes; working: [N] bytes of inputs, outputs and workspace.
        at: [N] tuples of the values that an operation reads or makes.
    """

    graph: Graph
    producer: np.ndarray
    last_run: np.ndarray
    last_held: np.ndarray
    repeatable: np.ndarray
    reader: np.ndarray
    read: np.ndarray
    size: np.ndarray
    keep: np.ndarray
    cost: np.ndarray
    working: np.ndarray
    at: list[np.ndarray]

    @classmethod
    def of(cls, graph: Graph) -> Arrays:
        flat, operations = GraphArrays.of(graph), graph.operations
        last_run, last_held = last_stages(graph, [not op.run_once for op in operations])
        at = [np.array(sorted({*op.inputs, *op.outputs}), dtype=np.int64) for op in operations]
        working = [graph.working_set_bytes(k) - graph.fixed_bytes for k in range(len(operations))]
        return cls(
            graph, flat.producer, np.array(last_run), np.array(last_held), ~flat.run_once,
            np.repeat(np.arange(len(operations)), np.diff(flat.in_start)), flat.in_ids, flat.size_bytes, flat.keep,
            flat.cost, np.array(working, dtype=np.int64), at,
        )  # fmt: skip

    def profile(self) -> np.ndarray:
        """[N] bytes held while each operation runs in the plan that repeats nothing; without fixed bytes."""
        once = Plan.from_order(self.graph, range(len(self.graph)))
        return simulate(self.graph, once).running_bytes - self.graph.fixed_bytes


@dataclass(frozen=True, eq=False)
class WindowModel:
    """min cost x + cost of running everything once, matrix x >= row_lower, 0 <= x <= 1.

    Attributes:
        boundaries: [K] operations, ascending.
        cost: [n] int64; matrix: [rows, n] int64; row_lower: [rows] int64.
        row_kind: [rows]; row_key: [rows, 4] int64, filled up with -1: NEED and CONTINUITY (k, m, v),
            EDGE (k, m, i, v), JOIN (k, m, i), EACH (k, m, i, j), MEMORY (k); intervals count from 0.
        S: [K, V] column or -1; R: [(k, m)] [N] column or -1; see the module.
    """

    arrays: Arrays
    budget_bytes: int
    boundaries: tuple[int, ...]
    cost: np.ndarray
    matrix: sp.csr_array
    row_lower: np.ndarray
    row_kind: np.ndarray
    row_key: np.ndarray
    S: np.ndarray
    R: dict[tuple[int, int], np.ndarray]

    @cached_property
    def unit_bytes(self) -> int:
        """The greatest common divisor of the sizes of all values that have a column."""
        return math.gcd(*self.arrays.size[(self.S >= 0).any(axis=0)].tolist()) or 1

    @cached_property
    def columns(self) -> list[tuple[str, int, int, int]]:
        """[n] what each column stands for: ("S", k, k, v), or ("R", k, m, i) with the shortest window."""
        names = [("", 0, 0, 0)] * len(self.cost)
        for k, columns in enumerate(self.S):
            for v in np.nonzero(columns >= 0)[0].tolist():
                names[columns[v]] = ("S", k, k, v)
        for (k, m), columns in sorted(self.R.items(), key=lambda item: item[0][1] - item[0][0], reverse=True):
            for i in np.nonzero(columns >= 0)[0].tolist():
                names[columns[i]] = ("R", k, m, i)
        return names

    def scaled(self) -> tuple[Program, np.ndarray, float]:
        """(the linear program for a solver, [rows] factor of each row, factor of the cost)."""
        cost_scale = scale_of(float(self.cost.sum(dtype=np.float64)))
        room = float(self.budget_bytes - self.arrays.graph.fixed_bytes)
        row_scale = np.where(self.row_kind == MEMORY, scale_of(room), 1.0)
        program = Program(
            matrix=sp.csr_array(sp.diags_array(row_scale) @ self.matrix.astype(np.float64)),
            cost=self.cost * cost_scale,
            upper=np.ones(len(self.cost)),
            row_lower=self.row_lower * row_scale,
        )
        return program, row_scale, cost_scale


def build_window_model(
    arrays: Arrays, budget_bytes: int, boundaries: Sequence[int], windows: Sequence[tuple[int, int]]
) -> WindowModel:
    """The relaxation of `arrays.graph` within `budget_bytes`.

    Args:
        boundaries: operations, ascending, none the last operation.
        windows: (k, m) with k < m, intervals from 0; single intervals are always there.
    """
    return _Builder(arrays, budget_bytes, boundaries, windows).model()


class _Builder:
    """Columns first, then the rows of each window."""

    def __init__(
        self, arrays: Arrays, budget_bytes: int, boundaries: Sequence[int], windows: Sequence[tuple[int, int]]
    ) -> None:
        self.arrays, self.budget_bytes = arrays, budget_bytes
        self.t = np.array(boundaries, dtype=np.int64)
        self.K = len(boundaries)
        singles = [(k, k) for k in range(self.K)]
        self.windows = singles + sorted({(k, m) for k, m in windows if 0 <= k < m < self.K}, key=lambda w: w[1])
        self.cost: list[np.ndarray] = []
        self.n_columns = 0
        self.rows = Rows()
        self.S, self.is_there = self._held_columns()
        self.R: dict[tuple[int, int], np.ndarray] = {}

    def model(self) -> WindowModel:
        for window in self.windows:
            self.R[window] = self._run_columns(*window)
            self._window_rows(*window)
        for k in range(self.K):
            self._memory_row(k)
        rows = self.rows
        return WindowModel(
            self.arrays, self.budget_bytes, tuple(self.t.tolist()), np.concatenate(self.cost),
            rows.matrix(self.n_columns, np.int64), np.array(rows.lower, dtype=np.int64),
            np.array(rows.kind, dtype=np.int64), np.array(rows.key, dtype=np.int64).reshape(-1, 4), self.S, self.R,
        )  # fmt: skip

    def _held_columns(self) -> tuple[np.ndarray, np.ndarray]:
        """([K, V] columns of S, [K, V] whether the value is resident without one)."""
        a = self.arrays
        S = np.full((self.K, len(a.size)), -1, dtype=np.int64)
        is_there = np.zeros_like(S, dtype=bool)
        for k, t in enumerate(self.t.tolist()):
            is_there[k, a.at[t]] = True
            can_serve = (a.producer < t) & (a.last_held > t)
            self._new(S[k], can_serve & ~is_there[k] & (a.size <= self._room(k)), None)
        return S, is_there

    def _run_columns(self, k: int, m: int) -> np.ndarray:
        """[N] columns of R[k,m,.], with the rows that join those of several intervals."""
        a, t = self.arrays, self.t
        i = np.arange(len(a.cost))
        can_run = a.repeatable & (i <= t[k]) & (a.last_run > t[k])
        columns = np.full(len(i), -1, dtype=np.int64)
        if k == m:
            self._new(columns, can_run, a.cost)
            return columns
        end = np.minimum(m, np.searchsorted(t, a.last_run, side="left") - 1)  # the last interval in which a run serves
        for shorter in range(k, m):
            here = can_run & (end == shorter)
            if here.any():
                columns[here] = self._shorter(k, shorter)[here]
        whole = can_run & (end == m)
        self._new(columns, whole, None)
        many = i[whole]
        parts = [self.R[j, j][many] for j in range(k, m + 1)]
        key = (k, m)
        self._add(JOIN, [(part, 1) for part in parts] + [(columns[many], -1)], 0, key, many)
        for j, part in enumerate(parts, start=k):
            self._add(EACH, [(columns[many], 1), (part, -1)], 0, key, many, np.full(len(many), j))
        return columns

    def _shorter(self, k: int, m: int) -> np.ndarray:
        """[N] columns of R[k,m,.], which has rows of its own only if it is one of the windows."""
        if (k, m) not in self.R:
            self.R[k, m] = self._run_columns(k, m)
        return self.R[k, m]

    def _window_rows(self, k: int, m: int) -> None:
        """NEED, EDGE and CONTINUITY of the window."""
        a, start, is_last = self.arrays, self.t[k], m + 1 == self.K
        end = len(a.cost) - 1 if is_last else self.t[m + 1]
        S, R, is_there = self.S[k], self.R[k, m], self.is_there[k]
        old = (a.producer <= start) & ~is_there
        needed = np.zeros(len(a.size), dtype=bool)
        needed[a.read[(a.reader > start) & (a.reader <= end)]] = True
        if is_last:
            needed |= a.keep
        needed &= old
        key = (k, m)
        v = np.nonzero(needed)[0]
        self._add(NEED, [(S[v], 1), (R[a.producer[v]], 1)], 1, key, v)
        edges = old[a.read] & ~needed[a.read] & (R[a.reader] >= 0)
        i, v = a.reader[edges], a.read[edges]
        self._add(EDGE, [(S[v], 1), (R[a.producer[v]], 1), (R[i], -1)], 0, key, i, v)
        if not is_last:
            v = np.nonzero(old & ~needed & (self.S[m + 1] >= 0))[0]
            self._add(CONTINUITY, [(S[v], 1), (R[a.producer[v]], 1), (self.S[m + 1][v], -1)], 0, key, v)

    def _memory_row(self, k: int) -> None:
        a = self.arrays
        v = np.nonzero(self.S[k] >= 0)[0]
        room = self._room(k)
        unit = math.gcd(*a.size[v].tolist()) or 1
        if int(a.size[v].sum()) <= room:
            return
        terms = zip(self.S[k][v].tolist(), (-a.size[v]).tolist(), strict=True)
        self.rows.add(terms, -(room // unit) * unit, MEMORY, (k, -1, -1, -1))

    def _room(self, k: int) -> int:
        """Bytes for other values while the operation of boundary k runs."""
        return self.budget_bytes - self.arrays.graph.fixed_bytes - int(self.arrays.working[self.t[k]])

    def _new(self, columns: np.ndarray, where: np.ndarray, cost: np.ndarray | None) -> None:
        """Number new columns where the mask says so."""
        n = int(where.sum())
        columns[where] = np.arange(self.n_columns, self.n_columns + n)
        self.n_columns += n
        self.cost.append(np.zeros(n, dtype=np.int64) if cost is None else cost[where])

    def _add(
        self, kind: int, terms: Sequence[tuple[np.ndarray, int]], lower: int, key: tuple[int, int], *names: np.ndarray
    ) -> None:
        """A row for each entry of the names, whose key is `key` and the names."""
        keys = np.full((len(names[0]), 4), -1, dtype=np.int64)
        for place, part in enumerate((*key, *names)):
            keys[:, place] = part
        self.rows.add_each(terms, lower, kind, keys)
