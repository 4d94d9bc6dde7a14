"""A run of the paper as a document: ``python -m experiments.paper_tables RUN [--write]``.

Prints what was published, what we got, why they differ, and every table, as Markdown; solves nothing. ``--write`` puts
it into docs/paper.md and the figures named in `FIGURES` beside it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.drawing import style_context
from analysis.paper import parts_of
from analysis.paper.part import Part, Table
from analysis.results import read_json
from experiments.cli import complain
from experiments.documents import DOCS, markdown_table, write_between_marks
from remat.errors import RematError

COMMAND = "python -m experiments.paper_tables RUN --write"
FIGURES = ("fig5_unet", "fig5_mobilenet", "throughput", "solver_time", "rounding", "cost_models")
LONG = 30  # rows, above which a table is folded away


def text_of(folder: Path) -> str:
    """The whole run as Markdown.

    Raises:
        InvalidInput: no run of the paper.
    """
    with style_context():
        parts = parts_of(folder)
    return "\n\n".join([_head(folder, [name for name, _ in parts]), *(_section(part, folder) for _, part in parts)])


def _head(folder: Path, names: Sequence[str]) -> str:
    head = read_json(folder / "paper.json")
    scale, source = head["scale"], head["provenance"]
    made = [read_json(folder / f"{name}.json")["made"] for name in names]
    return (
        f"`scale={head['config']['scale']}`: {scale['points']} budgets of a sweep, {scale['time_limit_s']:g} s for "
        f"each solve, {head['cores']} cores ({source.get('cpu', 'unknown CPU')}), "
        f"{', '.join(sorted({one['at'][:10] for one in made}))}; {sum(one['solved'] for one in made)} solves in "
        f"{sum(one['seconds'] for one in made) / 60:.0f} minutes, drawing not counted."
    )


def _section(part: Part, folder: Path) -> str:
    lines = [f"## {part.title}", f"**Published.** {part.published}", f"**Ours.** {part.ours}",
             f"**Why they differ.** {part.why}"]  # fmt: skip
    lines += [f"![{caption}](figures/paper_{file}.png)" for file, caption, _ in part.figures
              if file in FIGURES and (folder / "figures" / f"{file}.png").is_file()]  # fmt: skip
    return "\n\n".join([*lines, *map(_table, part.tables)])


def _table(table: Table) -> str:
    text = markdown_table(table.heads, table.rows)
    if len(table.rows) > LONG:
        return f"<details><summary>{table.caption}</summary>\n\n{text}\n\n</details>"
    return f"{table.caption}:\n\n{text}"


def main(arguments: Sequence[str]) -> int:
    """Print and write; the exit code."""
    folders = [Path(text) for text in arguments if text != "--write"]
    if len(folders) != 1 or str(folders[0]).startswith("-"):
        print("usage: python -m experiments.paper_tables RUN [--write]", file=sys.stderr)
        return 2
    folder = folders[0]
    try:
        text = text_of(folder)
        print(text)
        if "--write" in arguments:
            write_between_marks(DOCS / "paper.md", COMMAND, text)
            for name in FIGURES:
                drawn = folder / "figures" / f"{name}.png"
                if drawn.is_file():
                    shutil.copyfile(drawn, DOCS / "figures" / f"paper_{name}.png")
    except RematError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
