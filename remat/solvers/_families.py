"""Plans of other strategies, as starts for a search."""

from __future__ import annotations

import time
from collections.abc import Iterator

from remat.compiled import is_compiled
from remat.context import Context
from remat.errors import Skip
from remat.plan import Plan
from remat.registry import Strategy, get_strategy, strategies
from remat.solution import candidates_of


def start_plans(context: Context) -> Iterator[tuple[str, Plan]]:
    """(strategy name, plan) of each plan of the strategies that give starts, also of those beyond the budget.

    A strategy that would be compiled first is left out, because nothing could interrupt that.
    """
    for chosen in map(get_strategy, strategies()):
        if chosen.gives_starts and (chosen.compiles is None or is_compiled(chosen.compiles)):
            for plan in _plans(chosen, context):
                yield chosen.name, plan


def family_plans(context: Context, until: float) -> Iterator[tuple[str, Plan]]:
    """(strategy name, plan) of the strategies that ignore the budget, until the time `until` (`time.monotonic`).

    Plans beyond the budget are among them.

    The strategies take turns, so that a long family does not delay a short one.
    """
    limited = context.until(until)
    waiting = [
        (chosen.name, _plans(chosen, limited))
        for chosen in map(get_strategy, strategies())
        if chosen.ignores_budget and not chosen.isolated
    ]
    while waiting:
        for entry in list(waiting):
            if time.monotonic() > until:
                return
            plan = next(entry[1], None)
            if plan is None:
                waiting.remove(entry)
            else:
                yield entry[0], plan


def _plans(chosen: Strategy, context: Context) -> Iterator[Plan]:
    try:
        for candidate in candidates_of(chosen(context, {})):
            yield candidate.plan
    except Skip:
        pass  # the strategy does not apply to this graph
