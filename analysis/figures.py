"""Figures of single experiments: DTR's logs, compiled steps, the roofline, records."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from matplotlib.transforms import offset_copy

from analysis.charts import legend_below, mark_break, panels, points
from analysis.style import BLACK, BLUE, COPY_ONLY, GREY, LIGHT_GREY, ORANGE, OURS, SKY, label_of, style_of
from remat.incumbent import is_closed, relative_gap

US = 1e-3  # microseconds in a nanosecond
TIMES = {"1 s": 1, "10 s": 10, "1 min": 60, "10 min": 600, "1 h": 3600, "5 h": 18_000, "24 h": 86_400}


def dtr(networks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A panel for each network of `experiments.dtr`: slowdown for each share of the program's peak."""
    online, offline = style_of("dtr"), style_of(OURS)
    lines = (
        ("DTR as published (measured, with its search)", GREY, "s", "--", lambda row: row["published"]),
        (f"{online.label}, exact heuristic", online.colour, online.marker, "-", lambda row: row["online"]["exact"]),
        (offline.label, offline.colour, offline.marker, offline.line, lambda row: row["offline"]),
        ("Proven bound", BLACK, "", ":", lambda row: row["bound"]),
    )
    figure, grid = panels(len(networks), (3.2, 2.7), 3, xlabel="memory / the program's peak", ylabel="slowdown")
    for axes, (name, network) in zip(grid, networks.items(), strict=True):
        for label, colour, marker, line, number in lines:
            found = [(row["ratio"], number(row)) for row in network["rows"] if number(row) is not None]
            points(axes, found, colour, marker, line, label=label, size=4.5)
        axes.set(title=name, xlim=(0.15, 1.0), ylim=(0.98, None))
        mark_break(axes)
    legend_below(figure)
    return figure


def offload(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each network and budget with several rates: overhead of plans that recompute, copy, or do both."""
    both, rule = style_of(OURS), style_of(COPY_ONLY)
    rates_of: dict[tuple[str, float], set[float]] = {}
    for row in rows:
        rates_of.setdefault((row["network"], row["budget"]), set()).update({row["rate"]} - {0.0})
    several = [problem for problem, rates in rates_of.items() if len(rates) > 1]
    problems = sorted(several, key=lambda problem: (problem[0], -problem[1]))
    figure, grid = panels(max(1, len(problems)), (2.5, 2.1), 4, xlabel="GB/s each way", ylabel="overhead (%)")
    for axes, (network, budget) in zip(grid, problems, strict=False):
        own = [row for row in rows if (row["network"], row["budget"]) == (network, budget)]
        joint = [row for row in own if row["rate"] and row["strategy"] == OURS]
        greedy = [row for row in own if row["rate"] and row["strategy"] == COPY_ONLY]
        plain = next((row["overhead"] for row in own if not row["rate"]), None)
        rates = sorted(row["rate"] for row in joint)
        for found, colour, marker, line, label, number in (
            (greedy, rule.colour, rule.marker, rule.line, "copy only, greedily", lambda row: row["overhead"]),
            (joint, both.colour, both.marker, both.line, "recompute and copy", lambda row: row["overhead"]),
            (joint, BLACK, "", ":", "bound", lambda row: row["bound"] / row["total_cost"] - 1),
        ):
            known = [(row["rate"], 100 * number(row)) for row in found if number(row) is not None]
            points(axes, sorted(known), colour, marker, line, label=label, size=4.5)
        if plain is not None and rates:
            axes.plot([rates[0], rates[-1]], [100 * plain] * 2, color=GREY, linestyle="--", label="recompute only")
        size = f"{budget:.0%}" if budget < 1 else f"{budget:g} GiB"
        axes.set(title=f"{label_of(network)}, {size}", xscale="log")
        axes.set_ylim(bottom=0, top=None if not plain else 115 * plain)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
    legend_below(figure, 2)
    return figure


def monet_overhead(networks: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """A panel for each network of MONeT: cost of plans with all implementations, and bounds, for each budget."""
    ours = style_of(OURS)
    lines = (
        ("Gurobi, logged, up to 24 h", BLACK, "s", "--", lambda row: row["logged_ms"], {"mfc": "white"}),
        ("Gurobi's bound", GREY, "_", "", lambda row: row["logged_bound_ms"], {}),
        (ours.label, ours.colour, ours.marker, "-", lambda row: row["cost"] and row["cost"] / 1e6, {}),
    )
    figure, grid = panels(len(networks), (3.0, 2.6), 3, xlabel="memory budget (GiB)", ylabel="above the plain step (%)")
    for axes, (name, rows) in zip(grid, networks.items(), strict=True):
        for label, colour, marker, line, number, more in lines:
            found = [(row["budget_gib"], 100 * (number(row) / row["plain_ms"] - 1)) for row in rows if number(row)]
            points(axes, found, colour, marker, line, label=label, size=5, **more)
        axes.set(title=name, xlim=(4.5, 10.5), ylim=(min(0.0, axes.get_ylim()[0]), None))
    legend_below(figure)
    return figure


def monet_ablation(networks: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Cost of our plans for each budget: a column for each network of MONeT, a row for levels with one plain step."""
    rows = (
        ("", ("i", "in place", GREY, "o"), ("in", "and masks, indices", ORANGE, "^"),
         ("im", "and gradients from outputs", BLUE, "v")),
        (", algorithms", ("ic", "in place, algorithms", SKY, "D"), ("icmn", "all", style_of(OURS).colour, "*")),
    )  # fmt: skip
    figure, grid = panels(2 * len(networks), (1.9, 1.9), len(networks), xlabel="budget (GiB)", ylabel="above plain (%)")
    places = [(row, name) for row in rows for name in networks]
    for axes, ((words, *looks), name) in zip(grid, places, strict=True):
        for level, label, colour, marker in looks:
            found = [(row["budget_gib"], 100 * (row["cost"] / 1e6 / row["plain_ms"] - 1)) for row in networks[name]
                     if row["level"] == level and row["cost"] is not None]  # fmt: skip
            points(axes, found, colour, marker, "-", label=label, size=4)
        axes.set_title(f"{name}{words}", fontsize=8)
        axes.set(xlim=(4.5, 10.5), ylim=(min(0.0, axes.get_ylim()[0]), None))
        if not any(np.size(line.get_xdata()) for line in axes.lines):  # none of these levels was solved
            axes.set_axis_off()
            axes.set_title("")
    legend_below(figure)
    return figure


def compiled(models: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """A panel for each network: step time over that of plain ``torch.compile``, with quartiles, for each peak."""
    knob, ours = style_of("torch_budget"), style_of(OURS)
    looks: tuple[tuple[str, str, str, dict[str, Any], str], ...] = (
        ("plain", BLACK, "s", {}, "torch.compile"),
        ("dp", knob.colour, "^", {}, "its knob, solver dp"),
        ("ilp", knob.colour, "v", {"mfc": "white"}, "its knob, solver ilp"),
        ("remat", ours.colour, ours.marker, {"line": "-", "zorder": 3}, "remat"),
    )
    figure, grid = panels(len(models), (3.2, 2.7), 3, xlabel="peak / torch.compile's",
                          ylabel="step time / torch.compile's")  # fmt: skip
    for axes, (name, rows) in zip(grid, models.items(), strict=True):
        plain = next(row["measured_bytes"] for row in rows if row["variant"] == "plain")
        for variant, colour, marker, more, label in looks:
            mine = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row["measured_bytes"])
            quartiles = [(row["measured_bytes"] / plain, statistics.quantiles(row["ratios"], n=4)) for row in mine]
            points(axes, [(x, q[1], q[0], q[2]) for x, q in quartiles], colour, marker, label=label, **more)
        axes.set_title(label_of(name))
        mark_break(axes)
    legend_below(figure)
    return figure


def roofline(times_ns: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """A panel for each network, on logarithmic scales: a point for each operation.

    Args:
        times_ns: [network] (measured, modelled), arrays in the same order of operations.
    """
    figure, grid = panels(len(times_ns), (3.1, 2.8), 3, xlabel="measured (µs)", ylabel="roofline (µs)", sharex=True,
                          sharey=True)  # fmt: skip
    for axes, (network, times) in zip(grid, times_ns.items(), strict=True):
        both = np.array(times).T * US
        points(axes, both, BLUE, "o", size=3.5, alpha=0.45, mew=0, label="one operation")
        points(axes, [(end, end) for end in (both.min(), both.max())], GREY, line="-", label="as measured")
        model, _, batch = network.partition("_b")
        axes.set(xscale="log", yscale="log", title=f"{label_of(model)}, batch {batch}")
    legend_below(figure)
    return figure


def records(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Overhead and proven bound against seconds of recorded solves and of ours, a line for each budget."""
    figure, (axes,) = panels(1, (6.6, 3.9), xlabel="time of the solve", ylabel="overhead (%), bar: to the proven bound")
    recorded, ours = style_of("checkmate_milp"), style_of(OURS)
    for place, row in enumerate(sorted(rows, key=lambda row: row["budget_bytes"])):
        bound = row["record_cost"] * (1 - (row["record_gap"] or 0.0))
        aside = offset_copy(axes.transData, figure, 0 if row["record_proven"] else 5 * place, units="points")  # of 24 h
        both = (
            (row["record_s"], row["record_cost"], bound, recorded, aside, "Checkmate's MILP in Gurobi, recorded"),
            (row["wall_s"], row["cost"], row["bound"], ours, axes.transData, f"portfolio, {row['threads']} threads"),
        )
        over = [[100 * (cost / row["total_cost"] - 1) for cost in (cost, bound)] for _, cost, bound, *_ in both]
        points(axes, [(s, top) for (s, *_), (top, _) in zip(both, over, strict=True)], LIGHT_GREY, line=":")
        for (seconds, cost, bound, style, where, label), (top, low) in zip(both, over, strict=True):
            face = style.colour if is_closed(relative_gap(cost, bound)) else "white"
            points(axes, [(seconds, top, low, top)], style.colour, style.marker, mfc=face, capsize=2.5, zorder=3,
                   transform=where, label=label)  # fmt: skip
        axes.annotate(row["budget"], (row["wall_s"], over[1][0]), (-8, 0), textcoords="offset points", fontsize=8,
                      ha="right", va="center")  # fmt: skip
    axes.set(xscale="log", xlim=(0.8, 2e5))
    axes.set_xticks(list(TIMES.values()), list(TIMES))
    axes.xaxis.set_minor_locator(NullLocator())
    mark_break(axes)
    legend_below(figure)
    return figure
