"""Memory over time, features against parameters, and the schedules of all strategies side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import memory
from analysis.matrices import COLOURS, MOST_CELLS, NOTHING, RESIDENT, cells
from analysis.parts import Part, Table, prose
from analysis.results import Run, load_run
from analysis.shown_plans import ShownPlan, chosen_plan, store_all
from analysis.style import AGAIN, BLUE, FIRST, HELD, ORANGE, order_of, style_of

COLUMNS = 4


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """Three figures and the sizes as a table."""
    chain, schedules = load_run(folder / document["over_time"]), load_run(folder / document["matrices"])
    figures = []
    shown = chosen_plan(chain)
    chain_words = "no plan of the chain was found."
    if shown is not None and chain.graph is not None:
        plain = store_all(chain.graph, str(shown.row.accounting))
        figures.append(("memory_over_time", "Memory held over a training step", memory.draw(chain.graph, shown, plain)))
        chain_words = (f"the chain's peak falls from {plain.peak_bytes:,} to {shown.trace.peak_bytes:,} bytes for "
                f"{100 * (shown.trace.cost / plain.cost - 1):.1f} % more computation.")  # fmt: skip
    sizes = document["sizes"]
    figures.append(("features_parameters", "Features against parameters", _sizes(sizes)))
    matrices = _matrices(schedules)
    if matrices is not None:
        figures.append(("schedules", _caption(schedules), matrices))
    return Part(
        *prose(__file__, chain=chain_words),
        figures,
        [Table("features_parameters", "Float32", ["network", "batch", "features GB", "parameters GB", "ratio"], [
            [s["label"], str(s["batch"]), f"{s['features_bytes'] / 1e9:.2f}", f"{s['parameter_bytes'] / 1e9:.3f}",
             f"{s['features_bytes'] / s['parameter_bytes']:.0f}" if s["parameter_bytes"] else ""] for s in sizes
        ])],
    )  # fmt: skip


def _sizes(sizes: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(7.0, 0.42 * len(sizes) + 1.5), layout="constrained")
    axes = figure.subplots()
    y = np.arange(len(sizes))
    for shift, key, colour, hatch in ((-0.2, "features_bytes", BLUE, ""), (0.2, "parameter_bytes", ORANGE, "///")):
        axes.barh(y + shift, [max(s[key], 1) / 1e9 for s in sizes], 0.38, color=colour, hatch=hatch, edgecolor="white",
                  label="features" if key == "features_bytes" else "parameters")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yticks(y, [f"{s['label']} (batch {s['batch']})" for s in sizes])
    axes.invert_yaxis()
    axes.set_xlabel("Memory (GB, logarithmic)")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _caption(run: Run) -> str:
    """The figure's caption: network, budget, and the strategies without a plan."""
    without = [style_of(name).label for name in run.strategies if name not in set(run.planned["strategy"])]
    missing = f"; without a plan there: {', '.join(without)}" if without else ""
    budget = int(run.shown["budget_bytes"].min()) / 1e9
    return f"{run.title} within {budget:.2f} GB: values computed and held in each stage{missing}"


def _matrices(run: Run) -> Figure | None:
    """Every strategy's plan at the run's budget, as one matrix each: R over S. None without plans."""
    graph = run.graph
    plans = [ShownPlan(row, *found) for row in run.planned.itertuples() if (found := run.load_plan(row))]
    if graph is None or not plans:
        return None
    plans.sort(key=lambda shown: order_of(shown.strategy))
    n_rows = -(-len(plans) // COLUMNS)
    figure = Figure(figsize=(8.4, 2.35 * n_rows + 0.6))
    figure.set_layout_engine("constrained", h_pad=0.09)
    all_axes = figure.subplots(n_rows, COLUMNS, squeeze=False).ravel()
    for axes, shown in zip(all_axes, plans, strict=False):
        R, S, _ = cells(graph, shown.plan, MOST_CELLS)
        axes.imshow(np.where((R == NOTHING) & (S > 0), RESIDENT, R), cmap=ListedColormap(list(COLOURS)), vmin=0, vmax=3,
                    interpolation="nearest")  # fmt: skip
        axes.set_title(
            f"{style_of(shown.strategy).label}\n{100 * float(shown.row.overhead):.2f} %", fontsize=8, loc="left"
        )
        axes.set_xticks([])
        axes.set_yticks([])
        axes.grid(visible=False)
    for axes in all_axes[len(plans) :]:
        axes.set_visible(False)
    handles = [Patch(color=FIRST, label="first computation"), Patch(color=AGAIN, label="recomputation"),
               Patch(color=HELD, label="resident when the stage starts")]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3,
                  title="rows: stages, columns: operations; overhead in the titles", title_fontsize=8)  # fmt: skip
    return figure
