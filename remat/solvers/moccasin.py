"""MOCCASIN as published: the whole retention-interval program in two phases, without our plans and neighbourhoods."""

from __future__ import annotations

from typing import Any

from remat.context import CUT_S, Context
from remat.problem import Problem
from remat.programs.interval import IntervalModel, build_intervals
from remat.registry import POSITIVE, strategy
from remat.simulator import plain_peak
from remat.solution import Outcome
from remat.solvers._cp_sat import (
    IntervalSolver,
    is_unlimited,
    new_solver,
    proven_cost,
    solve_interruptibly,
    tensorflow_came_first,
)
from remat.solvers._polish import scope_note


@strategy(
    "moccasin", baseline=True, proves=True, isolated=True, allowed={"most_runs": POSITIVE},
    must_isolate=tensorflow_came_first,
)  # fmt: skip
def moccasin(problem: Problem, context: Context, *, most_runs: int = 2) -> Outcome:
    """The retention-interval program in its two published phases (MOCCASIN, Bartan et al., ICML 2023).

    The first phase starts from the graph's order, in which every operation runs once, and minimises the memory above
    the budget; CP-SAT may drop this start. The second phase starts from the first one's solution and minimises the
    cost within the budget. Both take what is left of the time, with the context's threads; published were 16.

    Deviations: a read is covered by one interval that a literal chooses, instead of a reservoir; intervals have any
    length, not one of 5 n; operations have a last useful run. The authors give each phase the whole time limit. A
    bound is claimed only if C restricts nothing, see `interval_cp`.

    Args:
        most_runs: C, the most runs of an operation; published results have 2.

    @inproceedings{bartan2023moccasin, title={Moccasin: Efficient Tensor Rematerialization for Neural Networks},
    author={Bartan, Burak and Li, Haoming and Teague, Harris and Lott, Christopher and Dilkina, Bistra},
    booktitle={ICML}, year={2023}}
    """
    return _Published(context, "moccasin", "cp-sat").run(most_runs)


class _Published(IntervalSolver):
    def run(self, most_runs: int) -> Outcome:
        context, budget = self.context, self.context.problem.budget_bytes
        peak = max(plain_peak(self.graph), budget)
        built = build_intervals(self.graph, budget, most_runs, most_bytes=peak)
        if built is not None and self._fit(built):
            self._cheapest(built)
        late = " with its time" if context.is_late() else ""
        above = f"its first phase ended{late}, above the budget"
        message = above if self.best is None else scope_note(context.problem.scope)
        return self.outcome(message, parameters={"most_runs": most_runs})

    def _fit(self, built: IntervalModel) -> bool:
        """The first phase; its solution becomes the hint of the second. Whether it is within the budget."""
        from ortools.sat.python import cp_model

        least = built.room.proto.domain[0]
        plain = built.model.clone()  # the graph's order, with a value for every variable
        for present in (present for own in built.starts for _, present in own[1:]):
            plain.add(plain.get_bool_var_from_proto_index(present.index) == 0)
        solver, status = self._solved(plain)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return False
        _hint(built.model, solver)
        built.model.minimize(built.room)
        solver, status = self._solved(built.model)
        self.stats["first_phase_s"] = round(solver.wall_time, 2)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return False
        above = solver.value(built.room) - least
        if above:
            self.stats["first_phase_above_bytes"] = above * built.memory_unit
            self.infeasible = status == cp_model.OPTIMAL and is_unlimited(self.graph, built.limits, None)
            return False
        self.keep_solution(built, solver)
        _hint(built.model, solver)
        built.model.add(built.room == least)
        return True

    def _cheapest(self, built: IntervalModel) -> None:
        """The second phase."""
        from ortools.sat.python import cp_model

        solve = self

        class Offer(cp_model.CpSolverSolutionCallback):
            def on_solution_callback(self) -> None:
                solve.keep_solution(built, self)

        built.model.minimize(built.cost)
        solver, _ = self._solved(built.model, Offer())
        if self.is_unlimited(built):
            self.keep_bound(proven_cost(built, solver))

    def _solved(self, model: Any, callback: Any = None) -> tuple[Any, Any]:
        solver = new_solver(self.context, max(0.05, self.context.remaining_s() - CUT_S))
        return solver, solve_interruptibly(solver, model, callback)


def _hint(model: Any, solver: Any) -> None:
    """Let every variable start from its value in a solution."""
    model.clear_hints()
    for variable, value in enumerate(solver.response_proto.solution):
        model.add_hint(model.get_int_var_from_proto_index(variable), value)
