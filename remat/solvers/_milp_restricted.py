"""Restricted MILPs: the trimmed MILP with the few repeats that a good plan may want, solved around the best plan.

A training graph has a repeat column for every stage and operation, but good plans use few of them: a
value is dropped over a stretch in which memory is short and computed again where it is used next, with
the one, two or three operations before it. The MILP with those columns and the repeats of the best plan
known is a hundred times smaller than the whole and often solved to its optimum in seconds. It is a
heuristic: its optimum is a plan, never a bound. Column choice by structure and a union with incumbents
follow the usual large-neighbourhood recipes (Rothberg, INFORMS J. Computing 2007: solution merging).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from remat.context import Context
from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.programs.staged import last_stages
from remat.simulator import simulate
from remat.solvers._milp_trimmed import solve_trimmed

WHO = "restricted MILP"
DEPTHS = (1, 2, 3, 4, 6, 8, 12)  # operations that are run again in a row, at most, in successive models
POOL = 24  # good plans that are merged
NEAR = 0.03  # of the best cost, up to which a plan counts as good
FRESH = 4  # new plans for which a merge is worth its time
MOST_REPEATS = 20_000  # columns of the largest model
MOST_RESIDENT = 600_000  # of all values over all stages: what a model costs to build
GAP = 2e-5
PATIENCE, PATIENCE_S = 0.2, 3.0  # share of the time, and seconds, before the first model
WAIT_S, LEAST_S = 0.02, 0.2
SMALLEST_WINDOW = 0.05
LONG_S, LONG_SHARE = 5.0, 0.2  # for one model: then another one, from what was found


def repeats_worth_trying(graph: Graph, budget_bytes: int, depth: int) -> set[tuple[int, int]]:
    """(stage, operation) pairs: computations for a use that follows a stretch of short memory.

    A use of a value in stage t qualifies if memory exceeds the budget in some stage between the use
    before it (or its first computation) and t when every operation runs once. With its producer, up to
    `depth` operations in a row that lead to it may run again in that stage.
    """
    n, operations, producer = len(graph), graph.operations, graph.producer
    held = simulate(graph, Plan.from_order(graph, range(n), budget_bytes)).running_bytes
    short_before = np.concatenate([[0], np.cumsum(np.asarray(held) > budget_bytes)])  # [n + 1]
    chosen: set[tuple[int, int]] = set()
    for v in range(len(graph.values)):
        previous = producer[v]
        for t in graph.users[v]:
            if short_before[t] > short_before[min(previous + 1, t)]:
                _add_chain(graph, t, producer[v], depth, chosen)
            previous = t
    return {(t, k) for t, k in chosen if not operations[k].run_once}


def _add_chain(graph: Graph, t: int, k: int, depth: int, chosen: set[tuple[int, int]]) -> None:
    """Operation k and, `depth` operations deep, what leads to it."""
    layer = {k}
    for _ in range(depth):
        chosen |= {(t, u) for u in layer}
        again = [graph.operations[u] for u in layer if not graph.operations[u].run_once]
        layer = {graph.producer[v] for op in again for v in op.inputs}


def repeats_of(graph: Graph, order: np.ndarray) -> set[tuple[int, int]]:
    """(stage, operation) pairs of the repeats among a staged plan's computations."""
    stage, found = 0, set()
    for k in order.tolist():
        if k == stage:
            stage += 1
        else:
            found.add((stage, k))
    return found


class Refiner:
    """Solves restricted MILPs one after the other, around the best plan.

    Each takes the repeats of the best plan and, to merge them, those of the last good plans of the search,
    whenever there are new ones. In between come models with the repeats worth trying, deeper each time
    one is solved to its end; where one is not, only a window of stages gets them, another one each time,
    of a size that can be solved.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.graph, self.best = context, context.problem.graph, context.incumbent
        self.pool: deque[tuple[int, set[tuple[int, int]]]] = deque(maxlen=POOL)
        self.fresh = FRESH  # plans that came since the last merge
        self.merged = POOL  # how many of them can be merged in time
        self.level, self.window = 0, 1.0  # depth, and share of the stages
        self.random = np.random.default_rng(abs(context.options.seed))
        self.too_large = False  # the last model
        self.solves = 0

    def add(self, order: np.ndarray, cost: int) -> None:
        """A good plan of the search, by its computations; called from any thread."""
        repeats = repeats_of(self.graph, order)
        if all(repeats != other for _, other in list(self.pool)):
            self.pool.append((cost, repeats))
            self.fresh += 1

    def run(
        self, deadline: float, threads: int, should_stop: Callable[[], bool], *, in_vain: int | None = None
    ) -> None:
        """Refine the best plan until `deadline`; returns early when there is nothing left to try, or after
        `in_vain` models in a row in whose time nobody has found a better plan."""

        def stop() -> bool:
            return should_stop() or self.context.is_solved() or time.monotonic() > deadline - LEAST_S

        # The search needs a moment to find plans worth merging.
        patience = time.monotonic() + min(PATIENCE * (deadline - time.monotonic()), PATIENCE_S)
        while not self.solves and time.monotonic() < patience and not stop():
            time.sleep(WAIT_S)
        failures = 0
        while not stop() and (in_vain is None or failures < in_vain):
            cost = self.best.cost
            if self.fresh >= FRESH:
                self._merge(deadline, threads, stop)
            elif self.level < len(DEPTHS):
                self._deepen(deadline, threads, stop)
            else:
                return
            failures = failures + 1 if self.best.cost == cost else 0

    def _merge(self, deadline: float, threads: int, stop: Callable[[], bool]) -> None:
        """A model with the repeats of the last good plans, as many of them as could be merged so far."""
        self.fresh = 0
        known = self.best.snapshot()
        good = [repeats for cost, repeats in list(self.pool) if known is None or cost <= known[1] * (1 + NEAR)]
        if self._solve(set().union(*good[-self.merged :]), deadline, threads, stop):
            self.merged = min(self.merged + 2, POOL)
        else:
            self.merged = max(self.merged // 2, 2)

    def _deepen(self, deadline: float, threads: int, stop: Callable[[], bool]) -> None:
        """A model with the repeats worth trying, as deep and as wide as could be solved so far."""
        chosen = repeats_worth_trying(self.graph, self.context.problem.budget_bytes, DEPTHS[self.level])
        stages = sorted({t for t, _ in chosen})
        if self.window < 1.0:
            size = int(self.window * len(stages))
            first = int(self.random.integers(len(stages) - size + 1))
            inside = set(stages[first : first + size])
            chosen = {(t, k) for t, k in chosen if t in inside}
        if self._solve(chosen, deadline, threads, stop):
            self.level += self.window == 1.0
            self.window = min(1.0, 1.5 * self.window)
        elif self.too_large:
            self.level = len(DEPTHS)
        else:
            self.window = max(0.5 * self.window, SMALLEST_WINDOW)

    def _solve(self, chosen: set[tuple[int, int]], deadline: float, threads: int, stop: Callable[[], bool]) -> bool:
        """One model, from the best plan, with these repeats and its own; whether it was decided."""
        context, graph = self.context, self.graph
        known = self.best.snapshot()
        plan = None
        if known is not None:
            plan, _ = known
            if plan.scope is not Scope.STAGED:
                self.level = len(DEPTHS)
                return False
            chosen = chosen | repeats_of(graph, plan.order)
        if len(chosen) > MOST_REPEATS or _resident(graph, chosen) > MOST_RESIDENT:
            self.too_large = True
            return False
        now = time.monotonic()
        deadline = min(deadline, now + max(LONG_S, LONG_SHARE * (deadline - now)))
        share = context.with_options(threads=threads, warm_start=plan).until(deadline)
        outcome = solve_trimmed(share, GAP, stop, repeats=chosen, who=WHO)
        self.solves += 1
        return outcome.decided  # also that nothing fits


def _resident(graph: Graph, repeats: set[tuple[int, int]]) -> int:
    """Columns of the model that say that a value is resident."""
    _, last_held = last_stages(graph, [not op.run_once for op in graph.operations], repeats)
    return sum(last - first for last, first in zip(last_held, graph.producer, strict=True))
