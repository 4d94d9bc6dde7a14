"""Cost over the optimum (Table 2), from the sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from analysis.paper.sweeps import Sweep, decided_costs, proven_words, ratios, sweeps
from analysis.parts import Part, Table, prose
from analysis.results import read_json
from analysis.style import style_of

# Geometric means as third parties quote them, because we did not have the paper itself.
PUBLISHED = {
    "MobileNet": {"ap_sqrtn": 1.14, "ap_greedy": 1.07, "griewank": 7.07, "lp_rounding": 1.06},
    "VGG16": {"ap_sqrtn": 1.28, "ap_greedy": 1.06, "griewank": 1.44, "lp_rounding": 1.01},
    "VGG19": {"ap_sqrtn": 1.54, "ap_greedy": 1.39, "griewank": 1.75, "lp_rounding": 1.00},
    "U-Net": {"ap_sqrtn": 1.27, "ap_greedy": 1.23, "lp_rounding": 1.03},
    "ResNet50": {"ap_sqrtn": 1.20, "ap_greedy": 1.25, "lp_rounding": 1.05},
}


def report(_: Mapping[str, Any], folder: Path) -> Part:
    """A row for each sweep and strategy."""
    all_sweeps = list(sweeps(read_json(folder / "fig5.json"), folder))
    rows = [row for sweep in all_sweeps for row in _rows(sweep)]
    return Part(
        *prose(__file__, proven=proven_words(all_sweeps)),
        tables=[Table(
            "table2", "Cost / cheapest known cost",
            ["network", "graph", "strategy", "geometric mean", "maximum", "budgets", "published [2nd]/[mem]"], rows,
        )],
    )  # fmt: skip


def _rows(sweep: Sweep) -> list[list[str]]:
    rows, n_budgets = [], len(decided_costs(sweep.run))
    published = PUBLISHED.get(sweep.label, {})
    for run, words in ((sweep.run, ""), (sweep.artifact, ", as the artifact counts")):
        if run is None:
            continue
        for name in run.strategies:
            values = ratios(sweep.run, name, run)
            does_not_apply = set(run.shown.loc[run.shown["strategy"] == name, "status"]) == {"SKIPPED"}
            if not values and (does_not_apply or (words and name not in published)):
                continue  # nothing to compare
            mean, most = (f"{geometric_mean(values):.3f}", f"{max(values):.3f}") if values else ("", "")
            rows.append([
                sweep.label, sweep.source, f"{style_of(name).label}{words}", mean, most,
                f"{len(values)} of {n_budgets}", f"{published[name]:.2f}" if name in published else "",
            ])  # fmt: skip
    return rows
