"""``python -m analysis RUN_FOLDER``: redraw a run from what is stored."""

from __future__ import annotations

import sys
from pathlib import Path

from analysis import draw_run, terminal_table
from remat.errors import RematError


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m analysis RUN_FOLDER", file=sys.stderr)
        return 2
    from rich.console import Console

    folder = Path(arguments[0])
    try:
        if (folder / "paper.json").is_file():
            from analysis.paper import draw_paper

            written = draw_paper(folder)
        else:
            written = draw_run(folder)
            Console().print(terminal_table(folder))
    except RematError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
