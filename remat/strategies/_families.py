"""Plans of the strategies that ignore the budget, for those that need one to start from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from remat.errors import Skip
from remat.plan import Plan
from remat.registry import get_strategy, strategies
from remat.solve import Problem, candidates_of


def family_plans(problem: Problem, until: float) -> Iterator[tuple[str, Plan]]:
    """(strategy, plan) of each, whether it fits the budget or not, until the time `until` (`time.monotonic`)."""
    for name in strategies():
        chosen = get_strategy(name)
        if chosen.ignores_budget and not chosen.isolated:
            try:
                for candidate in candidates_of(chosen.run(replace(problem, deadline=until))):
                    yield name, candidate.plan
                    if time.monotonic() > until:
                        return
            except Skip:
                pass  # it does not apply to this graph
        if time.monotonic() > until:
            return
