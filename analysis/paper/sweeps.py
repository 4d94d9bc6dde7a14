"""The sweeps of Figure 5 as numbers: the cheapest plan and the best bound at each budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.results import WITH_PLAN, Run, load_run

HEURISTICS = ("checkpoint_all", "checkpoint_all_ap", "checkpoint_last", "griewank", "chen_sqrtn", "chen_greedy",
              "ap_sqrtn", "ap_greedy")  # fmt: skip

USEFUL = 2.0  # costs of a plain step; at the tightest budgets only plans that keep almost nothing fit


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """One panel: its stored run, and whose graph it is."""

    network: str
    label: str
    source: str
    run: Run


def sweeps(document: Mapping[str, Any], folder: Path) -> Iterator[Sweep]:
    """The panels of a fig5 document."""
    for panel in document["panels"]:
        yield Sweep(panel["network"], panel["label"], panel["source"], load_run(folder / panel["folder"]))


def best_costs(run: Run) -> dict[int, tuple[int, int | None]]:
    """[budget_bytes] (the cheapest plan's cost, the best bound); budgets with a plan."""
    found: dict[int, tuple[int, int | None]] = {}
    for budget, rows in run.shown.groupby("budget_bytes"):
        planned = rows[rows["status"].isin(WITH_PLAN) & rows["cost"].notna()]
        if len(planned):
            bounds = rows["bound"].dropna()
            found[int(budget)] = int(planned["cost"].min()), int(bounds.max()) if len(bounds) else None
    return found


def best_heuristic(run: Run, budget_bytes: int) -> tuple[int, str] | None:
    """(cost, name) of the cheapest heuristic at one budget; None if none fits."""
    rows = run.shown
    rows = rows[(rows["budget_bytes"] == budget_bytes) & rows["strategy"].isin(HEURISTICS) & rows["cost"].notna()]
    return min(((int(row.cost), str(row.strategy)) for row in rows.itertuples()), default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Gain:
    """Cost of the best heuristic over the cheapest plan's at one budget."""

    ratio: float
    sweep: Sweep
    budget_bytes: int
    heuristic: str


def largest_gain(group: Iterable[Sweep]) -> Gain | None:
    """Over all budgets at which a heuristic fits that is of use: one that costs at most `USEFUL` plain steps."""
    gains = [
        Gain(heuristic[0] / cost, sweep, budget, heuristic[1])
        for sweep in group
        for budget, (cost, _) in best_costs(sweep.run).items()
        if (heuristic := best_heuristic(sweep.run, budget)) and heuristic[0] <= USEFUL * sweep.run.total_cost
    ]
    return max(gains, key=lambda gain: gain.ratio, default=None)


def ratios(run: Run, strategy: str) -> list[float]:
    """cost / the cheapest known cost at each budget of the sweep that leaves something to decide.

    Budgets at which nothing has to be computed again are left out, as everything is optimal there.
    """
    best = best_costs(run)
    rows = run.shown[(run.shown["strategy"] == strategy) & run.shown["cost"].notna()]
    return [
        int(row.cost) / best[int(row.budget_bytes)][0]
        for row in rows.itertuples()
        if int(row.budget_bytes) in best and best[int(row.budget_bytes)][0] > run.total_cost
    ]


def geometric_mean(values: list[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def gaps(run: Run) -> dict[int, float]:
    """[budget_bytes] (cost - bound) / cost of the cheapest plan: how far it may be from the optimum."""
    return {
        budget: (cost - (run.total_cost if bound is None else max(bound, run.total_cost))) / cost
        for budget, (cost, bound) in best_costs(run).items()
    }


def proven_words(group: Iterable[Sweep]) -> str:
    """How many of the cheapest plans are proven to be within a hundredth of the optimum, and which is the farthest."""
    known = [(gap, sweep, budget) for sweep in group for budget, gap in gaps(sweep.run).items()]
    if not known:
        return "no plan was found"
    near = sum(gap <= 0.01 for gap, *_ in known)
    gap, sweep, budget = max(known, key=lambda one: one[0])
    return (
        f"{near} of {len(known)} are proven to be within 1 % of the optimum; the widest gap to a proven bound is "
        f"{100 * gap:.1f} % ({sweep.label} at {budget / 1e9:.2f} GB)"
    )
