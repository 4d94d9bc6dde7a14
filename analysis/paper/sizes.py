"""What fits and what it is worth: largest batches (Figure 6), samples a second, sizes, a GiB's price, memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import batches, memory
from analysis.charts import legend_below, panels, points
from analysis.matrices import COLOURS, MOST_CELLS, NOTHING, RESIDENT, cells
from analysis.paper.sweeps import USEFUL
from analysis.parts import Part, Study, prose
from analysis.results import Run, ShownPlan, chosen_plan, store_all
from analysis.style import AGAIN, BLACK, BLUE, FIRST, HELD, ORANGE, order_of, style_of
from remat.graph import Graph


def fig6(document: Mapping[str, Any], _: Study) -> Part:
    """What came out; the figure and the batches of every strategy are on a page of their own."""
    documents = document["documents"]
    others = {batches.ENCODERS[d["network"]]: d["network"] for d in documents if d["network"] in batches.ENCODERS}
    networks = {others.get(d["network"], d["network"]) for d in documents}  # one with two encoders counts once
    open_ = {
        others.get(d["network"], d["network"]) for d in documents
        if any(batches.max_found(d, rule["name"]) != d["proven"][rule["name"]] for rule in d["rules"])
    }  # fmt: skip
    real = ", ".join(f"{batches.network_label(d)} {batches.continuous(d):.4f}" for d in documents)
    return Part(
        *prose("fig6", closed=len(networks - open_), networks=len(networks), real=real),
        tables=[("fig6", *batches.summary(documents))] if documents else [],
    )  # fmt: skip


def throughput(document: Mapping[str, Any], _: Study) -> Part:
    """A curve for each network, and the sizes that fit."""
    networks = [d for d in document["throughput"] if d["best"] is not None]
    searches = [search for search in document["searches"] if search["trials"]]
    at_plain = [d for d in networks if d["best"] <= d["plain_batch"]]
    found = []
    for s in searches:
        limit = f"{s['ruled_out_label']} is proven impossible" if s["ruled_out"] else "no limit was proven"
        found.append(f"The largest {s['what']} at batch {s['batch']}: {s['found_label'] or 'none found'}; {limit}.")
    tables = [
        ("throughput", batches.SPEED_HEADS,
         [row for d in networks for row in batches.speed_rows(d, batches.network_label(d))]),
        ("memory_price", ("network", "batch", "ms for each GiB", "bound of a step, ms"), _prices(networks)),
        *((f"largest_model_{n}", batches.TRIAL_HEADS, batches.trial_rows(search))
          for n, search in enumerate(searches, 1)),
    ]  # fmt: skip
    return Part(
        *prose("throughput", searches=" ".join(found), closed=_names(d for d in at_plain if _is_closed(d)),
            open=_names(d for d in at_plain if not _is_closed(d)),
            beyond=_names(d for d in networks if d["best"] > d["plain_batch"]),
        ),
        [("throughput", f"Samples a second against batch size, {document['gpu']}, roofline costs",
          batches.curves(networks))] if networks else [],
        [table for table in tables if table[-1]],
    )  # fmt: skip


def _names(documents: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(map(batches.network_label, documents)) or "none"


def _is_closed(document: Mapping[str, Any]) -> bool:
    """Whether the bounds prove that no batch tried is faster than the best found."""
    best = next(p["samples_per_s"] for p in document["points"] if p["batch"] == document["best"])
    return all(point["most_per_s"] <= best * (1 + 1e-9) for point in document["points"])


def _prices(networks: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [batches.network_label(d), str(p["batch"]), *(
            ("not solved in time", "") if p["ms_per_gib"] is None
            else (f"{p['ms_per_gib']:.3f}", f"{p['bound_ns'] / 1e6:.2f}")
        )]
        for d in networks for p in d["prices"]
    ]  # fmt: skip


def memory_part(document: Mapping[str, Any], study: Study) -> Part:
    """Three figures and the sizes as a table."""
    run = study.run(document["plans"])
    graph, shown = run.graph, chosen_plan(run)
    figures = []
    values = {"network": run.title, "plain": 0.0, "peak": 0.0, "more": 0.0, "left_out": "none"}
    if shown is not None and graph is not None:
        plain = store_all(graph, str(shown.row.accounting))
        figures.append(("memory_over_time", f"{run.title}: memory held over a training step",
                        memory.draw(graph, shown, plain)))  # fmt: skip
        caption, matrices, left_out = _schedules(run, graph)
        figures.append(("schedules", caption, matrices))
        values |= {"plain": plain.peak_bytes / 1e9, "peak": shown.trace.peak_bytes / 1e9, "left_out": left_out,
                   "more": 100 * (shown.trace.cost / plain.cost - 1)}  # fmt: skip
    sizes = document["sizes"]
    figures.append(
        ("layers", "Cost and memory of each layer of a forward pass, as shares of the largest", _layers(sizes))
    )
    return Part(
        *prose("memory", **values, spread=_spread(sizes), features=_features(sizes)),
        figures,
        [("features_parameters", ["network", "batch", "features GB", "parameters GB", "ratio"], [
            [s["label"], str(s["batch"]), f"{s['features_bytes'] / 1e9:.2f}", f"{s['parameter_bytes'] / 1e9:.3f}",
             f"{s['features_bytes'] / s['parameter_bytes']:.0f}" if s["parameter_bytes"] else ""] for s in sizes
        ])],
    )  # fmt: skip


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
    for key, what in (("layer_costs", "cost"), ("layer_flops", "FLOPs"), ("layer_bytes", "memory")):
        ratio, label = max((1 / float(_positive(s[key]).min(initial=1.0)), s["label"]) for s in sizes)
        words.append(f"{ratio:,.0f} times in {what} ({label})")
    return f"{', '.join(words[:-1])} and {words[-1]}"


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


def _schedules(run: Run, graph: Graph) -> tuple[str, Figure, str]:
    """(caption, a matrix R over S for each cost of a plan, strategies left out) at the run's budget.

    Plans of equal cost hardly differ: one stands for all, that of the strategy furthest down the legend.
    """
    groups: dict[int, list[ShownPlan]] = {}
    for row in sorted(run.planned.itertuples(), key=lambda row: order_of(row.strategy)):
        found = run.load_plan(row)
        if found is not None:
            groups.setdefault(int(row.cost), []).append(ShownPlan(row, *found))
    drawn = {cost: group for cost, group in sorted(groups.items()) if cost <= USEFUL * graph.total_cost}
    figure, grid = panels(len(drawn), (1.55, 1.95), 5)
    figure.set_layout_engine("constrained", h_pad=0.09)
    for axes, group in zip(grid, drawn.values(), strict=True):
        R, S, _ = cells(graph, group[-1].plan, MOST_CELLS)
        axes.imshow(np.where((R == NOTHING) & (S > 0), RESIDENT, R), cmap=ListedColormap(list(COLOURS)), vmin=0, vmax=3,
                    interpolation="nearest")  # fmt: skip
        name = style_of(group[-1].strategy).label + (f" + {len(group) - 1}" if len(group) > 1 else "")
        axes.set_title(f"{name}\n{100 * float(group[-1].row.overhead):.2f} %", fontsize=8)
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
    handles = [Patch(color=FIRST, label="first computation"), Patch(color=AGAIN, label="recomputation"),
               Patch(color=HELD, label="resident when the stage starts")]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    same = "; ".join(f"{_labels(group[:-1])} as {style_of(group[-1].strategy).label}"
                     for group in drawn.values() if len(group) > 1)  # fmt: skip
    asked = set(run.rows.loc[run.rows["status"] != "SKIPPED", "strategy"]) - set(run.planned["strategy"])
    above = [shown for cost, group in groups.items() if cost not in drawn for shown in group]
    without = ", ".join(style_of(name).label for name in sorted(asked, key=order_of))
    left_out = f"{without} (no plan)" + (f" and {_labels(above)} (over twice the cost)" if above else "")
    budget = int(run.rows["budget_bytes"].min()) / 1e9
    return (f"{run.title} within {budget:.2f} GB. Rows: stages; columns: operations; overheads in the titles. {same}",
            figure, left_out)  # fmt: skip


def _labels(group: Sequence[ShownPlan]) -> str:
    return ", ".join(style_of(shown.strategy).label for shown in group)
