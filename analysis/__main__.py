"""``python -m analysis RUN_FOLDER``: redraw a run from what is stored."""

from __future__ import annotations

import sys
from pathlib import Path

from analysis import draw_run, terminal_table
from analysis.command import command


def redraw(folder: Path) -> list[Path]:
    """Draw a run, or a run of the paper; prints the table of the former."""
    if (folder / "paper.json").is_file():
        from analysis.paper import draw_paper

        return draw_paper(folder)
    from rich.console import Console

    written = draw_run(folder)
    Console().print(terminal_table(folder))
    return written


def main(arguments: list[str]) -> int:
    return command("analysis", "RUN_FOLDER", redraw, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
