"""Figures of single experiments: DTR's logs, compiled steps, the roofline, records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from analysis.charts import legend_below, mark_break, panels, points
from analysis.style import BLACK, BLUE, GREY, OURS, style_of

US = 1e-3  # microseconds in a nanosecond
LABELS = {"gpt2": "GPT-2", "llama": "Llama", "vit": "ViT", "resnet50": "ResNet50", "unet": "U-Net", "vgg16": "VGG16"}


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


def compiled(models: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """A panel for each network: step time over that of plain ``torch.compile``, with quartiles, for each peak."""
    knob, ours = style_of("torch_budget"), style_of(OURS)
    looks = (
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
        axes.set_title(LABELS.get(name, name))
        mark_break(axes)
    legend_below(figure)
    return figure


def roofline(times_ns: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """A panel for each network, on logarithmic scales: a point for each operation.

    Args:
        times_ns: [network] (measured, modelled), arrays in the same order of operations.
    """
    figure, grid = panels(len(times_ns), (3.1, 2.8), xlabel="measured (µs)", ylabel="roofline (µs)", sharex=True,
                          sharey=True)  # fmt: skip
    for axes, (network, times) in zip(grid, times_ns.items(), strict=True):
        both = np.array(times).T * US
        points(axes, both, BLUE, "o", size=3.5, alpha=0.45, mew=0, label="one operation")
        points(axes, [(end, end) for end in (both.min(), both.max())], GREY, line="-", label="as measured")
        model, _, batch = network.partition("_b")
        axes.set(xscale="log", yscale="log", title=f"{LABELS.get(model, model)}, batch {batch}")
    legend_below(figure)
    return figure
