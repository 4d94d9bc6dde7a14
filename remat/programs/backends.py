"""MILP solvers behind cvxpy: each declares one back-end, which a tiny solve probes.

A package that can be imported may still have no licence. cvxpy's statuses are not verdicts: after a time limit
without an incumbent several interfaces report a status that counts as "solution present". So the back-ends read
verdicts, bounds and incumbents from the solver itself. Checked with cvxpy 1.9.3, highspy 1.14, mosek 11,
gurobipy 13, pyscipopt 6.
"""

from __future__ import annotations

import importlib
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from remat.errors import RematError, Skip, check_name
from remat.programs.highs import FEASIBLE, Answer, highs_options
from remat.programs.program import Limits, Program

if TYPE_CHECKING:
    import cvxpy as cp

PROBE_S = 60.0  # cvxpy compiles the tiny program within these seconds, and the machine may be busy


@dataclass(frozen=True, slots=True)
class Backend:
    """One solver: its names, how to pass limits to it and how to read its answer.

    Attributes:
        name: as users write it; also the name of the extra that installs it.
        package: module to import.
        options: turns `Limits` into keyword options of the cvxpy interface.
        read: turns the raw result of the interface into an `Answer`, still without x, and whether there is a solution;
            raises `Skip` if the licence forbids the model.
        cache_start: makes, from the variables' values, the `solver_cache` that passes a starting point to the
            interface; None if the interface takes no start.
    """

    name: str
    cvxpy_name: str
    package: str
    install: str
    options: Callable[[Limits], dict[str, Any]]
    read: Callable[[Any], tuple[Answer, bool]]
    cache_start: Callable[[cp.Problem, Any], dict[str, Any] | None] | None = None

    def solve(self, program: Program, limits: Limits, *, start: np.ndarray | None = None) -> Answer:
        """Solve an integer program.

        Args:
            start: [n] a feasible point to start from; ignored without `cache_start`.
        """
        started = time.monotonic()
        problem, variables = _in_cvxpy(program, start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the verdict repeats warnings about accuracy and the time limit
            chain: Any
            data, chain, inverse = problem.get_problem_data(self.cvxpy_name, ignore_dpp=True)
            left_s = limits.time_s - (time.monotonic() - started)  # large models take seconds to compile
            if left_s <= 0:
                return Answer()
            options = self.options(replace(limits, time_s=left_s))
            from_start, cache = False, None
            if start is not None and self.cache_start is not None:
                from_start, cache = True, self.cache_start(problem, data)
            raw = chain.solver.solve_via_data(data, from_start, False, options, cache)
            answer, has_solution = self.read(raw)
            answer = replace(answer, bound=answer.bound + program.offset)  # cvxpy keeps the offset from the solver
            if not has_solution:
                return answer
            problem.unpack_results(raw, chain, inverse)
        x = np.empty(len(program.cost))
        for columns, variable in variables:
            x[columns] = variable.value
        return replace(answer, x=x)

    def require(self) -> None:
        """Raise `Skip` unless the solver's package can be imported."""
        try:
            importlib.import_module(self.package)
        except ImportError as error:
            raise Skip(f"solver '{self.name}' is not installed ({error}); pip install '{self.install}'") from None

    def probe(self) -> None:
        """Raise `Skip` with the reason unless a tiny solve through cvxpy works."""
        self.require()
        either = Program(
            sp.csr_array([[1.0, 1.0]]), np.array([1.0, 2.0]), np.ones(2), np.ones(1), is_integer=np.ones(2, dtype=bool)
        )
        try:
            answer = self.solve(either, Limits(time_s=PROBE_S))
        except Skip:
            raise
        except Exception as error:  # each package raises its own licence errors
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise Skip(f"solver '{self.name}' does not run here: {reason}") from None
        if answer.x is None and not answer.infeasible:
            raise Skip(f"solver '{self.name}' solved no trivial problem in {PROBE_S:g} s; is the machine busy?")
        if answer.x is None or abs(float(answer.x @ either.cost) - 1) > 1e-6:
            raise Skip(f"solver '{self.name}' does not solve a trivial problem correctly; reinstall '{self.install}'")


def _in_cvxpy(program: Program, start: np.ndarray | None) -> tuple[cp.Problem, list[tuple[np.ndarray, Any]]]:
    """The problem, and (columns, variable) of the binary columns and of the others."""
    import cvxpy as cp

    assert program.is_integer is not None
    binary = program.is_integer
    lower = np.full(len(binary), program.lower)
    variables: list[tuple[np.ndarray, Any]] = []
    constraints: list[Any] = []
    for columns, kind in ((np.nonzero(binary)[0], "boolean"), (np.nonzero(~binary)[0], "nonneg")):
        if not len(columns):
            continue
        x: Any = cp.Variable(len(columns), boolean=kind == "boolean", nonneg=kind == "nonneg")
        if start is not None:
            x.value = start[columns]
        variables.append((columns, x))
        most = program.upper[columns]
        limited = np.nonzero(np.isfinite(most) & ~((most == 1) & binary[columns]))[0]
        if len(limited):
            constraints.append(x[limited] <= most[limited])
        least = lower[columns]
        if least.any():
            constraints.append(x[np.nonzero(least)[0]] >= least[least != 0])

    def times(matrix: Any) -> Any:
        return sum(matrix[:, columns] @ x for columns, x in variables)

    below = program.row_lower
    above = np.full(len(below), program.row_upper)
    equal, least_only, most_only = below == above, np.isfinite(below), np.isfinite(above)
    if equal.any():
        constraints.append(times(program.matrix[equal]) == below[equal])
    if (at := least_only & ~equal).any():
        constraints.append(times(program.matrix[at]) >= below[at])
    if (at := most_only & ~equal).any():
        constraints.append(times(program.matrix[at]) <= above[at])
    objective = times(sp.csr_array(program.cost.reshape(1, -1)))
    return cp.Problem(cp.Minimize(cp.sum(objective) + program.offset), constraints), variables


def get_backend(name: str) -> Backend:
    """The back-end of that name; raises `UnknownName` with the nearest names."""
    check_name("solver", name, BACKENDS)
    return BACKENDS[name]


def _finite_bound(bound: float) -> float:
    """`bound`, or minus infinity: solvers write "no bound" as an infinity or as 1e20 and more."""
    return bound if math.isfinite(bound) and abs(bound) < 1e19 else -math.inf


def _highs_start(problem: cp.Problem, data: Any) -> dict[str, Any]:
    """The cache that an earlier solve would have left: cvxpy's HiGHS interface takes a start only from there."""
    import highspy

    columns = data["param_prob"].var_id_to_col
    point = np.zeros(data["c"].shape[0])
    for variable in problem.variables():
        first = columns[variable.id]
        point[first : first + variable.size] = variable.value
    solution = highspy.HighsSolution()
    solution.col_value = point.tolist()
    return {"HIGHS": (None, None, {"model_status": "kOptimal", "solution": solution})}


def _read_highs(raw: Any) -> tuple[Answer, bool]:
    info, status = raw["info"], raw["model_status"]
    infeasible = status in ("kInfeasible", "kUnboundedOrInfeasible")  # never unbounded: no objective is below zero
    limits = ("kTimeLimit", "kIterationLimit", "kSolutionLimit", "kInterrupt", "kMemoryLimit")
    if not infeasible and status not in ("kOptimal", *limits):
        raise RematError(f"HiGHS ended with status {status}")
    answer = Answer(
        bound=_finite_bound(info.mip_dual_bound), nodes=max(0, int(info.mip_node_count)), infeasible=infeasible,
        optimal=status == "kOptimal",
    )  # fmt: skip
    return answer, int(info.primal_solution_status) == FEASIBLE


def _mosek_options(limits: Limits) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "MSK_DPAR_OPTIMIZER_MAX_TIME": limits.time_s,
        "MSK_DPAR_MIO_TOL_REL_GAP": limits.gap,
        "MSK_IPAR_NUM_THREADS": limits.threads,
        "MSK_IPAR_MIO_SEED": limits.seed % 2**31,
    }
    if limits.nodes is not None:
        parameters["MSK_IPAR_MIO_MAX_NUM_BRANCHES"] = limits.nodes
    return {"mosek_params": parameters}


def _read_mosek(raw: Any) -> tuple[Answer, bool]:
    import mosek

    task, kind = raw["task"], mosek.soltype.itg
    bound = _finite_bound(task.getdouinf(mosek.dinfitem.mio_obj_bound))
    nodes = int(task.getintinf(mosek.iinfitem.mio_num_branch))
    if not task.solutiondef(kind):
        return Answer(bound=bound, nodes=nodes), False
    if task.getprosta(kind) in (mosek.prosta.prim_infeas, mosek.prosta.prim_infeas_or_unbounded):
        return Answer(bound=bound, nodes=nodes, infeasible=True), False
    status = task.getsolsta(kind)
    solved = status == mosek.solsta.integer_optimal
    return Answer(bound=bound, nodes=nodes, optimal=solved), solved or status == mosek.solsta.prim_feas


def _gurobi_options(limits: Limits) -> dict[str, Any]:
    import gurobipy

    nodes = {} if limits.nodes is None else {"NodeLimit": limits.nodes}
    return {
        "env": gurobipy.Env(params={"OutputFlag": 0}), "TimeLimit": limits.time_s, "MIPGap": limits.gap,
        "Threads": limits.threads, "Seed": limits.seed % 2000000000, **nodes,
    }  # fmt: skip


def _read_gurobi(raw: Any) -> tuple[Answer, bool]:
    import gurobipy

    model, status = raw["model"], gurobipy.GRB.Status
    if model.Status == status.LOADED:  # cvxpy swallows the error of its optimize(); a second call raises it again
        try:
            model.optimize()
        except gurobipy.GurobiError as error:
            raise Skip(f"solver 'gurobi' does not take this model: {error}") from None
    nodes = int(model.NodeCount)
    if model.Status in (status.INFEASIBLE, status.INF_OR_UNBD):
        return Answer(nodes=nodes, infeasible=True), False
    bound = _finite_bound(model.ObjBound)
    return Answer(bound=bound, nodes=nodes, optimal=model.Status == status.OPTIMAL), model.SolCount > 0


def _scip_options(limits: Limits) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "limits/time": limits.time_s,
        "limits/gap": limits.gap,
        "randomization/randomseedshift": limits.seed % 2**31,
        "lp/threads": min(limits.threads, 64),
    }
    if limits.nodes is not None:
        parameters["limits/totalnodes"] = limits.nodes
    return {"scip_params": parameters}


def _read_scip(raw: Any) -> tuple[Answer, bool]:
    model, status = raw["model"], raw["scip_status"]
    nodes = int(model.getNTotalNodes())
    if status in ("infeasible", "inforunbd"):
        return Answer(nodes=nodes, infeasible=True), False
    bound = _finite_bound(model.getDualbound())
    return Answer(bound=bound, nodes=nodes, optimal=status in ("optimal", "gaplimit")), model.getNSols() > 0


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("highs", "HIGHS", "highspy", "highspy>=1.14,<1.15", highs_options, _read_highs, _highs_start),
        Backend("mosek", "MOSEK", "mosek", "mosek>=11", _mosek_options, _read_mosek),
        Backend("gurobi", "GUROBI", "gurobipy", "gurobipy>=12", _gurobi_options, _read_gurobi, lambda *_: None),
        Backend("scip", "SCIP", "pyscipopt", "pyscipopt>=5.5", _scip_options, _read_scip),
    )
}
