"""The staged LP bound: HiGHS proposes multipliers, exact arithmetic turns them into a bound.

The relaxation has only R and S and one memory row per stage (`build_staged_model` with
``memory="stage_end"``): on the published networks it equals the relaxation with all slots to
nine digits, in a tenth of the time. First only repeats of forward operations have columns. The certificate corrects for
all missing columns, so every bound holds for the full problem; columns with a negative reduced cost enter. Then
knapsack cuts (`remat.bounds.cuts`) are added in rounds as long as they pay. If operations have several implementations,
the LP is that of the relaxed graph (`remat.bounds.relax`), whose bound holds for every choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from remat.bounds.certificate import denominator_for, proven_bound
from remat.bounds.cuts import cuts_of_rows
from remat.bounds.relax import relaxed
from remat.certificate import FORMAT, KINDS, BoundCertificate
from remat.context import Context
from remat.graph import Graph
from remat.plan import Scope
from remat.programs.highs import interior_point
from remat.programs.program import Program, Rows
from remat.programs.staged import CONTINUITY, EDGE, MEMORY, ONCE, StagedModel, build_staged_model, last_stages

CUT = 6  # kind of row beside those of the model; its key is (index in the list of cuts, -1, -1)
KIND_NAMES = {EDGE: "edge", CONTINUITY: "continuity", MEMORY: "memory", ONCE: "once", CUT: "knapsack"}
WORTH = 2e-4  # least gain of a round of cuts before another round, as a share of the cost
LARGEST = 2_000_000  # with more columns, building the model alone takes too long
ENOUGH = 1e-6  # share of the cost that missing columns may lose
COLUMNS_IN_1S, POWER = 9_000, 1.6  # rough time of the interior point; decides whether it begins
SMALL_COLUMNS = 12_000  # a model with at most so many columns is likely to be solved to the end, in seconds


@dataclass(frozen=True, slots=True, eq=False)
class BoundResult:
    """A proven bound: no plan costs less.

    Attributes:
        certificate: its proof, None if the bound is only the cost of running everything once.
        stats: numbers for the result row.
    """

    bound: int
    certificate: BoundCertificate | None = None
    stats: dict[str, Any] = field(default_factory=dict)


def model_columns(graph: Graph) -> int:
    """Number of R and S that the staged model would have."""
    last_run, last_held = last_stages(graph, [not op.run_once for op in graph.operations])
    runs = sum(last - k for k, last in enumerate(last_run))
    return runs + sum(last - p for last, p in zip(last_held, graph.producer, strict=True))


def expected_seconds(columns: int) -> float:
    """Rough time of the LP bound of a model with so many columns."""
    return (columns / COLUMNS_IN_1S) ** POWER


def lower_bound(
    context: Context,
    *,
    on_bound: Callable[[BoundCertificate], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> BoundResult:
    """The best bound that the staged LP gives before the deadline, made rigorous.

    Valid for `context.problem.scope`; in scope free it is the cost of running everything once. `on_bound` gets each
    better bound with its proof; `should_stop` is asked before and during each LP.
    """
    graph, scope = relaxed(context.problem.graph), context.problem.scope
    best = BoundResult(graph.total_cost)
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
            best = BoundResult(certificate.bound, certificate)
            if on_bound is not None:
                on_bound(certificate)
        value = model.cost_constant + float(model.cost @ x)
        if value - certificate.bound <= ENOUGH * value:
            new = _violated(model, x, set(map(tuple, cuts)))
            enough_time = context.repeats or context.remaining_s() > 1.5 * (begun - context.remaining_s())
            if not new or not enough_time or value - value_before < WORTH * value:
                break
            model, value_before = _with_cuts(model, new, len(cuts)), value
            cuts += new
            continue
        if cuts:  # an inexact solve of a harder LP; its bound is kept
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
    The interior point asks `should_stop` in every iteration.
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
    solved = interior_point(program, time_limit_s, threads, should_stop)
    if solved is None:
        return None
    x, y = np.zeros(model.shape[1]), np.zeros(model.shape[0])
    x[used] = solved[0]
    y[rows_used] = solved[1] * scaled.row_scale[rows_used] / scaled.cost_scale
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
    """[n] bool: the columns that share an edge row with a wanted one, because a fair price of it needs them."""
    rows = (model.row_kind == EDGE) & (np.diff(model.matrix[:, wanted].indptr) > 0)
    shared = np.zeros(model.shape[1], dtype=bool)
    shared[model.matrix[rows].indices] = True
    return shared


def _violated(model: StagedModel, x: np.ndarray, known: set[tuple[int, ...]]) -> list[list[int]]:
    """Cuts that x violates, in the certificate's form: [t, right, v, a, v, a, ...]; `known` gets them too."""
    value_of = {column: v for (_, v), column in model.S_column.items()}
    found: list[list[int]] = []
    rows = np.nonzero(model.row_kind == MEMORY)[0]
    for row, weights, right in cuts_of_rows(model.matrix, model.row_lower, rows, x):
        cut = [int(model.row_key[row, 0]), right]
        for column, a in weights:
            cut += [value_of[column], a]
        if tuple(cut) not in known:
            known.add(tuple(cut))
            found.append(cut)
    return found


def _with_cuts(model: StagedModel, cuts: list[list[int]], first: int) -> StagedModel:
    """The model with the cuts as further rows; `first` is the index of the first one in the list of all cuts."""
    rows = Rows()
    for index, (t, right, *terms) in enumerate(cuts, start=first):
        weights = zip(terms[::2], terms[1::2], strict=True)
        rows.add([(model.S_column[t + 1, v], -a) for v, a in weights], -right, CUT, (index, -1, -1))
    return replace(
        model,
        matrix=sp.csr_array(sp.vstack([model.matrix, rows.matrix(model.shape[1], np.int64)])),
        row_lower=np.concatenate([model.row_lower, np.array(rows.lower, dtype=np.int64)]),
        row_kind=np.concatenate([model.row_kind, np.array(rows.kind, dtype=np.int8)]),
        row_key=np.vstack([model.row_key, np.array(rows.key, dtype=np.int32)]),
    )


def _certify(context: Context, model: StagedModel, y: np.ndarray, cuts: list[list[int]]) -> BoundCertificate:
    """Round the multipliers to integers over a common denominator, and compute their bound exactly."""
    graph, budget, scope = context.problem.graph, context.problem.budget_bytes, context.problem.scope
    least = float(np.min(y[y > 0], initial=1.0)) / model.unit_bytes
    denominator = denominator_for(least)
    multipliers: dict[str, list[list[int]]] = {name: [] for name in KIND_NAMES.values()}
    for row in np.nonzero(y > 0)[0].tolist():
        kind = int(model.row_kind[row])
        unit = model.unit_bytes if kind == MEMORY else 1  # the certificate's memory rows are in bytes
        amount = int(y[row] * (denominator / unit))
        if amount:
            name, key = KIND_NAMES[kind], model.row_key[row].tolist()
            multipliers[name].append([*(cuts[key[0]] if kind == CUT else key[: KINDS[FORMAT][name]]), amount])
    bound = proven_bound(model.graph, budget, scope, multipliers, denominator)
    if bound < graph.least_cost:
        multipliers, bound = {}, graph.least_cost
    return BoundCertificate(graph.name, graph.sha256(), budget, scope, bound, denominator, multipliers)
