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
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import scipy.sparse

from remat.graph import Graph
from remat.plan import Plan

EDGE, CONTINUITY, MEMORY, NEED, BALANCE, ONCE = range(6)  # kinds of rows
NO_BOUND = 1 << 62


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
    matrix: scipy.sparse.csr_matrix
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
        return int(self.matrix.shape[0]), int(self.matrix.shape[1])  # type: ignore[index]

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


class _Rows:
    """Rows under construction, as triplets."""

    def __init__(self) -> None:
        self.row: list[int] = []
        self.column: list[int] = []
        self.entry: list[int] = []
        self.lower: list[int] = []
        self.kind: list[int] = []
        self.key: list[tuple[int, int, int]] = []

    def add(
        self, kind: int, terms: list[tuple[int, int]], lower: int, key: tuple[int, int, int] = (-1, -1, -1)
    ) -> None:
        at = len(self.lower)
        for column, entry in terms:
            self.row.append(at)
            self.column.append(column)
            self.entry.append(entry)
        self.lower.append(lower)
        self.kind.append(kind)
        self.key.append(key)


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
    n, operations, producer = len(graph), graph.operations, graph.producer
    repeatable = [not op.run_once and bool(op.outputs) for op in operations]
    last_run, last_held = last_stages(graph, repeatable, repeats)
    unit = math.gcd(*(v.bytes for v in graph.values), *(op.workspace_bytes for op in operations)) or 1
    size = [value.bytes // unit for value in graph.values]
    scratch = [op.workspace_bytes // unit for op in operations]
    budget = (budget_bytes - graph.fixed_bytes) // unit

    cost: list[int] = []
    upper: list[int] = []
    R: dict[tuple[int, int], int] = {}
    S: dict[tuple[int, int], int] = {}
    for t in range(n):
        for k in range(t):
            if repeatable[k] and t <= last_run[k] and (repeats is None or (t, k) in repeats):
                R[t, k] = len(cost)
                cost.append(operations[k].cost)
    touched = _touched(graph, R) if repeats is not None else None
    for v in range(len(graph.values)):
        for t in range(producer[v] + 1, min(last_held[v], n - 1) + 1):
            if touched is not None and t - 1 not in touched[v]:
                S[t, v] = S[t - 1, v]
                continue
            S[t, v] = len(cost)
            cost.append(0)
    upper = [1] * len(cost)
    n_integer = len(cost)
    rows = _Rows()

    def need(t: int, v: int) -> list[tuple[int, int]]:
        """Terms that provide value v in stage t."""
        p = producer[v]
        return [(S[t, v], 1)] + ([(R[t, p], 1)] if (t, p) in R else [])

    stage_inputs = [frozenset(op.inputs) for op in operations]
    for t in range(n):
        for v in operations[t].inputs:
            rows.add(EDGE, need(t, v), 1, (t, t, v))
    for (t, k), column in R.items():
        for v in operations[k].inputs:
            rows.add(EDGE, [*need(t, v), (column, -1)], 0, (t, k, v))
        outputs = operations[k].outputs
        if once and len(outputs) == 1 and (t, outputs[0]) in S:
            rows.add(ONCE, [(column, -1), (S[t, outputs[0]], -1)], -1, (t, k, outputs[0]))
    for v, value in enumerate(graph.values):
        for t in range(producer[v] + 1, min(last_held[v], n - 1) + (1 if value.keep else 0)):
            if t + 1 == n:
                rows.add(CONTINUITY, need(t, v), 1, (t, v, -1))
            elif S[t, v] != S[t + 1, v]:
                rows.add(CONTINUITY, [*need(t, v), (S[t + 1, v], -1)], 0, (t, v, -1))

    infeasible = budget < 0
    held_after: list[list[int]] = [[] for _ in range(n)]  # values that may be held from stage t to t + 1
    for v in range(len(graph.values)):
        if size[v]:
            for t in range(producer[v] + 1, min(last_held[v], n)):
                held_after[t].append(v)
    for t in range(n):
        room = budget - scratch[t] - sum(size[v] for v in (*operations[t].inputs, *operations[t].outputs))
        terms, most = [], 0
        for v in held_after[t]:
            if v in stage_inputs[t]:
                continue
            if t + 1 == n:
                room -= size[v] if once else 0  # kept; fixed_order may compute it again after the last operation
            else:
                terms.append((S[t + 1, v], -size[v]))
                most += size[v]
        if room < 0:
            infeasible = True
        if most > room:
            rows.add(MEMORY, terms, -room, (t, t, -1))
    if memory == "full":
        for t in range(n) if slot_stages is None else sorted(slot_stages):
            _slots(graph, t, R, S, size, scratch, budget, rows, cost, upper)

    matrix = scipy.sparse.csr_matrix(
        (np.array(rows.entry, dtype=np.int64), (rows.row, rows.column)), shape=(len(rows.lower), len(cost))
    )
    is_integer = np.zeros(len(cost), dtype=bool)
    is_integer[:n_integer] = True
    return StagedModel(
        graph, budget_bytes, np.array(cost, dtype=np.int64), graph.total_cost, np.array(upper, dtype=np.int64), matrix,
        np.array(rows.lower, dtype=np.int64), np.array(rows.kind, dtype=np.int8),
        np.array(rows.key, dtype=np.int32).reshape(-1, 3), is_integer, unit, R, S,
        restricted=repeats is not None,
        infeasible=infeasible,
    )  # fmt: skip


def _touched(graph: Graph, R: Collection[tuple[int, int]]) -> list[set[int]]:
    """[V] stages in which each value may be computed or used. From one to the next it is held all along or not at all:
    what is dropped in between is better dropped at once."""
    stages = [{k} for k in range(len(graph))]
    for t, k in R:
        stages[k].add(t)
    return [stages[graph.producer[v]].union(*(stages[u] for u in graph.users[v])) for v in range(len(graph.values))]


def _slots(
    graph: Graph,
    t: int,
    R: dict[tuple[int, int], int],
    S: dict[tuple[int, int], int],
    size: list[int],
    scratch: list[int],
    budget: int,
    rows: _Rows,
    cost: list[int],
    upper: list[int],
) -> None:
    """Memory of the repeats in stage t, slot by slot.

    A[x], beside slot x's own outputs: values produced after x that were resident at the start, and values
    produced before x that are needed at x or later. From slot to slot only a few of them change.
    """
    n, operations, producer = len(graph), graph.operations, graph.producer
    slots = [k for k in range(t) if (t, k) in R]
    if not slots:
        return
    inputs = set(operations[t].inputs)
    # Values that may be there in this stage, and the users of each that may run in it.
    here = [v for v in range(len(size)) if size[v] and producer[v] < t and (t, v) in S]
    is_slot = set(slots)
    base = sum(size[v] for v in here if v in inputs)
    if (
        base
        + sum(size[v] for v in here if v not in inputs)
        + max(scratch[x] + sum(size[v] for v in operations[x].outputs) for x in slots)
        <= budget
    ):
        return  # nothing here can exceed the budget
    after: dict[int, tuple[int, int] | None] = {}  # needed in the next stage: (column, 1), (-1, 1) for always
    for v in here:
        if v in inputs or (t + 1 == n and graph.values[v].keep):
            after[v] = (-1, 1)
        elif (t + 1, v) in S:
            after[v] = (S[t + 1, v], 1)
        else:
            after[v] = None
    # needed[v][i]: column that says "needed from user i on"; the last entry is `after`.
    users: dict[int, list[int]] = {}
    needed: dict[int, list[tuple[int, int] | None]] = {}
    for v in here:
        if after[v] == (-1, 1):
            continue
        mine = [u for u in graph.users[v] if u in is_slot]
        chain: list[tuple[int, int] | None] = [after[v]]
        for u in reversed(mine):
            if chain[0] is None:
                chain.insert(0, (R[t, u], 1))
                continue
            column = len(cost)
            cost.append(0)
            upper.append(1)
            rows.add(NEED, [(column, 1), (R[t, u], -1)], 0)
            rows.add(NEED, [(column, 1), (chain[0][0], -1)], 0)
            chain.insert(0, (column, 1))
        users[v], needed[v] = mine, chain

    def from_slot(v: int, x: int) -> tuple[int, int] | None:
        """Column that says whether v is needed at slot x or later; -1 for a constant 1."""
        if after[v] == (-1, 1):
            return (-1, 1)
        for u, column in zip(users[v], needed[v], strict=False):
            if u >= x:
                return column
        return needed[v][-1]

    before: dict[int, tuple[int, int] | None] = {}  # how each value was counted at the slot before
    first = slots[0]
    produced: dict[int, list[int]] = {}
    for v in here:
        produced.setdefault(producer[v], []).append(v)
    change: dict[int, int] = {}
    constant = 0
    previous = -1
    last_column = -1

    def count(what: tuple[int, int] | None, amount: int) -> int:
        if what is None:
            return 0
        if what[0] < 0:
            return amount
        change[what[0]] = change.get(what[0], 0) + amount
        return 0

    for v in here:
        if producer[v] > first:
            constant += count((S[t, v], 1), size[v])
            before[v] = (S[t, v], 1)
    for x in slots:
        if previous >= 0:
            for p in range(previous + 1, x + 1):
                for v in produced.get(p, ()):
                    constant += count(before.pop(v), -size[v])
            touched = {v for v in operations[previous].inputs if v in before and v in needed}
            for v in touched:
                now = from_slot(v, x)
                if now != before[v]:
                    constant += count(before[v], -size[v])
                    constant += count(now, size[v])
                    before[v] = now
            starts = range(previous, x)
        else:
            starts = range(x)
        for p in starts:
            for v in produced.get(p, ()):
                before[v] = from_slot(v, x)
                constant += count(before[v], size[v])
        column = len(cost)
        cost.append(0)
        upper.append(max(budget, 0))
        # A[x] = A[previous] + changes (the constants are kept apart); as two rows only >= is needed.
        terms = [(column, 1)] + [(c, -amount) for c, amount in change.items() if amount]
        if last_column >= 0:
            terms.append((last_column, -1))
        rows.add(BALANCE, terms, 0)
        change.clear()
        own = sum(size[v] for v in operations[x].outputs)
        row = [(column, -1), (R[t, x], -(own + scratch[x]))]
        row += [(S[t, v], -size[v]) for v in operations[x].outputs if size[v] and (t, v) in S]
        rows.add(MEMORY, row, constant - budget, (t, x, -1))
        previous, last_column = x, column
