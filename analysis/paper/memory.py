"""Memory over time, features against parameters, spread over layers, and the schedules of all strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import memory
from analysis.charts import legend_below, panels, points
from analysis.matrices import COLOURS, MOST_CELLS, NOTHING, RESIDENT, cells
from analysis.parts import Part, Study, Table, prose
from analysis.results import Run
from analysis.shown_plans import ShownPlan, chosen_plan, store_all
from analysis.style import AGAIN, BLACK, BLUE, FIRST, HELD, ORANGE, order_of, style_of


def report(document: Mapping[str, Any], study: Study) -> Part:
    """Four figures and the sizes as a table."""
    run, schedules = study.run(document["over_time"]), study.run(document["matrices"])
    figures = []
    shown = chosen_plan(run)
    chain = {"plain": 0, "peak": 0, "more": 0.0}
    if shown is not None and run.graph is not None:
        plain = store_all(run.graph, str(shown.row.accounting))
        figures.append(("memory_over_time", "Memory held over a training step", memory.draw(run.graph, shown, plain)))
        more = 100 * (shown.trace.cost / plain.cost - 1)
        chain = {"plain": plain.peak_bytes, "peak": shown.trace.peak_bytes, "more": more}
    sizes = document["sizes"]
    figures.append(("features_parameters", "Features against parameters", _sizes(sizes)))
    figures.append(
        ("layers", "Cost and memory of each layer of a forward pass, as shares of the largest", _layers(sizes))
    )
    matrices = _matrices(schedules)
    if matrices is not None:
        figures.append(("schedules", _caption(schedules), matrices))
    return Part(
        *prose(__file__, "memory", **chain, spread=_spread(sizes), features=_features(sizes)),
        figures,
        [Table("features_parameters", ["network", "batch", "features GB", "parameters GB", "ratio"], [
            [s["label"], str(s["batch"]), f"{s['features_bytes'] / 1e9:.2f}", f"{s['parameter_bytes'] / 1e9:.3f}",
             f"{s['features_bytes'] / s['parameter_bytes']:.0f}" if s["parameter_bytes"] else ""] for s in sizes
        ])],
    )  # fmt: skip


def _sizes(sizes: list[dict[str, Any]]) -> Figure:
    figure, (axes,) = panels(1, (6.6, 0.42 * len(sizes) + 0.9), xlabel="Memory (GB, logarithmic)")
    y = np.arange(len(sizes))
    for shift, key, label, colour, hatch in (
        (-0.2, "features_bytes", "features", BLUE, ""), (0.2, "parameter_bytes", "parameters", ORANGE, "///"),
    ):  # fmt: skip
        axes.barh(y + shift, [max(s[key], 1) / 1e9 for s in sizes], 0.38, color=colour, hatch=hatch, edgecolor="white",
                  label=label)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yticks(y, [f"{s['label']} (batch {s['batch']})" for s in sizes])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    legend_below(figure)
    return figure


def _features(sizes: Sequence[Mapping[str, Any]]) -> str:
    """The least and the most times that a network's features take the bytes of its parameters."""
    found = sorted((s["features_bytes"] / s["parameter_bytes"], s["label"]) for s in sizes if s["parameter_bytes"])
    ends = dict.fromkeys((found[0], found[-1])) if found else {}
    return " to ".join(f"{ratio:,.0f} times ({label})" for ratio, label in ends) + " the bytes"


def _positive(numbers: Sequence[int]) -> np.ndarray:
    """Those above zero, as shares of the largest."""
    kept = np.array([number for number in numbers if number > 0], dtype=float)
    return kept / kept.max(initial=1.0)


def _spread(sizes: Sequence[Mapping[str, Any]]) -> str:
    """The widest ratios of a network's largest layer to its smallest."""
    words = []
    for key, what in (("layer_costs", "cost"), ("layer_bytes", "memory")):
        ratio, label = max((1 / float(_positive(s[key]).min(initial=1.0)), s["label"]) for s in sizes)
        words.append(f"{ratio:,.0f} times in {what} ({label})")
    return " and ".join(words)


def _layers(sizes: Sequence[Mapping[str, Any]]) -> Figure:
    """A strip of marks for each network, one for each layer: costs on the left, bytes on the right."""
    figure, both = panels(2, (4.0, 0.36 * len(sizes) + 0.5), sharey=True)
    marks = (("layer_costs", "Cost of a layer", BLUE), ("layer_bytes", "Output of a layer", ORANGE))
    for axes, (key, what, colour) in zip(both, marks, strict=True):
        for y, one in enumerate(sizes):
            shares = _positive(one[key])
            points(axes, [(x, y) for x in shares], colour, "|", size=10, alpha=0.6)
            points(axes, [(float(np.median(shares)), y)], BLACK, "D", size=4, label="median")
        axes.set(xscale="log", xlabel=f"{what} / the network's largest")
        axes.grid(visible=False, axis="y")
        axes.set_yticks(range(len(sizes)), [one["label"] for one in sizes])
        axes.set_ylim(len(sizes) - 0.5, -0.5)
    legend_below(figure)
    return figure


def _caption(run: Run) -> str:
    """The figure's caption: network, budget, and the strategies without a plan."""
    asked = set(run.shown.loc[run.shown["status"] != "SKIPPED", "strategy"]) - set(run.planned["strategy"])
    without = [style_of(name).label for name in run.strategies if name in asked]
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
    figure, grid = panels(len(plans), (2.0, 2.35), 4)
    figure.set_layout_engine("constrained", h_pad=0.09)
    for axes, shown in zip(grid, plans, strict=True):
        R, S, _ = cells(graph, shown.plan, MOST_CELLS)
        axes.imshow(np.where((R == NOTHING) & (S > 0), RESIDENT, R), cmap=ListedColormap(list(COLOURS)), vmin=0, vmax=3,
                    interpolation="nearest")  # fmt: skip
        axes.set_title(f"{style_of(shown.strategy).label}\n{100 * float(shown.row.overhead):.2f} %", fontsize=8)
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
    handles = [Patch(color=FIRST, label="first computation"), Patch(color=AGAIN, label="recomputation"),
               Patch(color=HELD, label="resident when the stage starts")]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3,
                  title="rows: stages, columns: operations; overhead in the titles", title_fontsize=8)  # fmt: skip
    return figure
