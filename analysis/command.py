"""The command line of every module that redraws stored results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from remat.errors import RematError
from remat.files import show_any_text


def command(
    module: str, argument: str, draw: Callable[..., Sequence[Path]], given: Sequence[str], *, several: bool = False
) -> int:
    """``python -m module FOLDER``: draw, then print the paths written or one line of error; returns the exit code.

    Args:
        draw: takes the folder; with `several`, one or more folders.
    """
    show_any_text()
    if not given or (len(given) > 1 and not several) or any(text.startswith("-") for text in given):
        print(f"usage: python -m {module} {argument}", file=sys.stderr)
        return 2
    try:
        written = draw(*map(Path, given))
    except (RematError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0
