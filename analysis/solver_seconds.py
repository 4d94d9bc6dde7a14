"""Seconds until a solve had a plan of some cost, and their figure: a dot for each solve, hollow if it never had one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from analysis.style import PALE

LEAST_S = 0.05  # dots of faster solves are drawn here
Dots = Mapping[str, Sequence[tuple[str, float | None]]]  # [form] (network, seconds or None) of each solve


def reached(steps: Iterable[tuple[float, int]], cost: int | None, wall_s: float, at_most: float | None) -> float | None:
    """Seconds until the solve had a plan of cost `at_most` or less (any plan, if None); None if it never had one.

    `steps` are the improvements, (seconds, cost). A plan without a step came with the final answer, at `wall_s`.
    """
    if cost is None or (at_most is not None and cost > at_most):
        return None
    return min((s for s, found in steps if at_most is None or found <= at_most), default=wall_s)


def draw(
    panels: Mapping[str, Dots], looks: Mapping[str, tuple[str, str]], networks: Sequence[str], limit_s: float,
    size: tuple[float, float],
) -> Figure:  # fmt: skip
    """A panel for each entry of `panels`: networks down, seconds across; `looks` are (colour, marker) of each form.

    Solves that had no such plan within the limit stand in the grey strip at the right.
    """
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    apart = 0.66 / len(looks)
    for axes, (title, dots) in zip(all_axes, panels.items(), strict=True):
        for number, (form, (colour, marker)) in enumerate(looks.items()):
            shift = apart * (number - (len(looks) - 1) / 2)
            hit = [(max(s, LEAST_S), networks.index(name) + shift) for name, s in dots[form] if s is not None]
            missed = [(1.6 * limit_s, networks.index(name) + shift) for name, s in dots[form] if s is None]
            ms = 8 if marker == "*" else 5
            for points, face, label in ((hit, colour, form), (missed, "none", None)):
                axes.plot([x for x, _ in points], [y for _, y in points], ls="", marker=marker, mec=colour, mfc=face,
                          ms=ms, label=label)  # fmt: skip
        axes.axvspan(1.3 * limit_s, 2.6 * limit_s, color=PALE, alpha=0.5, lw=0)
        axes.set(xscale="log", xlim=(0.8 * LEAST_S, 2.6 * limit_s), xlabel="Seconds")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if limit_s < 100 else (1.0,)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(title, loc="left")
    all_axes[0].set_yticks(range(len(networks)), networks)
    all_axes[0].set_ylim(len(networks) - 0.5, -0.5)
    handles, labels = all_axes[0].get_legend_handles_labels()
    handles.append(Patch(facecolor=PALE, alpha=0.5))
    labels.append(f"hollow: not reached in {limit_s:g} s")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels) if len(labels) < 5 else 3)
    return figure
