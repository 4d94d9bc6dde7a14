"""The staged problem as a sparse integer program: trimmed, exact, without big constants.

Checkmate's problem (Jain et al., MLSys 2020): stage t ends with the first run of operation t; in it
earlier operations may run again, in order, each at most once. Columns are R[t,k] (operation k runs
again in stage t), S[t,v] (value v is resident at the start of stage t), Z (a value is still needed
from some point of a stage on) and A (bytes held beside an operation's outputs). The published form has
FREE and U instead, for every stage and operation. What is left out here, and why nothing is lost:

- R[t,t] = 1 is substituted; an operation that must run once has no other R.
- R[t,k] and S[t,v] end at the last stage in which they can serve: S[t,v] at the last possible run of
  any user of v (not the last user: that one may run again later), R[t,k] at the last S or use of an
  output. A plan with more runs something for nothing; without that run it stays valid, at no greater
  cost and with no more memory.
- Memory counts what is *needed*, not what is there: a value produced before slot x is counted at
  x if a later operation of the stage or the next stage needs it; a value produced after x if it was
  resident when the stage started. A plan that frees at last use holds exactly that. The rows
  Z >= R[t,u], Z >= Z of the next user, Z >= S[t+1,v] say "needed from this user on" without any big
  constant, and an input of operation t is needed to the end, so it has no Z at all.
- S[t,v] + R[t,k] <= 1 for the output v of a single-output operation: what is resident is not
  computed again (the judge refuses it). With several outputs both copies count while it runs.
- With a chosen set of repeats one S stands for all stages between two in which a value may be computed or
  used: held all along or, if it is dropped, dropped at once.
- A memory row whose left side cannot exceed the budget is dropped. Sizes and budget are divided by the
  greatest common divisor, the budget rounded down.

`memory="stage_end"` keeps only the rows of each stage's own operation, which need neither Z nor A:
Sum of M[v] S[t+1,v] over v not read by t, plus what t reads, writes and needs as workspace. These
hold for every order within a stage, so the relaxation is valid for scope fixed_order as well.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from remat.graph import Graph
from remat.plan import Plan
from remat.programs.program import Program, Rows, scale_of

EDGE, CONTINUITY, MEMORY, NEED, BALANCE, ONCE = range(6)  # kinds of rows


@dataclass(frozen=True, slots=True, eq=False)
class StagedModel:
    """min cost x + cost_constant, matrix x >= row_lower, 0 <= x <= upper; every number an integer.

    Attributes:
        graph, budget_bytes: what it was made for.
        cost: [n] int64; cost_constant: cost of running every operation once.
        upper: [n] int64: 1, or the budget in units for A.
        matrix: [rows, n] int64, compressed by rows; row_lower: [rows] int64.
        row_kind: [rows] EDGE, CONTINUITY, MEMORY, NEED, BALANCE or ONCE.
        row_key: [rows, 3] int32; what a row is about: EDGE (stage, operation, value), CONTINUITY (stage,
            value, -1), MEMORY (stage, slot, -1), ONCE (stage, operation, value).
        is_integer: [n] bool; R and S. The rest follows from them.
        unit_bytes: bytes that count as one.
        R_column, S_column: (stage, operation or value) to column.
        restricted: some repeats are left out, so its bound is not one of the problem.
        infeasible: some row cannot be met whatever the columns.
    """

    graph: Graph
    budget_bytes: int
    cost: np.ndarray
    cost_constant: int
    upper: np.ndarray
    matrix: sp.csr_array
    row_lower: np.ndarray
    row_kind: np.ndarray
    row_key: np.ndarray
    is_integer: np.ndarray
    unit_bytes: int
    R_column: dict[tuple[int, int], int]
    S_column: dict[tuple[int, int], int]
    restricted: bool
    infeasible: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.row_lower), len(self.cost)

    @property
    def units(self) -> int:
        """The budget beside the fixed bytes."""
        return (self.budget_bytes - self.graph.fixed_bytes) // self.unit_bytes

    def scaled(self, room: float = 0.0, units: int | None = None) -> ScaledProgram:
        """The program for a solver, in numbers that it can tell from its tolerances.

        Args:
            room: what every memory row gets beside the budget, in units.
            units: the budget to scale by; None for the model's own.
        """
        memory_scale = scale_of(self.units if units is None else units)
        cost_scale = scale_of(float(self.cost.sum(dtype=np.float64)))
        is_bytes = ~self.is_integer & (self.upper > 1)
        row_scale = np.where(np.isin(self.row_kind, (MEMORY, BALANCE)), memory_scale, 1.0)
        columns = sp.diags_array(np.where(is_bytes, 1.0 / memory_scale, 1.0))  # bytes count in scaled units too
        program = Program(
            matrix=sp.csr_array(sp.diags_array(row_scale) @ self.matrix.astype(np.float64) @ columns),
            cost=self.cost * cost_scale,
            upper=np.where(is_bytes, (self.upper + 1) * memory_scale, self.upper),
            row_lower=(self.row_lower - np.where(self.row_kind == MEMORY, room, 0.0)) * row_scale,
            is_integer=self.is_integer,
        )
        return ScaledProgram(program, row_scale, memory_scale, cost_scale)

    def matrices(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(R_TN, S_TV) as floats from a point; R[t,t] = 1."""
        n = len(self.graph)
        R_TN = np.eye(n)
        S_TV = np.zeros((n, len(self.graph.values)))
        for (t, k), column in self.R_column.items():
            R_TN[t, k] = x[column]
        for (t, v), column in self.S_column.items():
            S_TV[t, v] = x[column]
        return R_TN, S_TV

    def plan(self, x: np.ndarray) -> Plan:
        """The plan of an integral point: its runs in order, frees at last use."""
        n = len(self.graph)
        runs: list[list[int]] = [[] for _ in range(n)]
        for (t, k), column in self.R_column.items():
            if x[column] > 0.5:
                runs[t].append(k)
        order = [k for t in range(n) for k in (*sorted(runs[t]), t)]
        return Plan.from_order(self.graph, order, self.budget_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledProgram:
    """A program and the factors that made it: [rows] of each row, of a unit of memory and of cost."""

    program: Program
    row_scale: np.ndarray
    memory_scale: float
    cost_scale: float


def last_stages(
    graph: Graph, repeatable: list[bool], repeats: Collection[tuple[int, int]] | None = None
) -> tuple[list[int], list[int]]:
    """([N] last stage in which each operation can usefully run, [V] in which each value can be resident).

    With `repeats`, (stage, operation) pairs, in a problem that allows no others.
    """
    n = len(graph)
    latest = [n] * n
    if repeats is not None:
        latest = list(range(n))
        for t, k in repeats:
            latest[k] = max(latest[k], t)
    last_run = list(range(n))
    last_held = [graph.producer[v] for v in range(len(graph.values))]
    for k in range(n - 1, -1, -1):
        for v in graph.operations[k].outputs:
            users = (last_run[u] for u in graph.users[v])
            last_held[v] = n if graph.values[v].keep else max(users, default=k)
            if repeatable[k]:
                last_run[k] = max(last_run[k], min(last_held[v], n - 1, latest[k]))
    return last_run, last_held


def build_staged_model(
    graph: Graph, budget_bytes: int, *, memory: str = "full", once: bool = True,
    slot_stages: Collection[int] | None = None, repeats: Collection[tuple[int, int]] | None = None,
) -> StagedModel:  # fmt: skip
    """The integer program of `graph` within `budget_bytes`.

    Args:
        memory: ``full`` (exact) or ``stage_end`` (a relaxation, valid for fixed_order too).
        slot_stages: with ``full`` the stages whose repeats get memory rows, by default all; fewer make a
            relaxation.
        once: False leaves out S + R <= 1, which does not hold for fixed_order: there a value may be used
            early in a stage, freed, and computed again later in it.
        repeats: the (stage, operation) pairs that may be repeats, by default all (a restricted problem).
    """
    builder = _Builder(graph, budget_bytes, once, repeats)
    builder.edges()
    builder.continuity()
    builder.stage_ends()
    if memory == "full":
        for t in range(len(graph)) if slot_stages is None else sorted(slot_stages):
            builder.slots(t)
    return builder.model()


class _Builder:
    """Columns and rows under construction. R and S come first; Z and A follow with their rows."""

    def __init__(
        self, graph: Graph, budget_bytes: int, once: bool, repeats: Collection[tuple[int, int]] | None
    ) -> None:
        self.graph, self.budget_bytes, self.once, self.repeats = graph, budget_bytes, once, repeats
        operations = graph.operations
        self.unit = math.gcd(*(v.bytes for v in graph.values), *(op.workspace_bytes for op in operations)) or 1
        self.size = [value.bytes // self.unit for value in graph.values]
        self.scratch = [op.workspace_bytes // self.unit for op in operations]
        self.budget = (budget_bytes - graph.fixed_bytes) // self.unit
        self.infeasible = self.budget < 0
        self.rows = Rows()
        self.cost: list[int] = []
        self.upper: list[int] = []
        self.R: dict[tuple[int, int], int] = {}
        self.S: dict[tuple[int, int], int] = {}
        repeatable = [not op.run_once and bool(op.outputs) for op in operations]
        last_run, self.last_held = last_stages(graph, repeatable, repeats)
        for t in range(len(graph)):
            for k in range(t):
                if repeatable[k] and t <= last_run[k] and (repeats is None or (t, k) in repeats):
                    self.R[t, k] = self.column(operations[k].cost)
        self._residency_columns()
        self.n_integer = len(self.cost)

    def column(self, cost: int = 0, upper: int = 1) -> int:
        """A new column."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def _residency_columns(self) -> None:
        touched = _touched(self.graph, self.R) if self.repeats is not None else None
        for v, p in enumerate(self.graph.producer):
            for t in range(p + 1, min(self.last_held[v], len(self.graph) - 1) + 1):
                is_new = touched is None or t - 1 in touched[v]
                self.S[t, v] = self.column() if is_new else self.S[t - 1, v]

    def _provided(self, t: int, v: int) -> list[tuple[int, int]]:
        """Terms that are at least one where value `v` can be read in stage `t`."""
        p = self.graph.producer[v]
        return [(self.S[t, v], 1)] + ([(self.R[t, p], 1)] if (t, p) in self.R else [])

    def edges(self) -> None:
        """(1b) R[t, k] <= R[t, producer(v)] + S[t, v] for every input v of k; and R[t, k] + S[t, v] <= 1 for its only
        output."""
        operations = self.graph.operations
        for t, op in enumerate(operations):
            for v in op.inputs:
                self.rows.add(self._provided(t, v), 1, EDGE, (t, t, v))
        for (t, k), column in self.R.items():
            for v in operations[k].inputs:
                self.rows.add([*self._provided(t, v), (column, -1)], 0, EDGE, (t, k, v))
            outputs = operations[k].outputs
            if self.once and len(outputs) == 1 and (t, outputs[0]) in self.S:
                self.rows.add([(column, -1), (self.S[t, outputs[0]], -1)], -1, ONCE, (t, k, outputs[0]))

    def continuity(self) -> None:
        """(1c) S[t + 1, v] <= R[t, producer(v)] + S[t, v]; what is kept is there after the last stage."""
        n = len(self.graph)
        for v, value in enumerate(self.graph.values):
            for t in range(self.graph.producer[v] + 1, min(self.last_held[v], n - 1) + (1 if value.keep else 0)):
                if t + 1 == n:
                    self.rows.add(self._provided(t, v), 1, CONTINUITY, (t, v, -1))
                elif self.S[t, v] != self.S[t + 1, v]:
                    self.rows.add([*self._provided(t, v), (self.S[t + 1, v], -1)], 0, CONTINUITY, (t, v, -1))

    def stage_ends(self) -> None:
        """(9) where operation t runs in its stage: beside what it reads and makes, what stage t + 1 starts with."""
        n, operations, size = len(self.graph), self.graph.operations, self.size
        held_after: list[list[int]] = [[] for _ in range(n)]  # values that may be held from stage t to t + 1
        for v, p in enumerate(self.graph.producer):
            if size[v]:
                for t in range(p + 1, min(self.last_held[v], n)):
                    held_after[t].append(v)
        for t, op in enumerate(operations):
            room = self.budget - self.scratch[t] - sum(size[v] for v in (*op.inputs, *op.outputs))
            beside = [v for v in held_after[t] if v not in op.inputs]
            terms = []
            if t + 1 < n:
                terms = [(self.S[t + 1, v], -size[v]) for v in beside]
            elif self.once:  # kept; fixed_order may compute it again after the last operation
                room -= sum(size[v] for v in beside)
            self.infeasible |= room < 0
            if -sum(factor for _, factor in terms) > room:
                self.rows.add(terms, -room, MEMORY, (t, t, -1))

    def slots(self, t: int) -> None:
        """Memory of the repeats in stage `t`, slot by slot."""
        slots = [k for k in range(t) if (t, k) in self.R]
        # Values that may be there when the stage starts.
        here = [v for v, p in enumerate(self.graph.producer) if p < t and self.size[v] and (t, v) in self.S]
        if not slots:
            return
        most = max(self.scratch[x] + sum(self.size[v] for v in self.graph.operations[x].outputs) for x in slots)
        if sum(self.size[v] for v in here) + most > self.budget:
            _StageMemory(self, t, slots, here).add_rows()

    def model(self) -> StagedModel:
        """What was built."""
        n = len(self.cost)
        return StagedModel(
            self.graph, self.budget_bytes, np.array(self.cost, dtype=np.int64), self.graph.total_cost,
            np.array(self.upper, dtype=np.int64), self.rows.matrix(n, np.int64),
            np.array(self.rows.lower, dtype=np.int64), np.array(self.rows.kind, dtype=np.int8),
            np.array(self.rows.key, dtype=np.int32).reshape(-1, 3), np.arange(n) < self.n_integer, self.unit,
            self.R, self.S, restricted=self.repeats is not None, infeasible=self.infeasible,
        )  # fmt: skip


def _touched(graph: Graph, R: Collection[tuple[int, int]]) -> list[set[int]]:
    """[V] stages in which each value may be computed or used. From one to the next it is held all along or not at all:
    what is dropped in between is better dropped at once."""
    stages = [{k} for k in range(len(graph))]
    for t, k in R:
        stages[k].add(t)
    return [stages[graph.producer[v]].union(*(stages[u] for u in graph.users[v])) for v in range(len(graph.values))]


ALWAYS = -1  # in place of a column: a constant one
Where = int | None  # a column that is one where a value counts, ALWAYS, or None for never


class _StageMemory:
    """Memory of the slots of one stage: A[x] = bytes of all values that count at slot x, beside x's own outputs.

    A value that is made after x counts if it was resident when the stage started; one made before x counts if it is
    needed at x or later. From slot to slot only a few of them change, so A[x] is A of the slot before plus changes.
    """

    def __init__(self, builder: _Builder, t: int, slots: list[int], here: list[int]) -> None:
        self.builder, self.graph, self.t, self.slots, self.here = builder, builder.graph, t, slots, here
        self.made_by: dict[int, list[int]] = {}
        for v in here:
            self.made_by.setdefault(self.graph.producer[v], []).append(v)
        self.users: dict[int, list[int]] = {}  # of each value, the slots that read it
        self.needed: dict[int, list[Where]] = {}  # from each of these users on; the last entry: after the stage
        for v in here:
            self._need(v)

    def _need(self, v: int) -> None:
        """Z[v, i] >= R of user i, Z[v, i] >= Z[v, i + 1]: the value is needed from its i-th user on."""
        builder, t = self.builder, self.t
        after = self._after(v)
        slots = set(self.slots) if after != ALWAYS else ()
        self.users[v] = [u for u in self.graph.users[v] if u in slots]
        chain = [after]
        for u in reversed(self.users[v]):
            user, later = builder.R[t, u], chain[0]
            if later is None:
                chain.insert(0, user)
                continue
            column = builder.column()
            builder.rows.add([(column, 1), (user, -1)], 0, NEED)
            builder.rows.add([(column, 1), (later, -1)], 0, NEED)
            chain.insert(0, column)
        self.needed[v] = chain

    def _after(self, v: int) -> Where:
        """Whether a value is needed by the stage's own operation or after it."""
        is_last = self.t + 1 == len(self.graph)
        if v in self.graph.operations[self.t].inputs or (is_last and self.graph.values[v].keep):
            return ALWAYS
        return self.builder.S.get((self.t + 1, v))

    def _counts(self, v: int, x: int) -> Where:
        """Whether a value counts in A[x]."""
        p = self.graph.producer[v]
        if p > x:
            return self.builder.S[self.t, v]
        return self.needed[v][bisect_left(self.users[v], x)] if p < x else None

    def add_rows(self) -> None:
        """A[x] >= A of the slot before + changes, and A[x] + what x makes and needs <= budget."""
        builder, t, operations = self.builder, self.t, self.graph.operations
        counted: dict[int, Where] = {}
        constant, previous, last_column = 0, None, None
        for x in self.slots:
            change: dict[int, int] = {}
            for v in self.here if previous is None else self._may_change(previous, x):
                now, size = self._counts(v, x), builder.size[v]
                for where, amount in ((counted.get(v), -size), (now, size)):
                    if where is not None:
                        change[where] = change.get(where, 0) + amount
                counted[v] = now
            constant += change.pop(ALWAYS, 0)
            column = builder.column(upper=max(builder.budget, 0))
            terms = [(column, 1), *((c, -amount) for c, amount in change.items() if amount)]
            if last_column is not None:
                terms.append((last_column, -1))
            builder.rows.add(terms, 0, BALANCE)
            makes = operations[x].outputs
            own = sum(builder.size[v] for v in makes) + builder.scratch[x]
            row = [(column, -1), (builder.R[t, x], -own)]
            row += [(builder.S[t, v], -builder.size[v]) for v in makes if builder.size[v] and (t, v) in builder.S]
            builder.rows.add(row, constant - builder.budget, MEMORY, (t, x, -1))
            previous, last_column = x, column

    def _may_change(self, previous: int, x: int) -> set[int]:
        """Values that may count otherwise at slot `x` than at the slot before it."""
        read = (v for v in self.graph.operations[previous].inputs if v in self.needed)
        return {*read, *(v for p in range(previous, x + 1) for v in self.made_by.get(p, ()))}
