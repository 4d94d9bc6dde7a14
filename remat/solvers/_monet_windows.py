"""MONeT's program around the best plan: all variables outside a window are fixed; a solve takes about a second.

The window is a row of stages, with or without the forward pass, or a row of operations in all stages, with the choices
of the backward pass. It grows while it is solved to the end, and shrinks otherwise. The result is a plan, never a
bound. A plan that the program cannot express, e.g. one that repeats backward operations, has no windows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from remat.context import Context
from remat.errors import Skip
from remat.plan import Plan
from remat.programs.highs import highs_options, solve_program
from remat.programs.monet import MonetModel, build_model
from remat.programs.program import Limits
from remat.search.choices import drop_unread_repeats

WHO = "windows of MONeT's program"
LONGEST_S, LEAST_S = 4.0, 0.1  # of one solve
FIRST_STAGES, FIRST_OPERATIONS = 4.0, 2.0  # width of the first window of each kind
WIDER, NARROWER = 1.15, 0.8
GAP = 1e-4
IN_VAIN = 60  # windows without a better plan, after which the plan is left


def improve_by_windows(context: Context, plan: Plan, threads: int) -> int | None:
    """Improve a plan until the deadline of `context`, or until nothing has helped for long; better plans are offered.

    Args:
        threads: of each solve.

    Returns:
        Number of solves; None if the program cannot express the plan.
    """
    try:
        model = build_model(context.problem.graph, context.problem.budget_bytes)
    except Skip:  # the graph is not a forward pass followed by a backward pass
        return None
    point = model.point(plan.calls)
    return None if point is None else _Windows(context, model, point, threads).run()


class _Windows:
    def __init__(self, context: Context, model: MonetModel, point: np.ndarray, threads: int) -> None:
        self.context, self.model, self.best, self.threads = context, model, point, threads
        self.program = model.program()
        self.stage, self.operation = model.places()
        self.n_forward = sum(not op.is_backward for op in context.problem.graph.operations)
        self.random = np.random.default_rng(abs(context.options.seed))
        self.widths, self.widest = [FIRST_STAGES, FIRST_OPERATIONS], [int(self.stage.max()) + 1, self.n_forward]
        self.is_optimal = False  # a window with everything in it was solved to the end

    def run(self) -> int:
        context, solves, vain = self.context, 0, 0
        while vain < IN_VAIN and not self.is_optimal and context.remaining_s() > LEAST_S and not context.is_solved():
            vain = 0 if self._solve(solves) else vain + 1
            solves += 1
        return solves

    def _solve(self, turn: int) -> bool:
        """Solve one window; whether the plan is better."""
        kind, context, known = turn % 2, self.context, self.best
        free = self._operations() if kind else self._stages()
        program = replace(self.program, lower=np.where(free, 0.0, known), upper=np.where(free, 1.0, known))
        limits = Limits(min(LONGEST_S, context.remaining_s()), self.threads, context.options.seed + turn, GAP)
        everything = np.arange(len(known), dtype=np.int32), known
        answer = solve_program(program, highs_options(limits), start=everything, should_stop=context.is_solved)
        self.is_optimal = answer.optimal and bool(free.all())
        change = WIDER if answer.optimal else NARROWER
        self.widths[kind] = float(np.clip(change * self.widths[kind], 1.0, self.widest[kind]))
        if answer.x is None:
            return False
        found = np.round(answer.x)
        if self.model.cost @ found >= self.model.cost @ known:
            return False
        self.best = found
        self._offer()
        return True

    def _stages(self) -> np.ndarray:
        """[n] bool, the variables of a random row of stages; every other time with those of the forward pass."""
        width = round(self.widths[0])
        first = self.random.integers(1 - width, self.stage.max() + 1)
        inside = (self.stage >= first) & (self.stage < first + width)
        return inside | (self.stage == 0) if self.random.random() < 0.5 else inside

    def _operations(self) -> np.ndarray:
        """[n] bool, the variables of a random row of forward operations and those of all backward operations."""
        width = round(self.widths[1])
        first = self.random.integers(1 - width, self.n_forward)
        inside = (self.operation >= first) & (self.operation < first + width)
        return inside | (self.operation >= self.n_forward)

    def _offer(self) -> None:
        problem = self.context.problem
        calls = drop_unread_repeats(problem.graph, self.model.calls(self.best))
        self.context.offer(Plan.from_calls(problem.graph, calls, problem.budget_bytes), WHO)
