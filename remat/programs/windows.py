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
- CONTINUITY: S[k,v] + R[k,m,p] - S[m+1,v] >= 0, for v whose producer first ran at or before t_k.
- JOIN: sum of R[j,j,i] for j = k..m - R[k,m,i] >= 0; EACH: R[k,m,i] - R[j,j,i] >= 0 for each j of them.
- MEMORY: the bytes of all S[k,v], of the inputs and outputs of t_k and of its workspace are within the budget.
- KNAPSACK: sum of a[v] S[k,v] <= most, if no set of values that fits beside t_k weighs more (`remat.bounds.cuts`).

**Every plan gives a point of it that costs no more**, so that the least cost of the relaxation is a bound. Take a plan
without useless runs (a run is useless if its outputs are not read before they are computed again, and are not kept at
the end; leaving it out keeps the plan valid, at no more cost and memory; if it wrote over a value, that value is freed
there). Set the columns as their descriptions say.

- Cost: a repeated run of i counts in the one interval in which it happens. Several in one interval count once.
- NEED and EDGE: a reader in the window k..m of a value v whose producer p first ran at or before t_k reads the result
  of some run of p. If that run is in the window, it is not the first one: R[k,m,p] is 1.
  Otherwise v has been resident since before t_k ended, and is used after it without being computed again: S[k,v] is 1,
  or v is an input or output of t_k and its rows are left out.
- CONTINUITY: if S[m+1,v] is 1, the run of p that made it is in the window, or S[k,v] is 1.
- MEMORY: the values with S[k,v] = 1 are resident while t_k runs, beside its inputs, outputs and workspace.
- An operation with several outputs makes all of them in each run, or those of its implementation. One that must run
  once has no R.

**Scope free.** In the scopes staged and fixed_order, first runs have the graph's order, and "first run at or before
t_k" means i <= t_k. In scope free only the edges decide (those of values that every implementation reads). There it
means that t_k depends on i, or is i; "a first run in the window" means that i depends on t_k, and t_(m+1) depends on i
or is i. Each boundary depends on the one before, so that intervals follow each other. Operations of which neither is
certain have no columns and rows beside that boundary; to leave them out only enlarges the relaxation. The argument
above needs no more than this: if the first run of an operation is certainly before t_k, so are those of the producers
of its inputs.

**Implementations.** If operations have several, R[k,k,i] costs the least of them, an operation reads in rows of kind
EDGE what all of them read, and MEMORY counts the least bytes of t_k; what some implementation of t_k reads or makes has
no S. More columns and rows charge the choice for the first run of an operation:

- X[i,w]: the first run of operation i has implementation w. It costs what w costs beyond the least, and counts in the
  row MEMORY of its own boundary with its bytes beyond the least.
- CHOICE: (sum over w of X[i,w]) >= 1.
- CHOSEN: operation i first runs in the window and reads v in some implementations only:
  S[k,v] + R[k,m,p] - (sum of X[i,w] over those w) >= 0. It is left out where NEED holds for v.

A plan sets X by its first runs. The rows hold as those of kind NEED do: if the first run of i reads v, v is resident
or made in the window. In place, the value that is written over and the first output count once, in these bytes and in
the simulator.

**Slots, in scope staged and without implementations only.** If t_(k+1) = t_k + 1, interval k is one stage: operations
run in it in order, at most once each. Slot i is the moment at which operation i runs in it, or would run. More columns
and rows say what is resident then:

- U[k,j,v], for a reader j of v that can run, and for j = p: v is resident from the slot after the previous j to slot
  j. It is if j runs (RUN: U[k,j,v] - R[k,k,j] >= 0), and if it is needed later in the stage or beyond (LATER:
  U[k,j,v] - U[k,j',v] >= 0 for the next j', and U[k,j,v] - S[k+1,v] >= 0 for the last): v comes from slot p or from
  before the stage, and has been resident since. If t_(k+1) reads v, it is resident at every slot from p on; no U.
- At a slot before p, a value with S[k,v] = 1 is resident: its next use is later than slot p. An input or output of t_k
  has no S. It is resident there if it is needed at or beyond t_(k+1) and is not computed again: at least
  1 - R[k,k,p], or S[k+1,v] - R[k,k,p].
- SLOT, for each i that can run: the bytes of what is resident, and the workspace of i if it runs, fit the budget.

No R[k,.,i] is needed where no run of i after t_k can serve anything, and no S[k,v] where no use of v can follow t_k
(`Arrays.sides`). R[k,m,i] is the same as R[k,m-1,i] where no run of i after t_m can serve; then only the shorter one
has a column.

With K = 1 this is a knapsack over one stage. More boundaries without windows make it weaker where a full staged LP
spreads fractions of one run over many stages; the windows undo that: one run serves all of a window or none of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import breadth_first_order

from remat.arrays import GraphArrays
from remat.graph import Graph, Operation
from remat.plan import Plan, Scope
from remat.programs.program import Program, Rows, scale_of
from remat.simulator import simulate


class Kind:
    """Kinds of rows; from NEED_OUT on those of copies to the host, see `remat.programs.link_windows`."""

    NEED, EDGE, CONTINUITY, JOIN, EACH, MEMORY, RUN, LATER, SLOT, CHOICE, CHOSEN, KNAPSACK = range(12)
    NEED_OUT, EDGE_OUT, CONTINUITY_OUT, OUT, SOURCE, ONE, ARRIVED, STREAM_OUT, STREAM_IN, ARRIVAL = range(12, 22)
    DEADLINE, HELD_OUT, BEGUN_OUT, SINGLE_OUT, HELD_IN, BEGUN_IN, SINGLE_IN = range(22, 29)
    RELEASE, ARRIVAL_RUN, HOST, STAYED, SENT, AGAIN = range(29, 35)


NAMES = [name.lower() for name in vars(Kind) if name.isupper()]
TIMES = (Kind.STREAM_OUT, Kind.STREAM_IN, Kind.ARRIVAL, Kind.DEADLINE, Kind.RELEASE, Kind.ARRIVAL_RUN)


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementations of an operation that has several, the default one first.

    Attributes:
        costs, bytes: of each, beyond the least; bytes of inputs, outputs and workspace.
        readers: [value] the implementations that read it, for values that only some of them read.
    """

    costs: tuple[int, ...]
    bytes: tuple[int, ...]
    readers: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, graph: Graph, operation: Operation) -> Choice:
        own = operation.all_implementations
        costs, sizes = [each.cost for each in own], [graph.touched_bytes(each) for each in own]
        read = {v for each in own for v in each.inputs}
        readers = {v: tuple(w for w, each in enumerate(own) if v in each.inputs) for v in read}
        return cls(
            tuple(cost - min(costs) for cost in costs), tuple(size - min(sizes) for size in sizes),
            {v: some for v, some in readers.items() if len(some) < len(own)},
        )  # fmt: skip


def united(graph: Graph) -> Graph:
    """The graph without implementations: each operation reads and makes what any of its own does, at the least cost."""
    if not graph.has_implementations:
        return graph
    operations = []
    for op in graph.operations:
        own = op.all_implementations
        operations.append(replace(
            op, inputs=tuple(sorted({v for each in own for v in each.inputs})),
            outputs=tuple(sorted({v for each in own for v in each.outputs})), cost=min(each.cost for each in own),
            workspace_bytes=min(each.workspace_bytes for each in own), implementations=(),
        ))  # fmt: skip
    return replace(graph, operations=tuple(operations))


@dataclass(frozen=True, slots=True, eq=False)
class Sides:
    """What is certain of the other operations when an operation t, a boundary, runs for the first time.

    Attributes:
        before: [N] whether its first run is not after that of t; after: [N] whether it is after it.
        can_run: [N] whether an operation of `before` may run again after t and serve.
        can_hold: [V] whether a value made before t may serve after t.
    """

    before: np.ndarray
    after: np.ndarray
    can_run: np.ndarray
    can_hold: np.ndarray


@dataclass(frozen=True, eq=False)
class Arrays:
    """A graph as the model reads it; N operations, V values, E pairs of a reader and an input.

    Attributes:
        graph: `united`.
        scope: of the plans; in scope free, first runs follow the edges alone.
        choices: of the operations with several implementations.
        producer: [V] of each value; repeatable: [N].
        reader, read: [E] operation and the value that it reads; always: [E] whether every implementation does.
        size: [V] bytes; working: [N] bytes of inputs, outputs and workspace, of the smallest implementation.
        at: [N] tuples of the values that an operation reads or makes.
    """

    graph: Graph
    scope: Scope
    choices: dict[int, Choice]
    producer: np.ndarray
    repeatable: np.ndarray
    reader: np.ndarray
    read: np.ndarray
    always: np.ndarray
    size: np.ndarray
    keep: np.ndarray
    cost: np.ndarray
    working: np.ndarray
    at: list[np.ndarray]
    _sides: dict[int, Sides] = field(default_factory=dict)

    @classmethod
    def of(cls, full: Graph, scope: Scope = Scope.STAGED) -> Arrays:
        choices = {i: Choice.of(full, op) for i, op in enumerate(full.operations) if op.implementations}
        graph = united(full)
        flat, operations = GraphArrays.of(graph), graph.operations
        at = [np.array(sorted({*op.inputs, *op.outputs}), dtype=np.int64) for op in operations]
        working = [full.working_set_bytes(k) - graph.fixed_bytes for k in range(len(operations))]
        always = [k not in choices or v not in choices[k].readers for k, op in enumerate(operations) for v in op.inputs]
        return cls(
            graph, scope, choices, flat.producer, ~flat.run_once,
            np.repeat(np.arange(len(operations)), np.diff(flat.in_start)), flat.in_ids, np.array(always, dtype=bool),
            flat.size_bytes, flat.keep, flat.cost, np.array(working, dtype=np.int64), at,
        )  # fmt: skip

    def profile(self) -> np.ndarray:
        """[N] bytes held while each operation runs in the plan that repeats nothing; without fixed bytes."""
        once = Plan.from_order(self.graph, range(len(self.graph)))
        return simulate(self.graph, once).running_bytes - self.graph.fixed_bytes

    def sides(self, t: int) -> Sides:
        """What is certain beside the first run of operation t."""
        if t not in self._sides:
            before, after = self._ancestors(t), self._descendants(t)
            can_run, can_hold = self._serving(before)
            can_hold &= before[self.producer]
            self._sides[t] = Sides(before, after, can_run, can_hold)
        return self._sides[t]

    def serving_after(self, t: int) -> np.ndarray:
        """[V] whether a value made at or before operation t may be of use after it."""
        return self._serving(self._ancestors(t))[1]

    def certain_bytes(self, t: int) -> int:
        """Bytes of the values made before and surely read after operation t runs first, and of its working set."""
        is_read = np.zeros(len(self.size), dtype=bool)
        is_read[self.read[self._descendants(t)[self.reader]]] = True
        is_read[self.at[t]] = False
        return int(self.working[t] + self.size[is_read & self._ancestors(t)[self.producer]].sum())

    def _ancestors(self, t: int) -> np.ndarray:
        """[N] operations that run first before t in every plan of the scope, and t."""
        if self.scope is not Scope.FREE:
            return np.arange(len(self.cost)) <= t
        before = np.zeros(len(self.cost), dtype=bool)
        before[breadth_first_order(self._waits_for, t, return_predecessors=False)] = True
        return before

    def _descendants(self, t: int) -> np.ndarray:
        """[N] operations that run first after t in every plan of the scope."""
        if self.scope is not Scope.FREE:
            return np.arange(len(self.cost)) > t
        after = np.zeros(len(self.cost), dtype=bool)
        after[breadth_first_order(self._is_before, t, return_predecessors=False)] = True
        after[t] = False
        return after

    @cached_property
    def _waits_for(self) -> sp.csr_array:
        """[N, N] not 0 where the operation of the row reads a value of that of the column in every implementation."""
        n, edges = len(self.cost), (self.reader[self.always], self.producer[self.read[self.always]])
        return sp.csr_array((np.ones(len(edges[0]), dtype=np.int8), edges), shape=(n, n))

    @cached_property
    def _is_before(self) -> sp.csr_array:
        """`_waits_for`, transposed."""
        return sp.csr_array(self._waits_for.T)

    def _serving(self, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """([N] whether operations of `before` can run again and serve, [V] whether a value can serve, after them).

        A value serves if it is kept, read by an operation that is not in `before`, or by one that can run again.
        """
        graph, is_before, repeatable = self.graph, before.tolist(), self.repeatable.tolist()
        runs, serves = [False] * len(is_before), self.keep.tolist()
        for i in reversed(range(len(is_before))):
            outputs = graph.operations[i].outputs
            for v in outputs:
                serves[v] = serves[v] or any(runs[user] or not is_before[user] for user in graph.users[v])
            runs[i] = is_before[i] and repeatable[i] and any(serves[v] for v in outputs)
        return np.array(runs, dtype=bool), np.array(serves, dtype=bool)


@dataclass(frozen=True, slots=True)
class Cut:
    """The row KNAPSACK of the boundary at operation `boundary`: [(v, a)] with sum of a S[k,v] <= most."""

    boundary: int
    most: int
    weights: tuple[tuple[int, int], ...]


def place_of(boundary: int) -> tuple[int, int]:
    """(operation of a boundary, the last one whose first run has ended there): t is its end, -t its start.

    Boundaries follow each other in the order of their places.
    """
    return (boundary, boundary) if boundary >= 0 else (-boundary, -boundary - 1)


@dataclass(frozen=True, eq=False)
class WindowModel:
    """min cost x + cost of running everything once, matrix x >= row_lower, 0 <= x <= 1.

    Attributes:
        boundaries: [K] operations, ascending; with copies also -t for the start of operation t, see `place_of`.
        cost: [n] int64; matrix: [rows, n] int64; row_lower: [rows] int64.
        row_kind: [rows]; row_key: [rows, 4] int64, filled up with -1: NEED and CONTINUITY (k, m, v),
            EDGE (k, m, i, v), JOIN (k, m, i), EACH (k, m, i, j), MEMORY (k), RUN and LATER (k, j, v), SLOT (k, i),
            CHOICE (i), CHOSEN (k, m, i, v), KNAPSACK (k, place in `cuts`); intervals count from 0.
        S: [K, V] column or -1; R: [(k, m)] [N] column or -1; U: [(k, j, v)] column; X: [i] [W] columns; see the module.
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
    U: dict[tuple[int, int, int], int]
    X: dict[int, np.ndarray]
    cuts: tuple[Cut, ...] = ()

    def with_cuts(self, cuts: Sequence[Cut]) -> WindowModel:
        """The same with more rows KNAPSACK, each at one of the boundaries."""
        if not cuts:
            return self
        rows = Rows()
        for place, cut in enumerate(cuts, start=len(self.cuts)):
            k = self.boundaries.index(cut.boundary)
            terms = [(int(self.S[k, v]), -a) for v, a in cut.weights]
            rows.add(terms, -cut.most, Kind.KNAPSACK, (k, place, -1, -1))
        return replace(self.with_rows(rows), cuts=(*self.cuts, *cuts))

    def with_missed(self, x: np.ndarray) -> Self:
        """The same with rows on demand that the point x [n] misses; here there are none."""
        return self

    def with_rows(self, rows: Rows) -> Self:
        """The same with more rows."""
        return replace(
            self, matrix=sp.csr_array(sp.vstack([self.matrix, rows.matrix(len(self.cost), np.int64)])),
            row_lower=np.concatenate([self.row_lower, np.array(rows.lower, dtype=np.int64)]),
            row_kind=np.concatenate([self.row_kind, np.array(rows.kind, dtype=np.int64)]),
            row_key=np.vstack([self.row_key, np.array(rows.key, dtype=np.int64)]),
        )  # fmt: skip

    @cached_property
    def can_be_boundary(self) -> np.ndarray:
        """[N] whether an operation can be another boundary; in scope free it must come before or after all of them."""
        a = self.arrays
        sides = [a.sides(abs(t)) for t in self.boundaries]
        can_be = np.all([side.before | side.after for side in sides], axis=0)
        if a.scope is Scope.FREE:  # nothing certainly follows an operation that nobody reads
            is_read = np.zeros_like(can_be)
            is_read[a.producer[a.read]] = True
            can_be &= is_read
        can_be[[*(t for t in self.boundaries if t >= 0), -1]] = False
        return can_be

    @cached_property
    def is_bytes(self) -> np.ndarray:
        """[rows] whether the row counts bytes."""
        return np.isin(self.row_kind, (Kind.MEMORY, Kind.SLOT, Kind.HOST))

    @cached_property
    def is_time(self) -> np.ndarray:
        """[rows] whether the row counts time."""
        return np.isin(self.row_kind, TIMES)

    @property
    def is_a_plan(self) -> bool:
        """Whether a point in integers says how repeated operations run."""
        return not self.arrays.choices

    @cached_property
    def is_whole(self) -> np.ndarray:
        """[n] whether every plan has 0 or 1 in the column."""
        return np.full(len(self.cost), True)

    @cached_property
    def units(self) -> np.ndarray:
        """[rows] greatest common divisor of the row's factors."""
        rows = np.split(self.matrix.data, self.matrix.indptr[1:-1])
        return np.array([np.gcd.reduce(row) if len(row) else 1 for row in rows], dtype=np.int64)

    @cached_property
    def columns(self) -> list[tuple[str, int, int, int]]:
        """[n] names: ("S", k, k, v), ("U", k, j, v), ("X", i, i, w), or ("R", k, m, i) with the least m."""
        names = [("", 0, 0, 0)] * len(self.cost)
        for k, columns in enumerate(self.S):
            for v in np.nonzero(columns >= 0)[0].tolist():
                names[columns[v]] = ("S", k, k, v)
        for (k, m), columns in sorted(self.R.items(), key=lambda item: item[0][1] - item[0][0], reverse=True):
            for i in np.nonzero(columns >= 0)[0].tolist():
                names[columns[i]] = ("R", k, m, i)
        for (k, j, v), column in self.U.items():
            names[column] = ("U", k, j, v)
        for i, columns in self.X.items():
            for w, column in enumerate(columns.tolist()):
                names[column] = ("X", i, i, w)
        return names

    def scaled(self) -> tuple[Program, np.ndarray, float]:
        """(the linear program for a solver, [rows] factor of each row, factor of the cost)."""
        cost_scale = scale_of(float(self.cost.sum(dtype=np.float64)))
        room = float(self.budget_bytes - self.arrays.graph.fixed_bytes)
        row_scale = np.where(self.is_bytes, scale_of(room), np.where(self.is_time, cost_scale, 1.0))
        program = Program(
            matrix=sp.csr_array(sp.diags_array(row_scale) @ self.matrix.astype(np.float64)),
            cost=self.cost * cost_scale,
            upper=np.ones(len(self.cost)),
            row_lower=self.row_lower * row_scale,
        )
        return program, row_scale, cost_scale


def build_window_model(
    arrays: Arrays, budget_bytes: int, boundaries: Sequence[int], windows: Sequence[tuple[int, int]], *,
    slots: bool = False,
) -> WindowModel:  # fmt: skip
    """The relaxation of `arrays.graph` within `budget_bytes`.

    Args:
        boundaries: operations, ascending, none the last operation; in scope free, each depends on those before it.
        windows: (k, m) with k < m, intervals from 0; single intervals are always there.
        slots: with the rows that hold in scope staged only; not for a graph with implementations.
    """
    builder = Builder(arrays, budget_bytes, boundaries, windows)
    for k in range(len(boundaries) - 1):
        if slots and not arrays.choices and boundaries[k + 1] == boundaries[k] + 1:
            builder.add_slots(k)
    return builder.model()


class Builder:
    """Columns first, then the rows of each window."""

    def __init__(
        self, arrays: Arrays, budget_bytes: int, boundaries: Sequence[int], windows: Sequence[tuple[int, int]]
    ) -> None:
        self.arrays, self.budget_bytes = arrays, budget_bytes
        self.boundaries = tuple(boundaries)
        self.t, self.done = np.array([place_of(t) for t in boundaries], dtype=np.int64).T
        self.K = len(boundaries)
        self.sides = [arrays.sides(t) for t in self.done.tolist()]
        assert all(later.before[t] for t, later in zip(self.done, self.sides[1:], strict=False)), "no chain"
        can_run = np.array([sides.can_run for sides in self.sides])
        self.last_run = np.where(can_run.any(axis=0), self.K - 1 - np.argmax(can_run[::-1], axis=0), -1)  # intervals
        singles = [(k, k) for k in range(self.K)]
        self.windows = singles + sorted({(k, m) for k, m in windows if 0 <= k < m < self.K}, key=lambda w: w[1])
        self.cost: list[np.ndarray] = []
        self.n_columns = 0
        self.rows = Rows()
        self.S, self.is_there = self._held_columns()
        self.R: dict[tuple[int, int], np.ndarray] = {}
        self.U: dict[tuple[int, int, int], int] = {}
        self.X: dict[int, np.ndarray] = {}
        self._copy_columns()
        for window in self.windows:
            self.R[window] = self._run_columns(*window)
            self._window_rows(*window)
        for k in range(self.K):
            self._memory_row(k)
        self._copy_rows()

    def _copy_columns(self) -> None:
        """Columns of copies to the host, see `remat.programs.link_windows`; here there are none."""

    def _copy_rows(self) -> None:
        """Their rows."""

    def _provided(self, k: int, m: int, v: np.ndarray, *, is_read: bool = True) -> list[tuple[np.ndarray, int]]:
        """Columns, some of which is 1 if the values v [rows] are there in the window, to be read or only held."""
        return [(self.S[k][v], 1), (self.R[k, m][self.arrays.producer[v]], 1)]

    def model(self) -> WindowModel:
        rows = self.rows
        return WindowModel(
            self.arrays, self.budget_bytes, self.boundaries, np.concatenate(self.cost),
            rows.matrix(self.n_columns, np.int64), np.array(rows.lower, dtype=np.int64),
            np.array(rows.kind, dtype=np.int64), np.array(rows.key, dtype=np.int64).reshape(-1, 4), self.S, self.R,
            self.U, self.X,
        )  # fmt: skip

    def add_slots(self, k: int) -> None:
        """U, RUN, LATER and SLOT of interval k, which is one stage."""
        graph, end = self.arrays.graph, int(self.t[k + 1])
        slots = np.nonzero(self.R[k, k] >= 0)[0].tolist()
        terms: dict[int, list[tuple[int, int]]] = {i: [] for i in slots}
        room = dict.fromkeys(slots, self.budget_bytes - graph.fixed_bytes)
        for v, value in enumerate(graph.values):
            if graph.producer[v] >= end:
                continue
            for i, columns, constant in self._resident(k, v, slots):
                terms[i] += [(column, -factor * value.bytes) for column, factor in columns]
                room[i] -= constant * value.bytes
        for i in slots:
            if graph.operations[i].workspace_bytes:
                terms[i].append((int(self.R[k, k][i]), -graph.operations[i].workspace_bytes))
            unit = math.gcd(*(factor for _, factor in terms[i])) or 1
            self.rows.add(terms[i], -(room[i] // unit) * unit, Kind.SLOT, (k, i, -1, -1))

    def _resident(self, k: int, v: int, slots: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, int]], int]]:
        """(slot, columns with factors, constant) whose sum is at most 1 if v is resident at the slot, and else 0."""
        graph, R = self.arrays.graph, self.R[k, k]
        p, end = graph.producer[v], int(self.t[k + 1])
        held, after = int(self.S[k, v]), int(self.S[k + 1, v])
        again = [(int(R[p]), -1)] if R[p] >= 0 else []
        is_read = v in graph.operations[end].inputs
        readers = [] if is_read else [j for j in sorted({p, *graph.users[v]}) if j < end and R[j] >= 0]
        for i in slots:
            if i >= p and is_read:
                yield i, [], 1
            elif i >= p:
                column = self._needed_from(k, i, v, readers, after)
                if column >= 0:
                    yield i, [(column, 1)], 0
            elif not self.is_there[k, v]:
                if held >= 0:
                    yield i, [(held, 1)], 0
            elif is_read:
                yield i, again, 1
            elif after >= 0:
                yield i, [(after, 1), *again], 0

    def _needed_from(self, k: int, i: int, v: int, readers: Sequence[int], after: int) -> int:
        """The column of U for the first reader from slot i on, or S[k+1,v], or -1."""
        column = after
        for j in reversed(readers):
            if j < i:
                break
            column = self._needed(k, j, v, column)
        return column

    def _needed(self, k: int, j: int, v: int, later: int) -> int:
        """The column U[k,j,v], with its rows if it is new; `later` is the column that it is at least, or -1."""
        if (k, j, v) not in self.U:
            column = self.U[k, j, v] = self.n_columns
            self.n_columns += 1
            self.cost.append(np.zeros(1, dtype=np.int64))
            self.rows.add([(column, 1), (int(self.R[k, k][j]), -1)], 0, Kind.RUN, (k, j, v, -1))
            if later >= 0:
                self.rows.add([(column, 1), (later, -1)], 0, Kind.LATER, (k, j, v, -1))
        return self.U[k, j, v]

    def _held_columns(self) -> tuple[np.ndarray, np.ndarray]:
        """([K, V] columns of S, [K, V] whether the value is resident without one)."""
        a = self.arrays
        S = np.full((self.K, len(a.size)), -1, dtype=np.int64)
        is_there = np.zeros_like(S, dtype=bool)
        for k, t in enumerate(self.t.tolist()):
            is_there[k, a.at[t]] = True
            self._new(S[k], self.sides[k].can_hold & ~is_there[k] & (a.size <= self._room(k)), None)
        return S, is_there

    def _run_columns(self, k: int, m: int) -> np.ndarray:
        """[N] columns of R[k,m,.], with the rows that join those of several intervals."""
        can_run = self.sides[k].can_run
        columns = np.full(len(can_run), -1, dtype=np.int64)
        if k == m:
            self._new(columns, can_run, self.arrays.cost)
            return columns
        end = np.minimum(m, self.last_run)
        for shorter in range(k, m):
            here = can_run & (end == shorter)
            if here.any():
                if (k, shorter) not in self.R:  # it has rows of its own only if it is one of the windows
                    self.R[k, shorter] = self._run_columns(k, shorter)
                columns[here] = self.R[k, shorter][here]
        whole = can_run & (end == m)
        self._new(columns, whole, None)
        many = np.nonzero(whole)[0]
        parts = [self.R[j, j][many] for j in range(k, m + 1)]
        key = (k, m)
        self._add(Kind.JOIN, [(part, 1) for part in parts] + [(columns[many], -1)], 0, key, many)
        for j, part in enumerate(parts, start=k):
            self._add(Kind.EACH, [(columns[many], 1), (part, -1)], 0, key, many, np.full(len(many), j))
        return columns

    def _window_rows(self, k: int, m: int) -> None:
        """NEED, EDGE and CONTINUITY of the window."""
        a, sides, is_last = self.arrays, self.sides[k], m + 1 == self.K
        S, R, is_there = self.S[k], self.R[k, m], self.is_there[k]
        old = sides.before[a.producer] & ~is_there
        needed = np.zeros(len(a.size), dtype=bool)
        first_runs = (sides.after if is_last else sides.after & a.sides(int(self.t[m + 1])).before)[a.reader]
        needed[a.read[first_runs & a.always]] = True
        if is_last:
            needed |= a.keep
        needed &= old
        key = (k, m)
        v = np.nonzero(needed)[0]
        self._add(Kind.NEED, self._provided(k, m, v), 1, key, v)
        edges = old[a.read] & ~needed[a.read] & (R[a.reader] >= 0) & a.always
        i, v = a.reader[edges], a.read[edges]
        self._add(Kind.EDGE, [*self._provided(k, m, v), (R[i], -1)], 0, key, i, v)
        if not is_last:
            v = np.nonzero(old & ~needed & (self.S[m + 1] >= 0))[0]
            held = (self.S[m + 1][v], -1)
            self._add(Kind.CONTINUITY, [*self._provided(k, m, v, is_read=False), held], 0, key, v)
        for i, v in np.stack([a.reader, a.read])[:, first_runs & ~a.always & (old & ~needed)[a.read]].T.tolist():
            chosen = [(int(column), 1) for column in (S[v], R[a.producer[v]]) if column >= 0]
            chosen += [(int(self._choice(i)[w]), -1) for w in a.choices[i].readers[v]]
            self.rows.add(chosen, 0, Kind.CHOSEN, (k, m, i, v))

    def _choice(self, i: int) -> np.ndarray:
        """The columns X[i,.], with their row if they are new."""
        if i not in self.X:
            costs = np.array(self.arrays.choices[i].costs, dtype=np.int64)
            self.X[i] = np.full(len(costs), -1, dtype=np.int64)
            self._new(self.X[i], np.full(len(costs), True), costs)
            self.rows.add([(column, 1) for column in self.X[i].tolist()], 1, Kind.CHOICE, (i, -1, -1, -1))
        return self.X[i]

    def _memory_row(self, k: int) -> None:
        a = self.arrays
        v, t = np.nonzero(self.S[k] >= 0)[0], int(self.t[k])
        columns, sizes = self.S[k][v].tolist(), a.size[v].tolist()
        if t in a.choices:
            columns, sizes = [*columns, *self._choice(t).tolist()], [*sizes, *a.choices[t].bytes]
        room = self._room(k)
        unit = math.gcd(*sizes) or 1
        if sum(sizes) <= room:
            return
        terms = [(column, -size) for column, size in zip(columns, sizes, strict=True) if size]
        self.rows.add(terms, -(room // unit) * unit, Kind.MEMORY, (k, -1, -1, -1))

    def _room(self, k: int) -> int:
        """Bytes for other values while the operation of boundary k runs with its smallest implementation."""
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
