"""The staged LP bound: HiGHS proposes multipliers, exact arithmetic turns them into a bound.

The relaxation has only R and S and one memory row per stage (`build_staged_model` with
``memory="stage_end"``): on the published networks its value is that of the relaxation with all slots, to
nine digits, at a tenth of the time. First only repeats of forward operations have columns; the missing
columns are priced by the certificate itself, which corrects for all of them, and enter when their
reduced cost is negative. So every bound returned is one of the full problem. Then knapsack cuts
(`remat.bounds.cuts`) are added in rounds for as long as they pay. Where operations have several implementations, the
LP is that of the relaxed graph (`remat.bounds.relax`), whose bound holds for every choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from remat.bounds.certificate import proven_bound
from remat.bounds.cuts import knapsack_cuts
from remat.bounds.relax import relaxed
from remat.certificate import BoundCertificate
from remat.context import Context
from remat.graph import Graph
from remat.plan import Scope
from remat.programs.highs import solve_program
from remat.programs.program import Program, sparse_matrix
from remat.programs.staged import CONTINUITY, EDGE, MEMORY, ONCE, StagedModel, build_staged_model, last_stages

KIND_NAMES = {EDGE: "edge", CONTINUITY: "continuity", MEMORY: "memory", ONCE: "once"}
CUT = 6  # kind of row beside those of the model; its key is (index in the list of cuts, -1, -1)
WORTH = 2e-4  # share of the cost that a round of cuts must bring for another
LARGEST = 2_000_000  # columns beyond which building alone takes too long
ENOUGH = 1e-6  # share of the cost that may be lost to missing columns


@dataclass(frozen=True, slots=True, eq=False)
class BoundResult:
    """What is proven: no plan of `scope` costs less than `bound`.

    Attributes:
        certificate: proof of it, None if it is only the cost of running everything once.
        stats: numbers for the result row.
    """

    bound: int
    scope: Scope
    certificate: BoundCertificate | None = None
    stats: dict[str, Any] = field(default_factory=dict)


COLUMNS_IN_1S, POWER = 9_000, 1.6  # the interior point's time, roughly; decides whether it is begun
SMALL_COLUMNS = 12_000  # a model of so many columns is likely to be solved to the end, in seconds


def model_columns(graph: Graph) -> int:
    """How many R and S the staged model would have."""
    last_run, last_held = last_stages(graph, [not op.run_once for op in graph.operations])
    runs = sum(last - k for k, last in enumerate(last_run))
    return runs + sum(last - p for last, p in zip(last_held, graph.producer, strict=True))


def expected_seconds(columns: int) -> float:
    """What the LP bound of a model of so many columns takes, roughly."""
    return (columns / COLUMNS_IN_1S) ** POWER


def lower_bound(
    context: Context,
    *,
    on_bound: Callable[[BoundCertificate], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    with_cuts: bool = True,
) -> BoundResult:
    """The best bound that the staged LP gives before the deadline, made rigorous.

    Valid for `context.problem.scope`: for free only the cost of running everything once is known. `on_bound` gets
    each better bound with its proof; `should_stop` is asked before each LP and in it. Without cuts the bound
    is that of the relaxation itself, whose multipliers have a meaning (`remat.bounds.price`).
    """
    graph, scope = relaxed(context.problem.graph), context.problem.scope
    best = BoundResult(graph.total_cost, scope)
    if scope is Scope.FREE or model_columns(graph) > LARGEST:
        return best
    model = build_staged_model(graph, context.problem.budget_bytes, memory="stage_end", once=scope is Scope.STAGED)
    if model.infeasible:
        return best
    used = _forward_columns(model)
    cuts: list[list[int]] = []  # as the certificate names them
    rounds, value_before = 0, -math.inf
    while not should_stop():
        begun = context.remaining_s()
        solved = solve_relaxation(model, used, context.remaining_s(), context.solver_threads, should_stop)
        if solved is None:
            break
        x, y = solved
        rounds += 1
        certificate = _certify(context, model, y, cuts)
        if certificate.bound > best.bound or best.certificate is None:
            best = BoundResult(certificate.bound, scope, certificate)
            if on_bound is not None:
                on_bound(certificate)
        value = model.cost_constant + float(model.cost @ x)
        if value - certificate.bound <= ENOUGH * value:
            new = _violated(model, x, set(map(tuple, cuts))) if with_cuts else []
            enough_time = context.repeats or context.remaining_s() > 1.5 * (begun - context.remaining_s())
            if not new or not enough_time or value - value_before < WORTH * value:
                break
            model, value_before = _with_cuts(model, new, len(cuts)), value
            cuts += new
            continue
        if cuts:  # an inexact solve of a harder LP; what it proved is kept
            break
        reduced = model.cost - model.matrix.T @ y
        wanted = ~used & (reduced < 0)
        if not wanted.any():
            break
        used |= wanted | _inputs_of(model, wanted)
    best.stats.update(lp_rounds=rounds, lp_columns=int(used.sum()), lp_cuts=len(cuts))
    return best


def solve_relaxation(
    model: StagedModel, used: np.ndarray, time_limit_s: float, threads: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[np.ndarray, np.ndarray] | None:  # fmt: skip
    """(x, y) of the LP over the columns `used` ([n] bool) by interior point; None if it did not finish.

    x [n] are the values of all columns, y [rows] multipliers of all rows in cost per unit of the row.
    `should_stop` is asked by the interior point in every iteration.
    """
    if not used.any():  # nothing to decide
        return np.zeros(model.shape[1]), np.zeros(model.shape[0])
    scaled = model.scaled()
    whole = scaled.program
    matrix = whole.matrix[:, used]
    rows_used = np.diff(matrix.indptr) > 0
    program = Program(
        matrix=matrix[rows_used],
        cost=whole.cost[used],
        upper=whole.upper[used].astype(np.float64),
        row_lower=whole.row_lower[rows_used],
    )
    options = {"solver": "ipm", "run_crossover": "off", "threads": threads, "time_limit": max(0.1, time_limit_s)}
    answer = solve_program(program, options, should_stop=should_stop)
    if answer.x is None or answer.row_dual is None:
        return None
    x, y = np.zeros(model.shape[1]), np.zeros(model.shape[0])
    x[used] = np.clip(answer.x, 0.0, 1.0)
    y[rows_used] = np.maximum(answer.row_dual, 0.0) * scaled.row_scale[rows_used] / scaled.cost_scale
    return x, y


def _forward_columns(model: StagedModel) -> np.ndarray:
    """[n] bool: the columns of the problem without repeats of backward operations."""
    graph = model.graph
    used = np.zeros(model.shape[1], dtype=bool)
    forward = [not op.run_once and not op.is_backward for op in graph.operations]
    last_run, last_held = last_stages(graph, forward)
    for (t, k), column in model.R_column.items():
        used[column] = forward[k] and t <= last_run[k]
    for (t, v), column in model.S_column.items():
        used[column] = t <= last_held[v]
    return used


def _inputs_of(model: StagedModel, wanted: np.ndarray) -> np.ndarray:
    """[n] bool: the columns that share an edge row with a wanted one, which it needs to be priced fairly."""
    rows = (model.row_kind == EDGE) & (np.diff(model.matrix[:, wanted].indptr) > 0)
    shared = np.zeros(model.shape[1], dtype=bool)
    shared[model.matrix[rows].indices] = True
    return shared


def _violated(model: StagedModel, x: np.ndarray, known: set[tuple[int, ...]]) -> list[list[int]]:
    """Cuts that x violates, as the certificate names them: [t, right, v, a, v, a, ...]."""
    value_of = {column: v for (_, v), column in model.S_column.items()}
    found: list[list[int]] = []
    for row in np.nonzero(model.row_kind == MEMORY)[0].tolist():
        lo, hi = model.matrix.indptr[row : row + 2]
        columns, sizes = model.matrix.indices[lo:hi], -np.asarray(model.matrix.data[lo:hi], dtype=np.int64)
        room = -int(model.row_lower[row])
        at = x[columns]
        if room < 0 or float(at @ sizes) < 0.9 * room:
            continue
        for weights, right in knapsack_cuts(at, sizes, room):
            cut = [int(model.row_key[row, 0]), right]
            for j in np.nonzero(weights)[0].tolist():
                cut += [value_of[int(columns[j])], int(weights[j])]
            if tuple(cut) not in known:
                known.add(tuple(cut))
                found.append(cut)
    return found


def _with_cuts(model: StagedModel, cuts: list[list[int]], first: int) -> StagedModel:
    """The model with more rows; `first` is the index of the first of them in the list of cuts."""
    row, column, entry = [], [], []
    for i, (t, _, *terms) in enumerate(cuts):
        for v, a in zip(terms[::2], terms[1::2], strict=True):
            row.append(i)
            column.append(model.S_column[t + 1, v])
            entry.append(-a)
    more = sparse_matrix((len(cuts), model.shape[1]), (row, column, np.array(entry, dtype=np.int64)))
    key = np.full((len(cuts), 3), -1, dtype=np.int32)
    key[:, 0] = np.arange(first, first + len(cuts))
    return replace(
        model,
        matrix=sp.csr_array(sp.vstack([model.matrix, more])),
        row_lower=np.concatenate([model.row_lower, [-cut[1] for cut in cuts]]),
        row_kind=np.concatenate([model.row_kind, np.full(len(cuts), CUT, dtype=np.int8)]),
        row_key=np.vstack([model.row_key, key]),
    )


def _certify(context: Context, model: StagedModel, y: np.ndarray, cuts: list[list[int]]) -> BoundCertificate:
    """Round the multipliers to integers over a common denominator and count exactly what they prove."""
    graph, budget, scope = context.problem.graph, context.problem.budget_bytes, context.problem.scope
    least = float(np.min(y[y > 0], initial=1.0)) / model.unit_bytes
    denominator = 1 << max(0, min(60, 24 - math.floor(math.log2(max(least, 1e-12)))))
    multipliers: dict[str, list[list[int]]] = {name: [] for name in KIND_NAMES.values()}
    multipliers["knapsack"] = []
    width = {EDGE: 3, CONTINUITY: 2, MEMORY: 1, ONCE: 2}
    for row in np.nonzero(y > 0)[0].tolist():
        kind = int(model.row_kind[row])
        unit = model.unit_bytes if kind == MEMORY else 1  # the certificate's memory rows are in bytes
        amount = int(y[row] * (denominator / unit))
        if amount and kind == CUT:
            multipliers["knapsack"].append([*cuts[int(model.row_key[row, 0])], amount])
        elif amount:
            multipliers[KIND_NAMES[kind]].append([*model.row_key[row, : width[kind]].tolist(), amount])
    bound = proven_bound(model.graph, budget, scope, multipliers, denominator)
    if bound < graph.least_cost:
        multipliers, bound = {}, graph.least_cost
    return BoundCertificate(graph.name, graph.sha256(), budget, scope, bound, denominator, multipliers)
