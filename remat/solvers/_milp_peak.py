"""The direct formulation: one program finds the least peak among the plans within a cost cap.

`remat.programs.staged` asks for the least cost within a budget. Here the peak Z is a column, every memory row
says "at most Z" instead of "at most the budget", the cost is a row and the objective is Z. Memory is linear
in the batch size b of a layer graph, fixed + b Z(1 sample), so the least Z gives the largest batch:
b = floor((memory - fixed) / Z). Checkmate (Jain et al., MLSys 2020, section 6.4) has the batch size as the
variable and memory quadratic in it; dividing by b makes it linear.

The model is built for a proven lower bound on the peak: Z starts there, and rows that cannot exceed it are left out.
Rows of repeats within a stage enter as in `remat.solvers._milp_trimmed`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp

from remat.bounds.peak import peak_bound
from remat.context import Context
from remat.errors import Skip
from remat.plan import Plan, Scope
from remat.programs.highs import highs_options, solve_program
from remat.programs.program import TOLERANCE, Program, least_whole, scale_of
from remat.programs.staged import MEMORY, StagedModel, build_staged_model
from remat.simulator import simulate
from remat.solution import Candidate, Outcome
from remat.solvers._milp_trimmed import limits_of, stages_beyond, start_of

PEAK_BOUND_SETS = 2000  # that `peak_bound` expands for each operation, at most


def solve_peak(context: Context, mip_gap: float) -> Outcome:
    """The plan of least peak that costs at most ``context.problem.cost_cap`` and fits ``context.problem.budget_bytes``.

    ``peak_bound_bytes`` of the outcome: no staged plan within the cap has a smaller peak, fixed bytes included.

    Raises:
        Skip: the problem has no cost cap.
    """
    if context.problem.cost_cap is None:
        raise Skip("formulation=peak looks for the least peak within a cost cap, and this problem has none")
    return _LeastPeak(context, context.problem.cost_cap, mip_gap).run()


@dataclass(slots=True)
class _LeastPeak:
    context: Context
    cost_cap: int
    mip_gap: float
    bound_bytes: int = 0
    best: tuple[int, Plan] | None = None  # peak, plan
    stats: dict[str, Any] = field(default_factory=lambda: {"solver": "highs", "rounds": 0, "nodes": 0})

    def run(self) -> Outcome:
        context, graph = self.context, self.context.problem.graph
        start = context.options.warm_start
        self._keep(Plan.from_order(graph, range(len(graph)), context.problem.budget_bytes))
        if start is not None and start.scope is Scope.STAGED:
            self._keep(start)
        self.bound_bytes = peak_bound(graph, max_sets=PEAK_BOUND_SETS).bytes
        slots: set[int] = set()
        slack = 0.5  # in cost units: exact, because costs come in whole units
        while context.remaining_s() > 0.3 and not self._is_decided():
            model = build_staged_model(graph, self.bound_bytes, slot_stages=slots)
            self.stats |= {"columns": model.shape[1] + 1, "rows": model.shape[0] + 1, "stages_with_slots": len(slots)}
            x, peak, ended = self._solve(model, slack)
            if x is None or not ended:
                break
            plan = model.plan(x)
            trace = simulate(graph, plan)
            beyond = stages_beyond(plan, trace.running_bytes, peak) - slots
            if trace.cost > self.cost_cap:  # by the solver's tolerance
                slack = min(-0.5, 4 * slack if slack < 0 else -1.0)
            elif beyond:
                slots |= beyond
            else:
                break
        if self.best is None:
            message = "no plan within the cost cap was found in time"
            return Outcome(timed_out=True, message=message, stats=self.stats, peak_bound_bytes=self.bound_bytes)
        return Outcome(
            (Candidate(self.best[1]),), stats=self.stats, decided=self._is_decided(), peak_bound_bytes=self.bound_bytes
        )

    def _is_decided(self) -> bool:
        return self.best is not None and self.best[0] <= self.bound_bytes

    def _keep(self, plan: Plan) -> None:
        trace = simulate(self.context.problem.graph, plan)
        if trace.cost <= self.cost_cap and (self.best is None or trace.peak_bytes < self.best[0]):
            self.best = trace.peak_bytes, plan

    def _solve(self, model: StagedModel, slack: float) -> tuple[np.ndarray | None, int, bool]:
        """(columns of the model or None, claimed peak in bytes, whether HiGHS solved the program to the end)."""
        context, graph, unit = self.context, self.context.problem.graph, model.unit_bytes
        self.stats["rounds"] += 1
        least = (self.bound_bytes - graph.fixed_bytes) // unit
        most = max(least, (context.problem.budget_bytes - graph.fixed_bytes) // unit)
        scaled = model.scaled(units=most)
        memory_scale = scaled.memory_scale
        spare = self.cost_cap - model.cost_constant
        cost_unit = max(1, int(np.gcd.reduce(model.cost))) if len(model.cost) else 1
        cost_scale = scale_of(spare)
        above = sp.csr_array((model.row_kind == MEMORY).astype(np.float64).reshape(-1, 1))  # Z - least, in scaled units
        cost_row = sp.csr_array((-model.cost * cost_scale).reshape(1, -1))
        program = Program(
            matrix=sp.csr_array(sp.block_array([[scaled.program.matrix, above], [cost_row, None]])),
            cost=np.append(np.zeros(model.shape[1]), 1.0),
            upper=np.append(np.where(model.is_integer, 1.0, np.inf), (most - least) * memory_scale),
            row_lower=np.append(scaled.program.row_lower, -(spare + slack * cost_unit) * cost_scale),
            is_integer=np.append(model.is_integer, False),
            offset=least * memory_scale,
        )
        answer = solve_program(
            program,
            highs_options(limits_of(context, self.mip_gap)),
            start=None if self.best is None else start_of(model, self.best[1]),
            on_solution=lambda x: self._keep(model.plan(x)),
        )
        self.stats["nodes"] += answer.nodes
        if slack > 0 and math.isfinite(answer.bound):
            units = least_whole(answer.bound / memory_scale, memory_scale)
            self.bound_bytes = max(self.bound_bytes, graph.fixed_bytes + units * unit)
        if answer.x is None:
            return None, 0, False
        claimed = (least + answer.x[-1] / memory_scale) * (1 + TOLERANCE) + 0.5
        self._keep(model.plan(answer.x))
        return answer.x[:-1], graph.fixed_bytes + int(claimed) * unit, answer.optimal
