"""The problem that a strategy solves, and the options of its solve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from remat.errors import InvalidInput, check_name, shown
from remat.graph import Graph
from remat.incumbent import GAP_TOLERANCE, Progress
from remat.link import Link
from remat.plan import Plan, Scope
from remat.units import check_time_limit, format_size, parse_seed

ACCOUNTINGS = ("exact", "published")
MOST = {"threads": 1024, "work_limit": 2**53}
MOST_COPIES_NS = 2**58  # so that the times of plans with many copies of each value stay below the limit of int64
LONGEST_S = 1e9  # 30 years, for a limit that is infinite: shares and differences of infinity are no numbers


@dataclass(frozen=True, slots=True)
class Problem:
    """The question alone; a `Context` adds the clock, the incumbent and the callbacks.

    Attributes:
        graph, budget_bytes: total budget, fixed bytes included.
        scope: widest scope that plans may have.
        accounting: ``exact`` or ``published`` (Checkmate's artifact; docs/decisions/0006-baselines.md).
        cost_cap: if given, the question is only whether some plan costs at most this: the solve ends at such a
            plan, or at a bound above it, at any gap.
        link: that values may be copied over; cost and bound are makespans in ns then. None for no copies.

    Raises:
        InvalidInput: a link that does not go with the graph's costs or the accounting, or is far too slow.
    """

    graph: Graph
    budget_bytes: int
    scope: Scope = Scope.STAGED
    accounting: str = "exact"
    cost_cap: int | None = None
    link: Link | None = None

    def __post_init__(self) -> None:
        if self.link is not None and self.graph.cost_unit != "ns":
            raise InvalidInput(
                f"a link needs costs in ns, but those of '{self.graph.name}' are in {self.graph.cost_unit}"
            )
        if self.link is not None and self.accounting != "exact":
            raise InvalidInput("a link needs accounting=exact: the published one knows no copies")
        if self.link is not None and _copies_ns(self.graph, self.link) > MOST_COPIES_NS:
            raise InvalidInput(
                f"the link is too slow for '{self.graph.name}' ({self.link}): to copy each value once takes years; is "
                "its unit right? e.g. link=12GB/s"
            )


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """How a solve runs: keyword arguments of `remat.solve`.

    Attributes:
        time_limit_s: limits the whole call, up to 5 % and 2 s more (to start and stop processes).
        seed: every random choice derives from it.
        threads: number of threads that the strategy may use.
        work_limit: moves or nodes instead of seconds, for runs that repeat exactly; None for no limit.
        deterministic: two runs give the same plan, bound and certificate, unless `Solution.cut_by_clock` says that
            the time limit ended one.
        warm_start: a plan of this graph to start from; if it fits, the solution is at least as good. Baselines leave
            it out, so that they can be compared.
        target_gap: the solve ends as soon as (cost - bound) / cost is at or below it. Up to the gap of OPTIMAL, the
            bound must be proven exactly.
        least_gain: the solve also ends when more time is not expected to lower the cost by this share
            (`remat.solving.patience`); None waits for `target_gap` or the time limit. Only strategies that combine
            others (``portfolio``) look at it, and no run that repeats exactly.
        progress: called with a `Progress` at each improvement of the plan or the bound, in the thread that
            found it; the search waits for its return.

    Raises:
        InvalidInput: a value that no solve can use.
    """

    time_limit_s: float = 60.0
    seed: int = 0
    threads: int = 2
    work_limit: int | None = None
    deterministic: bool = False
    warm_start: Plan | None = None
    target_gap: float = GAP_TOLERANCE
    least_gain: float | None = None
    progress: Callable[[Progress], None] | None = None

    @property
    def repeats(self) -> bool:
        """Whether two runs must give the same result: then counts limit each step, and the clock only the whole run."""
        return self.deterministic or self.work_limit is not None

    @classmethod
    def split(cls, keywords: Mapping[str, Any]) -> tuple[SolveOptions, dict[str, Any]]:
        """(options of the solve, options of the strategy) from the keyword arguments of a call.

        Raises:
            InvalidInput: a value that no solve can use.
        """
        names = {f.name for f in fields(cls)}
        own = cls(**{name: value for name, value in keywords.items() if name in names}).checked()
        return own, {name: value for name, value in keywords.items() if name not in names}

    def checked(self) -> SolveOptions:
        """These options with Python's own numbers; raises `InvalidInput` for a value that no solve can use."""
        check_time_limit(self.time_limit_s)
        for name, most in MOST.items():
            value = getattr(self, name)
            if not (_is_count(value) or (value is None and name == "work_limit")):
                raise InvalidInput(f"{name} must be an integer of at least 1, not {shown(value)}")
            if value is not None and value > most:
                raise InvalidInput(f"{name} must be at most {most:,}")
        if not isinstance(self.deterministic, bool):
            raise InvalidInput(f"deterministic must be True or False, not {shown(self.deterministic)}")
        if self.warm_start is not None and not isinstance(self.warm_start, Plan):
            kind = type(self.warm_start).__name__
            raise InvalidInput(f"warm_start must be a remat.Plan, not {kind}; see Plan.load")
        check_gap("target_gap", self.target_gap)
        if self.least_gain is not None:
            check_gap("least_gain", self.least_gain)
        if self.progress is not None and not callable(self.progress):
            raise InvalidInput(f"progress must be a function of one remat.Progress, not {shown(self.progress)}")
        limit = None if self.work_limit is None else int(self.work_limit)
        return SolveOptions(
            min(float(self.time_limit_s), LONGEST_S), parse_seed(self.seed), int(self.threads), limit,
            self.deterministic, self.warm_start, self.target_gap, self.least_gain, self.progress,
        )  # fmt: skip


def check_host(graph: Graph, link: Link | None, what: str, option: str) -> None:
    """Raise `InvalidInput` for a link to a host that has no room for any value; `what` has them, `option` gave it."""
    least = min((value.bytes for value in graph.values if value.bytes), default=0)
    if link is not None and link.host_bytes is not None and link.host_bytes < least:
        raise InvalidInput(
            f"the link's host_bytes of {format_size(link.host_bytes)} hold no value of {what}, the smallest of which "
            f"has {format_size(least)}; give more, or leave {option} out"
        )


def _copies_ns(graph: Graph, link: Link) -> int:
    """How long it takes to copy each value out and in, one after the other."""
    total, n = sum(value.bytes for value in graph.values), len(graph.values)
    return link.out_ns(total) + link.in_ns(total) + n * (link.out_ns(0) + link.in_ns(0))


def check_gap(name: str, gap: Any) -> None:
    """Raise `InvalidInput` unless a share of the cost is a number from 0 to 1."""
    if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 <= gap <= 1:
        raise InvalidInput(f"{name} must be a number from 0 to 1 (0.01 is 1 %), not {shown(gap)}")


def check_accounting(accounting: str) -> str:
    """The accounting; raises `UnknownName` with the nearest name."""
    check_name("accounting", accounting, ACCOUNTINGS)
    return accounting


def _is_count(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1
