"""A run made of parts as a document: its text, and the command that prints and writes it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from analysis.parts import Part, Table
from analysis.results import read_json
from experiments.cli import complain
from experiments.documents import DOCS, markdown_table, write_between_marks
from remat.errors import RematError


def part_text(
    part: Part, folder: Path, figures: Collection[str], *, prefix: str, long: int, left_out: Collection[str] = ()
) -> str:
    """A part of a run: what was published, what we got, why they differ, figures and tables.

    Args:
        figures: file names of those that the document shows, where it has them as ``figures/<prefix>_<name>.png``.
        long: rows, above which a table is folded away.
        left_out: names of tables that stay in the run's folder.
    """
    lines = [f"## {part.title}", f"**Published.** {part.published}", f"**Ours.** {part.ours}",
             f"**Why they differ.** {part.why}"]  # fmt: skip
    lines += [f"![{caption}](figures/{prefix}_{file}.png)" for file, caption, _ in part.figures
              if file in figures and (folder / "figures" / f"{file}.png").is_file()]  # fmt: skip
    return "\n\n".join([*lines, *(_table_text(table, long) for table in part.tables if table.name not in left_out)])


def _table_text(table: Table, long: int) -> str:
    text = markdown_table(table.heads, table.rows)
    if len(table.rows) > long:
        return f"<details><summary>{table.caption}</summary>\n\n{text}\n\n</details>"
    return f"{table.caption}:\n\n{text}"


def made_text(folder: Path, names: Iterable[str], digits: int = 0) -> str:
    """When the parts of a run were made, and in what time."""
    made = [read_json(folder / f"{name}.json")["made"] for name in names]
    return (
        f"{', '.join(sorted({one['at'][:10] for one in made}))}; {sum(one['solved'] for one in made)} solves in "
        f"{sum(one['seconds'] for one in made) / 60:.{digits}f} minutes, drawing not counted."
    )


def document_command(
    arguments: Sequence[str], command: str, text_of: Callable[[Path], str], prefix: str, figures: Iterable[str]
) -> int:
    """``RUN [--write]``: print a run as Markdown, and put it and its figures into ``docs/<prefix>.md``; the exit code.

    Args:
        command: as it stands in the document's marks.
    """
    folders = [Path(text) for text in arguments if text != "--write"]
    if len(folders) != 1 or str(folders[0]).startswith("-"):
        print(f"usage: {command.replace('--write', '[--write]')}", file=sys.stderr)
        return 2
    folder = folders[0]
    try:
        text = text_of(folder)
        print(text)
        if "--write" in arguments:
            write_between_marks(DOCS / f"{prefix}.md", command, text)
            for name in figures:
                drawn = folder / "figures" / f"{name}.png"
                if drawn.is_file():
                    shutil.copyfile(drawn, DOCS / "figures" / f"{prefix}_{name}.png")
    except RematError as error:
        return complain(error)
    return 0
