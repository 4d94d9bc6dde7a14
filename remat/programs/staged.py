"""The staged problem as a sparse integer program: trimmed, exact, without big constants.

Checkmate's problem (Jain et al., MLSys 2020): stage t ends with the first run of operation t. Before it, earlier
operations may run again, in order, each at most once. Columns are R[t,k] (operation k runs again in stage t), S[t,v]
(value v is resident at the start of stage t), Z (a value is still needed from some point of a stage on) and A (bytes
held beside an operation's outputs). The published form has FREE and U instead, for every stage and operation. This form
differs as follows, and loses nothing:

- R[t,t] = 1 is substituted; an operation that must run once has no other R.
- R[t,k] and S[t,v] end at the last stage in which they can be useful: S[t,v] at the last possible run of
  any user of v (not at the last user, because an earlier user may run again later), R[t,k] at the last S or use of an
  output. A plan beyond that has a useless run; without this run it stays valid and needs no more cost or memory.
- Memory counts the *needed* values, not the resident ones. A value produced before slot x counts at x if a later
  operation of the stage, or the next stage, needs it; a value produced after x counts if it was resident when the stage
  started. A plan that frees at last use holds exactly these values. The rows Z >= R[t,u], Z >= Z of the next user,
  Z >= S[t+1,v] say "needed from this user on" without a big constant. An input of operation t is needed to the end,
  so it has no Z.
- S[t,v] + R[t,k] <= 1 for the output v of a single-output operation: a resident value is not computed again (the
  simulator refuses it). An operation with several outputs may; both copies count while it runs.
- With a chosen set of repeats, a value may be computed or used only in some stages. One S serves all stages between two
  of these: a value that is dropped in between is dropped at once.
- A memory row whose left side cannot exceed the budget is left out. Sizes and budget are divided by the
  greatest common divisor, and the budget is rounded down.

`memory="stage_end"` keeps only the rows of each stage's own operation, which need neither Z nor A: the sum of
M[v] S[t+1,v] over values v that t does not read, plus the inputs, outputs and workspace of t. These rows hold for every
order within a stage, so the relaxation is also valid for scope fixed_order.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from remat.graph import Graph
from remat.plan import Plan
from remat.programs.program import Program, Rows, scale_of

EDGE, CONTINUITY, MEMORY, NEED, BALANCE, ONCE = range(6)  # kinds of rows


@dataclass(frozen=True, slots=True, eq=False)
class StagedModel:
    """min cost x + cost_constant, matrix x >= row_lower, 0 <= x <= upper; every number is an integer.

    Attributes:
        graph, budget_bytes: the problem.
        cost: [n] int64; cost_constant: cost of running every operation once.
        upper: [n] int64: 1, or the budget in units for A.
        matrix: [rows, n] int64, compressed by rows; row_lower: [rows] int64.
        row_kind: [rows] EDGE, CONTINUITY, MEMORY, NEED, BALANCE or ONCE.
        row_key: [rows, 3] int32; identifies a row: EDGE (stage, operation, value), CONTINUITY (stage,
            value, -1), MEMORY (stage, slot, -1), ONCE (stage, operation, value).
        is_integer: [n] bool; True for R and S. The other columns follow from them.
        unit_bytes: bytes in one unit.
        R_column, S_column: (stage, operation or value) to column.
        infeasible: no values of the columns meet some row.
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
    infeasible: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.row_lower), len(self.cost)

    @property
    def units(self) -> int:
        """The budget in units, without the fixed bytes."""
        return (self.budget_bytes - self.graph.fixed_bytes) // self.unit_bytes

    def scaled(self, room: float = 0.0, units: int | None = None) -> ScaledProgram:
        """The program for a solver, in numbers that are large beside its tolerances.

        Args:
            room: units added to the budget of every memory row.
            units: the budget to scale by; None for the model's own.
        """
        memory_scale = scale_of(self.units if units is None else units)
        cost_scale = scale_of(float(self.cost.sum(dtype=np.float64)))
        is_bytes = ~self.is_integer & (self.upper > 1)
        row_scale = np.where(np.isin(self.row_kind, (MEMORY, BALANCE)), memory_scale, 1.0)
        columns = sp.diags_array(np.where(is_bytes, 1.0 / memory_scale, 1.0))  # A counts in scaled units too
        program = Program(
            matrix=sp.csr_array(sp.diags_array(row_scale) @ self.matrix.astype(np.float64) @ columns),
            cost=self.cost * cost_scale,
            upper=np.where(is_bytes, (self.upper + 1) * memory_scale, self.upper),
            row_lower=(self.row_lower - np.where(self.row_kind == MEMORY, room, 0.0)) * row_scale,
            is_integer=self.is_integer,
        )
        return ScaledProgram(program, row_scale, memory_scale, cost_scale)

    def matrices(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(R_TN, S_TV) of a point, as floats; R[t,t] = 1."""
        n = len(self.graph)
        R_TN = np.eye(n)
        S_TV = np.zeros((n, len(self.graph.values)))
        for (t, k), column in self.R_column.items():
            R_TN[t, k] = x[column]
        for (t, v), column in self.S_column.items():
            S_TV[t, v] = x[column]
        return R_TN, S_TV

    def plan(self, x: np.ndarray) -> Plan:
        """The plan of an integral point: its runs in order, with values freed at their last use."""
        n = len(self.graph)
        runs: list[list[int]] = [[] for _ in range(n)]
        for (t, k), column in self.R_column.items():
            if x[column] > 0.5:
                runs[t].append(k)
        order = [k for t in range(n) for k in (*sorted(runs[t]), t)]
        return Plan.from_order(self.graph, order, self.budget_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledProgram:
    """A program with its scale factors: [rows] of each row, of a unit of memory and of cost."""

    program: Program
    row_scale: np.ndarray
    memory_scale: float
    cost_scale: float


def stages_of(order: Iterable[int]) -> Iterator[int]:
    """The stage of each computation of a staged order."""
    stage = 0
    for k in order:
        yield stage
        stage += k == stage


def last_stages(
    graph: Graph, repeatable: list[bool], repeats: Collection[tuple[int, int]] | None = None
) -> tuple[list[int], list[int]]:
    """([N] last stage in which each operation can usefully run, [V] in which each value can be resident).

    `repeats` are the (stage, operation) pairs that alone may be repeats; None for all.
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
    graph: Graph, budget_bytes: int, *, memory: str = "whole", once: bool = True,
    slot_stages: Collection[int] | None = None, repeats: Collection[tuple[int, int]] | None = None,
) -> StagedModel:  # fmt: skip
    """The integer program of `graph` within `budget_bytes`.

    Args:
        memory: ``whole`` (exact) or ``stage_end`` (a relaxation, valid for fixed_order too).
        slot_stages: with ``whole``, stages whose repeats get memory rows, by default all; fewer make a relaxation.
        once: False leaves out S + R <= 1, which does not hold for fixed_order: there a value may be used
            early in a stage, freed, and computed again later in the same stage.
        repeats: (stage, operation) pairs that alone may be repeats (a restricted problem), by default all.
    """
    builder = _Builder(graph, budget_bytes, once, repeats)
    builder.edges()
    builder.continuity()
    builder.stage_ends()
    if memory == "whole":
        for t in range(len(graph)) if slot_stages is None else sorted(slot_stages):
            builder.slots(t)
    return builder.model()


class _Builder:
    """Columns and rows under construction: first R and S, then Z and A with their rows."""

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
        touched = _touched(graph, self.R) if repeats is not None else None
        for v, p in enumerate(graph.producer):
            for t in range(p + 1, min(self.last_held[v], len(graph) - 1) + 1):
                is_new = touched is None or t - 1 in touched[v]
                self.S[t, v] = self.column() if is_new else self.S[t - 1, v]
        self.n_integer = len(self.cost)

    def column(self, cost: int = 0, upper: int = 1) -> int:
        """Add a column."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def _provided(self, t: int, v: int) -> list[tuple[int, int]]:
        """Terms whose sum is at least one if value `v` can be read in stage `t`."""
        p = self.graph.producer[v]
        return [(self.S[t, v], 1)] + ([(self.R[t, p], 1)] if (t, p) in self.R else [])

    def edges(self) -> None:
        """(1b) R[t, k] <= R[t, producer(v)] + S[t, v] for every input v of k; R[t, k] + S[t, v] <= 1 for the only
        output v of k."""
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
        """(1c) S[t + 1, v] <= R[t, producer(v)] + S[t, v]; kept values are resident after the last stage."""
        n = len(self.graph)
        for v, value in enumerate(self.graph.values):
            for t in range(self.graph.producer[v] + 1, min(self.last_held[v], n - 1) + (1 if value.keep else 0)):
                if t + 1 == n:
                    self.rows.add(self._provided(t, v), 1, CONTINUITY, (t, v, -1))
                elif self.S[t, v] != self.S[t + 1, v]:
                    self.rows.add([*self._provided(t, v), (self.S[t + 1, v], -1)], 0, CONTINUITY, (t, v, -1))

    def stage_ends(self) -> None:
        """(9) at the first run of operation t: its inputs, outputs and workspace, and the values held into t + 1."""
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
            elif self.once:  # kept values; fixed_order may compute them again after the last operation
                room -= sum(size[v] for v in beside)
            self.infeasible |= room < 0
            if -sum(factor for _, factor in terms) > room:
                self.rows.add(terms, -room, MEMORY, (t, t, -1))

    def slots(self, t: int) -> None:
        """Memory of the repeats in stage `t`, slot by slot."""
        slots = [k for k in range(t) if (t, k) in self.R]
        if not slots:
            return
        # Values that may be resident when the stage starts.
        values = [v for v, p in enumerate(self.graph.producer) if p < t and self.size[v] and (t, v) in self.S]
        most = max(self.scratch[x] + sum(self.size[v] for v in self.graph.operations[x].outputs) for x in slots)
        if sum(self.size[v] for v in values) + most > self.budget:
            _StageMemory(self, t, slots, values).add_rows()

    def model(self) -> StagedModel:
        n = len(self.cost)
        return StagedModel(
            self.graph, self.budget_bytes, np.array(self.cost, dtype=np.int64), self.graph.total_cost,
            np.array(self.upper, dtype=np.int64), self.rows.matrix(n, np.int64),
            np.array(self.rows.lower, dtype=np.int64), np.array(self.rows.kind, dtype=np.int8),
            np.array(self.rows.key, dtype=np.int32).reshape(-1, 3), np.arange(n) < self.n_integer, self.unit,
            self.R, self.S, self.infeasible,
        )  # fmt: skip


def _touched(graph: Graph, R: Collection[tuple[int, int]]) -> list[set[int]]:
    """[V] stages in which each value may be computed or used.

    Between two of them a value is resident all the time or dropped at once, because holding it longer is useless.
    """
    stages = [{k} for k in range(len(graph))]
    for t, k in R:
        stages[k].add(t)
    return [stages[graph.producer[v]].union(*(stages[u] for u in graph.users[v])) for v in range(len(graph.values))]


ALWAYS = -1  # in place of a column: the constant one
Indicator = int | None  # a column that is one if a value counts, ALWAYS, or None for never


class _StageMemory:
    """Memory of the slots of one stage: A[x] = bytes of all values that count at slot x, beside x's own outputs.

    A value made after x counts if it was resident when the stage started; a value made before x counts if it is
    needed at x or later. Few values change from one slot to the next, so A[x] is A of the slot before plus changes.
    """

    def __init__(self, builder: _Builder, t: int, slots: list[int], values: list[int]) -> None:
        self.builder, self.graph, self.t, self.slots, self.values = builder, builder.graph, t, slots, values
        self.made_by: dict[int, list[int]] = {}
        self.users: dict[int, list[int]] = {}  # slots that read each value
        self.needed: dict[int, list[Indicator]] = {}  # from each of these users on; the last entry: after the stage
        for v in values:
            self.made_by.setdefault(self.graph.producer[v], []).append(v)
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

    def _after(self, v: int) -> Indicator:
        """Whether the stage's own operation, or anything after it, needs the value."""
        is_last = self.t + 1 == len(self.graph)
        if v in self.graph.operations[self.t].inputs or (is_last and self.graph.values[v].keep):
            return ALWAYS
        return self.builder.S.get((self.t + 1, v))

    def _counts(self, v: int, x: int) -> Indicator:
        """Whether the value counts in A[x]."""
        p = self.graph.producer[v]
        if p > x:
            return self.builder.S[self.t, v]
        return self.needed[v][bisect_left(self.users[v], x)] if p < x else None

    def add_rows(self) -> None:
        """A[x] >= A of the slot before + changes, and A[x] + outputs and workspace of x <= budget."""
        builder, t, operations = self.builder, self.t, self.graph.operations
        counted: dict[int, Indicator] = {}
        constant, previous, last_column = 0, None, None
        for x in self.slots:
            change: dict[int, int] = {}
            for v in self.values if previous is None else self._may_change(previous, x):
                now, size = self._counts(v, x), builder.size[v]
                for indicator, amount in ((counted.get(v), -size), (now, size)):
                    if indicator is not None:
                        change[indicator] = change.get(indicator, 0) + amount
                counted[v] = now
            constant += change.pop(ALWAYS, 0)
            column = builder.column(upper=max(builder.budget, 0))
            terms = [(column, 1), *((c, -amount) for c, amount in change.items() if amount)]
            if last_column is not None:
                terms.append((last_column, -1))
            builder.rows.add(terms, 0, BALANCE)
            outputs = operations[x].outputs
            own = sum(builder.size[v] for v in outputs) + builder.scratch[x]
            row = [(column, -1), (builder.R[t, x], -own)]
            row += [(builder.S[t, v], -builder.size[v]) for v in outputs if builder.size[v] and (t, v) in builder.S]
            builder.rows.add(row, constant - builder.budget, MEMORY, (t, x, -1))
            previous, last_column = x, column

    def _may_change(self, previous: int, x: int) -> set[int]:
        """Values that may count differently at slot `x` and at the slot before it."""
        read = (v for v in self.graph.operations[previous].inputs if v in self.needed)
        return {*read, *(v for p in range(previous, x + 1) for v in self.made_by.get(p, ()))}
