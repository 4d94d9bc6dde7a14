"""Plans by rules, with copies to the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from baselines._forward import Forward
from baselines._segments import base_holds, computations
from remat import Plan, Problem, Scope, Skip
from remat.link import Link
from remat.search.offload import OffloadSearch


def offloaded(problem: Problem, plan: Plan, greedily: bool = False) -> Plan:
    """A staged plan in which what the backward pass reads, and does not run again, is on the host meanwhile.

    Args:
        greedily: whatever is not touched for a while, as long as the plan does not fit the budget.

    Raises:
        Skip: there is no link, or the plan is not staged.
    """
    if plan.scope is not Scope.STAGED:
        raise Skip("its plan is not staged")
    search = search_of(problem)
    search.load(plan)
    if greedily:
        search.offload_greedily(lambda: False)
    else:
        search.offload_all()
    return search.plan()


def required_link(problem: Problem) -> Link:
    """The problem's link; raises `Skip` without one."""
    if problem.link is None:
        raise Skip("copies need a link, e.g. link=12GB/s")
    return problem.link


@dataclass(frozen=True, slots=True)
class Activations:
    """What the forward pass makes and the backward pass reads.

    Attributes:
        base: [V] up to which stage each value of the graph is held at least.
        last: [value] the last operation of the forward pass that touches it; first: the first one after that reads it.
    """

    forward: Forward
    base: Sequence[int]
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
        return cls(forward, base_holds(forward), last, first)

    def may_rebuild(self, v: int) -> bool:
        """Whether a plan may drop a value after the forward pass and compute it again."""
        graph = self.forward.graph
        return self.forward.position[graph.producer[v]] >= 0 and not graph.values[v].keep

    def load(
        self, search: OffloadSearch, rebuilt: Collection[int], copied: Collection[int],
        held: Mapping[int, int] | None = None,
    ) -> bool:  # fmt: skip
        """Give a search the genes of a plan: these are computed again, and these fetched, where they are first read.

        Args:
            rebuilt, copied: values, which the backward pass reads.
            held: [value] up to which operation it stays, though none reads it.

        Returns:
            Whether there was room: for four repeats an operation, about.
        """
        graph, keys, readers = self.forward.graph, list[int](), dict(self.first)
        for t, computed in enumerate(self._stages(rebuilt, held or {})):
            for i in computed:
                if i == t:
                    continue
                keys.append(t * len(graph) + i)
                for v in graph.operations[i].inputs:
                    if t > self.last.get(v, t):
                        readers[v] = min(readers[v], t)
        search.clear()
        if len(keys) > len(search.genes.repeats):
            return False
        search.genes.repeats[: len(keys)], search.genes.numbers[0] = keys, len(keys)
        for v in copied:
            search.genes.away[readers[v], v] = True
        return True

    def _stages(self, rebuilt: Collection[int], held: Mapping[int, int]) -> Iterator[list[int]]:
        """The operations computed in each stage."""
        graph, n = self.forward.graph, len(self.forward.graph)
        begins, ends = [list[int]() for _ in range(n + 1)], [list[int]() for _ in range(n + 1)]
        for v, producer in enumerate(graph.producer):
            until = max(self.base[v], held.get(v, producer))
            if v in rebuilt:
                until, reads = max(until, self.last[v]), [u for u in graph.users[v] if u > self.last[v]]
                if until + 1 < reads[0]:
                    begins[reads[0]].append(v)
                    ends[reads[-1] + 1].append(v)
                else:
                    until = max(until, reads[-1])
            else:
                until = max(until, max(graph.users[v], default=producer))
            if until > producer:
                begins[producer + 1].append(v)
                ends[until + 1].append(v)
        there = bytearray(len(graph.values))

        def held_at() -> Iterator[bytearray]:
            for t in range(n):
                for v in ends[t]:
                    there[v] = False
                for v in begins[t]:
                    there[v] = True
                yield there

        gained = [[graph.producer[v] for v in begins[t + 1]] for t in range(n)]
        return computations(graph, gained, held_at(), late=True)


def search_of(problem: Problem) -> OffloadSearch:
    """What makes plans of repeats and copies; raises `Skip` without a link."""
    return OffloadSearch(problem.graph, problem.budget_bytes, required_link(problem), 0)
