"""The leaderboard's performance profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from analysis.ranking import Board, Entry, profile
from analysis.style import GREY, Style, style_of

KNEE_PERCENT = 0.1  # the profile's axis is linear below and logarithmic above
MOST_MARKS = 80  # if all curves have more corners, only the start of each has a marker
LINES = ("-", "--", "-.", ":")


def draw(board: Board) -> Figure:
    """Performance profiles: the share of the common problems solved within each distance of the best known cost."""
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    axes = figure.subplots()
    styles = looks(board.ranked)
    curves = [(styles[s.entrant], *profile(board.common[s.entrant].tolist())) for s in board.ranked]
    right = max([5.0, *(1.15 * 100 * (taus[-1] - 1) for _, taus, _ in curves)])
    mark_all = sum(len(taus) for _, taus, _ in curves) <= MOST_MARKS
    handles = []
    for place, (style, taus, shares) in enumerate(curves, start=1):
        percent = 100 * (taus - 1)
        axes.step(np.append(percent, right), 100 * np.append(shares, shares[-1]), where="post", color=style.colour,
                  lw=style.width, ls=style.line, zorder=3 + 1 / place)  # fmt: skip
        marked = slice(None) if mark_all else slice(1)
        axes.plot(percent[marked], 100 * shares[marked], ls="", marker=style.marker, ms=4.5, mfc="white",
                  mec=style.colour, clip_on=False, zorder=5 + 1 / place)  # fmt: skip
        label = f"{place}. {style.label}: {100 * shares[0]:.0f} % → {100 * shares[-1]:.0f} %"
        handles.append(Line2D([], [], color=style.colour, lw=style.width, ls=style.line, marker=style.marker, ms=5,
                              mfc="white", label=label))  # fmt: skip
    axes.set_xscale("asinh", linear_width=KNEE_PERCENT)
    at = [0.0, *(m * 10.0**p for p in range(-1, 5) for m in ((1, 2, 5) if p < 2 else (1,)))]
    axes.set_xticks([t for t in at if t <= right], [f"{t:,g}" for t in at if t <= right])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.3 * KNEE_PERCENT, right)
    axes.set_ylim(-2, 102)
    axes.set_xlabel("Cost above the best known plan, at most (%, arcsinh scale)")
    axes.set_ylabel(f"Share of {len(board.common)} problems (%)")
    axes.set_title(f"Performance profiles, {board.name}", loc="left", fontweight="bold")
    figure.legend(handles=handles, loc="outside right upper", handlelength=2.8, labelspacing=0.5,
                  title="rank, share with the best plan → with any", title_fontsize=7.5, alignment="left")  # fmt: skip
    figure.text(1, 0, "after Dolan and Moré (2002)", ha="right", va="bottom", fontsize=6.5, color=GREY)
    return figure


def looks(entries: Sequence[Entry]) -> dict[str, Style]:
    """[entrant] the style of its strategy; entrants of one strategy differ in the line."""
    styles: dict[str, Style] = {}
    seen: dict[str, int] = {}
    for s in sorted(entries, key=lambda s: s.entrant):
        base = style_of(s.strategy)
        i = seen[s.strategy] = seen.get(s.strategy, -1) + 1
        line = LINES[(LINES.index(base.line) + i) % len(LINES)]
        styles[s.entrant] = replace(base, label=base.label + s.entrant.removeprefix(s.strategy), line=line)
    return styles
