"""What the modules that redraw one thing have in common on the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from remat.errors import RematError


def command(module: str, argument: str, draw: Callable[[Path], Sequence[Path]], given: Sequence[str]) -> int:
    """``python -m module FOLDER``: draw and print the paths written, or one line of error; the exit code."""
    if len(given) != 1 or given[0].startswith("-"):
        print(f"usage: python -m {module} {argument}", file=sys.stderr)
        return 2
    try:
        written = draw(Path(given[0]))
    except RematError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0
