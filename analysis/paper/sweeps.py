"""Numbers from the sweeps of Figure 5: the cheapest plan and the best bound at each budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.results import PAPERS_HEURISTICS, WITH_PLAN, Run, load_run

USEFUL = 2.0  # in costs of a plain step; at the tightest budgets only plans that keep almost nothing fit


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """One sweep.

    Attributes:
        source: of its graph, ``published`` or ``ours``.
        artifact: the heuristics when they hold their checkpoints to the end of the step, as in Checkmate's artifact.
    """

    network: str
    label: str
    source: str
    run: Run
    artifact: Run | None = None


def sweeps(document: Mapping[str, Any], folder: Path) -> Iterator[Sweep]:
    """The sweeps of a fig5 document."""
    for panel in document["panels"]:
        yield Sweep(panel["network"], panel["label"], panel["source"], load_run(folder / panel["folder"]),
                    load_run(folder / panel["artifact"]) if "artifact" in panel else None)  # fmt: skip


def best_costs(run: Run) -> dict[int, tuple[int, int | None]]:
    """[budget_bytes, of those with a plan] (cost of the cheapest plan, best bound)."""
    found: dict[int, tuple[int, int | None]] = {}
    for budget, rows in run.shown.groupby("budget_bytes"):
        planned = rows[rows["status"].isin(WITH_PLAN) & rows["cost"].notna()]
        if len(planned):
            bounds = rows["bound"].dropna()
            found[int(budget)] = int(planned["cost"].min()), int(bounds.max()) if len(bounds) else None
    return found


def best_heuristic(run: Run, budget_bytes: int) -> tuple[int, str] | None:
    """(cost, name) of the cheapest of the paper's heuristics at one budget; None if none fits."""
    rows = run.shown
    rows = rows[
        (rows["budget_bytes"] == budget_bytes) & rows["strategy"].isin(PAPERS_HEURISTICS) & rows["cost"].notna()
    ]
    return min(((int(row.cost), str(row.strategy)) for row in rows.itertuples()), default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Gain:
    """Cost of the best heuristic over the cheapest plan's at one budget."""

    ratio: float
    sweep: Sweep
    budget_bytes: int
    heuristic: str


def largest_gain(
    group: Iterable[Sweep], *, useful: float = USEFUL, budget_bytes: int | None = None, artifact: bool = False
) -> Gain | None:
    """The largest gain over the budgets where the best heuristic costs at most `useful` plain steps.

    Args:
        budget_bytes: only at this budget.
        artifact: the heuristics hold their checkpoints to the end, see `Sweep.artifact`.
    """
    gains = [
        Gain(heuristic[0] / cost, sweep, budget, heuristic[1])
        for sweep in group
        for budget, (cost, _) in best_costs(sweep.run).items()
        if (run := sweep.artifact if artifact else sweep.run) is not None
        and budget_bytes in (None, budget)
        and (heuristic := best_heuristic(run, budget))
        and heuristic[0] <= useful * sweep.run.total_cost
    ]
    return max(gains, key=lambda gain: gain.ratio, default=None)


def decided_costs(run: Run) -> dict[int, int]:
    """[budget_bytes] the cheapest known cost, without the budgets at which that plan repeats nothing."""
    return {budget: cost for budget, (cost, _) in best_costs(run).items() if cost > run.total_cost}


def ratios(run: Run, strategy: str, of: Run | None = None) -> list[float]:
    """The strategy's cost divided by the cheapest cost that `run` knows, for each budget of `decided_costs`.

    Args:
        of: the run with the strategy's rows; by default `run` itself.
    """
    best, own = decided_costs(run), (run if of is None else of).shown
    rows = own[(own["strategy"] == strategy) & own["cost"].notna()]
    return [int(row.cost) / best[int(row.budget_bytes)] for row in rows.itertuples() if int(row.budget_bytes) in best]


def gaps(run: Run) -> dict[int, float]:
    """[budget_bytes] (cost - bound) / cost of the cheapest plan, for the budgets of `decided_costs`.

    The bound is at least the cost of running every operation once.
    """
    bounds = {budget: max(bound or 0, run.total_cost) for budget, (_, bound) in best_costs(run).items()}
    return {budget: (cost - bounds[budget]) / cost for budget, cost in decided_costs(run).items()}


def proven_words(group: Iterable[Sweep]) -> str:
    """How many of the cheapest plans are proven to be within 1 % of the optimum, and the widest gap, see `gaps`."""
    known = [(gap, sweep, budget) for sweep in group for budget, gap in gaps(sweep.run).items()]
    if not known:
        return "no plan with recomputation was found"
    near = sum(gap <= 0.01 for gap, *_ in known)
    gap, sweep, budget = max(known, key=lambda one: one[0])
    return (
        f"{near} of {len(known)} are proven to be within 1 % of the optimum; the widest gap to a proven bound is "
        f"{100 * gap:.1f} % ({sweep.label} at {budget / 1e9:.2f} GB)"
    )
