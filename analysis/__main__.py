"""Redraws a run from its stored results, without solving anything: ``python -m analysis RUN_FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from analysis import draw_run, max_batch_size, terminal_table, throughput
from analysis.command import command
from analysis.results import read_json

OWN_DRAWINGS = {  # experiments whose figures are not those of a sweep
    "largest_model": throughput.draw_sizes,
    "max_batch_size": max_batch_size.redraw,
    "throughput": throughput.draw_throughput,
}


def redraw(folder: Path) -> list[Path]:
    """Draw a run of any experiment; print the table of a sweep."""
    experiment = read_json(folder / "run.json").get("experiment")
    if experiment in OWN_DRAWINGS:
        return OWN_DRAWINGS[experiment](folder)
    written = draw_run(folder)
    Console().print(terminal_table(folder))
    return written


if __name__ == "__main__":
    sys.exit(command("analysis", "RUN_FOLDER", redraw, sys.argv[1:]))
