"""The trimmed MILP: `remat.programs.staged` as sparse matrices, given to HiGHS directly.

Memory within a stage rarely binds when memory at the end of each stage is kept, so the rows of repeats
(and their columns Z and A) enter only for stages in which the last optimum exceeds the budget. Each
solve is a relaxation of the next one and of the whole problem: its bound holds, and a plan that the
judge accepts is as good as its bound says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from remat.context import Context
from remat.plan import COMPUTE, Plan, Scope
from remat.programs.highs import Answer, solve_program
from remat.programs.program import TOLERANCE, half_unit_is_lost, least_whole
from remat.programs.staged import StagedModel, build_staged_model
from remat.simulator import simulate
from remat.solution import Candidate, Outcome
from remat.solvers._polish import drop_needless_repeats

WHO = "checkmate_milp"


def solve_trimmed(
    context: Context, mip_gap: float, should_stop: Callable[[], bool] = lambda: False, *,
    repeats: Collection[tuple[int, int]] | None = None, who: str = WHO,
) -> Outcome:  # fmt: skip
    """Solve the staged problem exactly, as far as the limits allow; better plans are offered as they come.

    Args:
        mip_gap: relative gap at which HiGHS stops.
        should_stop: asked by HiGHS now and then, besides ``context.is_solved()``.
        repeats: (stage, operation) pairs that alone may be repeats; nothing is then proven.
            `Outcome.decided` says whether the restricted problem was solved to its end.
        who: the name under which plans and bounds are offered.
    """
    return _Trimmed(context, mip_gap, should_stop, repeats, who).run()


@dataclass(slots=True)
class _Trimmed:
    context: Context
    mip_gap: float
    should_stop: Callable[[], bool]
    repeats: Collection[tuple[int, int]] | None = None
    who: str = WHO
    stats: dict[str, Any] = field(default_factory=lambda: {"solver": "highs", "rounds": 0, "nodes": 0})
    bound: int | None = None
    best: tuple[int, Plan] | None = None
    decided: bool = False

    def run(self) -> Outcome:
        context, graph = self.context, self.context.problem.graph
        start = context.options.warm_start
        if start is not None and start.scope is Scope.STAGED:
            self._keep(start)
        slots: set[int] = set()
        room = 0.5  # in units: exact, because memory comes in whole units
        while context.remaining_s() > 0.1 and not self.should_stop():
            memory = "full" if slots else "stage_end"
            model = build_staged_model(
                graph, context.problem.budget_bytes, memory=memory, slot_stages=slots, repeats=self.repeats
            )
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
            if self._keep(plan):
                self.decided = True
                break
            beyond = stages_beyond(plan, simulate(graph, plan).running_bytes, context.problem.budget_bytes) - slots
            if beyond:
                slots |= beyond
            else:  # it slipped over the budget by the tolerance: a little less room
                self.stats["slips"] = self.stats.get("slips", 0) + 1
                room = min(-0.5, 4 * room if room < 0 else -model.units * TOLERANCE)
            if self.best is not None and self.bound is not None and self.best[0] <= self.bound * (1 + self.mip_gap):
                break
        return self._outcome("no plan found within the limit")

    def _keep(self, plan: Plan) -> bool:
        """Whether the plan fits; the best one is remembered and offered."""
        trace = simulate(self.context.problem.graph, plan)
        if trace.peak_bytes > self.context.problem.budget_bytes:
            return False
        if self.best is None or trace.cost < self.best[0]:
            self.best = trace.cost, plan
            self.context.offer(plan, self.who)
        return True

    def _solve(self, model: StagedModel, room: float) -> Answer:
        context = self.context
        self.stats["rounds"] += 1
        scaled = model.scaled(room)
        answer = solve_program(
            scaled.program,
            limits_of(context, self.mip_gap),
            start=start_of(model, self.best[1]) if self.best is not None and room > 0 else None,
            on_solution=lambda x: self._keep(model.plan(x)),
            should_stop=lambda: self.should_stop() or context.is_solved(),
        )
        self.stats["nodes"] += answer.nodes
        if not answer.infeasible and room > 0 and math.isfinite(answer.bound) and not model.restricted:
            bound = least_whole(answer.bound / scaled.cost_scale, scaled.cost_scale)
            self._take_bound(model.cost_constant + bound)
        return answer

    def _take_bound(self, bound: int) -> None:
        if self.bound is None or bound > self.bound:
            self.bound = bound
            if self.context.problem.scope is Scope.STAGED:
                self.context.offer_bound(bound, self.who)

    def _infeasible(self) -> Outcome:
        if self.repeats is not None:
            self.decided = True
            return self._outcome("no plan fits with these repeats; nothing is proven", timed_out=False)
        if self.context.problem.scope is not Scope.STAGED:
            message = f"no staged plan fits; nothing is proven for scope {self.context.problem.scope}"
            return self._outcome(message, timed_out=False)
        # With a plan in hand this is a contradiction, which the judge names.
        candidates = () if self.best is None else (Candidate(self.best[1]),)
        return Outcome(candidates, infeasible=True, stats=self.stats)

    def _outcome(self, without_plan: str, *, timed_out: bool = True) -> Outcome:
        staged = self.context.problem.scope is Scope.STAGED
        bound = self.bound if staged else None
        note = "" if staged else f"plans are staged; nothing is proven for scope {self.context.problem.scope}"
        if self.best is not None:
            candidate = Candidate(self.best[1])
            return Outcome((candidate,), bound=bound, message=note, stats=self.stats, decided=self.decided)
        return Outcome(bound=bound, timed_out=timed_out, message=without_plan, stats=self.stats, decided=self.decided)


def stages_beyond(plan: Plan, running_bytes: np.ndarray, budget_bytes: int) -> set[int]:
    """Stages in which a repeat exceeds the budget."""
    order = plan.ids[plan.kinds == COMPUTE].tolist()
    stages, stage = set(), 0
    for k, held in zip(order, running_bytes.tolist(), strict=True):
        if held > budget_bytes and k != stage:
            stages.add(stage)
        if k == stage:
            stage += 1
    return stages


def limits_of(context: Context, mip_gap: float) -> dict[str, Any]:
    """HiGHS's options for what is left of a solve; it overruns, and the plan takes a moment."""
    left = context.remaining_s()
    options: dict[str, Any] = {
        "time_limit": max(0.05, min(left - 0.2, 0.96 * left, 1e7)), "threads": context.solver_threads,
        "random_seed": context.options.seed % 2**31, "mip_rel_gap": mip_gap,
    }  # fmt: skip
    if context.options.work_limit is not None:
        options["mip_max_nodes"] = context.options.work_limit
    return options


def start_of(model: StagedModel, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """(columns, values) of R and S of a staged plan; HiGHS completes the rest."""
    R_TN, S_TV = plan.matrices(model.graph)
    index, values = [], []
    for columns, matrix in ((model.R_column, R_TN), (model.S_column, S_TV)):
        for (t, i), column in columns.items():
            index.append(column)
            values.append(float(matrix[t, i]))
    return np.array(index, dtype=np.int32), np.array(values)
