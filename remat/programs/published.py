"""Equations (1) to (9) of Checkmate as one program, generalised to operations and values.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020.
Stages t = 0 .. N-1. With (8), frontier-advancing, stage t ends with the first computation of operation t; variables
that (8) fixes to zero have no column. Without it any operation may run in any stage, in the graph's order.

    R[t, k]        operation k is computed in stage t
    S[t, v]        value v is resident at the start of stage t
    FREE[t, v, k]  v is freed in stage t right after k, one of its users or its producer
    U[t, k]        memory in use when k has been computed in stage t

The columns of the program are R, S, FREE and U, in this order.

Generalisations; on graphs with one value per operation and no workspace the program is the published one:

- R belongs to operations, S and FREE to values. A value can be freed after its producer or any
  of its users (DEPS(k) and k itself).
- Several outputs: U grows by all of them. If an output is resident while its producer runs again, the simulator
  counts both copies, then drops one; the model counts both to the end of the stage, as the published model does
  with S and R both one. No optimum is lost: within a stage users follow the producer, so nothing reads the old
  copy, and freeing it earlier is never worse.
- Workspace counts in (9) while its operation runs, and not in U.
- An operation that must run once has R only in its own stage. Kept values obey (1c) after the last
  stage too, as if another followed, and are a hazard there. Values of zero bytes need no FREE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from remat.errors import InvalidInput
from remat.graph import Graph
from remat.programs.program import Program, scale_of, sparse_matrix


class Columns:
    """Places of the variables.

    With (8), stage t has operations 0 .. t and values of 0 .. t - 1. Without it every stage has all operations and,
    except stage 0, all values.

    Attributes:
        width: [N] number of operations in each stage.
        first_R, first_S: [N + 1] first R (and U), and first S, of each stage.
        rank: [V] place of a value among the values of a stage.
        stage_of_R, operation_of_R, stage_of_S, value_of_S: of each column.
        start_S, start_F, start_U, n: first column of each kind, and number of columns.
    """

    def __init__(self, graph: Graph, n_F: int, frontier_advancing: bool) -> None:
        n, producer = len(graph), np.array(graph.producer, dtype=np.int64)
        by_producer = np.argsort(producer, kind="stable")
        self.frontier_advancing = frontier_advancing
        self.rank = np.empty(len(producer), dtype=np.int64)
        self.rank[by_producer] = np.arange(len(producer))
        if frontier_advancing:
            self.width = np.arange(1, n + 1)
            exist = np.searchsorted(producer[by_producer], np.arange(n), side="left")
        else:
            self.width = np.full(n, n)
            exist = np.where(np.arange(n) > 0, len(producer), 0)
        self.first_R, self.first_S = (np.concatenate(([0], np.cumsum(counts))) for counts in (self.width, exist))
        self.stage_of_R, self.stage_of_S = np.repeat(np.arange(n), self.width), np.repeat(np.arange(n), exist)
        self.start_S = len(self.stage_of_R)
        self.start_F = self.start_S + len(self.stage_of_S)
        self.start_U = self.start_F + n_F
        self.n = self.start_U + self.start_S
        self.operation_of_R = np.arange(self.start_S) - self.first_R[self.stage_of_R]
        self.value_of_S = by_producer[np.arange(len(self.stage_of_S)) - self.first_S[self.stage_of_S]]

    def R(self, t: np.ndarray, k: np.ndarray | int) -> np.ndarray:
        """Columns of R[t, k]."""
        return self.first_R[t] + k

    def S(self, t: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Columns of S[t, v]."""
        return self.start_S + self.first_S[t] + self.rank[v]


@dataclass(frozen=True, slots=True)
class Equations:
    """The program for any budget; memory counts in units of `unit_bytes`, without the fixed bytes.

    Attributes:
        cost: [n] in units of `cost_unit`, the greatest common divisor of all costs.
        upper, lower: [n] limits of the columns; U has no upper one.
        logic, logic_lower: (1), (6), (7): ``logic @ x >= logic_lower``.
        hazard, hazard_constant: [n_F, n] and [n_F], the hazards of each FREE.
        change: [n_U, n] of (2), (3): the change of U in each slot by R, S and FREE.
        differences: [n_U, n] U minus the U before it: ``differences @ x == change @ x``.
        workspace: [n_U, n] workspace that (9) adds to U.
    """

    graph: Graph
    columns: Columns
    cost: np.ndarray
    cost_unit: int
    unit_bytes: int
    upper: np.ndarray
    lower: np.ndarray
    logic: sp.csr_array
    logic_lower: np.ndarray
    hazard: sp.csr_array
    hazard_constant: np.ndarray
    change: sp.csr_array
    differences: sp.csr_array
    workspace: sp.csr_array

    @property
    def cost_scale(self) -> float:
        """Scale of the objective: the cost of running every operation once, in units, becomes at most `SCALED`."""
        return scale_of(self.graph.total_cost / self.cost_unit)

    def program(self, units: float) -> Program:
        """The program for a budget of `units`; U counts in scaled units."""
        at, scale = self.columns, scale_of(units)
        n_U = at.start_S  # one for each R
        held = self.differences - scale * self.change  # (2), (3)
        used = sparse_matrix((n_U, at.n), (np.arange(n_U), at.start_U + np.arange(n_U), -1.0)) - scale * self.workspace
        none = np.full(n_U, np.inf)
        return Program(
            matrix=sp.csr_array(sp.vstack([self.logic, held, used])),
            cost=self.cost * self.cost_scale,
            upper=self.upper,
            row_lower=np.concatenate([self.logic_lower, np.zeros(n_U), np.full(n_U, -scale * units)]),  # (9)
            is_integer=np.arange(at.n) < at.start_U,
            row_upper=np.concatenate([np.full(len(self.logic_lower), np.inf), np.zeros(n_U), none]),
            lower=self.lower,
        )

    def point(self, units: float, R_TN: np.ndarray, S_TV: np.ndarray) -> np.ndarray:
        """[n] values of the columns for a staged plan's matrices, in the program of that budget."""
        at = self.columns
        x = np.zeros(at.n)
        x[: at.start_S] = R_TN[at.stage_of_R, at.operation_of_R] > 0
        x[at.start_S : at.start_F] = S_TV[at.stage_of_S, at.value_of_S]
        x[at.start_F : at.start_U] = self.hazard @ x + self.hazard_constant < 0.5
        U = np.cumsum(self.change @ x)
        before = np.concatenate(([0.0], U[at.first_R[1:-1] - 1]))  # each stage's row of U starts anew
        x[at.start_U :] = scale_of(units) * (U - np.repeat(before, at.width))
        return x

    def residency(self, x: np.ndarray) -> np.ndarray:
        """[T, V] S of a solution."""
        S_TV = np.zeros((len(self.graph), len(self.graph.values)))
        S_TV[self.columns.stage_of_S, self.columns.value_of_S] = x[self.columns.start_S : self.columns.start_F]
        return S_TV

    def order(self, x: np.ndarray) -> list[int]:
        """Computations of a solution. Leaves out repeats whose outputs are all resident, because solvers add some."""
        at, outputs = self.columns, [list(op.outputs) for op in self.graph.operations]
        S_TV = self.residency(x) > 0.5
        computed = np.nonzero(x[: at.start_S] > 0.5)[0]
        return [
            k for t, k in zip(at.stage_of_R[computed].tolist(), at.operation_of_R[computed].tolist(), strict=True)
            if k == t or not S_TV[t, outputs[k]].all()
        ]  # fmt: skip


def estimate_nonzeros(graph: Graph) -> int:
    """Number of matrix entries that `build` would make, within a few percent."""
    n = len(graph)
    entries = n * n * 3 + 3 * sum(n - p for p in graph.producer) + 3 * sum(n - k for k, j in _edges(graph))
    for v, users in enumerate(graph.users):
        if graph.values[v].bytes:
            later = [n - j for j in users]
            entries += 9 * (n - graph.producer[v]) + 2 * sum(later)
            entries += sum(9 * stages + 2 * sum(later[at + 1 :]) for at, stages in enumerate(later))
    return entries


def build(graph: Graph, *, frontier_advancing: bool = True) -> Equations:
    """The equations of `graph`; time and memory grow with ``edges * operations``.

    Args:
        frontier_advancing: False leaves out (8); then (1e) requires each operation that nobody reads in some stage.

    Raises:
        InvalidInput: an operation must run once, or a value must be kept; only (8) can express this.
    """
    operations = graph.operations
    keep = np.array([value.keep for value in graph.values], dtype=bool)
    if not frontier_advancing and (keep.any() or any(op.run_once for op in operations)):
        raise InvalidInput("without frontier-advancing stages no value can be kept and no operation limited to one run")
    weight, scratch = graph.value_bytes, np.array([op.workspace_bytes for op in operations], dtype=np.int64)
    unit = math.gcd(*weight.tolist(), *scratch.tolist()) or 1
    weight, scratch = weight // unit, scratch // unit
    cost_unit = math.gcd(*graph.costs.tolist()) or 1
    frees = _Frees(graph, weight, frontier_advancing)
    at = Columns(graph, len(frees.stage), frontier_advancing)
    hazard, hazard_constant, most = _hazards(graph, at, frees, keep)
    parts = [
        _dependencies(graph, at),
        _retention(graph, at, keep),
        *_freed(at, hazard, hazard_constant, most),
    ]
    cost, upper, lower = np.zeros(at.n), np.ones(at.n), np.zeros(at.n)
    cost[: at.start_S] = (graph.costs // cost_unit)[at.operation_of_R]
    upper[at.start_U :] = np.inf
    if frontier_advancing:
        is_first = at.stage_of_R == at.operation_of_R
        once = np.array([op.run_once for op in operations], dtype=bool)
        lower[: at.start_S] = is_first  # (8)
        upper[: at.start_S] = is_first | ~once[at.operation_of_R]
    else:
        parts.append(_results(graph, at))
    change, differences = _memory(graph, at, frees, weight)
    slots = np.arange(at.start_S)
    workspace = sparse_matrix((at.start_S, at.n), (slots, slots, scratch[at.operation_of_R].astype(float)))
    return Equations(
        graph, at, cost, cost_unit, unit, upper, lower, sp.csr_array(sp.vstack([matrix for matrix, _ in parts])),
        np.concatenate([right for _, right in parts]), hazard, hazard_constant, change, differences, workspace,
    )  # fmt: skip


Block = tuple[sp.csr_array, np.ndarray]  # rows and their lower limits


class _Frees:
    """FREE[t, v, k]: one for every pair (v, k) that can end a value's life and every stage in which k can run.

    Attributes:
        pairs: [(v, k)]; first: [P + 1] first FREE of each pair; first_stage: [P] of each pair.
        pair, stage, value, operation: of each FREE.
    """

    def __init__(self, graph: Graph, weight: np.ndarray, frontier_advancing: bool) -> None:
        n = len(graph)
        self.pairs = [(v, k) for v in np.nonzero(weight)[0].tolist() for k in (graph.producer[v], *graph.users[v])]
        value, operation = np.array(self.pairs, dtype=np.int64).reshape(-1, 2).T
        self.first_stage = _first_stage(operation, frontier_advancing)
        self.pair, self.stage = _stages_from(self.first_stage, n)
        self.value, self.operation = value[self.pair], operation[self.pair]
        self.first = np.concatenate(([0], np.cumsum(n - self.first_stage)))


def _dependencies(graph: Graph, at: Columns) -> Block:
    """(1b) R[t, j] <= R[t, producer(v)] + S[t, v] for every input v of j."""
    producer = np.array(graph.producer, dtype=np.int64)
    j_E, v_E = _edges(graph).T
    e, t = _stages_from(_first_stage(j_E, at.frontier_advancing), len(graph))
    row, j, v = np.arange(len(e)), j_E[e], v_E[e]
    has_S = t > 0  # nothing is resident at the start of the first stage (1d)
    matrix = sparse_matrix(
        (len(row), at.n), (row, at.R(t, producer[v]), 1.0), (row, at.R(t, j), -1.0),
        (row[has_S], at.S(t[has_S], v[has_S]), 1.0),
    )  # fmt: skip
    return matrix, np.zeros(len(row))


def _retention(graph: Graph, at: Columns, keep: np.ndarray) -> Block:
    """(1c) S[t, v] <= R[t-1, producer(v)] + S[t-1, v]; for kept values the same with S[N, v] = 1."""
    n, n_S = len(graph), len(at.stage_of_S)
    t = np.concatenate((at.stage_of_S, np.full(keep.sum(), n)))
    v = np.concatenate((at.value_of_S, np.nonzero(keep)[0]))
    row, p = np.arange(len(t)), np.array(graph.producer, dtype=np.int64)[v]
    first = at.first_S[1:] - at.first_S[:-1]  # values that exist in each stage
    before = at.rank[v] < first[t - 1]
    matrix = sparse_matrix(
        (len(row), at.n), (row, at.R(t - 1, p), 1.0), (row[:n_S], at.start_S + np.arange(n_S), -1.0),
        (row[before], at.S(t[before] - 1, v[before]), 1.0),
    )  # fmt: skip
    return matrix, np.where(t == n, 1.0, 0.0)


def _results(graph: Graph, at: Columns) -> Block:
    """(1e) without (8): an operation whose outputs nobody reads is computed in some stage."""
    last = [k for k, op in enumerate(graph.operations) if not any(graph.users[v] for v in op.outputs)]
    stages = np.arange(len(graph))
    parts = [(np.full(len(stages), row), at.R(stages, k), 1.0) for row, k in enumerate(last)]
    return sparse_matrix((len(last), at.n), *parts), np.ones(len(last))


def _hazards(graph: Graph, at: Columns, frees: _Frees, keep: np.ndarray) -> tuple[sp.csr_array, np.ndarray, np.ndarray]:
    """(5) The hazards of FREE[t, v, k]: ``1 - R[t, k] + S[t+1, v]`` and R[t, j] of the users j > k of v.

    Returns the matrix, its constant and the largest value that each count can take.
    """
    n, n_F = len(graph), len(frees.stage)
    row, t, v = np.arange(n_F), frees.stage, frees.value
    goes_on = t + 1 < n
    users = [(p, j) for p, (v_p, k) in enumerate(frees.pairs) for j in graph.users[v_p] if j > k]
    p_L, j_L = np.array(users, dtype=np.int64).reshape(-1, 2).T
    # User j of pair p can run from its own first stage on; the rows of the pair begin at an earlier stage.
    q, stage = _stages_from(_first_stage(j_L, at.frontier_advancing), n)
    row_L = frees.first[p_L[q]] + stage - frees.first_stage[p_L[q]]
    matrix = sparse_matrix(
        (n_F, at.n), (row, at.R(t, frees.operation), -1.0), (row_L, at.R(stage, j_L[q]), 1.0),
        (row[goes_on], at.S(t[goes_on] + 1, v[goes_on]), 1.0),
    )  # fmt: skip
    held_at_end = (~goes_on & keep[v]).astype(float)
    return matrix, 1.0 + held_at_end, 1.0 + goes_on + held_at_end + np.bincount(row_L, minlength=n_F)


def _freed(at: Columns, hazard: sp.csr_array, constant: np.ndarray, most: np.ndarray) -> tuple[Block, Block]:
    """(6) 1 - FREE <= hazards and (7) most (1 - FREE) >= hazards: FREE is one if and only if there is no hazard."""
    row = np.arange(len(constant))
    free = sparse_matrix((len(row), at.n), (row, at.start_F + row, 1.0))
    some = (sp.csr_array(hazard + free), 1.0 - constant)
    none = (sp.csr_array(-hazard - sp.diags_array(most) @ free), constant - most)
    return some, none


def _memory(graph: Graph, at: Columns, frees: _Frees, weight: np.ndarray) -> tuple[sp.csr_array, sp.csr_array]:
    """(2) U[t, 0] = sum_v M[v] S[t, v] + M[outputs(0)] R[t, 0]
    (3) U[t, k] = U[t, k-1] - sum_v M[v] FREE[t, v, k-1] + M[outputs(k)] R[t, k]: (`change`, `differences`).
    """
    n_U = at.start_S
    row, k = np.arange(n_U), at.operation_of_R
    born = np.bincount(np.array(graph.producer, dtype=np.int64), weights=weight, minlength=len(graph))
    slot = frees.operation < at.width[frees.stage] - 1  # another slot follows in the stage
    stage, free = frees.stage[slot], np.nonzero(slot)[0]
    change = sparse_matrix(
        (n_U, at.n), (row, row, born[k]),
        (at.first_R[at.stage_of_S], at.start_S + np.arange(len(at.stage_of_S)), weight[at.value_of_S].astype(float)),
        (at.R(stage, frees.operation[slot]) + 1, at.start_F + free, -weight[frees.value[slot]].astype(float)),
    )  # fmt: skip
    inner = k > 0
    before = (row[inner], at.start_U + row[inner] - 1, -1.0)
    return change, sparse_matrix((n_U, at.n), (row, at.start_U + row, 1.0), before)


def _edges(graph: Graph) -> np.ndarray:
    """[E, 2] (operation, input value)."""
    edges = [(j, v) for j, op in enumerate(graph.operations) for v in op.inputs]
    return np.array(edges, dtype=np.int64).reshape(-1, 2)


def _first_stage(k: np.ndarray, frontier_advancing: bool) -> np.ndarray:
    """The first stage in which each operation can run."""
    return k if frontier_advancing else np.zeros_like(k)


def _stages_from(first: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(index i into `first`, stage) for every stage ``first[i] <= stage < n``, sorted by index."""
    count = n - first
    index = np.repeat(np.arange(len(first)), count)
    start = np.concatenate(([0], np.cumsum(count)))[:-1]
    return index, np.arange(len(index)) - start[index] + first[index]
