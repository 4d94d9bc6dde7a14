"""The incumbent: the best plan and the best bound that any strategy of a solve has offered so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat.errors import HostFull, warn
from remat.graph import Graph
from remat.link import Link
from remat.plan import Plan, Scope
from remat.simulator import simulate

GAP_TOLERANCE = 1e-4  # a plan counts as optimal up to this (cost - bound) / cost; Gurobi's default
EXACT = ("certificate", "exhaustive", "cp-sat", "")  # values of `proven_by`; '': running everything once costs it
MAX_TRAJECTORY = 50


def relative_gap(cost: int, bound: int) -> float:
    """(cost - bound) / cost; 0 for a plan that costs nothing."""
    return (cost - bound) / cost if cost else 0.0


def is_closed(gap: float | None) -> bool:
    """Whether a gap is at most `GAP_TOLERANCE`, whatever proves it: a solver has ended with what it takes for a proof.

    Tables that count such solves ask this, not for OPTIMAL, which needs an exact proof (`is_proven`).
    """
    return gap is not None and gap <= GAP_TOLERANCE


def is_proven(cost: int, bound: int, proven_by: str | None, target_gap: float = GAP_TOLERANCE) -> bool:
    """Whether the gap is at most `target_gap`, proven exactly unless that is larger than `GAP_TOLERANCE`.

    OPTIMAL needs it with `GAP_TOLERANCE`. HiGHS and other solvers in floating point prove within their tolerances
    only, which are not much smaller.
    """
    is_exact = target_gap > GAP_TOLERANCE or (proven_by or "") in EXACT
    return is_exact and relative_gap(cost, bound) <= target_gap


def _thinned(steps: list[tuple[float, int, str]]) -> list[tuple[float, int, str]]:
    """At most `MAX_TRAJECTORY` of the steps: the last one before each of so many times, ever further apart."""
    if len(steps) <= MAX_TRAJECTORY:
        return steps
    first, last = max(0.01, steps[0][0]), max(0.02, steps[-1][0])
    kept = {0: steps[0]}
    for i in range(1, MAX_TRAJECTORY):
        until = first * (last / first) ** (i / (MAX_TRAJECTORY - 1)) * (1 + 1e-9)
        place = max((k for k, step in enumerate(steps) if step[0] <= until), default=0)
        kept[place] = steps[place]
    return [*kept.values()]


@dataclass(frozen=True, slots=True)
class Progress:
    """One improvement, `seconds` after the start; a field is None if it is not known yet.

    Attributes:
        cost: of the best plan, in the graph's cost unit.
        bound: the best proven one, in the graph's cost unit.
        gap: (cost - bound) / cost.
        who: the strategy that found the improvement.
    """

    seconds: float
    cost: int | None
    bound: int | None
    gap: float | None
    who: str


@dataclass(frozen=True, slots=True)
class Found:
    """An improvement and its plan; if only a bound rose, `plan` is None, and `proven_by` says by what.

    Attributes:
        bound: the bound that rose: the best one, or the best one that is proven exactly.
    """

    progress: Progress
    plan: Plan | None
    bound: int = 0
    proven_by: str = ""


class Incumbent:
    """Best plan and best bound of one problem; every method may be called from any thread.

    A plan counts if it fits the budget and the scope; the simulator replays it when it is offered.

    Attributes:
        bound, bound_who, proven_by: the best bound, its finder and its proof.
        exact_bound, exact_who, exact_by: the same of the best bound that is proven exactly.
    """

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        scope: Scope,
        *,
        link: Link | None = None,
        report: Callable[[Progress], None] | None = None,
        record: Callable[[Found], None] | None = None,
    ):
        """`report`, a user's function, is called with each improvement, but not again once it raises;
        `record` is called with each improvement and its plan."""
        self.graph, self.budget_bytes, self.scope, self.link = graph, budget_bytes, scope, link
        self.began = time.time()  # not monotonic, because processes compare it
        self.plan: Plan | None = None
        self.cost: int | None = None
        self.peak_bytes: int | None = None
        self.bound = self.exact_bound = graph.least_cost
        self.who = self.bound_who = self.proven_by = self.exact_who = self.exact_by = ""
        self.contradiction = ""  # a claim that the simulator refutes
        self._report, self._record = report, record
        self._trajectory: list[tuple[float, int, str]] = []
        self._lock = threading.RLock()

    def snapshot(self) -> tuple[Plan, int] | None:
        """The best plan and its cost, read together so that no other thread comes between."""
        with self._lock:
            return None if self.plan is None or self.cost is None else (self.plan, self.cost)

    def offer(self, plan: Plan, who: str) -> bool:
        """Judge `plan`; whether it fits the device and the host, and is cheaper than the best so far.

        Raises:
            InvalidPlan: it cannot be executed.
        """
        if not self.scope.contains(plan.scope):
            return False
        try:
            trace = simulate(self.graph, plan, link=self.link)
        except HostFull:
            return False
        return self.take(plan, trace.cost, trace.peak_bytes, who)

    def take(self, plan: Plan, cost: int, peak_bytes: int, who: str, *, at: float | None = None) -> bool:
        """`offer` for a plan that the simulator has judged, found `at` a `time.time()`, or else now."""
        if peak_bytes > self.budget_bytes or not self.scope.contains(plan.scope):
            return False
        with self._lock:
            if self.cost is not None and (self.cost, self.peak_bytes or 0) <= (cost, peak_bytes):
                return False
            cheaper = self.cost is None or cost < self.cost
            self.plan, self.cost, self.peak_bytes = plan, cost, peak_bytes
            if cheaper:
                self.who = who
                progress = self._progress(who, at)
                self._trajectory.append((progress.seconds, cost, who))
                self._announce(Found(progress, plan))
            return cheaper

    def offer_bound(self, bound: int, who: str, by: str = "", *, at: float | None = None) -> bool:
        """Offer a lower bound on the cost of every plan of this budget and scope; whether it is the best so far.

        `by`: what proves it, see `Solution.proven_by`; by default `who`.
        """
        bound, by = int(bound), by or who
        with self._lock:
            is_better, is_more_exact = bound > self.bound, by in EXACT and bound > self.exact_bound
            if is_better:
                self.bound, self.bound_who, self.proven_by = bound, who, by
            if is_more_exact:
                self.exact_bound, self.exact_who, self.exact_by = bound, who, by
            if is_better or is_more_exact:
                self._announce(Found(self._progress(who, at), None, bound, by), is_news=is_better)
            return is_better

    def is_proven(self, target_gap: float = GAP_TOLERANCE) -> bool:
        """`is_proven` of the best plan, by either bound."""
        with self._lock:
            bounds = ((self.bound, self.proven_by), (self.exact_bound, self.exact_by))
            return self.cost is not None and any(is_proven(self.cost, *bound, target_gap) for bound in bounds)

    @property
    def proof(self) -> tuple[int, str]:
        """(bound, what proves it): the best bound, or the exact one if that proves the plan optimal.

        The best bound remains if it is above the plan's cost, because such a claim is refuted.
        """
        with self._lock:
            exact = self.exact_bound, self.exact_by
            is_enough = self.cost is not None and self.bound <= self.cost and is_proven(self.cost, *exact)
            return exact if is_enough else (self.bound, self.proven_by)

    def contradict(self, message: str) -> None:
        """Note a claim that the simulator refutes, so that the solve is FAILED."""
        self.contradiction = self.contradiction or message

    @property
    def gap(self) -> float | None:
        """Relative gap of the best plan; None without a plan."""
        with self._lock:
            return None if self.cost is None else relative_gap(self.cost, self.bound)

    def costs(self) -> list[tuple[float, int]]:
        """(seconds, cost) of each better plan, in their order."""
        with self._lock:
            return [(seconds, cost) for seconds, cost, _ in self._trajectory]

    def stats(self) -> dict[str, Any]:
        """``first_plan_s``, ``within_1pct_s`` and ``trajectory`` ([seconds, cost, who], thinned); {} without a plan."""
        with self._lock:
            steps = sorted(self._trajectory)
            if not steps:
                return {}
            final = min(cost for _, cost, _ in steps)
            return {
                "first_plan_s": round(steps[0][0], 3),
                "within_1pct_s": round(next(s for s, cost, _ in steps if cost <= 1.01 * final), 3),
                "trajectory": [[round(s, 3), cost, who] for s, cost, who in _thinned(steps)],
            }

    def _progress(self, who: str, at: float | None) -> Progress:
        seconds = max(0.0, (time.time() if at is None else at) - self.began)
        gap = None if self.cost is None else relative_gap(self.cost, self.bound)
        return Progress(seconds, self.cost, self.bound, gap, who)

    def _announce(self, found: Found, *, is_news: bool = True) -> None:
        """Call `record`, and `report` if the best plan or the best bound is news."""
        if self._record is not None:
            self._record(found)
        if self._report is None or not is_news:
            return
        try:
            self._report(found.progress)
        except Exception as error:  # a broken callback must not end the solve; a warning reports it
            self._report = None
            warn(f"the progress callback failed and is not called again: {error!r}")
