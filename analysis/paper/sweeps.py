"""Overhead against budget, a figure for each network (Figure 5), cost over the optimum (Table 2), cost models."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from statistics import geometric_mean, median_high
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import overhead
from analysis.charts import heatmap, panels
from analysis.overhead_data import overhead_data
from analysis.parts import Part, Study, percent, prose
from analysis.published import PUBLISHED
from analysis.results import PAPERS_HEURISTICS, WITH_PLAN, Frame, Run
from analysis.style import style_of

MOST = 0.5  # overhead at the top of Figure 5, as in the paper
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
    artifact: Run


def sweeps(document: Mapping[str, Any], study: Study) -> Iterator[Sweep]:
    """The sweeps of a fig5 document."""
    for panel in document["panels"]:
        runs = study.run(panel["panel"]), study.run(panel["artifact"])
        yield Sweep(panel["network"], panel["label"], panel["source"], *runs)


def best_costs(run: Run) -> dict[int, tuple[int, int | None]]:
    """[budget_bytes, of those with a plan] (cost of the cheapest plan, best bound)."""
    found: dict[int, tuple[int, int | None]] = {}
    for budget, rows in run.rows.groupby("budget_bytes"):
        planned = rows[rows["status"].isin(WITH_PLAN) & rows["cost"].notna()]
        if len(planned):
            bounds = rows["bound"].dropna()
            found[int(budget)] = int(planned["cost"].min()), int(bounds.max()) if len(bounds) else None
    return found


def best_heuristic(run: Run, budget_bytes: int) -> tuple[int, str] | None:
    """(cost, name) of the cheapest of the paper's heuristics at one budget; None if none fits."""
    rows = run.rows
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
        if budget_bytes in (None, budget)
        and (heuristic := best_heuristic(sweep.artifact if artifact else sweep.run, budget))
        and heuristic[0] <= useful * sweep.run.total_cost
    ]
    return max(gains, key=lambda gain: gain.ratio, default=None)


def decided_costs(run: Run) -> dict[int, int]:
    """[budget_bytes] the cheapest known cost, without the budgets at which that plan repeats nothing."""
    return {budget: cost for budget, (cost, _) in best_costs(run).items() if cost > run.total_cost}


def ratios(run: Run, strategy: str, of: Run | None = None, *, every: bool = False) -> list[float]:
    """The strategy's cost divided by the cheapest cost that `run` knows, for each budget of `decided_costs`.

    Args:
        of: the run with the strategy's rows; by default `run` itself.
        every: at every budget with a plan, as in the artifact's means, also where the cheapest repeats nothing. A
            strategy's only plan that needs more than all of these budgets has the same ratio wherever it fits.
    """
    best = {b: cost for b, (cost, _) in best_costs(run).items()} if every else decided_costs(run)
    own = (run if of is None else of).rows
    rows = own[(own["strategy"] == strategy) & own["cost"].notna()]
    found = [int(row.cost) / best[int(row.budget_bytes)] for row in rows.itertuples() if int(row.budget_bytes) in best]
    members = run.families[run.families["strategy"] == strategy] if every and not found else ()
    return [int(members["cost"].iloc[0]) / run.total_cost] if len(members) == 1 else found


def gaps(run: Run) -> dict[int, float]:
    """[budget_bytes] (cost - bound) / cost of the cheapest plan, for the budgets of `decided_costs`.

    The bound is at least the cost of running every operation once.
    """
    bounds = {budget: max(bound or 0, run.total_cost) for budget, (_, bound) in best_costs(run).items()}
    return {budget: (cost - bounds[budget]) / cost for budget, cost in decided_costs(run).items()}


def proven(group: Iterable[Sweep]) -> dict[str, Any]:
    """How many of the cheapest plans are within 1 % of a bound, and the widest gap, see `gaps`; for the prose."""
    known = [(gap, sweep, budget) for sweep in group for budget, gap in gaps(sweep.run).items()]
    widest, sweep, budget = max(known, key=lambda one: one[0], default=(0.0, None, 0))
    return {"near": sum(gap <= 0.01 for gap, *_ in known), "known": len(known), "widest": 100 * widest,
            "widest_at": "none" if sweep is None else f"{sweep.label} at {budget / 1e9:.2f} GB"}  # fmt: skip


SOURCE = {"published": "published graph, V100 costs", "ours": "our extraction, roofline costs"}


def fig5(document: Mapping[str, Any], study: Study) -> Part:
    """A figure for each network, and the cost of the best plan at each budget."""
    all_sweeps = list(sweeps(document, study))
    figures = []
    for label, group in groupby(all_sweeps, key=lambda sweep: sweep.label):
        drawn = _figure(list(group))
        if drawn is not None:
            name = f"fig5_{label.lower().replace(' ', '_').replace('-', '')}"
            figures.append((name, f"{label}: compute overhead against memory budget", drawn))
    gain = largest_gain(all_sweeps)
    has_published = any(sweep.source == "published" for sweep in all_sweeps)
    fate = "carry the costs behind the published figure" if has_published else "were not there (set REMAT_INSTANCES)"
    points = max((len(best_costs(sweep.run)) for sweep in all_sweeps), default=0)
    gain_on = "none" if gain is None else f"{gain.sweep.label} ({SOURCE[gain.sweep.source]})"
    return Part(
        *prose("fig5", sweeps=len(all_sweeps), points=points, start=start_of(document), gain_on=gain_on,
            gain=1.0 if gain is None else gain.ratio, **proven(all_sweeps), published=f"The published graphs {fate}",
        ),
        figures,
        [("fig5_best", *_best_rows(all_sweeps))],
    )  # fmt: skip


def start_of(document: Mapping[str, Any]) -> str:
    """From which plans the MILPs of a document started."""
    if document.get("has_starts"):
        return "The MILPs start from the cheapest plan of a heuristic that fits, as the artifact's."
    return ("These rows are older than that start: here the trimmed form begins with a plan of ours, the published "
            "form with nothing.")  # fmt: skip


def _figure(group: list[Sweep]) -> Figure | None:
    known = [(overhead_data(sweep.run, MOST), sweep) for sweep in group]
    shown = [(panel, sweep) for panel, sweep in known if panel is not None]
    if not shown:
        return None
    figure, grid = panels(len(shown), (4.4, 3.3))
    figure.set_figwidth(figure.get_figwidth() + 2.8)  # of the legend
    for axes, (panel, sweep) in zip(grid, shown, strict=True):
        overhead.draw_axes(axes, panel, sweep.run)
        axes.set_title(f"{sweep.label}: {SOURCE[sweep.source]}", fontsize=9)
        axes.set_xlabel(f"Memory budget ({panel.scale.unit})")
    overhead.place_legend(figure, overhead.legend([panel for panel, _ in shown]))
    return figure


def _best_rows(all_sweeps: list[Sweep]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for sweep in all_sweeps:
        total = sweep.run.total_cost
        for budget, (cost, bound) in best_costs(sweep.run).items():
            heuristic = best_heuristic(sweep.run, budget)
            rows.append([
                sweep.label, SOURCE[sweep.source], f"{budget / 1e9:.2f}", percent(cost / total - 1),
                "" if bound is None else percent(max(bound, total) / total - 1),
                "none fits" if heuristic is None else percent(heuristic[0] / total - 1),
            ])  # fmt: skip
    return ["network", "graph and costs", "budget GB", "best plan", "lower bound", "best heuristic"], rows


def table2(document: Mapping[str, Any], study: Study) -> Part:
    """A row for each sweep and strategy."""
    all_sweeps = list(sweeps(document, study))
    rows = [row for sweep in all_sweeps for row in ratio_rows(sweep)]
    return Part(*prose("table2", **proven(all_sweeps)), tables=[("table2", RATIO_HEADS, rows)])


RATIO_HEADS = ("network", "graph", "strategy", "geometric mean", "maximum", "budgets", "mean over all budgets",
               "published [2nd]/[mem]")  # fmt: skip


def ratio_rows(sweep: Sweep) -> list[list[str]]:
    """Cells of `RATIO_HEADS`; a published number stands where costs and counting are the artifact's."""
    rows, n_budgets = [], len(decided_costs(sweep.run))
    published = PUBLISHED["checkmate"]["table_2"].get(sweep.label, {})
    for run, words in ((sweep.run, ""), (sweep.artifact, ", as the artifact counts")):
        for name in run.strategies:
            values, every = ratios(sweep.run, name, run), ratios(sweep.run, name, run, every=True)
            does_not_apply = set(run.rows.loc[run.rows["strategy"] == name, "status"]) == {"SKIPPED"}
            if not values and (does_not_apply or (words and name not in published)):
                continue  # nothing to compare
            is_like = sweep.source == "published" and bool(words) == (name in PAPERS_HEURISTICS)
            mean, most, over_all = (f"{f(x):.3f}" if x else "" for f, x in
                                    ((geometric_mean, values), (max, values), (geometric_mean, every)))  # fmt: skip
            rows.append([
                sweep.label, sweep.source, f"{style_of(name).label}{words}", mean, most,
                f"{len(values)} of {n_budgets}", over_all,
                f"{published[name]:.2f}" if is_like and name in published else "",
            ])  # fmt: skip
    return rows


def cost_models(document: Mapping[str, Any], _: Study) -> Part:
    """A matrix of losses for each network and batch, and the rows."""
    rows = document["rows"]
    worst = max(rows, key=_loss, default=None)
    others = [_loss(row) for row in rows if row["chosen_under"] != row["judged_by"]]
    worst_of = dict.fromkeys(("loss", "case", "chosen_under", "judged_by"), "none")
    if worst is not None:
        worst_of = worst | {"loss": percent(_loss(worst)), "case": _case(worst)}
    proven = {case: _gap_words([row for row in rows if _case(row) == case]) for case in dict.fromkeys(map(_case, rows))}
    left_out = f" Left out: {'; '.join(document['skipped'])}." if document["skipped"] else ""
    return Part(
        *prose("cost_models", worst=worst_of, median=percent(median_high(others or [0.0])),
               gaps="; ".join(f"{n} {w}" for n, w in proven.items()), left_out=left_out),
        [("cost_models", "Loss of a plan chosen under one cost model and judged by another", _losses_figure(rows))]
        if rows else [],
        [("cost_models", [
            "network", "batch", "budget GB", "chosen under", "judged by", "loss",
        ], [
            [r["network"], str(r["batch"]), f"{r['budget_bytes'] / 1e9:.3f}", r["chosen_under"], r["judged_by"],
             percent(_loss(r))] for r in rows
        ])],
    )  # fmt: skip


def _case(row: Mapping[str, Any]) -> str:
    return f"{row['network']}, batch {row['batch']}"


def _gap_words(rows: list[dict[str, Any]]) -> str:
    """The widest gap of the plans of each cost model."""
    words = []
    for cost in dict.fromkeys(row["chosen_under"] for row in rows):
        of = [row["gap"] for row in rows if row["chosen_under"] == cost]
        words.append(f"{cost} {'no bound' if None in of else percent(max(of))}")
    return ", ".join(words)


def _loss(row: Mapping[str, Any]) -> float:
    return row["cost"] / row["best"] - 1


def _losses_figure(rows: list[dict[str, Any]]) -> Figure:
    """Networks across; above the published batch, below the one that a CPU can run. A dash: a model without a plan."""
    frame: Frame = pd.DataFrame([row | {"loss": 100 * _loss(row)} for row in rows])
    networks, least = list(frame["network"].unique()), frame["batch"].min()
    costs = {is_small: list(own["chosen_under"].unique()) for is_small, own in frame.groupby(frame["batch"] == least)}
    top = 1.3 * frame["loss"].max() or 1.0
    figure, grid = panels(2 * len(networks), (1.75, 1.6), len(networks), xlabel="judged by", ylabel="chosen under")
    for (network, batch), own in frame.groupby(["network", "batch"], sort=False):
        of, column = costs[batch == least], networks.index(network)
        axes = grid[len(networks) * int(batch == least) + column]
        largest = own.pivot_table("loss", "chosen_under", "judged_by", aggfunc="max")
        losses = largest.reindex(index=of, columns=of).to_numpy()
        texts = np.where(np.isnan(losses), "–", np.char.mod("%.1f", losses))
        heatmap(axes, np.nan_to_num(losses), texts, of if column == 0 else [], of, colours="Blues", top=top)
        axes.set_title(f"{network}, batch {batch}", fontsize=9)
    for axes in grid:
        axes.set_visible(axes.has_data())
    figure.suptitle("Largest loss over the budgets, in per cent", x=0.01, ha="left", fontsize=9)
    return figure
