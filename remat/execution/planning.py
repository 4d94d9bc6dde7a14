"""From a captured step and a budget as a user gives it to a plan, or to an error that says why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from remat.errors import InvalidInput
from remat.graph import Graph
from remat.incumbent import GAP_TOLERANCE
from remat.plan import Plan
from remat.simulator import simulate
from remat.solve import Solution, solve
from remat.units import format_size, parse_size


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks in bytes that a budget is compared with: of the framework's own step, or why it is not known."""

    plain_bytes: int | None
    unknown_because: str = ""


def parse_budget(budget: int | float | str | np.floating, plain: Peaks) -> int:
    """Total bytes from an integer, a size (``8GB``) or a fraction in (0, 1] of the plain step's peak.

    Raises:
        InvalidInput: not a size, a fraction outside (0, 1], or a fraction while the plain peak is not known.
    """
    if isinstance(budget, (float, np.floating)):
        share = float(budget)
        if not (math.isfinite(share) and 0 < share <= 1):
            raise InvalidInput(f"budget={budget!r}: a fraction of the plain step's peak is above 0 and at most 1; "
                               "write an integer number of bytes or e.g. '8GB' for a size")  # fmt: skip
        if plain.plain_bytes is None:
            raise InvalidInput(f"budget={budget!r} is a fraction, but the plain step's peak is not known: "
                               f"{plain.unknown_because}; give a size, e.g. budget='8GB'")  # fmt: skip
        return int(share * plain.plain_bytes)
    return parse_size(budget)


def find_plan(
    graph: Graph,
    budget_bytes: int,
    *,
    strategy: str,
    scope: str,
    time_limit_s: float,
    seed: int,
    threads: int,
    known: Iterable[Plan] = (),
) -> Solution:
    """A plan within the budget, at least as cheap as every one of `known` that fits.

    If everything fits without a recomputation in the graph's order, that is the plan, and nothing is solved.

    Raises:
        InvalidInput: no plan was found; the message says what is known of the smallest budget.
    """
    once = Plan.from_order(graph, range(len(graph)), budget_bytes)
    fitting = [once] if simulate(graph, once).peak_bytes <= budget_bytes else []
    if fitting:
        return solve(graph, budget_bytes, "checkpoint_all")
    fitting += [plan for plan in known if simulate(graph, plan).peak_bytes <= budget_bytes]
    solution = solve(
        graph, budget_bytes, strategy, scope=scope, time_limit_s=time_limit_s, seed=seed, threads=threads,
        warm_start=min(fitting, key=lambda plan: simulate(graph, plan).cost, default=None),
        target_gap=max(GAP_TOLERANCE, 0.001),
    )  # fmt: skip
    if solution.plan is None:
        raise InvalidInput(
            f"no plan of '{graph.name}' within {format_size(budget_bytes)} ({solution.status} by {strategy}): "
            f"{solution.message}"
        )
    return solution
