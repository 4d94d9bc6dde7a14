"""Numbers in documents: tables printed by a command and written between its marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from remat.errors import InvalidInput

DOCS = Path(__file__).resolve().parents[1] / "docs"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, its first column to the left and the others to the right."""
    rule = ["---", *["--:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def marks(command: str) -> tuple[str, str]:
    """What stands before and after the output of `command` in a document."""
    return f"<!-- tables: {command} -->", "<!-- end of tables -->"


def write_between_marks(document: Path, command: str, text: str) -> None:
    """Replace what `document` holds between the marks of `command`.

    Raises:
        InvalidInput: the marks are not there.
    """
    first, last = marks(command)
    before, found, rest = document.read_text(encoding="utf-8").partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise InvalidInput(f"{document}: lacks the lines '{first}' and '{last}'")
    document.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}", encoding="utf-8")
