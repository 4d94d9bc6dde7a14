"""From a captured step and a user's budget to a plan, or to an error that says why there is none."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from remat.bounds.min_budget import DESCRIBE_SECONDS, min_budget
from remat.cost import COST_MODELS
from remat.cost.gpu import Gpu, load_gpu
from remat.cost.profile import cpu_count
from remat.errors import InvalidInput, RematError, check_name
from remat.execution.kept import keep_plan, kept_plan, path_of
from remat.execution.step_plan import StepPlan
from remat.graph import Graph
from remat.link import Link
from remat.plan import Plan, parse_scope
from remat.problem import SolveOptions, check_gap
from remat.registry import get_strategy
from remat.simulator import simulate
from remat.solution import Ending, Solution, Status
from remat.solving.api import solve
from remat.units import format_size, parse_size

if TYPE_CHECKING:
    from typing_extensions import TypeIs

DEFAULT_STRATEGY = "portfolio"
ENOUGH = 0.001  # share of the cost that is not worth more time
# A plan is kept that took so long to search, if the search ended by itself: another one would have no more time. On a
# busy machine a later one may find more, so that there the gap must be small.
KEEP_S, ENDED_ITSELF = 0.2, 0.9  # seconds; most share of the time limit
QUIET, KEEP_GAP = 0.8, 0.01  # least processor seconds for each second; largest gap where there were fewer
_log = logging.getLogger("remat")
NO_BUDGET = "give a budget (e.g. budget='8GB', or budget=0.6 of the plain step's peak) or a plan (plan='plan.json')"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How plans are made, in any framework.

    Attributes:
        cost: of operations: ``profile``, ``roofline`` or ``flops``.
        time_limit_s, seed, threads: of the solver; None: a thread for each core.
        target_gap: of the solver; None ends it too where more time is not worth it (`remat.solving.patience`).
        gpu: of ``cost="roofline"``.
        link: that plans may copy values over; None for no copies.
        cache_folder: of measurements, and of plans that were searched (`remat.execution.kept`).
    """

    strategy: str = DEFAULT_STRATEGY
    scope: str = "free"
    cost: str = "profile"
    time_limit_s: float = 60.0
    seed: int = 0
    threads: int | None = None
    target_gap: float | None = None
    gpu: Gpu = field(default_factory=lambda: load_gpu("cpu"))
    cache_folder: Path = field(default_factory=lambda: default_cache() / "profile")
    link: Link | None = None

    def of_solver(self) -> dict[str, Any]:
        """Keyword arguments of `remat.solve`."""
        threads = cpu_count() if self.threads is None else self.threads
        return {"time_limit_s": self.time_limit_s, "threads": threads, **self.of_search()}

    def of_search(self) -> dict[str, Any]:
        """Those of `of_solver` on which the plan of a search depends that ends by itself."""
        gaps = {"target_gap": self.target_gap}
        if self.target_gap is None:
            gaps = {"target_gap": ENOUGH, "least_gain": ENOUGH}
        return {"scope": self.scope, "seed": self.seed, **gaps}

    def within(self, seconds: float) -> PlanOptions:
        """The same with another time limit."""
        return replace(self, time_limit_s=seconds)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak in bytes of the framework's own step, or why it is not known."""

    plain_bytes: int | None
    unknown_because: str = ""


UNKNOWN = Peaks(None)


def parse_budget(budget: int | float | str | np.floating, plain: Peaks) -> int:
    """Total bytes from an integer, a size (``8GB``) or a fraction in (0, 1] of the plain step's peak.

    Raises:
        InvalidInput: not a size, a fraction outside (0, 1], or a fraction although the plain peak is not known.
    """
    if is_fraction(budget):
        share = float(budget)
        if not (math.isfinite(share) and 0 < share <= 1):
            raise InvalidInput(f"budget={budget!r}: a fraction of the plain step's peak is above 0 and at most 1; "
                               "write an integer number of bytes or e.g. '8GB' for a size")  # fmt: skip
        if plain.plain_bytes is None:
            raise InvalidInput(f"budget={budget!r} is a fraction, but the plain step's peak is not known: "
                               f"{plain.unknown_because}; give a size, e.g. budget='8GB'")  # fmt: skip
        return int(share * plain.plain_bytes)
    return parse_size(budget)


def is_fraction(budget: object) -> TypeIs[float | np.floating]:
    """Whether a budget is a fraction of the plain step's peak."""
    return isinstance(budget, (float, np.floating))


def check_options(budget: Any, plan: Any, options: PlanOptions) -> None:
    """Refuse unusable options before a step is captured."""
    if budget is None and plan is None:
        raise InvalidInput(NO_BUDGET)
    if plan is not None and not isinstance(plan, (StepPlan, str, os.PathLike)):
        raise InvalidInput(f"plan must be the .plan of a module or the path of a saved one, not {type(plan).__name__}")
    if budget is not None:
        parse_budget(budget, Peaks(2**40))  # with any plain peak, so that a fraction can be checked
    is_default = isinstance(options.strategy, str) and options.strategy == DEFAULT_STRATEGY
    if plan is None or not is_default:  # a plan can be followed without any solver installed
        get_strategy(options.strategy)
    parse_scope(options.scope)
    threads = 1 if options.threads is None else options.threads
    SolveOptions(time_limit_s=options.time_limit_s, seed=options.seed, threads=threads).checked()
    if options.target_gap is not None:
        check_gap("target_gap", options.target_gap)
    check_name("cost model", options.cost, COST_MODELS)


def default_cache() -> Path:
    """Folder of stored measurements: ``$REMAT_CACHE``, or ``remat`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("REMAT_CACHE") or Path(base, "remat"))


def announce_pause(name: str, inputs: str, time_limit_s: float, instead: str) -> None:
    """Log a warning that a step is planned now, and how to plan it earlier.

    The warning goes to the logger ``remat``: to stderr, unless the program configures logging.

    Args:
        name: of the model.
        inputs: shapes and dtypes for which the step is planned.
        time_limit_s: of the solver.
        instead: the call that plans ahead, e.g. ``model.prepare(...)``.
    """
    _log.warning(
        "remat: the training loop pauses to plan '%s' for %s: up to %g s of search, and measurements of kernels that "
        "are new; %s before the loop avoids this", name, inputs, time_limit_s, instead,
    )  # fmt: skip


def cheapest_fitting(graph: Graph, plans: Iterable[Plan], budget_bytes: int) -> Plan | None:
    """The cheapest of `plans` whose peak is within the budget; None if there is none."""
    traces = ((simulate(graph, plan), plan) for plan in plans)
    fitting = [(trace.cost, plan) for trace, plan in traces if trace.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda pair: pair[0])[1] if fitting else None


def find_plan(graph: Graph, budget_bytes: int, options: PlanOptions, known: Iterable[Plan] = ()) -> Solution:
    """A plan within the budget, at least as cheap as every plan of `known` that fits.

    If the graph's order fits without recomputation, that is the plan, and nothing is solved, unless operations have
    other implementations, which may be faster. A plan that an earlier call searched for is read from `cache_folder`.

    Raises:
        InvalidInput: no plan was found; the message says what is known about the smallest budget.
        RematError: the strategy failed.
    """
    once = Plan.from_order(graph, range(len(graph)), budget_bytes)
    if not graph.has_implementations and cheapest_fitting(graph, [once], budget_bytes) is not None:
        return solve(graph, budget_bytes, DEFAULT_STRATEGY)  # ends at once

    def solved(start: Plan | None, seconds: float) -> Solution:
        how = options.within(seconds).of_solver()
        return solve(graph, budget_bytes, options.strategy, link=options.link, **how, warm_start=start)

    best = cheapest_fitting(graph, known, budget_bytes)
    path = None
    if options.strategy == DEFAULT_STRATEGY and options.link is None:
        path = path_of(options.cache_folder, graph, budget_bytes, options.strategy, options.of_search())
        if (kept := _kept(path, graph, budget_bytes, options, best)) is not None:
            return kept
    began_s = time.process_time()
    solution = solved(best, options.time_limit_s)
    used_s = time.process_time() - began_s
    if path is not None and solution.plan is not None and _is_final(solution, used_s, options.time_limit_s):
        keep_plan(path, graph, solution.plan)
    if solution.plan is None and solution.status is not Status.INFEASIBLE:
        least = min_budget(graph, options.scope, time_limit_s=DESCRIBE_SECONDS)  # minimizes only memory, not cost
        if least.bytes <= budget_bytes:
            solution = solved(least.plan, min(options.time_limit_s, DESCRIBE_SECONDS))
    if solution.status is Status.FAILED:
        raise RematError(f"{options.strategy} failed on '{graph.name}': {solution.message}")
    if solution.plan is None:
        raise InvalidInput(
            f"no plan of '{graph.name}' within {format_size(budget_bytes)} ({solution.status} by {options.strategy}): "
            f"{solution.message}"
        )
    return solution


def _is_final(solution: Solution, used_s: float, time_limit_s: float) -> bool:
    """Whether another search is not expected to find a cheaper plan; `used_s`: processor seconds of this process."""
    ended_itself = solution.ended is Ending.RETURNED and KEEP_S < solution.wall_s < ENDED_ITSELF * time_limit_s
    was_quiet = used_s >= QUIET * solution.wall_s
    return ended_itself and (was_quiet or (solution.gap is not None and solution.gap <= KEEP_GAP))


def _kept(path: Path, graph: Graph, budget_bytes: int, options: PlanOptions, best: Plan | None) -> Solution | None:
    """The plan of a file as a solution; None if there is none, or `best` costs less."""
    scope = parse_scope(options.scope)
    found = kept_plan(path, graph, budget_bytes, scope)
    if found is None:
        return None
    plan, trace = found
    if best is not None and simulate(graph, best).cost < trace.cost:
        return None
    overhead = trace.cost / graph.total_cost - 1 if graph.total_cost else 0.0
    return Solution(
        Status.FEASIBLE, options.strategy, graph.name, budget_bytes, scope, "exact", plan, trace.cost,
        trace.peak_bytes, overhead, message="searched for before",
    )  # fmt: skip
