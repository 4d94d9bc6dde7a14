"""One call for every method: `solve` runs a strategy on a problem and judges what it returns."""

from __future__ import annotations

import operator
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Integral
from pathlib import Path
from typing import Any

from remat.bounds.certificate import BoundCertificate
from remat.errors import InvalidInput, InvalidPlan, RematError, Skip, unknown_name
from remat.graph import Graph, check_graph
from remat.incumbent import GAP_TOLERANCE, Incumbent, Progress, relative_gap
from remat.plan import Plan, Scope, parse_scope
from remat.registry import Strategy, get_strategy
from remat.simulator import Trace, simulate
from remat.units import check_time_limit, format_size, parse_size

ACCOUNTINGS = ("exact", "published")
# A run that repeats exactly has more than that and that share of its time left, or the clock may have cut it short.
CUT_S, CUT_SHARE = 0.5, 0.05
PROOF_SHARE = 0.4  # of the time limit, for a proof in such a run
LATE_S = 1.0  # other solves that end with less time left are taken to have been ended by the time limit
LONGEST_S = 3600.0  # of a time limit, from which such a run derives its work
NAMING_S = 1.7  # after the deadline, when the smallest budget is named at the latest; the promised overrun is longer


class Status(StrEnum):
    """How a solve ended; the value is what rows and tables show."""

    OPTIMAL = "OPTIMAL"  # gap below tolerance, proven
    FEASIBLE = "FEASIBLE"  # a plan, with bound and gap
    INFEASIBLE = "INFEASIBLE"  # proven
    TIMEOUT = "TIMEOUT"  # nothing found in time
    SKIPPED = "SKIPPED"  # the method does not apply, or a package or licence is missing
    NO_PLAN = "NO_PLAN"  # ended without a plan inside the budget; nothing proven
    FAILED = "FAILED"  # crashed


@dataclass(frozen=True, slots=True)
class Problem:
    """What a strategy is asked.

    Attributes:
        graph, budget_bytes: total budget, fixed bytes included.
        scope: widest scope that plans may have.
        accounting: ``exact`` or ``published`` (Checkmate's artifact; see PEERS in the docs).
        deadline: `time.monotonic()` value after which the call must have ended.
        time_limit_s: as asked for; what runs that repeat exactly derive their work from.
        seed, threads: as given; every random choice derives from the seed.
        work_limit: iterations or nodes, for runs that repeat exactly; None for none.
        warm_start: a plan known to be good, or None.
        target_gap: the solve may end when the gap of the best plan is at or below it.
        cost_cap: if given, the question is only whether some plan costs at most this: the solve ends at such a
            plan, or at a bound above it, whatever the gap.
        report: is shown each improvement, or None; `best` calls it.
        best: where plans and bounds are handed over while a strategy runs; `offer` and `offer_bound`
            lead there. None where nobody collects them.
    """

    graph: Graph
    budget_bytes: int
    scope: Scope = Scope.STAGED
    accounting: str = "exact"
    deadline: float = float("inf")
    time_limit_s: float = float("inf")
    seed: int = 0
    threads: int = 1
    work_limit: int | None = None
    deterministic: bool = False
    warm_start: Plan | None = None
    target_gap: float = GAP_TOLERANCE
    cost_cap: int | None = None
    report: Callable[[Progress], None] | None = None
    best: Incumbent | None = None

    def remaining_s(self) -> float:
        """Seconds left until the deadline; never negative."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def repeats(self) -> bool:
        """Whether two runs must give the same: then counts limit the work, and the clock only ends all of it."""
        return self.deterministic or self.work_limit is not None

    @property
    def solver_threads(self) -> int:
        """Threads for a linear or integer program: where runs repeat one, because several need not."""
        return 1 if self.repeats else self.threads

    def until(self, share: float) -> float:
        """When a step that may take `share` of the time left has to end; where runs repeat, the deadline."""
        return self.deadline if self.repeats else time.monotonic() + share * self.remaining_s()

    def steps_in(self, rate: float, most: int = 1 << 40) -> int:
        """Steps that a run which repeats makes at `rate` per second of its time limit: 1 to `most`."""
        return max(1, min(most, int(rate * min(self.time_limit_s, LONGEST_S))))

    def seconds_for_a_proof(self) -> float:
        """How long a proof may be expected to take for it to be begun: the time left, or where runs repeat, a share."""
        return PROOF_SHARE * self.time_limit_s if self.repeats else self.remaining_s()

    def is_cut(self) -> bool:
        """Whether the clock has ended it, or may have, before it was solved: some solvers end a little early."""
        near_s = CUT_S + CUT_SHARE * min(self.time_limit_s, LONGEST_S)
        return self.remaining_s() <= near_s and not self.is_solved()

    def is_late(self) -> bool:
        """Whether a solve that ends now without a plan was ended by the time limit."""
        return self.is_cut() if self.repeats else self.remaining_s() < LATE_S

    def offer(self, plan: Plan, who: str) -> bool:
        """Hand over a plan found by `who`; it counts whatever happens to the strategy later.

        Returns whether it is the cheapest so far; one beyond the budget or the scope is ignored.

        Raises:
            InvalidPlan: it cannot be executed.
        """
        return self.best is not None and self.best.offer(plan, who)

    def offer_bound(self, bound: int, who: str) -> bool:
        """Hand over a proven lower bound on every plan of this problem; whether it is the best so far.

        A bound of a problem that was derived with a smaller budget or a narrower scope proves nothing
        about the one asked, and is ignored.
        """
        best = self.best
        if best is None or self.budget_bytes < best.budget_bytes or not self.scope.contains(best.scope):
            return False
        return best.offer_bound(bound, who)

    def is_solved(self) -> bool:
        """Whether what was offered so far has a gap of at most `target_gap`, or decides `cost_cap`: time to stop."""
        if self.cost_cap is not None and self.best is not None:
            cost = self.best.cost
            return (cost is not None and cost <= self.cost_cap) or self.best.bound > self.cost_cap
        gap = None if self.best is None else self.best.gap
        return gap is not None and gap <= self.target_gap

    def collecting(self) -> Problem:
        """This problem with an empty `best`."""
        return replace(self, best=Incumbent(self.graph, self.budget_bytes, self.scope, report=self.report))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan proposed by a strategy; `parameters` say which member of a family it is."""

    plan: Plan
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy with more to say than plans returns; every plan in it is judged anew.

    Attributes:
        candidates: plans proposed.
        bound: proven lower bound on cost within the problem's scope, or None.
        infeasible: no plan exists within the scope; proven.
        timed_out: ended by the time limit.
        message: one line for people.
        stats: numbers for the result row.
        certificate: proof of the bound, or None.
    """

    candidates: tuple[Candidate, ...] = ()
    bound: int | None = None
    infeasible: bool = False
    timed_out: bool = False
    message: str = ""
    stats: Mapping[str, Any] = field(default_factory=dict)
    certificate: BoundCertificate | None = None


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
        rejected: why a candidate was not taken, or ''.
        status: SKIPPED, FAILED or TIMEOUT if there are no members for that reason, else None.
        message: the reason.
        wall_s: seconds the run took.
    """

    strategy: str
    members: tuple[Member, ...] = ()
    rejected: str = ""
    status: Status | None = None
    message: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Solution:
    """The result of `solve`; without a plan, `plan`, `cost`, `peak_bytes` and `overhead` are None.

    Attributes:
        overhead: cost / cost of running every operation once, minus 1.
        bound: proven lower bound on the cost of any plan of this scope.
        gap: (cost - bound) / cost.
        parameters: the member of a family that was chosen, e.g. Griewank's slots.
        wall_s: seconds the call took.
        certificate: what `remat.verify_bound` checks, where the strategy makes one. It proves its own `bound`:
            that of the solution or, where a MILP without a certificate got further, a smaller one.
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

    def __repr__(self) -> str:
        asked = f"{self.status} by {self.strategy}, '{self.graph_name}' within {format_size(self.budget_bytes)}"
        if self.cost is None or self.peak_bytes is None:
            return f"<Solution: {asked}: {self.message or 'no plan'}>"
        shares = [f"{name} {x:.2%}" for name, x in (("overhead", self.overhead), ("gap", self.gap)) if x is not None]
        return (
            f"<Solution: {asked}: {', '.join([f'cost {self.cost}', f'peak {format_size(self.peak_bytes)}', *shares])}>"
        )


def solve(
    graph: Graph,
    budget: int | str,
    strategy: str = "portfolio",
    scope: str = "staged",
    time_limit_s: float = 60.0,
    seed: int = 0,
    threads: int = 2,
    accounting: str = "exact",
    work_limit: int | None = None,
    deterministic: bool = False,
    warm_start: Plan | None = None,
    target_gap: float = GAP_TOLERANCE,
    progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Solution:
    """Find a plan for `graph` within `budget`.

    Args:
        budget: total bytes, fixed bytes included; an int or a string with a unit (``5GiB``).
        strategy: a name from `remat.strategies()`.
        scope: ``staged``, ``fixed_order`` or ``free``.
        time_limit_s: bounds the whole call, to within 5 % and 2 s (a process may have to be started or stopped).
        seed: every random choice derives from it.
        threads: that the strategy may use.
        accounting: ``exact``, or ``published`` for the memory that Checkmate's artifact counts.
        work_limit: moves or nodes instead of seconds, for runs that repeat exactly.
        deterministic: two runs give the same plan, bound and certificate, unless ``stats["cut_by_clock"]`` says that
            the time limit ended one.
        warm_start: a plan of this graph to start from; if it fits, the solution is at least as good.
        target_gap: end as soon as (cost - bound) / cost is at or below it.
        progress: is called with a `Progress` at each improvement of the plan or of the bound, from
            whichever thread found it; the search waits meanwhile.
        options: keyword options of the strategy.

    Returns:
        A `Solution`; never raises because a budget cannot be met. Ctrl-C returns the best plan found so
        far, and raises KeyboardInterrupt only if there is none.

    Raises:
        InvalidInput: unknown strategy or option, unreadable size or limit.
    """
    return solve_sweep(
        graph,
        [budget],
        strategy,
        scope=scope,
        time_limit_s=time_limit_s,
        seed=seed,
        threads=threads,
        accounting=accounting,
        work_limit=work_limit,
        deterministic=deterministic,
        warm_start=warm_start,
        target_gap=target_gap,
        progress=progress,
        **options,
    )[0]


def solve_sweep(
    graph: Graph,
    budgets: Sequence[int | str],
    strategy: str = "portfolio",
    *,
    scope: str = "staged",
    time_limit_s: float = 60.0,
    seed: int = 0,
    threads: int = 2,
    accounting: str = "exact",
    work_limit: int | None = None,
    deterministic: bool = False,
    warm_start: Plan | None = None,
    target_gap: float = GAP_TOLERANCE,
    progress: Callable[[Progress], None] | None = None,
    isolate: bool | None = None,
    **options: Any,
) -> list[Solution]:
    """`solve` for several budgets; `time_limit_s` is for each of them; results in the order of `budgets`.

    A strategy that ignores the budget runs once for all of them. `isolate` overrides whether the
    strategy runs in a process of its own with a hard limit. The budgets share work: they are solved in
    ascending order, each from the best plan of the smaller ones, and `remat.sharing.share` makes the
    results monotone (not for a baseline, whose results are its own).
    """
    start = time.monotonic()
    chosen = get_strategy(strategy)
    chosen.check_options(options)
    _check_call(time_limit_s, threads, accounting, work_limit)
    _check_stopping(target_gap, progress)
    seed, threads, time_limit_s = _check_seed(seed), int(threads), float(time_limit_s)
    work_limit = None if work_limit is None else int(work_limit)
    if not isinstance(deterministic, bool):
        raise InvalidInput(f"deterministic must be True or False, not {deterministic!r}")
    if warm_start is not None and not isinstance(warm_start, Plan):
        raise InvalidInput(f"warm_start must be a remat.Plan, not {type(warm_start).__name__}; see Plan.load")
    check_graph(graph)
    if isinstance(budgets, (str, bytes)) or not isinstance(budgets, Iterable):
        raise InvalidInput(f"budgets must be a list of sizes, not {budgets!r}; `remat.solve` takes a single one")
    if not len(graph):
        raise InvalidInput(f"graph '{graph.name}' has no operations; there is nothing to plan")
    if warm_start is not None and warm_start.graph_sha256 != graph.sha256():
        raise InvalidInput(f"warm_start was made for another graph ('{warm_start.graph_name}'), not for '{graph.name}'")
    problem = Problem(
        graph=graph,
        budget_bytes=0,
        scope=parse_scope(scope),
        accounting=accounting,
        deadline=start + time_limit_s,
        time_limit_s=time_limit_s,
        seed=seed,
        threads=threads,
        work_limit=work_limit,
        deterministic=deterministic,
        warm_start=warm_start,
        target_gap=target_gap,
        report=progress,
    )
    problems = [replace(problem, budget_bytes=parse_size(budget)) for budget in budgets]
    if graph.has_implementations and chosen.implementations == "default":
        from remat.joint import solve_default  # imports this module

        asked = replace(problem, warm_start=_without_choices(warm_start, graph))
        found = solve_default(graph, lambda plain: _solve_all(
            chosen, [replace(asked, graph=plain, budget_bytes=one.budget_bytes) for one in problems], options,
            time_limit_s, isolate, asked.warm_start))  # fmt: skip
        if warm_start is None or chosen.is_baseline or chosen.ignores_budget:
            return found
        return [_at_least(one, chosen, asked, warm_start) for one, asked in zip(found, problems, strict=True)]
    return _solve_all(chosen, problems, options, time_limit_s, isolate, warm_start)


def _without_choices(plan: Plan | None, graph: Graph) -> Plan | None:
    """The plan on the graph of default implementations; None if it has others."""
    return None if plan is None or plan.ways else replace(plan, graph_sha256=graph.default().sha256())


def _solve_all(
    chosen: Strategy, problems: Sequence[Problem], options: dict[str, Any], time_limit_s: float, isolate: bool | None,
    warm_start: Plan | None,
) -> list[Solution]:  # fmt: skip
    strategy = chosen.name
    if chosen.ignores_budget:
        if not problems:
            return []
        return solve_family(run_family(max(problems, key=lambda p: p.budget_bytes), strategy, options), problems)
    if chosen.is_baseline or len(problems) == 1:
        return [_solve_one(chosen, one, options, time_limit_s, isolate, warm_start) for one in problems]
    from remat.sharing import share, solve_ascending  # imports this module

    return share(
        solve_ascending(problems, lambda one: _solve_one(chosen, one, options, time_limit_s, isolate, warm_start))
    )


def _solve_one(
    chosen: Strategy, problem: Problem, options: dict[str, Any], time_limit_s: float, isolate: bool | None,
    given: Plan | None,
) -> Solution:  # fmt: skip
    problem = replace(problem, deadline=time.monotonic() + time_limit_s).collecting()
    refusal = _refuse_if_impossible(chosen, problem)
    if refusal is not None:
        return refusal
    solution = solve_one(problem, chosen, options, isolate)
    if given is not None and not chosen.is_baseline:
        solution = _at_least(solution, chosen, problem, given)
    return name_minimum(solution, problem)


def name_minimum(solution: Solution, problem: Problem) -> Solution:
    """The solution; where no plan was found, its message ends with the smallest budget known feasible.

    An INFEASIBLE names it already. The time for it is what the promised overrun leaves.
    """
    if solution.status not in (Status.TIMEOUT, Status.NO_PLAN):
        return solution
    from remat.bounds.min_budget import describe_minimum

    seconds = max(0.0, problem.deadline + NAMING_S - time.monotonic())
    least = describe_minimum(problem.graph, problem.scope, time_limit_s=seconds, budget_bytes=problem.budget_bytes)
    return replace(solution, message=f"{solution.message}; {least}")


def solve_one(problem: Problem, chosen: Strategy, options: Mapping[str, Any], isolate: bool | None = None) -> Solution:
    """Run one strategy on a problem that has a `best`, in a process of its own if it asks for one."""
    if chosen.in_own_process(isolate) and not (
        problem.graph.has_implementations and chosen.implementations == "search"
    ):
        from remat.worker import solve_isolated  # imports this module

        return solve_isolated(problem, chosen.name, options)
    return solve_here(problem, chosen.name, options)


def _at_least(solution: Solution, chosen: Strategy, problem: Problem, given: Plan) -> Solution:
    """The solution, or the plan that was given to start from if nothing cheaper was found."""
    if solution.status in (Status.FAILED, Status.SKIPPED) or not problem.scope.contains(given.scope):
        return solution
    trace = simulate(problem.graph, given)
    if trace.peak_bytes > problem.budget_bytes or (solution.cost is not None and solution.cost <= trace.cost):
        return solution
    known = Outcome(
        bound=solution.bound, infeasible=solution.status is Status.INFEASIBLE, message=solution.message,
        stats=solution.stats, certificate=solution.certificate,
    )  # fmt: skip
    member = Member(given, trace.cost, trace.peak_bytes, {"from": "warm start"})
    return replace(_conclude(chosen, replace(problem, best=None), known, [member], ""), wall_s=solution.wall_s)


def solve_here(problem: Problem, strategy: str, options: Mapping[str, Any]) -> Solution:
    """Run one strategy in this process on a problem that has a `best`."""
    began = time.monotonic()
    chosen = get_strategy(strategy)
    solution = _refuse_if_impossible(chosen, problem) or _solve_here(chosen, problem, options)
    return replace(solution, wall_s=time.monotonic() - began)


def family(
    graph: Graph,
    strategy: str,
    *,
    scope: str = "staged",
    accounting: str = "exact",
    time_limit_s: float = 60.0,
    **options: Any,
) -> list[Member]:
    """Every plan of a strategy that ignores the budget, judged: what figures draw.

    Raises:
        Skip: the strategy does not apply to this graph.
    """
    chosen = get_strategy(strategy)
    chosen.check_options(options)
    if not chosen.ignores_budget:
        raise InvalidInput(f"strategy '{strategy}' depends on the budget; it has no family to list")
    problem = Problem(
        graph, budget_bytes=2**60, scope=parse_scope(scope), accounting=accounting,
        deadline=time.monotonic() + time_limit_s,
    )  # fmt: skip
    return list(_judge(problem, candidates_of(chosen.run(problem, **options)))[0])


def _check_call(time_limit_s: float, threads: int, accounting: str, work_limit: int | None) -> None:
    check_time_limit(time_limit_s)
    if not _is_count(threads):
        raise InvalidInput(f"threads must be an integer of at least 1, not {threads!r}")
    if accounting not in ACCOUNTINGS:
        raise unknown_name("accounting", accounting, ACCOUNTINGS)
    if work_limit is not None and not _is_count(work_limit):
        raise InvalidInput(f"work_limit must be an integer of at least 1, not {work_limit!r}")


def _is_count(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1


def _check_stopping(target_gap: float, progress: Any) -> None:
    if isinstance(target_gap, bool) or not isinstance(target_gap, (int, float)) or not 0 <= target_gap <= 1:
        raise InvalidInput(f"target_gap must be a number from 0 to 1 (0.01 is 1 %), not {target_gap!r}")
    if progress is not None and not callable(progress):
        raise InvalidInput(f"progress must be a function of one remat.Progress, not {progress!r:.60}")


def _check_seed(seed: int) -> int:
    try:
        return operator.index(seed)  # NumPy's integers too
    except TypeError:
        raise InvalidInput(f"seed must be an integer, not {seed!r}") from None


def _refuse_if_impossible(chosen: Strategy, problem: Problem) -> Solution | None:
    """An INFEASIBLE solution if some operation alone needs more than the budget."""
    reason = why_impossible(problem.graph, problem.budget_bytes, problem.scope)
    return _without_plan(chosen, problem, Status.INFEASIBLE, reason) if reason else None


def why_impossible(graph: Graph, budget_bytes: int, scope: Scope) -> str:
    """Why no plan can be within the budget, where one operation or what is kept shows it; '' where neither does."""
    needed, k = graph.largest_working_set()
    if budget_bytes >= max(needed, graph.final_bytes):
        return ""
    from remat.bounds.min_budget import describe_minimum

    what = f"operation {k} ({graph.operations[k].name}) alone needs {format_size(needed)}"
    if graph.final_bytes > needed:
        what = f"what must be there at the end (gradients, say) alone needs {format_size(graph.final_bytes)}"
    least = describe_minimum(graph, scope, with_operation=graph.final_bytes > needed)
    return f"budget {format_size(budget_bytes)} is too small: {what}; {least}"


def _without_plan(chosen: Strategy, problem: Problem, status: Status, message: str, **more: Any) -> Solution:
    return Solution(
        status, chosen.name, problem.graph.name, problem.budget_bytes, problem.scope, problem.accounting,
        message=message, **more,
    )  # fmt: skip


def run_family(problem: Problem, strategy: str, options: Mapping[str, Any]) -> Family:
    """Run a strategy that ignores the budget, in this process, and judge all of its plans."""
    start = time.monotonic()
    chosen = get_strategy(strategy)
    result = Family(strategy)
    try:
        members, rejected = _judge(problem, candidates_of(chosen.run(problem, **options)))
        result = replace(result, members=tuple(members), rejected=rejected)
    except Skip as skip:
        result = replace(result, status=Status.SKIPPED, message=str(skip))
    except Exception as error:  # a strategy that crashes costs its own row, and the row says why
        result = replace(result, status=Status.FAILED, message=_reason(error))
    return replace(result, wall_s=time.monotonic() - start)


def solve_family(family: Family, problems: Sequence[Problem]) -> list[Solution]:
    """For each problem the cheapest member of `family` that fits its budget; solves nothing."""
    chosen = get_strategy(family.strategy)
    solutions = []
    for problem in problems:
        refusal = None if family.status else _refuse_if_impossible(chosen, problem)
        if family.status:
            solution = _without_plan(chosen, problem, family.status, family.message)
        elif refusal:
            solution = refusal
        else:
            solution = _conclude(chosen, problem, Outcome(), family.members, family.rejected)
        solutions.append(replace(solution, wall_s=family.wall_s))
    return solutions


def _solve_here(chosen: Strategy, problem: Problem, options: Mapping[str, Any]) -> Solution:
    """Run a strategy in this process on a problem that has a `best`; what it handed over outlives it."""
    try:
        if problem.graph.has_implementations and chosen.implementations == "search":
            from remat.joint import solve_chosen  # imports this module

            produced = solve_chosen(problem, chosen, options)
        else:
            produced = chosen.run(problem, **options)
        outcome = produced if isinstance(produced, Outcome) else Outcome()
        members, rejected = _judge(problem, candidates_of(produced), chosen.name)
        if problem.repeats:
            outcome = replace(outcome, stats={"cut_by_clock": problem.is_cut(), **outcome.stats})
    except Skip as skip:
        return _without_plan(chosen, problem, Status.SKIPPED, str(skip))
    except KeyboardInterrupt:
        kept = conclude_early(chosen, problem, "interrupted", "interrupted")
        if kept.plan is None and kept.status is not Status.FAILED:
            raise
        return kept
    except Exception as error:  # a strategy that crashes costs its own row, and the row says why
        if isinstance(error, InvalidPlan) and problem.best is not None:  # a claim that the judge refutes
            problem.best.contradict(f"strategy '{chosen.name}' proposed a plan that cannot be executed: {error}")
        return conclude_early(chosen, problem, "crashed", _reason(error), without_plan=Status.FAILED)
    return _conclude(chosen, problem, outcome, members, rejected)


def conclude_early(
    chosen: Strategy, problem: Problem, ended: str, message: str, *, without_plan: Status = Status.TIMEOUT
) -> Solution:
    """A solution from what was handed over before a strategy ended otherwise than by returning.

    Args:
        ended: ``interrupted``, ``crashed`` or ``killed``; kept in ``stats["ended"]``.
        message: how it ended, one line.
        without_plan: the status if nothing was handed over.
    """
    best = problem.best
    stats = {"ended": ended}
    if best is not None and (best.plan is not None or best.contradiction):
        outcome = Outcome(message=f"{message}; the best plan found before is kept", stats=stats)
        return _conclude(chosen, problem, outcome, (), "")
    bound = None if best is None or without_plan is Status.FAILED else best.bound
    return _without_plan(chosen, problem, without_plan, message, stats=stats, bound=bound)


def _reason(error: Exception) -> str:
    """One line; the kind and place of an error that was not meant for users."""
    if isinstance(error, RematError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"


def candidates_of(produced: Any) -> Iterator[Candidate]:
    """What a strategy's `run` returned, as candidates; nothing lazy is started before it is asked for."""
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


def _judge(problem: Problem, candidates: Iterator[Candidate], who: str = "") -> tuple[list[Member], str]:
    """(members, why others were rejected): every candidate replayed by the simulator, and handed over."""
    members: list[Member] = []
    rejected = ""
    for candidate in candidates:
        plan = candidate.plan
        if not problem.scope.contains(plan.scope):
            rejected = f"its plan is {plan.scope}, but {problem.scope} was asked for"
        else:
            trace: Trace = simulate(problem.graph, plan)
            members.append(Member(plan, trace.cost, trace.peak_bytes, candidate.parameters))
            if problem.best is not None:
                finder = str(candidate.parameters.get("from", who))
                problem.best.take(plan, trace.cost, trace.peak_bytes, finder)
        if time.monotonic() > problem.deadline:
            rejected = rejected or f"stopped at the time limit after {len(members)} plans"
            break
    return members, rejected


def _conclude(
    chosen: Strategy, problem: Problem, outcome: Outcome, members: Sequence[Member], rejected: str
) -> Solution:
    """Pick the cheapest member that fits and say what is proven about it."""
    graph, budget, offered = problem.graph, problem.budget_bytes, problem.best
    fitting = [m for m in members if m.peak_bytes <= budget]
    bound = max(graph.least_cost, outcome.bound or 0, offered.bound if offered else 0)
    common: dict[str, Any] = {"stats": dict(outcome.stats)}
    if offered is not None:
        common["stats"] |= offered.stats()
        if offered.plan is not None and offered.cost is not None and offered.peak_bytes is not None:
            fitting.append(Member(offered.plan, offered.cost, offered.peak_bytes, {"from": offered.who}))
        if offered.contradiction:
            common["stats"]["contradicted"] = True
            return _without_plan(chosen, problem, Status.FAILED, offered.contradiction, **common)
    if fitting:
        best = min(fitting, key=lambda m: (m.cost, m.peak_bytes))  # of equals the strategy's own
        if outcome.infeasible or bound > best.cost:
            claim = "that no plan fits" if outcome.infeasible else f"the bound {bound}"
            message = f"strategy '{chosen.name}' claims {claim}, but its own plan fits and costs {best.cost}"
            common["stats"]["contradicted"] = True
            return _without_plan(chosen, problem, Status.FAILED, message, **common)
        gap = relative_gap(best.cost, bound)
        return Solution(
            Status.OPTIMAL if gap <= GAP_TOLERANCE else Status.FEASIBLE,
            chosen.name, graph.name, budget, problem.scope, problem.accounting,
            plan=replace(best.plan, budget_bytes=budget), cost=best.cost, peak_bytes=best.peak_bytes,
            overhead=best.cost / graph.total_cost - 1 if graph.total_cost else 0.0,
            bound=bound, gap=gap, message=outcome.message, parameters=dict(best.parameters),
            certificate=outcome.certificate, **common,
        )  # fmt: skip
    if outcome.infeasible:
        from remat.bounds.min_budget import describe_minimum

        message = outcome.message or f"no {problem.scope} plan fits {format_size(budget)}"
        message = f"{message}; {describe_minimum(graph, problem.scope)}"
        return _without_plan(chosen, problem, Status.INFEASIBLE, message, **common)
    if outcome.timed_out:
        message = outcome.message or "no plan found within the time limit"
        return _without_plan(chosen, problem, Status.TIMEOUT, message, bound=bound, **common)
    if members:
        smallest = min(m.peak_bytes for m in members)
        message = f"none of its {len(members)} plans fits; the smallest needs {format_size(smallest)}"
    else:
        message = outcome.message or rejected or "it proposed no plan"
    return _without_plan(chosen, problem, Status.NO_PLAN, message, bound=bound, **common)
