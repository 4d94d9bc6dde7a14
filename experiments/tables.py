"""Every page that an experiment draws: ``python -m experiments.tables [NAME ...] [--write]``.

Without a name it lists the pages, and whether the current code made their rows. With names it draws and prints these;
``--write`` puts the text into the page, the long tables into results/tables and the figures into docs/figures.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.arguments import one_of, run
from experiments.cli import complain
from experiments.documents import DOCS, ROOT, Drawing, markdown_table, write_drawing
from experiments.registry import Experiment, experiments
from experiments.runner import drawing_of
from experiments.table import Table
from remat.errors import RematError

MAKES_ROWS = ("remat", "baselines")  # the packages that determine a row


def drawn_pages() -> dict[str, tuple[Experiment, Path]]:
    """[name] every experiment that has a page, and the page."""
    loaded = {name: listed.load() for name, listed in experiments().items()}
    return {name: (one, DOCS / one.page) for name, one in loaded.items() if one.page is not None}


def listing() -> str:
    """Each experiment's page, and the version of the code that made its rows."""
    return "\n".join(
        f"{name:<18} {page.resolve().relative_to(ROOT).as_posix()}\n{'':<18}   {state(name, one)}"
        for name, (one, page) in drawn_pages().items()
    )


def state(name: str, experiment: Experiment) -> str:
    """The date of an experiment's rows, and the version of the code that made them."""
    if not experiment.measures:
        return "drawn from other rows"
    rows = Table(name).rows()
    if not rows:
        return "no rows"
    last = max(rows, key=lambda row: row["date"])
    changed = None if last["git_commit"] is None else changed_since(last["git_commit"])
    version = {True: "an older", False: "this", None: "an unknown"}[changed]
    return f"rows of {last['date']} and earlier, by {version} version of the code"


def changed_since(commit: str) -> bool | None:
    """Whether the packages that make rows differ from those of a commit; None if the commit is unknown here."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *MAKES_ROWS], capture_output=True, check=False
    )
    return {0: False, 1: True}.get(done.returncode)


def printed(drawing: Drawing) -> str:
    """The text of the page, then every long table."""
    tables = [f"{table.name}.csv:\n\n{markdown_table(table.heads, table.rows)}" for table in drawing.tables]
    return "\n\n".join([drawing.text, *tables])


def main(arguments: Sequence[str]) -> int:
    """List, or draw and write; returns the exit code."""
    names = [argument for argument in arguments if argument != "--write"]
    if {"-h", "--help"} & {*names}:
        print(__doc__)
        return 0
    if not names:
        print(listing())
        return 0
    try:
        known = drawn_pages()
        for name in names:
            experiment, page = known[one_of("table", name, known)]
            drawing = drawing_of(name, experiment)
            if "--write" in arguments:
                write_drawing(name, page, drawing)
            print(printed(drawing))
    except RematError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
