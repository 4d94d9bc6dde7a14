"""The plans to show: one in the printed figures, a few on the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from analysis.results import Run
from analysis.style import order_of, style_of
from remat.graph import Graph
from remat.plan import Plan, frees_held_to_end
from remat.simulator import Trace, simulate
from remat.units import format_size

MAX_PLANS = 40
MAX_STEPS = 400_000  # over all plans of a page


@dataclass(frozen=True, slots=True, eq=False)
class ShownPlan:
    """A stored plan with its row and its trace."""

    row: Any
    plan: Plan
    trace: Trace

    @property
    def strategy(self) -> str:
        return str(self.row.strategy)

    @property
    def title(self) -> str:
        return f"{style_of(self.strategy).label} at {format_size(int(self.row.budget_bytes))}"


def store_all(graph: Graph, accounting: str) -> Trace:
    """The trace of checkpoint-all, which is plain training."""
    order = range(len(graph))
    if accounting == "published":
        return simulate(graph, Plan.from_steps(graph, frees_held_to_end(graph, order, range(len(graph.values)))))
    return simulate(graph, Plan.from_order(graph, order))


def chosen_plan(run: Run) -> ShownPlan | None:
    """The plan of the printed figures: the cheapest at the middle one of the budgets that need recomputation.

    Ties go to a proven plan, then to the strategy further down the legend (exact and combined strategies).
    """
    rows = [row for row in run.planned.itertuples() if isinstance(row.plan_file, str)]
    working = [row for row in rows if row.overhead > 0] or rows
    budgets = sorted({int(row.budget_bytes) for row in working})
    if not budgets or run.graph is None:
        return None
    middle = budgets[(len(budgets) - 1) // 2]
    at_middle = [row for row in working if int(row.budget_bytes) == middle]
    best = min(
        at_middle,
        key=lambda row: (int(row.cost), row.status != "OPTIMAL", -order_of(row.strategy)[0], row.strategy, row.key),
    )
    return _shown(run, best)


def page_plans(run: Run) -> list[ShownPlan]:
    """Each strategy's cheapest plan at up to three budgets (tight, middle, wide), within the limits of a page."""
    rows = [row for row in run.planned.itertuples() if isinstance(row.plan_file, str)]
    budgets = sorted({int(row.budget_bytes) for row in rows if row.overhead > 0} or {int(r.budget_bytes) for r in rows})
    if not budgets or run.graph is None:
        return []
    picked = {budgets[0], budgets[(len(budgets) - 1) // 2], budgets[(3 * (len(budgets) - 1)) // 4]}
    best: dict[tuple[str, int], Any] = {}
    for row in rows:
        place = (str(row.strategy), int(row.budget_bytes))
        if place[1] in picked and (place not in best or row.cost < best[place].cost):
            best[place] = row
    shown, steps = [], 0
    for strategy, budget in sorted(best, key=lambda place: (order_of(place[0]), place[1])):
        one = _shown(run, best[strategy, budget])
        if one is None:
            continue
        steps += len(one.plan.ids)
        if len(shown) >= MAX_PLANS or steps > MAX_STEPS:
            break
        shown.append(one)
    return shown


def _shown(run: Run, row: Any) -> ShownPlan | None:
    found = run.load_plan(row)
    return None if found is None else ShownPlan(row, *found)
