"""The context of a solve: the clock, the incumbent, and a function that runs another strategy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from remat.errors import RematError
from remat.incumbent import Found, Incumbent
from remat.plan import Plan
from remat.problem import Problem, SolveOptions
from remat.solution import Solution

# The clock may have cut a repeatable run short if less than CUT_S plus CUT_SHARE of the time limit is left at its end.
CUT_S, CUT_SHARE = 0.5, 0.05
PROOF_SHARE = 0.4  # of the time limit, for a proof in a repeatable run
# Any other solve that ends with less time left, or a smaller share of a short limit, counts as ended by the time limit.
LATE_S, LATE_SHARE = 1.0, 0.5
LONGEST_S = 3600.0  # a repeatable run derives its work from at most this much of the time limit


def incumbent_of(problem: Problem, **listeners: Any) -> Incumbent:
    """An empty incumbent of a problem; `listeners` are those of `Incumbent`."""
    return Incumbent(problem.graph, problem.budget_bytes, problem.scope, link=problem.link, **listeners)


def _run_none(context: Context, strategy: str, *_: Any, **__: Any) -> Solution:
    raise RematError(f"this solve cannot run strategy '{strategy}'; begin it with remat.solving.dispatch.new_context")


@dataclass(frozen=True, slots=True)
class Context:
    """One solve of one problem.

    Attributes:
        problem: the question.
        options: how it runs; every random choice derives from the seed.
        deadline: `time.monotonic()` value by which the call must end.
        incumbent: collects the plans and bounds given to `offer` and `offer_bound` while strategies run.
        run_strategy: `remat.solving.dispatch.run_strategy`, which runs another strategy.
    """

    problem: Problem
    options: SolveOptions
    deadline: float
    incumbent: Incumbent
    run_strategy: Callable[..., Solution]

    @classmethod
    def of(cls, problem: Problem, options: SolveOptions, run_strategy: Callable[..., Solution] = _run_none) -> Context:
        """A solve that starts now, with an empty incumbent."""
        incumbent = incumbent_of(problem, report=options.progress)
        return cls(problem, options, time.monotonic() + options.time_limit_s, incumbent, run_strategy)

    def with_options(self, **changes: Any) -> Context:
        """This solve with other options; the clock and the incumbent stay."""
        return replace(self, options=replace(self.options, **changes))

    def asking(self, **changes: Any) -> Context:
        """This solve with fields of the problem changed; its incumbent still collects for the original problem."""
        return replace(self, problem=replace(self.problem, **changes))

    def until(self, deadline: float) -> Context:
        """This solve with another deadline."""
        return replace(self, deadline=deadline)

    def about(self, problem: Problem, incumbent: Incumbent | None = None) -> Context:
        """A solve of another problem on this clock, with `incumbent` or an empty one that reports to nobody."""
        if incumbent is None:
            incumbent = incumbent_of(problem)
        return replace(self, problem=problem, incumbent=incumbent)

    def remaining_s(self) -> float:
        """Seconds left until the deadline; never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    @property
    def repeats(self) -> bool:
        """`SolveOptions.repeats`."""
        return self.options.repeats

    @property
    def solver_threads(self) -> int:
        """Threads for a linear or integer program: one if the run must repeat, because several may not repeat."""
        return 1 if self.repeats else self.options.threads

    def share_ends(self, share: float) -> float:
        """When a step that may take `share` of the time left must end; in a repeatable run, the deadline."""
        return self.deadline if self.repeats else time.monotonic() + share * self.remaining_s()

    def steps_in(self, rate: float, most: int = 1 << 40) -> int:
        """Number of steps of a repeatable run at `rate` per second of its time limit: 1 to `most`."""
        return max(1, min(most, int(rate * min(self.options.time_limit_s, LONGEST_S))))

    def seconds_for_a_proof(self) -> float:
        """A longer proof is not begun: the time left, or in a repeatable run `PROOF_SHARE` of the time limit."""
        return PROOF_SHARE * self.options.time_limit_s if self.repeats else self.remaining_s()

    def is_cut(self) -> bool:
        """Whether the clock may have ended the solve before it was solved; some solvers end a little early."""
        near_s = CUT_S + CUT_SHARE * min(self.options.time_limit_s, LONGEST_S)
        return self.remaining_s() <= near_s and not self.is_solved()

    def is_late(self) -> bool:
        """Whether a solve that ends now without a plan was ended by the time limit."""
        late_s = min(LATE_S, LATE_SHARE * self.options.time_limit_s)
        return self.is_cut() if self.repeats else self.remaining_s() < late_s

    def offer(self, plan: Plan, who: str) -> bool:
        """Offer a plan found by `who`; it counts even if the strategy fails later.

        Returns whether it is the cheapest so far. A plan outside the budget or the scope is ignored.

        Raises:
            InvalidPlan: the plan cannot be executed.
        """
        return self.incumbent.offer(plan, who)

    def take_plan(self, found: Found) -> None:
        """Offer what is found of a narrower problem: its plan; its bound holds there alone."""
        if found.plan is not None:
            self.offer(found.plan, found.progress.who)

    def offer_bound(self, bound: int, who: str, by: str = "") -> bool:
        """Offer a proven lower bound on every plan of this problem; whether it is the best so far.

        A bound for a smaller budget or a narrower scope than the incumbent's proves nothing about the
        incumbent's problem and is ignored.
        """
        problem, incumbent = self.problem, self.incumbent
        if problem.budget_bytes < incumbent.budget_bytes or not problem.scope.contains(incumbent.scope):
            return False
        return incumbent.offer_bound(bound, who, by)

    def is_solved(self) -> bool:
        """Whether the solve can stop: `Incumbent.is_proven` with `target_gap`, or the incumbent decides `cost_cap`."""
        cap, cost = self.problem.cost_cap, self.incumbent.cost
        if cap is not None:
            return (cost is not None and cost <= cap) or self.incumbent.bound > cap
        return self.incumbent.is_proven(self.options.target_gap)
