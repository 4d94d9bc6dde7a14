"""Modelled against measured times, a point for each operation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from analysis.saving import save, style_context

US = 1e-3  # microseconds in a nanosecond


def draw_roofline(times_ns: Mapping[str, tuple[np.ndarray, np.ndarray]], path: Path) -> list[Path]:
    """Draw a panel for each network, on logarithmic scales; returns the paths.

    Args:
        times_ns: [network] (measured, modelled), arrays in the same order of operations.
        path: of the figure, without the ending.
    """
    with style_context():
        figure = Figure(figsize=(3.1 * len(times_ns) + 0.6, 3.4), layout="constrained")
        panels = figure.subplots(1, len(times_ns), squeeze=False, sharex=True, sharey=True)[0]
        for axes, (network, (measured, modelled)) in zip(panels, times_ns.items(), strict=True):
            axes.loglog(measured * US, modelled * US, "o", markersize=3.5, alpha=0.45, markeredgewidth=0)
            ends = np.array([min(measured.min(), modelled.min()), max(measured.max(), modelled.max())]) * US
            axes.loglog(ends, ends, color="0.4", linewidth=0.9)
            axes.set_title(network, loc="left", fontsize=9)
            axes.set_xlabel("measured (us)")
        panels[0].set_ylabel("roofline (us)")
        return save(figure, path)
