"""Samples a second against batch size: ``python -m analysis.throughput RUN`` redraws from what is stored."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.drawing import save, style_context
from analysis.style import GREY, style_of
from remat.errors import InvalidInput
from remat.files import replacing


def draw_run(folder: Path) -> list[Path]:
    """``table.csv`` and the figure of a run; the paths written.

    Raises:
        InvalidInput: no run of this experiment.
    """
    folder = Path(folder)
    try:
        document = json.loads((folder / "run.json").read_text())
        points = document["points"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{folder / 'run.json'}: not a readable run of experiment=throughput ({error})") from None
    with replacing(folder / "table.csv") as scratch:
        pd.DataFrame(points).to_csv(scratch, index=False)
    (folder / "figures").mkdir(exist_ok=True)
    with style_context():
        return [folder / "table.csv", *save(draw(document), folder / "figures" / "throughput")]


def draw(document: Mapping[str, Any]) -> Figure:
    """Found and proven samples a second; the best batch and the largest that plain training fits are marked."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    points = [p for p in document["points"] if p["samples_per_s"] is not None]
    style = style_of("portfolio")
    open_points = [p for p in document["points"] if p["most_per_s"] > 0]
    axes.plot([p["batch"] for p in open_points], [p["most_per_s"] for p in open_points], color=GREY, lw=1.0, ls=":",
              marker="_", label="proven: no plan of this batch is faster")  # fmt: skip
    axes.plot([p["batch"] for p in points], [p["samples_per_s"] for p in points], color=style.colour, lw=style.width,
              marker=style.marker, ms=7, label="fastest plan found")  # fmt: skip
    axes.axvline(document["plain_batch"], color=GREY, lw=0.9, ls="--", label="largest batch without recomputation")
    best = next((p for p in points if p["batch"] == document["best"]), None)
    if best is not None:
        axes.annotate(
            f"batch {best['batch']}: {best['samples_per_s']:.1f}/s, {100 * best['overhead']:.2f} % overhead",
            (best["batch"], best["samples_per_s"]), xytext=(0, 10), textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
    axes.margins(y=0.15)
    axes.set(xlabel="batch size", ylabel="samples / s")
    memory = document["memory_bytes"] / 1e9
    axes.set_title(
        f"{document['network']} on {document['gpu']} ({memory:g} GB), modelled", loc="left", fontweight="bold"
    )
    axes.legend(loc="lower left")
    return figure


if __name__ == "__main__":
    sys.exit(command("analysis.throughput", "RUN", draw_run, sys.argv[1:]))
