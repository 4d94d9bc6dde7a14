"""Equations (1) to (9) of Checkmate as sparse matrices, generalised to operations and values.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020.
Stages t = 0 .. N-1; stage t computes operation t for the first time. Variables, all of them created
only where (8), frontier-advancing, does not fix them to zero:

    R[t, k]        operation k is computed in stage t                       k <= t
    S[t, v]        value v is resident at the start of stage t              producer(v) < t
    FREE[t, v, k]  v is freed in stage t right after k                      k in users(v) + {producer(v)}, k <= t
    U[t, k]        memory in use when k has been computed in stage t        k <= t

Axes of the matrices below: rows of an equation x variables of one kind. See `checkmate_milp` for
what is generalised and why the optimum is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from remat.graph import Graph


@dataclass(frozen=True, slots=True)
class Equations:
    """The model ``min cost @ R`` under the constraints below; memory in units of `unit_bytes`.

    Attributes:
        n_R, n_S, n_F, n_U: number of variables of each kind.
        cost: [n_R] in units of `cost_unit` (greatest common divisor of all costs).
        unit_bytes: greatest common divisor of all sizes; fixed bytes are already subtracted.
        R1, R0: indices of R fixed to one (first computations) and to zero (run-once repetitions).
        dep_R, dep_S: (1b) ``dep_R @ R + dep_S @ S >= 0``.
        hold_R, hold_S, hold_rhs: (1c) ``hold_R @ R + hold_S @ S >= hold_rhs``.
        haz_R, haz_S, haz_const, kappa: hazards of each FREE, ``haz_R @ R + haz_S @ S + haz_const``, and
            the largest value it can take.
        use_U, use_R, use_S, use_F: (2), (3) ``use_U @ U == use_R @ R + use_S @ S + use_F @ FREE``.
        workspace_R: [n_U, n_R] scratch memory added to U in (9).
    """

    n_operations: int
    n_R: int
    n_S: int
    n_F: int
    n_U: int
    cost: np.ndarray
    cost_unit: int
    unit_bytes: int
    R1: np.ndarray
    R0: np.ndarray
    dep_R: sp.csr_array
    dep_S: sp.csr_array
    hold_R: sp.csr_array
    hold_S: sp.csr_array
    hold_rhs: np.ndarray
    haz_R: sp.csr_array
    haz_S: sp.csr_array
    haz_const: np.ndarray
    kappa: np.ndarray
    use_U: sp.csr_array
    use_R: sp.csr_array
    use_S: sp.csr_array
    use_F: sp.csr_array
    workspace_R: sp.csr_array
    stage_of_S: np.ndarray
    value_of_S: np.ndarray

    def point(self, R_TN: np.ndarray, S_TV: np.ndarray) -> tuple[np.ndarray, ...]:
        """(R, S, FREE, U) of a staged plan's matrices; U in units of `unit_bytes`."""
        n = self.n_operations
        R = R_TN[np.tril_indices(n)].astype(float)
        S = S_TV[self.stage_of_S, self.value_of_S].astype(float)
        F = (self.haz_R @ R + self.haz_S @ S + self.haz_const < 0.5).astype(float)
        change = self.use_R @ R + self.use_S @ S + self.use_F @ F
        U = np.cumsum(change)
        ends = np.cumsum(np.arange(1, n + 1))  # each stage's row of U starts anew
        return R, S, F, U - np.repeat(np.concatenate(([0.0], U[ends[:-1] - 1])), np.arange(1, n + 1))

    def matrices(self, R: np.ndarray, S: np.ndarray, n_values: int) -> tuple[np.ndarray, np.ndarray]:
        """(R_TN, S_TV) booleans from flat variable values."""
        n = self.n_operations
        R_TN = np.zeros((n, n), dtype=bool)
        R_TN[np.tril_indices(n)] = R > 0.5
        S_TV = np.zeros((n, n_values), dtype=bool)
        S_TV[self.stage_of_S, self.value_of_S] = S > 0.5
        return R_TN, S_TV


def estimate_nonzeros(graph: Graph) -> int:
    """Number of matrix entries that `build` makes, within a few percent, without making them."""
    n = len(graph)
    entries = n * n * 3 + 3 * sum(n - p for p in graph.producer) + 3 * sum(n - k for k, j in _edges(graph))
    for v, users in enumerate(graph.users):
        if graph.values[v].bytes:
            later = [n - j for j in users]
            entries += 9 * (n - graph.producer[v]) + 2 * sum(later)
            entries += sum(9 * stages + 2 * sum(later[at + 1 :]) for at, stages in enumerate(later))
    return entries


def build(graph: Graph) -> Equations:
    """The equations of `graph`; time and memory grow with ``edges * operations``."""
    n, n_values = len(graph), len(graph.values)
    producer = np.array(graph.producer, dtype=np.int64)
    size = graph.value_bytes
    workspace = np.array([op.workspace_bytes for op in graph.operations], dtype=np.int64)
    keep = np.array([value.keep for value in graph.values], dtype=bool)
    unit = math.gcd(*size.tolist(), *workspace.tolist()) or 1
    weight, workspace = size // unit, workspace // unit
    cost_unit = math.gcd(*graph.costs.tolist()) or 1

    def at_R(t: np.ndarray, k: np.ndarray) -> np.ndarray:
        return t * (t + 1) // 2 + k

    # S[t, .] lists the values that exist before stage t, by producer.
    by_producer = np.argsort(producer, kind="stable")
    rank = np.empty(n_values, dtype=np.int64)
    rank[by_producer] = np.arange(n_values)
    exist = np.searchsorted(producer[by_producer], np.arange(n), side="left")
    first_S = np.concatenate(([0], np.cumsum(exist)))
    n_R = n_U = n * (n + 1) // 2
    n_S = int(first_S[-1])
    stage_of_S = np.repeat(np.arange(n), exist)
    value_of_S = by_producer[np.arange(n_S) - first_S[stage_of_S]]

    def at_S(t: np.ndarray, v: np.ndarray) -> np.ndarray:
        return first_S[t] + rank[v]

    t_of_R, k_of_R = np.tril_indices(n)
    once = np.array([op.run_once for op in graph.operations], dtype=bool)

    # (1b) R[t, j] <= R[t, producer(v)] + S[t, v] for every input v of j
    j_E, v_E = _edges(graph).T
    e, t = _stages_from(j_E, n)
    row = np.arange(len(e))
    dep_R = _matrix((len(row), n_R), (row, at_R(t, producer[v_E[e]]), 1), (row, at_R(t, j_E[e]), -1))
    dep_S = _matrix((len(row), n_S), (row, at_S(t, v_E[e]), 1))

    # (1c) S[t, v] <= R[t-1, producer(v)] + S[t-1, v]; kept values: the same with S[N, v] = 1
    t = np.concatenate((stage_of_S, np.full(keep.sum(), n)))
    v = np.concatenate((value_of_S, np.nonzero(keep)[0]))
    row = np.arange(len(t))
    before = producer[v] < t - 1
    hold_R = _matrix((len(row), n_R), (row, at_R(t - 1, producer[v]), 1))
    hold_S = _matrix((len(row), n_S), (row[:n_S], np.arange(n_S), -1), (row[before], at_S(t[before] - 1, v[before]), 1))
    hold_rhs = np.where(t == n, 1.0, 0.0)

    # FREE[t, v, k]: pairs P = (v, k) that can end a value's life in a stage, for every stage from k on
    pairs = [(v, k) for v in np.nonzero(weight)[0].tolist() for k in (graph.producer[v], *graph.users[v])]
    v_P, k_P = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    p_F, t_F = _stages_from(k_P, n)
    v_F, k_F = v_P[p_F], k_P[p_F]
    n_F = len(p_F)
    first_F = np.concatenate(([0], np.cumsum(n - k_P)))
    row = np.arange(n_F)
    goes_on = t_F + 1 < n
    haz_S = _matrix((n_F, n_S), (row[goes_on], at_S(t_F[goes_on] + 1, v_F[goes_on]), 1))
    # ... + sum of R[t, j] over users j > k of v
    later = [(p, j) for p, (v, k) in enumerate(pairs) for j in graph.users[v] if j > k]
    p_L, j_L = np.array(later, dtype=np.int64).reshape(-1, 2).T
    q, t = _stages_from(j_L, n)
    row_L = first_F[p_L[q]] + t - k_P[p_L[q]]
    haz_R = _matrix((n_F, n_R), (row, at_R(t_F, k_F), -1), (row_L, at_R(t, j_L[q]), 1))
    held_at_end = (~goes_on & keep[v_F]).astype(float)
    kappa = 1.0 + goes_on + held_at_end + np.bincount(row_L, minlength=n_F)

    # (2) U[t, 0] = sum_v M[v] S[t, v] + M[outputs(0)] R[t, 0]
    # (3) U[t, k] = U[t, k-1] - sum_v M[v] FREE[t, v, k-1] + M[outputs(k)] R[t, k]
    row = np.arange(n_U)
    born = np.bincount(producer, weights=weight, minlength=n)
    inner = k_of_R > 0
    use_U = _matrix((n_U, n_U), (row, row, 1), (row[inner], row[inner] - 1, -1))
    use_R = _matrix((n_U, n_R), (row, row, born[k_of_R]))
    use_S = _matrix((n_U, n_S), (at_R(stage_of_S, np.zeros_like(stage_of_S)), np.arange(n_S), weight[value_of_S]))
    next_slot = k_F < t_F
    use_F = _matrix((n_U, n_F), (at_R(t_F, k_F)[next_slot] + 1, np.nonzero(next_slot)[0], -weight[v_F[next_slot]]))
    workspace_R = _matrix((n_U, n_R), (row, row, workspace[k_of_R]))

    diagonal = t_of_R == k_of_R
    return Equations(
        n, n_R, n_S, n_F, n_U,
        cost=(graph.costs // cost_unit)[k_of_R].astype(float), cost_unit=cost_unit, unit_bytes=unit,
        R1=np.nonzero(diagonal)[0], R0=np.nonzero(once[k_of_R] & ~diagonal)[0],
        dep_R=dep_R, dep_S=dep_S, hold_R=hold_R, hold_S=hold_S, hold_rhs=hold_rhs,
        haz_R=haz_R, haz_S=haz_S, haz_const=1.0 + held_at_end, kappa=kappa,
        use_U=use_U, use_R=use_R, use_S=use_S, use_F=use_F, workspace_R=workspace_R,
        stage_of_S=stage_of_S, value_of_S=value_of_S,
    )  # fmt: skip


def minimal_order(graph: Graph, R_TN: np.ndarray, S_TV: np.ndarray) -> list[int]:
    """Computations of (R, S) that are needed, in order; (1b) and (1c) let a solver compute for nothing.

    Walks backwards: a repetition is needed if one of its outputs is read later in its stage, or
    carried over, and is not resident from before.
    """
    needed = np.array([value.keep for value in graph.values], dtype=bool)
    order: list[int] = []
    for t in range(len(graph) - 1, -1, -1):
        for k in np.nonzero(R_TN[t])[0][::-1].tolist():
            outputs = list(graph.operations[k].outputs)
            if k == t or (needed[outputs] & ~S_TV[t, outputs]).any():
                order.append(k)
                needed[outputs] = False
                needed[list(graph.operations[k].inputs)] = True
    return order[::-1]


def _edges(graph: Graph) -> np.ndarray:
    """[E, 2] (operation, input value)."""
    edges = [(j, v) for j, op in enumerate(graph.operations) for v in op.inputs]
    return np.array(edges, dtype=np.int64).reshape(-1, 2)


def _stages_from(first: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(index into `first`, stage) for every stage ``first[i] <= stage < n``, by index."""
    count = n - first
    index = np.repeat(np.arange(len(first)), count)
    start = np.concatenate(([0], np.cumsum(count)))[:-1]
    return index, np.arange(len(index)) - start[index] + first[index]


def _matrix(shape: tuple[int, int], *parts: tuple) -> sp.csr_array:
    """A sparse matrix from ``(rows, columns, values)`` parts; entries at the same place add up."""
    rows = np.concatenate([part[0] for part in parts])
    columns = np.concatenate([part[1] for part in parts])
    values = np.concatenate([np.broadcast_to(np.asarray(part[2], dtype=float), len(part[0])) for part in parts])
    return sp.csr_array((values, (rows, columns)), shape=shape)
