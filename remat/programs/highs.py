"""The only module that calls HiGHS directly: its options, and the solve of a program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from remat.programs.program import TOLERANCE, Limits, Program

FEASIBLE = 2  # kSolutionStatusFeasible; the info holds it as a number
MOST_MISSED = 8_000  # rows that enter a `Simplex` at once
UNASKED_S = 0.25  # most time in which it does not ask whether to stop


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Result of a solver for one program; neither `infeasible` nor `optimal` if a limit ended it.

    Attributes:
        x: [n] a solution, or None. A point of the interior-point method need not be feasible.
        row_dual: [rows] multipliers of a linear program; None without valid ones.
        bound: proven lower bound on the objective of an integer program; minus infinity without one.
        nodes: number of nodes of the branch and bound.
        infeasible: it is proven that there is no solution.
        optimal: the program was solved to the end, or to the gap asked for.
    """

    x: np.ndarray | None = None
    row_dual: np.ndarray | None = None
    bound: float = -np.inf
    nodes: int = 0
    infeasible: bool = False
    optimal: bool = False


def highs_options(limits: Limits) -> dict[str, Any]:
    """HiGHS options for these limits."""
    import highspy

    highspy.Highs.resetGlobalScheduler(True)  # otherwise a process keeps its first number of threads
    nodes = {} if limits.nodes is None else {"mip_max_nodes": limits.nodes}
    return {
        "time_limit": limits.time_s, "mip_rel_gap": limits.gap, "threads": limits.threads,
        "random_seed": limits.seed % 2**31, **nodes,
    }  # fmt: skip


def interior_point(
    program: Program, time_limit_s: float, threads: int = 1, should_stop: Callable[[], bool] | None = None
) -> tuple[np.ndarray, np.ndarray] | None:  # fmt: skip
    """Solve a linear program, columns 0 to 1, without crossover.

    Returns:
        ([n] columns, [rows] multipliers, none below 0), within the solver's tolerance; None if it did not end in time.
    """
    options = {
        "solver": "ipm", "run_crossover": "off", "threads": threads, "time_limit": max(0.1, time_limit_s),
    }  # fmt: skip
    answer = solve_program(program, options, should_stop=should_stop)
    if answer.x is None or answer.row_dual is None:
        return None
    return np.clip(answer.x, 0.0, 1.0), np.maximum(answer.row_dual, 0.0)


class Basis(NamedTuple):
    """A basis of HiGHS for the first `n_rows` rows of a `Simplex`; to ask it for that number takes long."""

    basis: Any
    n_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Vertex:
    """What `Simplex` found.

    Attributes:
        x: [n] the columns; None if there is no solution.
        row_dual: [rows] multipliers, none below 0; without a solution a ray: a large multiple proves any bound.
        basis: to start from in a similar program.
        is_solved: whether it was solved to the end; if not, x is no solution, and the multipliers still prove a bound.
    """

    x: np.ndarray | None
    row_dual: np.ndarray
    basis: Basis | None
    is_solved: bool = True


class Simplex:
    """A linear program, ``matrix x >= row_lower``, that is solved often, each time with other bounds of its columns.

    Rows enter when a point misses them, because few of them matter: about 1,000 of 50,000 in the window relaxation.
    """

    def __init__(self, program: Program, first: np.ndarray) -> None:
        """`first` [rows] says which rows are there from the beginning."""
        self._program, self._is_in = program, first.copy()
        self._rows = np.nonzero(first)[0]
        self._highs = _load(replace(program, matrix=program.matrix[first], row_lower=program.row_lower[first]))
        self._columns = np.arange(len(program.cost), dtype=np.int32)
        for option, value in {"solver": "simplex", "presolve": "off", "threads": 1}.items():
            self._highs.setOptionValue(option, value)

    def solve(
        self, lower: np.ndarray, upper: np.ndarray, *, basis: Basis | None = None, enough: float = np.inf,
        time_limit_s: float, iterations: int = 2**31 - 1, should_stop: Callable[[], bool] | None = None,
    ) -> Vertex | None:  # fmt: skip
        """Solve by the dual simplex method; None if it did not end in time.

        HiGHS may go another way after each question to `should_stop`; without it two solves are the same.

        Args:
            lower, upper: [n] of the columns.
            basis: of an earlier vertex.
            enough: an objective above which the solve may end.
            iterations: after which it ends.
            should_stop: is asked now and then.
        """
        import highspy

        highs, statuses = self._highs, highspy.HighsModelStatus
        deadline = time.monotonic() + max(0.1, time_limit_s)
        highs.changeColsBounds(len(self._columns), self._columns, lower, upper)
        if basis is not None:
            self._start_from(basis)
        highs.setOptionValue("objective_bound", enough)
        highs.setOptionValue("simplex_iteration_limit", iterations)
        unasked_s = np.inf if should_stop is None else UNASKED_S
        while should_stop is None or not should_stop():
            left_s = deadline - time.monotonic()
            highs.setOptionValue("time_limit", highs.getRunTime() + max(0.01, min(left_s, unasked_s)))
            highs.run()
            status = highs.getModelStatus()
            if status == statuses.kTimeLimit and left_s > 0:
                continue
            if status == statuses.kInfeasible:
                _, exists, ray = highs.getDualRay()
                return Vertex(None, self._all_rows(ray), None) if exists else None
            if status not in (statuses.kOptimal, statuses.kObjectiveBound, statuses.kIterationLimit):
                break
            solution = highs.getSolution()
            x = np.asarray(solution.col_value)
            if status == statuses.kOptimal and self._add_missed(x):
                continue
            is_solved = status != statuses.kIterationLimit
            basis = Basis(highs.getBasis(), len(self._rows))
            return Vertex(np.clip(x, 0.0, 1.0), self._all_rows(solution.row_dual), basis, is_solved)
        return None

    def extend(self, program: Program) -> None:
        """Go on with the same program and more rows at its end."""
        self._program = program
        self._is_in = np.concatenate([self._is_in, np.zeros(len(program.row_lower) - len(self._is_in), dtype=bool)])

    def _add_missed(self, x: np.ndarray) -> bool:
        """Add the rows that x [n] misses most; whether there are any."""
        missed = np.where(self._is_in, 0.0, self._program.row_lower - self._program.matrix @ x)
        rows = np.nonzero(missed > TOLERANCE)[0]
        if len(rows) > MOST_MISSED:
            rows = np.sort(rows[np.argsort(-missed[rows], kind="stable")[:MOST_MISSED]])
        part = self._program.matrix[rows]
        starts, indices = part.indptr[:-1].astype(np.int32), part.indices.astype(np.int32)
        upper = np.full(len(rows), np.inf)
        self._highs.addRows(len(rows), self._program.row_lower[rows], upper, part.nnz, starts, indices, part.data)
        self._rows = np.concatenate([self._rows, rows])
        self._is_in[rows] = True
        return bool(len(rows))

    def _start_from(self, start: Basis) -> None:
        """Begin from the basis of an earlier vertex, with the rows that have entered since."""
        import highspy

        basis: Any = start.basis
        if new := len(self._rows) - start.n_rows:
            basis = highspy.HighsBasis()
            basis.valid, basis.alien, basis.col_status = True, False, start.basis.col_status
            basis.row_status = [*start.basis.row_status, *[highspy.HighsBasisStatus.kBasic] * new]
        self._highs.setBasis(basis)

    def _all_rows(self, multipliers: Any) -> np.ndarray:
        """[rows] multipliers, none below 0, from those of the rows that are in."""
        y = np.zeros(len(self._is_in))
        y[self._rows] = np.maximum(np.asarray(multipliers), 0.0)
        return y


def solve_program(
    program: Program,
    options: Mapping[str, Any],
    *,
    start: tuple[np.ndarray, np.ndarray] | None = None,
    on_solution: Callable[[np.ndarray], object] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Answer:
    """Solve a linear or integer program.

    Args:
        options: HiGHS options by name.
        start: (columns, their values) of a known solution; HiGHS completes the other columns.
        on_solution: called with each better solution of an integer program.
        should_stop: asked now and then; if true, HiGHS stops and returns its best result so far.
    """
    import highspy

    highs: Any = _load(program)
    for option, value in options.items():
        highs.setOptionValue(option, value)
    if start is not None:
        index, values = start
        highs.setSolution(len(index), index, values)
    if on_solution is not None:

        def improved(event: Any) -> None:
            on_solution(np.asarray(event.data_out.mip_solution))

        highs.cbMipImprovingSolution.subscribe(improved)
    if should_stop is not None:
        interrupt = highs.cbIpmInterrupt if program.is_integer is None else highs.cbMipInterrupt
        interrupt.subscribe(lambda event: event.interrupt() if should_stop() else None)
    highs.run()
    info, status, solution = highs.getInfo(), highs.getModelStatus(), highs.getSolution()
    statuses = highspy.HighsModelStatus
    is_linear = program.is_integer is None
    has_x = (
        status in (statuses.kOptimal, statuses.kUnknown) if is_linear else int(info.primal_solution_status) == FEASIBLE
    )
    return Answer(
        x=np.asarray(solution.col_value) if has_x else None,
        row_dual=np.asarray(solution.row_dual) if has_x and is_linear and solution.dual_valid else None,
        bound=-np.inf if is_linear else info.mip_dual_bound,
        nodes=max(0, int(info.mip_node_count)),
        infeasible=status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible),
        optimal=status == statuses.kOptimal,
    )


def cheapest_columns(
    cost: np.ndarray, rows: np.ndarray, row_lower: np.ndarray, row_upper: np.ndarray, time_limit_s: float
) -> tuple[np.ndarray | None, float]:
    """The cheapest choice of columns where ``row_lower <= rows x <= row_upper``, x being 0 or 1.

    Args:
        cost: [n].
        rows: [rows, n]; numbers of moderate size, see `scale_of`.

    Returns:
        ([n] bool, None if no choice was found in time; a bound on the cost of every choice, infinite without any).
    """
    n, largest = len(cost), max(1.0, cost.max(initial=0))
    program = Program(sp.csr_array(rows), cost / largest, np.ones(n), row_lower, np.ones(n, bool), row_upper=row_upper)
    found = solve_program(program, highs_options(Limits(time_limit_s)))
    bound = np.inf if found.infeasible else found.bound * largest
    return None if found.x is None else found.x > 0.5, bound


def _load(program: Program) -> Any:
    import highspy

    matrix: Any = program.matrix
    lp: Any = highspy.HighsLp()
    lp.num_row_, lp.num_col_ = matrix.shape
    lp.col_cost_, lp.offset_ = program.cost, program.offset
    lp.col_lower_ = np.full(matrix.shape[1], program.lower)
    lp.col_upper_ = program.upper
    lp.row_lower_ = program.row_lower
    lp.row_upper_ = np.full(matrix.shape[0], program.row_upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
    if program.is_integer is not None:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[int(whole)] for whole in program.is_integer]
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highspy.Highs.resetGlobalScheduler(True)
    highs.passModel(lp)
    return highs
