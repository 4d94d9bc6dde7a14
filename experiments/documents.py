"""Numbers in pages: a command draws text and writes it between its marks, and long tables into CSV files."""

from __future__ import annotations

import csv
import datetime
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.store import write_json
from remat.errors import InvalidInput
from remat.files import read_json, replacing

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TABLES = ROOT / "results" / "tables"
RECORDS = TABLES / "index.json"


@dataclass(frozen=True, slots=True)
class LongTable:
    """A table for ``results/tables/<name>.csv``: `heads` above `rows`, all text."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Drawing:
    """The output of a command.

    Attributes:
        text: Markdown for the page, between the marks.
        figures: [name in docs/figures, without ``.png``] the drawn file.
        columns: of the rows behind the drawing; empty if it was computed without rows.
        commit: of the code that made the rows; None if unknown.
        whole: whether the page is complete; only then may it be written.
        failed: whether something could not be computed; the text says so, and the command's exit code is 1.
        files: other drawn files, which are not kept.
    """

    text: str
    tables: Sequence[LongTable] = ()
    figures: Mapping[str, Path] = field(default_factory=dict)
    columns: Sequence[str] = ()
    commit: str | None = None
    whole: bool = True
    failed: bool = False
    files: Sequence[Path] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """A page whose numbers a command draws.

    Attributes:
        name: argument of ``python -m experiments.tables``.
        page: file with the marks of `command`.
        draw: draws from the arguments after the name; raises `RematError` with one line.
        usage: the arguments that it needs, e.g. ``RUN``.
        columns: of a row that drawing reads. A page drawn from rows without one of them has another schema.
        by: the command that draws it, if it is not the one of all documents.
    """

    name: str
    page: Path
    draw: Callable[[Sequence[str]], Drawing]
    usage: str = ""
    columns: Sequence[str] = ()
    by: str = ""

    @property
    def command(self) -> str:
        """The command that writes the page; the page's marks contain it."""
        if self.by:
            return self.by
        return " ".join(filter(None, ("python -m experiments.tables", self.name, self.usage, "--write")))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """A Markdown table. `align` has "l" or "r" for each column; by default the first is left, the others right."""
    rule = [{"l": "---", "r": "--:"}[side] for side in align or "l" + "r" * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def long_table(name: str, rows: Sequence[Mapping[str, Any]]) -> LongTable:
    """The table of rows that have the same columns."""
    return LongTable(name, [*rows[0]], [["" if cell is None else str(cell) for cell in row.values()] for row in rows])


def link_to(table: LongTable, page: Path) -> str:
    """A link from a page to a table's CSV file, with its number of rows."""
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    return f"[{table.name}.csv]({up}results/tables/{table.name}.csv) ({len(table.rows)} rows)"


def marks(command: str) -> tuple[str, str]:
    """The lines before and after the output of `command` in a document."""
    return f"<!-- tables: {command} -->", "<!-- end of tables -->"


def between_marks(document: Path, command: str) -> str:
    """The text of `document` between the marks of `command`; raises like `write_between_marks`."""
    return _split(document, command)[1].strip("\n")


def write_between_marks(document: Path, command: str, text: str) -> None:
    """Replace the text of `document` between the marks of `command`.

    Raises:
        InvalidInput: `document` lacks the marks.
    """
    before, _, after = _split(document, command)
    document.write_text(f"{before}\n\n{text}\n\n{after}", encoding="utf-8")


def _split(document: Path, command: str) -> tuple[str, str, str]:
    """(text up to the end of the first mark, text between the marks, text from the last mark on)."""
    first, last = marks(command)
    before, found, rest = document.read_text(encoding="utf-8").partition(first)
    between, ended, after = rest.partition(last)
    if not found or not ended:
        raise InvalidInput(f"{document}: lacks the lines '{first}' and '{last}'")
    return before + first, between, last + after


def write_document(document: Document, drawing: Drawing) -> None:
    """Write a drawing into its page, its tables under results/tables, its figures under docs/figures; record it.

    Raises:
        InvalidInput: the drawing covers only a part of the page, or the page lacks the marks.
    """
    if not drawing.whole:
        raise InvalidInput(f"'{document.name}' is written as a whole: {document.command}")
    write_between_marks(document.page, document.command, drawing.text)
    write_tables(drawing, TABLES)
    for name, drawn in drawing.figures.items():
        shutil.copyfile(drawn, DOCS / "figures" / f"{name}.png")
    record = {
        "page": document.page.relative_to(ROOT).as_posix(), "tables": [table.name for table in drawing.tables],
        "columns": list(drawing.columns), "drawn": datetime.date.today().isoformat(), "commit": drawing.commit,
    }  # fmt: skip
    write_json(RECORDS, dict(sorted((records() | {document.name: record}).items())))


def write_tables(drawing: Drawing, folder: Path) -> list[Path]:
    """Write the long tables as CSV files; returns these."""
    paths = [folder / f"{table.name}.csv" for table in drawing.tables]
    for path, table in zip(paths, drawing.tables, strict=True):
        with replacing(path) as scratch, scratch.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([table.heads, *table.rows])
    return paths


def records() -> dict[str, Any]:
    """[name of a document] its date, the commit and columns of its rows, and its files."""
    return read_json(RECORDS) if RECORDS.is_file() else {}


def other_schema(document: Document, record: Mapping[str, Any]) -> list[str]:
    """Columns that drawing reads and that the rows behind the written page lack; empty for the same schema."""
    return [column for column in document.columns if column not in record["columns"]]
