"""Plans by rules, with copies to the host."""

from __future__ import annotations

from remat import Plan, Problem, Scope, Skip
from remat.search.offload import OffloadSearch
from remat.simulator import plain_peak


def offloaded(problem: Problem, plan: Plan, greedily: bool = False) -> Plan:
    """A staged plan in which what the backward pass reads, and does not run again, is on the host meanwhile.

    Args:
        greedily: whatever is not touched for a while, as long as the plan does not fit the budget.

    Raises:
        Skip: there is no link, or the plan is not staged.
    """
    if problem.link is None:
        raise Skip("copies need a link, e.g. link=12GB/s")
    if plan.scope is not Scope.STAGED:
        raise Skip("its plan is not staged")
    search = OffloadSearch(problem.graph, problem.budget_bytes, problem.link, 0, plain_peak(problem.graph))
    search.load(plan)
    if greedily:
        search.offload_greedily(lambda: False)
    else:
        search.offload_all()
    return search.plan(search.genes)
