"""The trimmed MILP: `remat.programs.staged` as sparse matrices, solved by HiGHS directly.

When memory at the end of each stage is within the budget, memory inside the stage rarely exceeds it. So the rows of
repeats (and their columns Z and A) enter only for stages in which the last optimum exceeds the budget. Each solve is a
relaxation of the next one and of the whole problem: its bound holds, and its plan, if it fits, is optimal within the
gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np

from remat.context import Context
from remat.plan import Plan, Scope
from remat.programs.highs import Answer, highs_options, solve_program
from remat.programs.program import TOLERANCE, Limits, half_unit_is_lost, least_whole
from remat.programs.staged import StagedModel, build_staged_model, stages_of
from remat.simulator import simulate
from remat.solution import Outcome
from remat.solvers._polish import StagedSolver, drop_needless_repeats, scope_note

WHO = "checkmate_milp"
MARGIN_S = 0.2  # for the plan after a solve


def solve_trimmed(
    context: Context, mip_gap: float, should_stop: Callable[[], bool] = lambda: False, *,
    repeats: Collection[tuple[int, int]] | None = None, who: str = WHO,
) -> Outcome:  # fmt: skip
    """Solve the staged problem exactly, as far as the limits allow; offer each better plan at once.

    Args:
        mip_gap: relative gap at which HiGHS stops.
        should_stop: HiGHS calls it now and then, besides ``context.is_solved()``.
        repeats: (stage, operation) pairs that alone may be repeats; nothing is then proven.
            `Outcome.decided` says whether the restricted problem was solved to the end.
        who: the name under which plans and bounds are offered.
    """
    return _Trimmed(context, mip_gap, should_stop, repeats, who).run()


class _Trimmed(StagedSolver):
    def __init__(
        self, context: Context, mip_gap: float, should_stop: Callable[[], bool],
        repeats: Collection[tuple[int, int]] | None, who: str,
    ) -> None:  # fmt: skip
        super().__init__(context, who, "highs")
        self.mip_gap, self.should_stop, self.repeats = mip_gap, should_stop, repeats
        self.stats = {"solver": "highs", "rounds": 0, "nodes": 0}

    def run(self) -> Outcome:
        context, graph = self.context, self.graph
        start = context.options.warm_start
        if start is not None and start.scope is Scope.STAGED:
            self.keep(start)
        slots: set[int] = set()
        room = 0.5  # in units: exact, because memory comes in whole units
        while context.remaining_s() > 0.1 and not self.should_stop():
            model = build_staged_model(graph, context.problem.budget_bytes, slot_stages=slots, repeats=self.repeats)
            if model.infeasible:
                return self._infeasible()
            self.stats |= {"columns": model.shape[1], "rows": model.shape[0], "stages_with_slots": len(slots)}
            answer = self._solve(model, room)
            if answer.infeasible:
                if room > 0 and half_unit_is_lost(model.units):
                    again = self._solve(model, model.units * TOLERANCE + 0.5)
                    if not again.infeasible:
                        return self._outcome("infeasible within the solver's tolerance only; unproven", timed_out=False)
                if room < 0:
                    return self._outcome("plans exceed the budget by the solver's tolerance; unproven", timed_out=False)
                return self._infeasible()
            if answer.x is None or not answer.optimal:
                break
            plan = model.plan(answer.x)
            plan = drop_needless_repeats(graph, plan, context.problem.budget_bytes, context.deadline - 0.2)
            if self.keep(plan):
                self.decided = True
                break
            beyond = stages_beyond(plan, simulate(graph, plan).running_bytes, context.problem.budget_bytes) - slots
            if beyond:
                slots |= beyond
            else:  # the plan slipped over the budget by the solver's tolerance: solve again with less room
                self.stats["slips"] = self.stats.get("slips", 0) + 1
                room = min(-0.5, 4 * room if room < 0 else -model.units * TOLERANCE)
            if self.best is not None and self.bound is not None and self.best[0] <= self.bound * (1 + self.mip_gap):
                break
        return self._outcome("no plan found within the limit")

    def _solve(self, model: StagedModel, room: float) -> Answer:
        context = self.context
        self.stats["rounds"] += 1
        scaled = model.scaled(room)
        answer = solve_program(
            scaled.program,
            highs_options(limits_of(context, self.mip_gap)),
            start=start_of(model, self.best[1]) if self.best is not None and room > 0 else None,
            on_solution=lambda x: self.keep(model.plan(x)),
            should_stop=lambda: self.should_stop() or context.is_solved(),
        )
        self.stats["nodes"] += answer.nodes
        if not answer.infeasible and room > 0 and math.isfinite(answer.bound) and self.repeats is None:
            bound = least_whole(answer.bound / scaled.cost_scale, scaled.cost_scale)
            self.keep_bound(model.cost_constant + bound)
        return answer

    def _infeasible(self) -> Outcome:
        if self.repeats is not None:
            self.decided = True
            return self._outcome("no plan fits with these repeats; nothing is proven", timed_out=False)
        if self.context.problem.scope is not Scope.STAGED:
            message = f"no staged plan fits; nothing is proven for scope {self.context.problem.scope}"
            return self._outcome(message, timed_out=False)
        self.infeasible = True
        return self.outcome("")

    def _outcome(self, without_plan: str, *, timed_out: bool = True) -> Outcome:
        message = without_plan if self.best is None else scope_note(self.context.problem.scope)
        return self.outcome(message, timed_out=timed_out)


def stages_beyond(plan: Plan, running_bytes: np.ndarray, budget_bytes: int) -> set[int]:
    """Stages in which a repeat exceeds the budget."""
    order = plan.order.tolist()
    steps = zip(order, stages_of(order), running_bytes.tolist(), strict=True)
    return {stage for k, stage, held in steps if held > budget_bytes and k != stage}


def limits_of(context: Context, mip_gap: float) -> Limits:
    """Limits of a MILP within the time left, less a margin: solvers overrun, and reading the plan takes time."""
    left = context.remaining_s()
    time_s = max(0.05, min(left - MARGIN_S, 0.96 * left, 1e7))
    return Limits(time_s, context.solver_threads, context.options.seed, mip_gap, context.options.work_limit)


def start_of(model: StagedModel, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """(columns, values) of R and S of a staged plan; HiGHS completes the other columns."""
    R_TN, S_TV = plan.matrices(model.graph)
    index, values = [], []
    for columns, matrix in ((model.R_column, R_TN), (model.S_column, S_TV)):
        for (t, i), column in columns.items():
            index.append(column)
            values.append(float(matrix[t, i]))
    return np.array(index, dtype=np.int32), np.array(values)
