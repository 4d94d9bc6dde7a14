"""A run of ``experiment=paper/monet`` as a document: ``python -m experiments.monet_tables RUN [--write]``.

Prints what was published, what we got, why they differ, and the tables, as Markdown; solves nothing. ``--write`` puts
it into docs/results/monet.md and the figures beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.monet import front, parts_of
from analysis.results import read_json
from analysis.saving import style_context
from experiments.run_documents import document_command, made_text, part_text

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
    cpu, first = read_json(folder / "monet.json")["provenance"].get("cpu", "Unknown CPU"), front(folder)
    lead = f"{first.paragraphs[0]} {cpu}, {made_text(folder, [name for name, _ in parts], digits=1)}"
    texts = [part_text(part, folder, FIGURES, prefix="monet", long=LONG, left_out=LEFT_OUT) for _, part in parts]
    return "\n\n".join([lead, *first.notes[:1], *texts])


def main(arguments: Sequence[str]) -> int:
    """Print and write; the exit code."""
    return document_command(arguments, COMMAND, text_of, "monet", FIGURES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
