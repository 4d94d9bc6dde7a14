"""The portfolio: every method that applies, the best plan and the best bound."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from remat.errors import RematError, Skip
from remat.eviction import greedy_eviction
from remat.registry import get_strategy, strategies, strategy
from remat.simulator import simulate
from remat.solve import Candidate, Outcome, Problem, Status, candidates_of
from remat.strategies._backends import get_backend
from remat.strategies._milp_published import estimate_nonzeros

MILP_NONZEROS = 1_500_000  # beyond it HiGHS finds nothing in the minutes a portfolio is given
MILP_SECONDS = 3.0  # less is not worth the start of its process
HEURISTICS_SHARE = 0.4  # of the time, at most, before the MILP starts
LARGE_SHARE = 0.9  # of the time, where no MILP follows
GREEDY_SHARE = 0.5  # of that, at most, for the greedy: on large graphs it would leave nothing to the others
COST_POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)


def _check_options(options: dict[str, Any]) -> None:
    get_backend(options.get("solver", "highs"))


@strategy("portfolio", check=_check_options)
def portfolio(problem: Problem, *, solver: str = "highs", milp_nonzeros: int = MILP_NONZEROS) -> Outcome:
    """Best plan and best bound of everything that applies, in the time given.

    A thin first form: greedy eviction, every registered strategy that ignores the budget, then the
    exact MILP in what is left of the time (in a process of its own) if the graph is small enough.

    Args:
        solver: of the MILP, as in `checkmate_milp`.
        milp_nonzeros: largest model that is given to the MILP.
    """
    graph = problem.graph
    started = time.monotonic()
    small = estimate_nonzeros(graph) <= milp_nonzeros
    share = HEURISTICS_SHARE if small else LARGE_SHARE  # nothing comes after them on a large graph
    quick = replace(problem, deadline=min(problem.deadline, started + share * problem.remaining_s()))
    best: tuple[tuple[int, int], Candidate] | None = None
    failures: list[str] = []
    for name, candidates in _quick_members(quick):
        try:
            for candidate in candidates:
                best = _better(problem, best, candidate, name)
                if not quick.remaining_s():
                    break
        except Skip:
            pass  # it does not apply to this graph
        except Exception as error:  # one broken method must not cost the others' plans; it is named
            failures.append(f"{name} failed: {error}")
        if not quick.remaining_s():
            break
    stats: dict[str, Any] = {"heuristics_s": time.monotonic() - started}
    if best is not None:
        stats["heuristics_cost"] = best[0][0]
    found = () if best is None else (best[1],)
    if best is not None and best[0][0] == graph.total_cost:
        return Outcome(found, message="; ".join(failures), stats=stats)
    if problem.remaining_s() < MILP_SECONDS or not small:
        timed_out = best is None and not quick.remaining_s()
        why = "no time was left for it" if small else f"its model has over {milp_nonzeros:,} nonzeros (milp_nonzeros)"
        failures.append(f"checkmate_milp left out: {why}")
        return Outcome(found, timed_out=timed_out, message="; ".join(failures), stats=stats)
    return _with_milp(problem, solver, best, failures, stats)


def _quick_members(problem: Problem) -> Iterator[tuple[str, Iterator[Candidate]]]:
    """(name, candidates) of every fast method; nothing runs before its candidates are asked for."""
    middle = time.monotonic() + GREEDY_SHARE * problem.remaining_s()
    yield "greedy_eviction", _greedy(replace(problem, deadline=min(problem.deadline, middle)))
    for name in strategies():
        chosen = get_strategy(name)
        if chosen.ignores_budget and not chosen.isolated:
            yield name, _of_family(chosen.run, problem)


def _greedy(problem: Problem) -> Iterator[Candidate]:
    for power in COST_POWERS:
        plan = greedy_eviction(problem.graph, problem.budget_bytes, cost_power=power, deadline=problem.deadline)
        if plan is not None:
            yield Candidate(plan, {"cost_power": power})


def _of_family(run: Any, problem: Problem) -> Iterator[Candidate]:
    yield from candidates_of(run(problem))


def _better(
    problem: Problem, best: tuple[tuple[int, int], Candidate] | None, candidate: Candidate, name: str
) -> tuple[tuple[int, int], Candidate] | None:
    """The better of two by (cost, peak), if the new one fits and is in scope."""
    if not problem.scope.contains(candidate.plan.scope):
        return best
    trace = simulate(problem.graph, candidate.plan)
    if trace.peak_bytes > problem.budget_bytes:
        return best
    key = trace.cost, trace.peak_bytes
    if best is not None and best[0] <= key:
        return best
    return key, Candidate(candidate.plan, {"from": name, **candidate.parameters})


def _with_milp(
    problem: Problem,
    solver: str,
    best: tuple[tuple[int, int], Candidate] | None,
    failures: list[str],
    stats: dict[str, Any],
) -> Outcome:
    from remat.worker import solve_isolated  # a solver that hangs or dies costs its own process

    start = None if best is None else best[1].plan
    milp = solve_isolated(replace(problem, warm_start=start), "checkmate_milp", {"solver": solver})
    stats |= {"milp_status": str(milp.status), "milp_s": milp.wall_s}
    if milp.status in (Status.FAILED, Status.SKIPPED):
        failures.append(f"checkmate_milp {milp.status}: {milp.message}")
    if milp.plan is not None:
        best = _better(problem, best, Candidate(milp.plan), "checkmate_milp")
    if best is not None and milp.status is Status.INFEASIBLE:
        raise RematError(f"the MILP claims that no plan fits, but {best[1].parameters['from']} has one")
    return Outcome(
        () if best is None else (best[1],),
        bound=milp.bound,
        infeasible=milp.status is Status.INFEASIBLE,
        timed_out=milp.status is Status.TIMEOUT,
        message="; ".join(failures),
        stats=stats,
    )
