"""Plans by rules, with copies to the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from baselines._forward import Forward
from baselines._segments import base_residency, plan_of_residency
from remat import Plan, Problem, Scope, Skip
from remat.link import Link
from remat.search.offload import OffloadSearch
from remat.simulator import plain_peak


def offloaded(problem: Problem, plan: Plan, greedily: bool = False) -> Plan:
    """A staged plan in which what the backward pass reads, and does not run again, is on the host meanwhile.

    Args:
        greedily: whatever is not touched for a while, as long as the plan does not fit the budget.

    Raises:
        Skip: there is no link, or the plan is not staged.
    """
    link_of(problem)
    if plan.scope is not Scope.STAGED:
        raise Skip("its plan is not staged")
    search = _loaded(problem, plan)
    if greedily:
        search.offload_greedily(lambda: False)
    else:
        search.offload_all()
    return search.plan(search.genes)


def link_of(problem: Problem) -> Link:
    """The problem's link; raises `Skip` without one."""
    if problem.link is None:
        raise Skip("copies need a link, e.g. link=12GB/s")
    return problem.link


@dataclass(frozen=True, slots=True)
class Activations:
    """What the forward pass makes and the backward pass reads.

    Attributes:
        last: [value] the last operation of the forward pass that touches it; first: the first one after that reads it.
    """

    forward: Forward
    last: Mapping[int, int]
    first: Mapping[int, int]

    @classmethod
    def of(cls, problem: Problem) -> Activations:
        """The activations of a training graph; raises `Skip` without a backward pass."""
        forward = Forward.of(problem.graph)
        graph, end = forward.graph, forward.region[-1]
        last, first = dict[int, int](), dict[int, int]()
        for v, (producer, users) in enumerate(zip(graph.producer, graph.users, strict=True)):
            later = [u for u in users if u > end]
            if producer <= end and later and graph.values[v].bytes:
                last[v] = max((u for u in users if u <= end), default=producer)
                first[v] = min(later)
        return cls(forward, last, first)

    def may_rebuild(self, v: int) -> bool:
        """Whether a plan may drop a value after the forward pass and compute it again."""
        graph = self.forward.graph
        return self.forward.position[graph.producer[v]] >= 0 and not graph.values[v].keep

    def plan(
        self, problem: Problem, rebuilt: Collection[int], copied: Collection[int], held: Mapping[int, int] | None = None
    ) -> Plan:
        """The plan in which these are computed again, and these fetched, where the backward pass first reads them.

        Args:
            held: [value] up to which operation it stays, though none reads it.
        """
        graph = self.forward.graph
        S_TV = base_residency(self.forward)
        for v, producer in enumerate(graph.producer):
            reads = [u for u in graph.users[v] if u > self.last.get(v, -1)]
            if v in rebuilt:
                S_TV[producer + 1 : self.last[v] + 1, v] = True
                S_TV[reads[0] : reads[-1] + 1, v] = True
            else:
                S_TV[producer + 1 : max(graph.users[v], default=producer) + 1, v] = True
        for v, until in (held or {}).items():
            S_TV[graph.producer[v] + 1 : until + 1, v] = True
        plan = plan_of_residency(self.forward, S_TV, problem.accounting)
        if not copied:
            return plan
        search = _loaded(problem, plan)
        stages, operations = np.divmod(search.genes.repeats[: search.genes.numbers[0]], len(graph))
        readers = dict(self.first)
        for stage, i in zip(stages.tolist(), operations.tolist(), strict=True):
            for v in graph.operations[i].inputs:
                if stage > self.last.get(v, stage):
                    readers[v] = min(readers[v], stage)
        for v in copied:
            search.genes.away[readers[v], v] = True
        return search.plan(search.genes)


def _loaded(problem: Problem, plan: Plan) -> OffloadSearch:
    search = OffloadSearch(problem.graph, problem.budget_bytes, link_of(problem), 0, plain_peak(problem.graph))
    search.load(plan)
    return search
