"""The largest batch or length whose step fits into a budget, for several overheads."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from remat.arrays import GraphArrays
from remat.bounds.min_budget import min_budget
from remat.errors import InvalidInput
from remat.graph import Graph
from remat.largest import GREATEST, SizeSearch
from remat.link import Link
from remat.plan import Plan
from remat.search.timeline import Sizes, Timeline
from remat.simulator import plain_peak, simulate
from remat.solving.api import solve

if TYPE_CHECKING:
    from remat.search.chain import BlockPlans, Option

BLOCKS = 10  # times as long as for a budget is the search for plans of one block
LARGE = 500  # operations from which a short search adds nothing to a chain of plans of one block


@dataclass(slots=True)
class _AtSize:
    """The step at one size, and the plans of its blocks there."""

    graph: Graph
    sizes: Sizes
    blocks: list[BlockPlans | None] = field(default_factory=list)


Found = tuple[int, Timeline | Plan]  # cost, plan; a `Plan` if it copies


class KnownPlans:
    """Orders that were found for a step at any size. Each is an order of the step at every other size too.

    With a `link`, plans that copy are looked for too. Without time, plans of one block are not.

    Attributes:
        of_blocks: see `BlockPlans.of`; another step, with the same blocks, may take it.
    """

    def __init__(
        self, graph: Graph, limit_s: float, threads: int, of_blocks: dict[str, list[Option]] | None = None,
        like: Sequence[BlockPlans] = (),
    ):  # fmt: skip
        """`like`: see `BlockPlans.of`."""
        self.limit_s, self.threads = limit_s, threads
        self.of_blocks = {} if of_blocks is None else of_blocks
        self.link: Link | None = None
        self.orders: dict[bytes, Timeline] = {}
        self.copying: list[Plan] = []
        self.steps: dict[int, _AtSize] = {}  # [identity of a graph]
        self._know(graph, Plan.from_order(graph, range(len(graph))))
        self.blocks: list[BlockPlans] = []
        for each in like or (None,):
            self.learn_blocks(graph, each)

    def over(self, link: Link) -> KnownPlans:
        """These plans, and those that copy over a link."""
        with_copies = copy(self)
        with_copies.link, with_copies.copying = link, []
        return with_copies

    def around(self, graph: Graph) -> KnownPlans:
        """Plans of a step that runs other operations, perhaps around the same blocks; plans of those serve it."""
        others = KnownPlans(graph, self.limit_s, self.threads, self.of_blocks, self.blocks)
        others.link = self.link
        return others

    def learn_blocks(self, graph: Graph, like: BlockPlans | None = None) -> None:
        """Look for plans of one block at the size of this graph, with costs; see `BlockPlans.of`."""
        from remat.search.anneal import compile_annealing  # imports Numba, which training does not need
        from remat.search.chain import BlockPlans

        if not self.limit_s:
            return
        compile_annealing()  # before the time of the search begins
        deadline = time.monotonic() + BLOCKS * self.limit_s
        found = BlockPlans.of(graph, threads=self.threads, deadline=deadline, known=self.of_blocks, like=like)
        if found is not None:
            self.blocks.append(found)

    def _at(self, graph: Graph) -> _AtSize:
        if id(graph) not in self.steps:
            self.steps[id(graph)] = _AtSize(graph, Sizes(graph))
        return self.steps[id(graph)]

    def _blocks_at(self, step: _AtSize) -> list[BlockPlans]:
        for each in self.blocks[len(step.blocks) :]:
            step.blocks.append(each if each.chain.graph is step.graph else each.at(step.graph))
        return [each for each in step.blocks if each is not None]

    def least(self, graph: Graph) -> int:
        """The smallest budget that is known to suffice."""
        found, sizes = min_budget(graph, time_limit_s=self.limit_s), self._at(graph).sizes
        self._know(graph, found.plan)
        orders = [self._know_order(order) for blocks in self.blocks if (order := blocks.least()) is not None]
        return min([found.bytes, *(int(order.running_bytes(sizes).max()) for order in orders)])

    def least_copying(self, graph: Graph) -> int:
        """The peak of a plan that sends every value away between two uses."""
        if self.link is None:
            raise ValueError("there is no link")
        from remat.search.offload import OffloadSearch  # imports Numba

        search = OffloadSearch(graph, graph.largest_working_set()[0], self.link, 0)
        search.genes.away[:] = True
        plan = search.plan()
        self._know(graph, plan)
        return simulate(graph, plan).peak_bytes

    def known(self, graph: Graph, budget_bytes: int) -> Plan | None:
        """The cheapest plan within the budget whose order is known."""
        return _plan(graph, budget_bytes, self._known(graph, budget_bytes))

    def _known(self, graph: Graph, budget_bytes: int) -> Found | None:
        sizes = self._at(graph).sizes
        by_cost = sorted(((order.cost(sizes), order) for order in self.orders.values()), key=lambda known: known[0])
        first = next((each for each in by_cost if each[1].running_bytes(sizes).max(initial=0) <= budget_bytes), None)
        found: list[Found] = [] if first is None else [first]
        for each in self.copying:
            plan = Plan.from_steps(graph, each.steps, budget_bytes, self.link)
            trace = simulate(graph, plan)
            found += [(trace.cost, plan)] if trace.peak_bytes <= budget_bytes else []
        return min(found, key=_cost, default=None)

    def cheapest(self, graph: Graph, budget_bytes: int, enough: float = 0.0) -> Plan | None:
        """A cheap plan within the budget; the search ends at an overhead of `enough`. None if none was found.

        The cheapest known order or chain of plans of one block is taken as it is, unless two of three hold: the graph
        is small, it is the one whose blocks were planned first, no chain fits. Then a search follows, as it does
        without blocks and with a link.
        """
        return _plan(graph, budget_bytes, self._cheapest(graph, budget_bytes, enough))

    def suffices(self, graph: Graph, budget_bytes: int, overhead: float) -> bool:
        """Whether the cheapest plan within the budget costs no more."""
        return _is_within(graph, self._cheapest(graph, budget_bytes, overhead), overhead)

    def _cheapest(self, graph: Graph, budget_bytes: int, enough: float) -> Found | None:
        best, step = self._known(graph, budget_bytes), self._at(graph)
        if _is_within(graph, best, enough):
            return best
        each_chain = (blocks.timeline_within(budget_bytes) for blocks in self._blocks_at(step))
        orders = [order for order in each_chain if order is not None]
        found: list[Found] = [] if best is None else [best]
        found = [*((order.cost(step.sizes), self._know_order(order)) for order in orders), *found]
        best = min(found, key=_cost, default=None)
        if self.link is not None:
            return self._searched(graph, budget_bytes, enough, best)
        is_first = bool(self.blocks) and self.blocks[0].chain.graph is graph
        if not self.blocks or sum((len(graph) < LARGE, is_first, not orders)) > 1:
            best = self._searched(graph, budget_bytes, enough, best)
        return best

    def _searched(self, graph: Graph, budget_bytes: int, enough: float, start: Found | None) -> Found | None:
        if _is_within(graph, start, enough):
            return start
        found = solve(
            graph, budget_bytes, "search", time_limit_s=self.limit_s, threads=self.threads,
            warm_start=_plan(graph, budget_bytes, start), target_gap=max(1e-4, enough / (1 + enough)), link=self.link,
        )  # fmt: skip
        if found.plan is None or found.cost is None:
            return start
        return found.cost, self._know(graph, found.plan)

    def _know(self, graph: Graph, plan: Plan) -> Timeline | Plan:
        if plan.has_copies:
            self.copying.append(plan)
            return plan
        return self._know_order(Timeline.of(GraphArrays.of(graph), plan.order))

    def _know_order(self, order: Timeline) -> Timeline:
        return self.orders.setdefault(order.order.astype(np.int32).tobytes(), order)


def _cost(found: Found) -> int:
    return found[0]


def _plan(graph: Graph, budget_bytes: int, found: Found | None) -> Plan | None:
    if found is None:
        return None
    plan = found[1]
    return plan if isinstance(plan, Plan) else Plan.from_order(graph, plan.order.tolist(), budget_bytes)


@dataclass(slots=True)
class Growing:
    """Looks for the largest size of a step that fits.

    Attributes:
        graph_at: [size] the graph with costs.
        peak_at: [size] peak of the step that recomputes nothing; None: that of the graph.
        plans: of the step at one size, which is one of `apart` if there are any.
        unit: by which sizes grow at least.
        learns: whether other plans of a block may be better at another size: attention has another share.
        steps: [size] what `graph_at` gave.
        apart: sizes, below all others, at which the step runs other operations.
        others: plans for the other sizes.
    """

    graph_at: Callable[[int], Graph]
    peak_at: Callable[[int], int] | None
    budget_bytes: int
    plans: KnownPlans
    unit: int = 1
    learns: bool = True
    steps: dict[int, Graph] = field(default_factory=dict)
    apart: Collection[int] = ()
    others: KnownPlans = field(init=False)

    def __post_init__(self) -> None:
        self.others = self.plans.around(self._at(max(self.apart) + 1)) if self.apart else self.plans

    def largest(self, overheads: Sequence[float], check: Callable[[int], None]) -> dict[float, int | None]:
        """[overhead] the largest size whose cheapest plan within the budget costs no more; None if none does.

        Args:
            overheads: rising, from 0.
            check: raises if the step differs at a size; asked about the first and the last size found.
        """
        found = {0.0: _last(self._fits_plainly, 1, 0, exact=True)}
        if self.learns and self.others.blocks and overheads[1:]:
            self._grow(found, overheads[-1:])
            most = max(found.values())
            if 0 < most < GREATEST - 1 and self._plans_at(most).blocks:
                self._plans_at(most).learn_blocks(self._at(most))
        self._grow(found, overheads[1:])
        most = max(found.values())
        if most + 1 >= GREATEST:
            raise InvalidInput(f"every size that was tried fits, up to {most * self.unit:,}")
        for size in {found[0.0], max(found.values())} - {0}:
            check(max(2, size * self.unit))
        return {overhead: found[overhead] * self.unit or None for overhead in overheads}

    def _grow(self, found: dict[float, int], overheads: Sequence[float]) -> None:
        """Raise [overhead] sizes from what is known of it and of smaller overheads."""
        for overhead in overheads:
            known = max(size for other, size in found.items() if other <= overhead)
            found[overhead] = _last(lambda n, overhead=overhead: self._fits(n, overhead), round(1.1 * known), known)

    def _at(self, size: int) -> Graph:
        if size not in self.steps:
            self.steps[size] = self.graph_at(size * self.unit)
        return self.steps[size]

    def _fits_plainly(self, size: int) -> bool:
        peak = plain_peak(self._at(size)) if self.peak_at is None else self.peak_at(size * self.unit)
        return peak <= self.budget_bytes

    def _fits(self, size: int, overhead: float) -> bool:
        if self._fits_plainly(size):
            return True
        return self._plans_at(size).suffices(self._at(size), self.budget_bytes, overhead)

    def _plans_at(self, size: int) -> KnownPlans:
        return self.plans if size in self.apart else self.others


def _is_within(graph: Graph, found: Found | None, overhead: float) -> bool:
    """Whether there is a plan, and it costs no more."""
    return found is not None and found[0] <= (1 + overhead) * graph.total_cost


def _last(fits: Callable[[int], bool], guess: int, known: int, exact: bool = False) -> int:
    """The largest size that fits, if all smaller ones do; within 1/32 of it unless `exact`.

    Args:
        known: it fits; 0 if none is known to.
    """
    search = SizeSearch(max(guess, known + 1), max(1, guess // 16), found=known, share=0.0 if exact else 1 / 32)
    while (size := search.next_size()) is not None:
        does_fit = fits(size)
        search.learn(size, fits=does_fit, impossible=not does_fit)
    return search.found
