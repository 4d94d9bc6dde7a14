"""Redraws a run from its stored results, without solving anything: ``python -m analysis RUN_FOLDER``."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from analysis import draw_run, terminal_table
from remat.errors import RematError
from remat.files import show_any_text


def main(given: Sequence[str]) -> int:
    """Draw, then print the paths written or one line of error; returns the exit code."""
    show_any_text()
    if len(given) != 1 or given[0].startswith("-"):
        print("usage: python -m analysis RUN_FOLDER", file=sys.stderr)
        return 2
    try:
        written = draw_run(Path(given[0]))
        Console().print(terminal_table(Path(given[0])))
    except (RematError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
