"""Restricted MILPs: the trimmed MILP with the few repeats that a good plan may use, solved around the best plan.

A training graph has a repeat column for every stage and operation, but good plans use few of them: they drop a value
while memory is short and recompute it at its next use, with the one, two or three operations before it. The MILP with
those columns and the repeats of the best known plan is a hundred times smaller than the whole MILP, and often solved to
optimality in seconds. It is a heuristic: its optimum is a plan, never a bound. The choice of columns by structure and
the union with incumbents follow the usual large-neighbourhood recipes (Rothberg, INFORMS J. Computing 2007: solution
merging).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from remat.context import Context
from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.programs.staged import last_stages, stages_of
from remat.simulator import simulate
from remat.solvers._milp_trimmed import solve_trimmed

WHO = "restricted MILP"
DEPTHS = (1, 2, 3, 4, 6, 8, 12)  # most operations that repeat in a row, in successive models
POOL = 24  # good plans to merge
NEAR = 0.03  # a good plan costs at most this share more than the best one
FRESH = 4  # new plans that make a merge worth its time
MOST_REPEATS = 20_000  # repeat columns of the largest model
MOST_RESIDENT = 600_000  # residency columns of the largest model: they limit the time to build it
GAP = 2e-5
PATIENCE, PATIENCE_S = 0.2, 3.0  # share of the time, and seconds, before the first model
WAIT_S, LEAST_S = 0.02, 0.2
SMALLEST_WINDOW = 0.05
LONG_S, LONG_SHARE = 5.0, 0.2  # longest time for one model, in seconds and as a share of the time left


def repeats_worth_trying(graph: Graph, budget_bytes: int, depth: int) -> set[tuple[int, int]]:
    """(stage, operation) pairs: repeats for a use that follows stages in which memory is short.

    A use of a value in stage t qualifies if, when every operation runs once, memory exceeds the budget in some stage
    between the previous use (or the first computation) and t. Then the producer, and operations up to `depth` in a row
    that lead to it, may run again in that stage.
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
    """Add operation k and its ancestors, `depth` operations in a row at most."""
    layer = {k}
    for _ in range(depth):
        chosen |= {(t, u) for u in layer}
        again = [graph.operations[u] for u in layer if not graph.operations[u].run_once]
        layer = {graph.producer[v] for op in again for v in op.inputs}


def repeats_of(graph: Graph, order: np.ndarray) -> set[tuple[int, int]]:
    """(stage, operation) of every repeat in the order of a staged plan."""
    calls = order.tolist()
    return {(stage, k) for k, stage in zip(calls, stages_of(calls), strict=True) if k != stage}


class Refiner:
    """Solves restricted MILPs one after the other, around the best plan.

    Each model has the repeats of the best plan. When the search has new good plans, the model also has their repeats,
    which merges the plans. Other models have the repeats worth trying: deeper ones whenever a model is solved to the
    end; otherwise only those in a random window of stages, small enough to solve.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.graph, self.best = context, context.problem.graph, context.incumbent
        self.pool: deque[tuple[int, set[tuple[int, int]]]] = deque(maxlen=POOL)
        self.fresh = FRESH  # new plans since the last merge
        self.merged = POOL  # number of plans that can be merged in time
        self.level, self.window = 0, 1.0  # index of the depth, and share of the stages
        self.random = np.random.default_rng(abs(context.options.seed))
        self.too_large = False  # whether a model was too large to build
        self.solves = 0

    def add(self, order: np.ndarray, cost: int) -> None:
        """Add a good plan of the search, given its computations; may be called from any thread."""
        repeats = repeats_of(self.graph, order)
        if all(repeats != other for _, other in list(self.pool)):
            self.pool.append((cost, repeats))
            self.fresh += 1

    def run(
        self, deadline: float, threads: int, should_stop: Callable[[], bool], *, in_vain: int | None = None,
        is_beside: bool = False,
    ) -> None:  # fmt: skip
        """Refine the best plan until `deadline`; `is_beside` says that a search runs in other threads.

        Returns early when nothing is left to try, or after `in_vain` models in a row without a better plan from anyone.
        """

        def stop() -> bool:
            return should_stop() or self.context.is_solved() or time.monotonic() > deadline - LEAST_S

        # A search that runs beside needs a moment to find plans worth merging.
        patience = time.monotonic() + min(PATIENCE * (deadline - time.monotonic()), PATIENCE_S)
        while is_beside and not self.solves and time.monotonic() < patience and not stop():
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
        """Solve a model with the repeats of the latest good plans: of more plans if the last one was solved in time."""
        self.fresh = 0
        known = self.best.snapshot()
        good = [repeats for cost, repeats in list(self.pool) if known is None or cost <= known[1] * (1 + NEAR)]
        if self._solve(set().union(*good[-self.merged :]), deadline, threads, stop):
            self.merged = min(self.merged + 2, POOL)
        else:
            self.merged = max(self.merged // 2, 2)

    def _deepen(self, deadline: float, threads: int, stop: Callable[[], bool]) -> None:
        """Solve a model with the repeats worth trying, as deep and as wide as could be solved before."""
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
        """Solve a model with these repeats and those of the best plan, from that plan; whether it was decided."""
        context, graph = self.context, self.graph
        plan = self.best.plan
        if plan is not None:
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
        return outcome.decided  # also if nothing fits


def _resident(graph: Graph, repeats: set[tuple[int, int]]) -> int:
    """Number of residency columns of the model, an upper bound."""
    _, last_held = last_stages(graph, [not op.run_once for op in graph.operations], repeats)
    return sum(last - first for last, first in zip(last_held, graph.producer, strict=True))
