"""Marks on a frame: the values that lie above it, and an axis that does not begin at zero."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from analysis.style import BLACK


def write_beyond(axes: Axes, top: float, lines: Sequence[tuple[str, Mapping[float, float]]]) -> None:
    """Write the values above the frame's `top` over it, one over the other where lines share a place.

    Args:
        lines: (colour, [x] value) of each line.
    """
    written: Counter[float] = Counter()
    for colour, line in lines:
        for x, y in line.items():
            if y > top:
                axes.annotate(f"{y:.0f}", (x, top), (0, 3 + 7 * written[x]), textcoords="offset points", ha="center",
                              fontsize=6, color=colour, annotation_clip=False)  # fmt: skip
                written[x] += 1


def mark_break(axes: Axes) -> None:
    """Show that the vertical axis does not begin at zero: two strokes across its foot."""
    strokes: dict[str, Any] = {"transform": axes.transAxes, "color": BLACK, "lw": 1.0, "clip_on": False}
    for height in (0.012, 0.032):
        axes.plot((-0.014, 0.014), (height - 0.012, height + 0.012), **strokes)
