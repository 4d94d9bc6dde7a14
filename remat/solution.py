"""The results of strategies, and the solution of a solve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from remat.arena import Arena
from remat.certificate import BoundCertificate
from remat.errors import RematError
from remat.plan import Plan, Scope
from remat.units import format_size


class Status(StrEnum):
    """How a solve ended; rows and tables show the value."""

    OPTIMAL = "OPTIMAL"  # gap below tolerance, proven exactly (`remat.incumbent.is_proven`)
    FEASIBLE = "FEASIBLE"  # a plan, with bound and gap
    # Proven: exactly, or by a MILP solver that also finds no plan a millionth above the budget.
    INFEASIBLE = "INFEASIBLE"
    TIMEOUT = "TIMEOUT"  # nothing found in time
    SKIPPED = "SKIPPED"  # the strategy does not apply, or a package or licence is missing
    NO_PLAN = "NO_PLAN"  # ended without a plan inside the budget; nothing proven
    FAILED = "FAILED"  # crashed


class Ending(StrEnum):
    """What ended a strategy that did not return by itself."""

    RETURNED = ""
    INTERRUPTED = "interrupted"  # Ctrl-C, or the engine
    CRASHED = "crashed"
    KILLED = "killed"  # its process ignored the time limit
    DECIDED = "decided"  # another strategy's proof decided the problem


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan proposed by a strategy; `parameters` identify it within a family."""

    plan: Plan
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a strategy that returns more than plans; every plan in it is judged again.

    Attributes:
        candidates: plans proposed.
        bound: proven lower bound on cost within the problem's scope, or None.
        infeasible: it is proven that no plan exists within the scope.
        timed_out: the time limit ended it.
        cut_by_clock: whether the time limit ended a repeatable run, or a part of it. None: the caller derives it
            from the clock.
        decided: whether a restricted problem was solved to its end.
        message: one line for people.
        stats: numbers for people, stored in the result row; no code reads them to decide.
        certificate: proof of the bound, or None.
        peak_bound_bytes: proven lower bound on the peak of any staged plan within the cost cap, or None.
        proven_by: what proves the bound, see `Solution`.
        members_memory_bytes: largest resident set of the processes that ran members of the strategy; 0 without any.
    """

    candidates: tuple[Candidate, ...] = ()
    bound: int | None = None
    infeasible: bool = False
    timed_out: bool = False
    message: str = ""
    stats: Mapping[str, Any] = field(default_factory=dict)
    certificate: BoundCertificate | None = None
    cut_by_clock: bool | None = None
    decided: bool = False
    peak_bound_bytes: int | None = None
    proven_by: str = ""
    members_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """A candidate after judgement: cost in the graph's unit and peak in bytes."""

    plan: Plan
    cost: int
    peak_bytes: int
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """Every plan of a strategy that ignores the budget, judged once for all budgets.

    Attributes:
        members: in the order proposed.
        rejected: why a candidate was rejected, or ''.
        status: SKIPPED, FAILED or TIMEOUT if that is why there are no members, else None.
        message: the reason.
        wall_s: duration of the run in seconds.
    """

    strategy: str
    members: tuple[Member, ...] = ()
    rejected: str = ""
    status: Status | None = None
    message: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Solution:
    """The result of `remat.solve`; without a plan, `plan`, `cost`, `peak_bytes` and `overhead` are None.

    Attributes:
        overhead: cost / cost of running every operation once, minus 1.
        bound: proven lower bound on the cost of any plan of this scope.
        gap: (cost - bound) / cost.
        parameters: the member of a family that was chosen, e.g. Griewank's slots.
        stats: numbers for people; nothing depends on them.
        wall_s: duration of the call in seconds.
        certificate: for `remat.verify_bound`, if the strategy makes one. It proves its own `bound`, which may be
            smaller than the solution's: a MILP may prove more, without a certificate.
        ended: how the strategy ended.
        cut_by_clock: whether the time limit ended a repeatable run, so that another run may differ; None for
            other runs.
        contradicted: the judge refuted a claim of the strategy.
        proof_from: the strategy whose proof ended the solve, or ''.
        proven_by: what proves the bound: ``certificate``, ``exhaustive`` (search of a small graph) or ``cp-sat``, all
            exact; ``highs`` or another MILP solver, within its tolerance; a strategy that does not say; '' if running
            everything once costs it.
        peak_bound_bytes: proven lower bound on the peak of any staged plan within the cost cap, fixed bytes included;
            None unless the strategy proves one.
        solver_memory_bytes: largest resident set of the processes that solved the problem, this one not counted.
        arena: of the plan, if the solve was asked for one.
    """

    status: Status
    strategy: str
    graph_name: str
    budget_bytes: int
    scope: Scope
    accounting: str
    plan: Plan | None = None
    cost: int | None = None
    peak_bytes: int | None = None
    overhead: float | None = None
    bound: int | None = None
    gap: float | None = None
    message: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    certificate: BoundCertificate | None = None
    ended: Ending = Ending.RETURNED
    cut_by_clock: bool | None = None
    contradicted: bool = False
    proof_from: str = ""
    proven_by: str = ""
    peak_bound_bytes: int | None = None
    solver_memory_bytes: int = 0
    arena: Arena | None = None

    def __repr__(self) -> str:
        asked = f"{self.status} by {self.strategy}, '{self.graph_name}' within {format_size(self.budget_bytes)}"
        if self.cost is None or self.peak_bytes is None:
            return f"<Solution: {asked}: {self.message or 'no plan'}>"
        shares = [f"{name} {x:.2%}" for name, x in (("overhead", self.overhead), ("gap", self.gap)) if x is not None]
        return (
            f"<Solution: {asked}: {', '.join([f'cost {self.cost}', f'peak {format_size(self.peak_bytes)}', *shares])}>"
        )


def candidates_of(produced: Any) -> Iterator[Candidate]:
    """The result of a strategy's `run` as candidates; a lazy result stays lazy."""
    if isinstance(produced, Outcome):
        yield from produced.candidates
    elif isinstance(produced, Plan):
        yield Candidate(produced)
    elif isinstance(produced, Candidate):
        yield produced
    elif isinstance(produced, Iterable):
        for item in produced:
            yield item if isinstance(item, Candidate) else Candidate(item)
    elif produced is not None:
        raise RematError(f"a strategy must return plans, candidates or an Outcome, not {type(produced).__name__}")
