"""Redraws a run from what is stored, without solving anything: ``python -m analysis RUN_FOLDER``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from analysis import draw_run, terminal_table
from analysis.command import command
from analysis.results import read_json

OF_THEIR_OWN = {  # experiments whose runs are drawn by another module, and by what in it
    "largest_model": "draw_run",
    "max_batch_size": "redraw",
    "throughput": "draw_run",
}


def redraw(folder: Path) -> list[Path]:
    """Draw a run of whatever experiment; prints the table of a sweep."""
    if (folder / "paper.json").is_file():
        from analysis.paper import draw_paper

        return draw_paper(folder)
    if (folder / "monet.json").is_file():
        from analysis.monet import draw_monet

        return draw_monet(folder)
    experiment = read_json(folder / "run.json").get("experiment")
    if experiment in OF_THEIR_OWN:
        return getattr(importlib.import_module(f"analysis.{experiment}"), OF_THEIR_OWN[experiment])(folder)
    from rich.console import Console

    written = draw_run(folder)
    Console().print(terminal_table(folder))
    return written


def main(arguments: list[str]) -> int:
    return command("analysis", "RUN_FOLDER", redraw, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
