"""What fits and what it is worth: largest batches (Figure 6), samples a second, sizes, a GiB's price, memory."""

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
from analysis.max_batch_size import ENCODERS, continuous, found_rows, limit_rows, max_found, network_label
from analysis.paper.sweeps import USEFUL
from analysis.parts import Part, Study, Table, percent, prose
from analysis.results import Run
from analysis.shown_plans import ShownPlan, chosen_plan, store_all
from analysis.style import AGAIN, BLACK, BLUE, FIRST, HELD, ORANGE, order_of, style_of
from analysis.throughput import KINDS, plot, sizes
from remat.graph import Graph


def fig6(document: Mapping[str, Any], _: Study) -> Part:
    """The bars, and found and proven batches as tables."""
    documents = document["documents"]
    others = {ENCODERS[d["network"]]: d["network"] for d in documents if d["network"] in ENCODERS}
    networks = {others.get(d["network"], d["network"]) for d in documents}  # one with two encoders counts once
    open_ = {
        others.get(d["network"], d["network"]) for d in documents
        if any(max_found(d, rule["name"]) != d["proven"][rule["name"]] for rule in d["rules"])
    }  # fmt: skip
    real = ", ".join(f"{network_label(d)} {continuous(d):.4f}" for d in documents)
    return Part(
        *prose(__file__, "fig6", closed=len(networks - open_), networks=len(networks), real=real),
        tables=[_batches(documents, rule) for rule in documents[0]["rules"]] if documents else [],
    )


def _batches(documents: list[dict[str, Any]], rule: Mapping[str, str]) -> Table:
    def label(strategy: str) -> str:
        return style_of(strategy).label

    rows = [row for row in found_rows(documents, rule["name"], label) if any(row[1:])]
    rows += limit_rows(documents, rule["name"], label)
    return Table(f"fig6_{rule['name']}", ["strategy", *map(network_label, documents)], rows)


def throughput(document: Mapping[str, Any], _: Study) -> Part:
    """A curve for each network, and the sizes that fit."""
    networks = [d for d in document["throughput"] if d["best"] is not None]
    searches = [search for search in document["searches"] if search["trials"]]
    figures, tables = [], []
    if networks:
        figures.append(("throughput", f"Samples a second against batch size, {document['gpu']}, roofline costs",
                        _curves(networks)))  # fmt: skip
        tables += [_speeds(networks), _prices(networks)]
    if searches:
        figures.append(("largest_model", "Sizes tried, and their peaks without recomputation",
                        sizes(searches, document["memory_bytes"])))  # fmt: skip
        tables += [_trials(search, number) for number, search in enumerate(searches)]
    return Part(*prose(__file__, "throughput", found=_words(networks, searches)), figures, tables)


def _words(networks: Sequence[Mapping[str, Any]], searches: Sequence[Mapping[str, Any]]) -> str:
    """Where recomputation pays, where it is proven not to, and the largest sizes."""
    at_plain = [d for d in networks if d["best"] <= d["plain_batch"]]
    closed = [network_label(d) for d in at_plain if _is_closed(d)]
    open_ones = [network_label(d) for d in at_plain if not _is_closed(d)]
    beyond = [f"{network_label(d)} (batch {d['best']}, {_gain(d)} over the best batch without)"
              for d in networks if d["best"] > d["plain_batch"]]  # fmt: skip
    sentences = []
    if closed:
        sentences.append(f"On {', '.join(closed)} no batch tried that needs recomputation is faster than the best "
                         "without: this is proven.")  # fmt: skip
    if open_ones:
        sentences.append(f"On {', '.join(open_ones)} none was found; the bounds do not rule one out.")
    if beyond:
        sentences.append(f"Recomputation pays on {', '.join(beyond)}.")
    for s in searches:
        limit = f"{s['ruled_out_label']} is proven impossible." if s["ruled_out"] else "no limit was proven."
        sentences.append(f"The largest {s['what']} at batch {s['batch']}: {s['found_label'] or 'none found'}; {limit}")
    return " ".join(sentences)


def _is_closed(document: Mapping[str, Any]) -> bool:
    """Whether the bounds prove that no batch tried is faster than the best found."""
    best = _point(document, document["best"])["samples_per_s"]
    return all(point["most_per_s"] <= best * (1 + 1e-9) for point in document["points"])


def _best_plain(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fastest of the batches that fit without recomputation."""
    plain = [p for p in document["points"] if p["batch"] <= document["plain_batch"] and p["samples_per_s"] is not None]
    return max(plain, key=lambda point: point["samples_per_s"], default=None)


def _gain(document: Mapping[str, Any]) -> str:
    best, plain = _point(document, document["best"]), _best_plain(document)
    return "alone" if plain is None else f"{best['samples_per_s'] / plain['samples_per_s']:.3f}x"


def _point(document: Mapping[str, Any], batch: int) -> Mapping[str, Any]:
    return next(point for point in document["points"] if point["batch"] == batch)


def _curves(networks: Sequence[Mapping[str, Any]]) -> Figure:
    figure, grid = panels(len(networks), (2.9, 2.6), 3, xlabel="batch size", ylabel="samples / s")
    for axes, document in zip(grid, networks, strict=True):
        plot(axes, document)
        axes.set_title(network_label(document), fontweight="bold")
    legend_below(figure)
    return figure


def _speeds(networks: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for document in networks:
        for point in document["points"]:
            found = point["samples_per_s"]
            plain = point["batch"] <= document["plain_batch"]
            rows.append([
                network_label(document), str(point["batch"]), "yes" if plain else "no",
                point["status"], "" if found is None else f"{found:.2f}",
                f"{point['most_per_s']:.2f}" if point["most_per_s"] else "none",
                "" if point["overhead"] is None else percent(point["overhead"]),
                "best" if point["batch"] == document["best"] else "",
            ])  # fmt: skip
    return Table("throughput", [
        "network", "batch", "fits without recomputation", "status", "samples/s", "at most (proven)", "overhead", "",
    ], rows)  # fmt: skip


def _prices(networks: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [network_label(d), str(p["batch"]), *(
            ("not solved in time", "") if p["ms_per_gib"] is None
            else (f"{p['ms_per_gib']:.3f}", f"{p['bound_ns'] / 1e6:.2f}")
        )]
        for d in networks for p in d["prices"]
    ]  # fmt: skip
    return Table("memory_price", [
        "network", "batch", "ms for each GiB", "bound of a step, ms",
    ], rows)  # fmt: skip


def _trials(search: Mapping[str, Any], number: int) -> Table:
    trials = sorted(search["trials"], key=lambda trial: trial["size"])
    rows = [[
        trial["label"], str(trial["operations"]), f"{trial['plain_peak_bytes'] / 1e9:.2f}",
        KINDS[trial["kind"]][2], trial["status"],
        "" if trial["cost"] is None else f"{100 * trial['cost'] / trial['cost_cap']:.1f} %",
    ] for trial in trials]  # fmt: skip
    return Table(f"largest_model_{number + 1}", [
        "size", "operations", "GB without recomputation", "found", "status", "share of the allowed cost",
    ], rows)  # fmt: skip


def memory_part(document: Mapping[str, Any], study: Study) -> Part:
    """Four figures and the sizes as a table."""
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
    figures.append(("features_parameters", "Features against parameters", _sizes_figure(sizes)))
    figures.append(
        ("layers", "Cost and memory of each layer of a forward pass, as shares of the largest", _layers(sizes))
    )
    return Part(
        *prose(__file__, "memory", **values, spread=_spread(sizes), features=_features(sizes)),
        figures,
        [Table("features_parameters", ["network", "batch", "features GB", "parameters GB", "ratio"], [
            [s["label"], str(s["batch"]), f"{s['features_bytes'] / 1e9:.2f}", f"{s['parameter_bytes'] / 1e9:.3f}",
             f"{s['features_bytes'] / s['parameter_bytes']:.0f}" if s["parameter_bytes"] else ""] for s in sizes
        ])],
    )  # fmt: skip


def _sizes_figure(sizes: list[dict[str, Any]]) -> Figure:
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
    asked = set(run.shown.loc[run.shown["status"] != "SKIPPED", "strategy"]) - set(run.planned["strategy"])
    above = [shown for cost, group in groups.items() if cost not in drawn for shown in group]
    without = ", ".join(style_of(name).label for name in sorted(asked, key=order_of))
    left_out = f"{without} (no plan)" + (f" and {_labels(above)} (over twice the cost)" if above else "")
    budget = int(run.shown["budget_bytes"].min()) / 1e9
    return (f"{run.title} within {budget:.2f} GB. Rows: stages; columns: operations; overheads in the titles. {same}",
            figure, left_out)  # fmt: skip


def _labels(group: Sequence[ShownPlan]) -> str:
    return ", ".join(style_of(shown.strategy).label for shown in group)
