"""Run one strategy on one problem: in this process, or in a worker if the strategy or the caller asks for one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from remat.context import Context
from remat.problem import Problem, SolveOptions
from remat.registry import get_strategy
from remat.solution import Ending, Solution
from remat.solving.here import solve_here
from remat.solving.worker import solve_isolated


def run_strategy(
    context: Context,
    strategy: str,
    options: Mapping[str, Any],
    *,
    isolate: bool | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Solution:
    """The solution of one strategy, by default in a separate process if it declares so; `should_stop` ends a worker."""
    if get_strategy(strategy).in_own_process(isolate, len(context.problem.graph)):
        return solve_isolated(context, strategy, options, should_stop)
    return solve_here(context, strategy, options)


def _run_member(
    context: Context, strategy: str, options: Mapping[str, Any], *, isolate: bool | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Solution:  # fmt: skip
    """`run_strategy` for another strategy; Ctrl-C that ended the member ends the other one too."""
    solution = run_strategy(context, strategy, options, isolate=isolate, should_stop=should_stop)
    is_main = threading.current_thread() is threading.main_thread()
    if solution.ended is Ending.INTERRUPTED and is_main and not should_stop():
        raise KeyboardInterrupt
    return solution


def new_context(problem: Problem, options: SolveOptions) -> Context:
    """A solve of `problem` that starts now."""
    return Context.of(problem, options, _run_member)
