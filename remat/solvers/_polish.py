"""Parts shared by the exact solvers: keep the best staged plan and bound, and remove needless repeats from plans."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from remat.context import Context
from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.simulator import simulate
from remat.solution import Candidate, Outcome


def scope_note(scope: Scope) -> str:
    """Message of a solver that finds and proves staged plans only; '' in that scope."""
    return "" if scope is Scope.STAGED else f"plans are staged; nothing is proven for scope {scope}"


class StagedSolver:
    """A solver whose plans are all staged: it keeps its best plan and bound, and offers them at once.

    Attributes:
        best: (cost, plan) of the cheapest plan that fits, None without one.
        bound: proven for staged plans, None without one.
        infeasible: it is proven that no staged plan fits; if there is a plan, `remat.solve` reports a contradiction.
        decided: whether a restricted problem was solved to its end.
    """

    def __init__(self, context: Context, who: str, solver: str) -> None:
        self.context, self.graph, self.who, self.solver = context, context.problem.graph, who, solver
        self.best: tuple[int, Plan] | None = None
        self.bound: int | None = None
        self.infeasible = self.decided = False
        self.stats: dict[str, Any] = {}

    def keep(self, plan: Plan) -> bool:
        """Keep the plan if it fits and is better; whether it fits."""
        trace = simulate(self.graph, plan)
        if trace.peak_bytes > self.context.problem.budget_bytes:
            return False
        if self.best is None or trace.cost < self.best[0]:
            self.best = trace.cost, plan
            self.context.offer(plan, self.who)
        return True

    def outcome(
        self, message: str, *, timed_out: bool | None = None, parameters: Mapping[str, Any] = MappingProxyType({})
    ) -> Outcome:
        """The best plan and what is proven; in a wider scope nothing is.

        Args:
            timed_out: whether the time limit is why there is no plan; by default as the clock says.
        """
        context, staged = self.context, self.context.problem.scope is Scope.STAGED
        candidates = () if self.best is None else (Candidate(self.best[1], parameters),)
        infeasible = self.infeasible and staged
        timed_out = context.is_late() if timed_out is None else timed_out
        return Outcome(
            candidates, self.bound if staged else None, infeasible, timed_out and not candidates and not infeasible,
            message, self.stats, decided=self.decided, proven_by=self.solver,
        )  # fmt: skip

    def keep_bound(self, bound: int) -> None:
        """Keep the bound if it is better; in a wider scope it is not offered."""
        if self.bound is None or bound > self.bound:
            self.bound = bound
            if self.context.problem.scope is Scope.STAGED:
                self.context.offer_bound(bound, self.who, self.solver)


def drop_needless_repeats(graph: Graph, plan: Plan, budget_bytes: int, deadline: float) -> Plan:
    """Remove repeats from a plan, the last one first, as long as it fits the budget.

    Without a repeat the earlier copy is held until its later uses, so the plan stays valid (and
    staged); only its peak may grow. Takes one simulation for each repeat; stops at `deadline`
    (`time.monotonic()`).
    """
    order = plan.order.tolist()
    seen: set[int] = set()
    repeats = [i for i, k in enumerate(order) if k in seen or seen.add(k)]
    for at in reversed(repeats):
        if time.monotonic() > deadline:
            break
        shorter = Plan.from_order(graph, order[:at] + order[at + 1 :], plan.budget_bytes)
        if simulate(graph, shorter).peak_bytes <= budget_bytes:
            order, plan = shorter.order.tolist(), shorter
    return plan
