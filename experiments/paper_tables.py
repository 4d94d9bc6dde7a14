"""A run of the paper as a document: ``python -m experiments.paper_tables RUN [--write]``.

Prints what was published, what we got, why they differ, and every table, as Markdown; solves nothing. ``--write`` puts
it into docs/results/checkmate.md and the figures named in `FIGURES` beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.paper import parts_of
from analysis.results import read_json
from analysis.saving import style_context
from experiments.run_documents import document_command, made_text, part_text

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
    texts = [part_text(part, folder, FIGURES, prefix="paper", long=LONG) for _, part in parts]
    return "\n\n".join([_head(folder, [name for name, _ in parts]), *texts])


def _head(folder: Path, names: Sequence[str]) -> str:
    head = read_json(folder / "paper.json")
    scale, source = head["scale"], head["provenance"]
    return (
        f"`scale={head['config']['scale']}`: {scale['points']} budgets of a sweep, {scale['time_limit_s']:g} s for "
        f"each solve, {head['cores']} cores ({source.get('cpu', 'unknown CPU')}), {made_text(folder, names)}"
    )


def main(arguments: Sequence[str]) -> int:
    """Print and write; the exit code."""
    return document_command(arguments, COMMAND, text_of, "paper", FIGURES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
