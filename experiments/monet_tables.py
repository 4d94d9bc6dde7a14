"""A run of ``experiment=paper/monet`` as a document: ``python -m experiments.monet_tables RUN [--write]``.

Prints what was published, what we got, why they differ, and the tables, as Markdown; solves nothing. ``--write`` puts
it into docs/monet.md and the figures beside it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.drawing import style_context
from analysis.monet import front, parts_of
from analysis.paper.part import Part, Table
from analysis.results import read_json
from experiments.cli import complain
from experiments.documents import DOCS, markdown_table, write_between_marks
from remat.errors import RematError

COMMAND = "python -m experiments.monet_tables RUN --write"
FIGURES = ("overhead", "ablation", "ten_percent", "solver_time", "records", "implementations_no_winograd")
LEFT_OUT = ("monet_solves",)  # every solve: in the run's own tables
LONG = 16  # rows, above which a table is folded away


def text_of(folder: Path) -> str:
    """The whole run as Markdown.

    Raises:
        InvalidInput: no run of this experiment.
    """
    with style_context():
        parts = parts_of(folder)
    head = read_json(folder / "monet.json")
    made = [read_json(folder / f"{name}.json")["made"] for name, _ in parts]
    first = front(folder)
    lead = (
        f"{first.paragraphs[0]} {head['provenance'].get('cpu', 'Unknown CPU')}, "
        f"{', '.join(sorted({one['at'][:10] for one in made}))}; {sum(one['solved'] for one in made)} solves in "
        f"{sum(one['seconds'] for one in made) / 60:.1f} minutes, drawing not counted."
    )
    return "\n\n".join([lead, *first.notes[:1], *(_section(part, folder) for _, part in parts)])


def _section(part: Part, folder: Path) -> str:
    lines = [f"## {part.title}", f"**Published.** {part.published}", f"**Ours.** {part.ours}",
             f"**Why they differ.** {part.why}"]  # fmt: skip
    lines += [f"![{caption}](figures/monet_{file}.png)" for file, caption, _ in part.figures
              if file in FIGURES and (folder / "figures" / f"{file}.png").is_file()]  # fmt: skip
    return "\n\n".join([*lines, *(_table(table) for table in part.tables if table.name not in LEFT_OUT)])


def _table(table: Table) -> str:
    text = markdown_table(table.heads, table.rows)
    if len(table.rows) > LONG:
        return f"<details><summary>{table.caption}</summary>\n\n{text}\n\n</details>"
    return f"{table.caption}:\n\n{text}"


def main(arguments: Sequence[str]) -> int:
    """Print and write; the exit code."""
    folders = [Path(text) for text in arguments if text != "--write"]
    if len(folders) != 1 or str(folders[0]).startswith("-"):
        print("usage: python -m experiments.monet_tables RUN [--write]", file=sys.stderr)
        return 2
    folder = folders[0]
    try:
        text = text_of(folder)
        print(text)
        if "--write" in arguments:
            write_between_marks(DOCS / "monet.md", COMMAND, text)
            for name in FIGURES:
                drawn = folder / "figures" / f"{name}.png"
                if drawn.is_file():
                    shutil.copyfile(drawn, DOCS / "figures" / f"monet_{name}.png")
    except RematError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
