"""`solve`: run any strategy on a problem and judge its result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from remat.errors import HostFull, InvalidInput, InvalidPlan, shown
from remat.graph import Graph, check_graph
from remat.link import Link, parse_link
from remat.plan import Plan, parse_scope
from remat.problem import Problem, SolveOptions, check_accounting, check_host
from remat.registry import Strategy, get_strategy
from remat.simulator import simulate
from remat.solution import Member, Solution, candidates_of
from remat.solving.arenas import solve_with_arena
from remat.solving.budgets import share, solve_ascending
from remat.solving.dispatch import new_context, run_strategy
from remat.solving.here import run_family, solve_family
from remat.solving.judgement import at_least, judge, name_minimum, refuse_if_impossible, restated
from remat.solving.worker import run_family_isolated
from remat.units import MAX_BYTES, parse_size


def solve(
    graph: Graph,
    budget: int | str,
    strategy: str = "portfolio",
    scope: str = "staged",
    *,
    accounting: str = "exact",
    link: Link | str | None = None,
    arena: bool = False,
    **options: Any,
) -> Solution:
    """Find a plan for `graph` within `budget`.

    Args:
        budget: total bytes, fixed bytes included; an int or a string with a unit (``5GiB``).
        strategy: a name from `remat.strategies()`.
        scope: ``staged``, ``fixed_order`` or ``free``.
        accounting: ``exact``, or ``published`` for the memory that Checkmate's artifact counts.
        link: to the host's memory, to which values may be copied: a `remat.Link`, a rate (``12GB/s``) or a name
            (``pcie5``). Costs and bounds are makespans then.
        arena: find a plan that has an arena within the budget (`Solution.arena`), or the one found that misses it by
            least, which the message says.
        options: `remat.SolveOptions` (`time_limit_s`, `seed`, `threads`, ...) and keyword options of the strategy.

    Returns:
        A `Solution`, even if no plan meets the budget. Ctrl-C returns the best plan found so far, and raises
        KeyboardInterrupt only if there is none.

    Raises:
        InvalidInput: unknown strategy or option, unreadable size or limit.
    """
    if not isinstance(arena, bool):
        raise InvalidInput(f"arena must be True or False, not {shown(arena)}")

    def solve_within(budget: int | str, **more: Any) -> Solution:
        return solve_sweep(graph, [budget], strategy, scope, accounting=accounting, link=link, **{**options, **more})[0]

    if not arena:
        return solve_within(budget)
    check_graph(graph)
    how, _ = SolveOptions.split(options)
    return solve_with_arena(
        graph, parse_size(budget), how.time_limit_s,
        lambda size, seconds, n_before, plan: solve_within(
            size, time_limit_s=seconds, seed=how.seed + n_before, warm_start=plan or how.warm_start
        ),
    )  # fmt: skip


def solve_sweep(
    graph: Graph,
    budgets: Sequence[int | str],
    strategy: str = "portfolio",
    scope: str = "staged",
    *,
    accounting: str = "exact",
    link: Link | str | None = None,
    isolate: bool | None = None,
    **options: Any,
) -> list[Solution]:
    """`solve` for several budgets, with the time limit for each; solutions in the order of `budgets`.

    A strategy that ignores the budget runs once for all budgets. `isolate` overrides whether the strategy
    runs in a separate process with a hard limit. Budgets are solved in ascending order, each from the best
    plan of the smaller ones, and `remat.solving.budgets.share` makes the results monotone. The results of a
    baseline are never shared.
    """
    began = time.monotonic()
    chosen = get_strategy(strategy)  # a process's first call imports all strategies, which counts as time of the solve
    how, own = SolveOptions.split(options)
    chosen.check_options(own)
    way = parse_link(link)
    if how.warm_start is not None and how.warm_start.has_copies and way is None:
        raise InvalidInput("warm_start copies values to the host; give the solve a link, too, e.g. link=12GB/s")
    checked = _checked(graph, how.warm_start)
    check_host(checked, way, f"'{graph.name}'", "link=")
    if how.warm_start is not None:
        _check_warm_start(checked, how.warm_start, way)
    question = Problem(checked, 0, parse_scope(scope), check_accounting(accounting), link=way)
    if isolate is not None and not isinstance(isolate, bool):
        raise InvalidInput(f"isolate must be True, False or None, not {shown(isolate)}")
    if isinstance(budgets, (str, bytes)) or not np.iterable(budgets):
        raise InvalidInput(f"budgets must be a list of sizes, not {shown(budgets)}; `remat.solve` takes a single one")
    problems = [replace(question, budget_bytes=parse_size(budget)) for budget in budgets]

    if not graph.has_implementations or chosen.implementations != "default":
        return _solve_all(chosen, problems, how, own, isolate, began)
    default, start = graph.default(), how.warm_start
    start = None if start is None or start.implementations else replace(start, graph_sha256=default.sha256())
    plain = replace(how, warm_start=start)
    solutions = _solve_all(chosen, [replace(p, graph=default) for p in problems], plain, own, isolate, began)
    found = [restated(graph, solution, "with default implementations") for solution in solutions]
    return [_no_worse(chosen, one, asked, how.warm_start) for one, asked in zip(found, problems, strict=True)]


def _no_worse(chosen: Strategy, solution: Solution, problem: Problem, warm_start: Plan | None) -> Solution:
    """The solution, which is no worse than the warm start; a baseline's as it is."""
    return solution if warm_start is None or chosen.is_baseline else at_least(solution, problem, warm_start)


def _checked(graph: Graph, warm_start: Plan | None) -> Graph:
    """The graph; raises `InvalidInput` if it is no graph, is empty, or is not that of the warm start."""
    check_graph(graph)
    if not len(graph):
        raise InvalidInput(f"graph '{graph.name}' has no operations; there is nothing to plan")
    if warm_start is not None and warm_start.graph_sha256 != graph.sha256():
        raise InvalidInput(f"warm_start was made for another graph ('{warm_start.graph_name}'), not for '{graph.name}'")
    return graph


def _check_warm_start(graph: Graph, warm_start: Plan, link: Link | None) -> None:
    """Raise `InvalidPlan` if it cannot be executed; one that does not fit is not wrong."""
    try:
        simulate(graph, warm_start, link=link)
    except HostFull:
        pass
    except InvalidPlan as error:
        raise error.of_file("warm_start") from None


def _solve_all(
    chosen: Strategy, problems: Sequence[Problem], how: SolveOptions, own: Mapping[str, Any], isolate: bool | None,
    began: float,
) -> list[Solution]:  # fmt: skip
    """The solutions of `problems`; the clock of the first one runs since `began` (`time.monotonic`)."""
    late_s = time.monotonic() - began
    if chosen.ignores_budget:
        if not problems:
            return []
        widest = max(problems, key=lambda problem: problem.budget_bytes)
        context = new_context(widest, replace(how, progress=None))
        is_aside = chosen.in_own_process(False, len(widest.graph))  # a family has no wish of the caller
        family_of = partial(run_family_isolated, start_counts=True) if is_aside else run_family
        found = solve_family(family_of(context, chosen.name, own), problems)
        return [_no_worse(chosen, one, asked, how.warm_start) for one, asked in zip(found, problems, strict=True)]

    def solve_one(problem: Problem, warm_start: Plan | None) -> Solution:
        nonlocal late_s
        context = new_context(problem, replace(how, warm_start=warm_start))
        context, late_s = context.until(context.deadline - late_s), 0.0
        refusal = refuse_if_impossible(problem, chosen.name)
        if refusal is not None:
            return refusal
        solution = run_strategy(context, chosen.name, own, isolate=isolate)
        solution = _no_worse(chosen, solution, problem, how.warm_start)
        takes_start = how.warm_start is None and not chosen.is_baseline
        return name_minimum(solution, problem, context.deadline, takes_start=takes_start)

    if chosen.is_baseline or len(problems) == 1:
        return [solve_one(problem, how.warm_start) for problem in problems]
    return share(solve_ascending(problems, how.warm_start, solve_one))


def family(
    graph: Graph,
    strategy: str,
    *,
    scope: str = "staged",
    accounting: str = "exact",
    time_limit_s: float = 60.0,
    **options: Any,
) -> list[Member]:
    """Every plan of a strategy that ignores the budget, judged, e.g. to draw a figure.

    Raises:
        Skip: the strategy does not apply to this graph.
        InvalidInput: the strategy depends on the budget.
    """
    chosen = get_strategy(strategy)
    chosen.check_options(options)
    if not chosen.ignores_budget:
        raise InvalidInput(f"strategy '{strategy}' depends on the budget; it has no family to list")
    problem = Problem(_checked(graph, None), MAX_BYTES, parse_scope(scope), check_accounting(accounting))
    context = new_context(problem, SolveOptions(time_limit_s=time_limit_s).checked())
    return judge(context, candidates_of(chosen(context, options)))[0]
