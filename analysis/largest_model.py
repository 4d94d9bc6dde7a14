"""The largest models that train: ``python -m analysis.largest_model RUN`` redraws stored results."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from analysis.command import command
from analysis.results import read_json
from analysis.saving import save_in_run
from analysis.style import BLUE, GREY, ORANGE, WINE
from remat.errors import InvalidInput

KINDS = {  # [kind of a trial] (colour, marker, label)
    "fits": (BLUE, "o", "trains within the memory"),
    "ruled out": (WINE, "x", "proven impossible, or larger than such"),
    "undecided": (ORANGE, "D", "no plan found, not ruled out"),
}


def draw_run(folder: Path) -> list[Path]:
    """Draw the figure of a run; returns the paths.

    Raises:
        InvalidInput: the folder is not a run of this experiment.
    """
    document = read_json(folder / "run.json")
    if not document.get("searches"):
        raise InvalidInput(f"{folder / 'run.json'}: not a run of experiment=largest_model")
    return save_in_run(folder, "largest_model", lambda: draw(document["searches"], document["memory_bytes"]))


def draw(searches: Sequence[Mapping[str, Any]], memory_bytes: int) -> Figure:
    """A panel for each search: peak of plain training at each size tried, against the memory of the GPU."""
    figure = Figure(figsize=(3.9 * len(searches) + 0.4, 3.7), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, search in zip(figure.subplots(1, len(searches), squeeze=False)[0], searches, strict=True):
        _panel(axes, search, memory_bytes)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=2)
    return figure


def _panel(axes: Axes, search: Mapping[str, Any], memory_bytes: int) -> None:
    trials = sorted(search["trials"], key=lambda trial: trial["size"])
    for kind, (colour, marker, label) in KINDS.items():
        found = [trial for trial in trials if trial["kind"] == kind]
        if found:
            axes.plot([trial["size"] for trial in found], [trial["plain_peak_bytes"] / 1e9 for trial in found], ls="",
                      marker=marker, ms=6, color=colour, label=label)  # fmt: skip
    axes.axhline(memory_bytes / 1e9, color=GREY, lw=1.0, ls="--", label=f"memory of the GPU, {memory_bytes / 1e9:g} GB")
    axes.set(xscale="log", yscale="log", ylabel="GB without recomputation")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks([trial["size"] for trial in trials], [trial["label"] for trial in trials], rotation=40, ha="right",
                    fontsize=8)  # fmt: skip
    axes.margins(x=0.12, y=0.15)
    axes.set_title(f"{search['what']}, batch {search['batch']}", loc="left", fontweight="bold", fontsize=9)


if __name__ == "__main__":
    sys.exit(command("analysis.largest_model", "RUN", draw_run, sys.argv[1:]))
