"""Numbers in pages: text that a command draws and writes between its marks, and long tables as CSV files."""

from __future__ import annotations

import csv
import datetime
import re
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
    """A table that becomes ``results/tables/<name>.csv``: `heads` above `rows`, all text."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a command drew.

    Attributes:
        text: Markdown for the page, between the marks.
        figures: [name in docs/figures, without ``.png``] the drawn file.
        columns: what the rows have that it was drawn from; empty if it was computed and not drawn from rows.
        commit: of the code that made the rows; None if they do not say.
        stores: [file under results/] rows to keep with the page, as JSON.
        whole: nothing of the page is left out; only then may it be written.
        failed: something could not be computed; it is in the text, and the command's exit code is 1.
    """

    text: str
    tables: Sequence[LongTable] = ()
    figures: Mapping[str, Path] = field(default_factory=dict)
    columns: Sequence[str] = ()
    commit: str | None = None
    stores: Mapping[Path, Any] = field(default_factory=dict)
    whole: bool = True
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """A page whose numbers a command draws.

    Attributes:
        name: as ``python -m experiments.tables`` takes it.
        page: where the text stands between the marks of `command`.
        draw: from the arguments after the name. Raises `RematError` with one line where it cannot.
        usage: the arguments that it needs, e.g. ``RUN``.
        columns: what drawing reads of a row. A page drawn from rows that lack one is of another schema.
    """

    name: str
    page: Path
    draw: Callable[[Sequence[str]], Drawing]
    usage: str = ""
    columns: Sequence[str] = ()

    @property
    def command(self) -> str:
        """What stands in the marks of the page, and writes it."""
        return " ".join(filter(None, ("python -m experiments.tables", self.name, self.usage, "--write")))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, its first column to the left and the others to the right."""
    rule = ["---", *["--:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def link_to(table: LongTable, page: Path) -> str:
    """A link from a page to the CSV of a table, with its number of rows."""
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    return f"[{table.name}.csv]({up}results/tables/{table.name}.csv) ({len(table.rows)} rows)"


def marks(command: str) -> tuple[str, str]:
    """What stands before and after the output of `command` in a document."""
    return f"<!-- tables: {command} -->", "<!-- end of tables -->"


def between_marks(document: Path, command: str) -> str:
    """What `document` holds between the marks of `command`.

    Raises:
        InvalidInput: the marks are not there.
    """
    return _split(document, command)[1].strip("\n")


def write_between_marks(document: Path, command: str, text: str) -> None:
    """Replace what `document` holds between the marks of `command`.

    Raises:
        InvalidInput: the marks are not there.
    """
    before, _, after = _split(document, command)
    document.write_text(f"{before}\n\n{text}\n\n{after}", encoding="utf-8")


def _split(document: Path, command: str) -> tuple[str, str, str]:
    """(up to and with the first mark, between the marks, from the last mark on)."""
    first, last = marks(command)
    before, found, rest = document.read_text(encoding="utf-8").partition(first)
    between, ended, after = rest.partition(last)
    if not found or not ended:
        raise InvalidInput(f"{document}: lacks the lines '{first}' and '{last}'")
    return before + first, between, last + after


def write_document(document: Document, drawing: Drawing) -> None:
    """Put a drawing into its page, its tables under results/tables, its figures under docs/figures; record it.

    Raises:
        InvalidInput: the drawing is of a part of the page, or the page lacks the marks.
    """
    if not drawing.whole:
        raise InvalidInput(f"'{document.name}' is written as a whole: {document.command}")
    write_between_marks(document.page, document.command, drawing.text)
    for table in drawing.tables:
        with replacing(TABLES / f"{table.name}.csv") as scratch, scratch.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([table.heads, *table.rows])
    for name, drawn in drawing.figures.items():
        shutil.copyfile(drawn, DOCS / "figures" / f"{name}.png")
    for path, content in drawing.stores.items():
        write_json(path, content)
    record = {
        "page": document.page.relative_to(ROOT).as_posix(), "tables": [table.name for table in drawing.tables],
        "columns": list(drawing.columns), "drawn": datetime.date.today().isoformat(), "commit": drawing.commit,
    }  # fmt: skip
    write_json(RECORDS, dict(sorted((records() | {document.name: record}).items())))


def records() -> dict[str, Any]:
    """[name of a document] when it was written, from which rows, into which files."""
    return read_json(RECORDS) if RECORDS.is_file() else {}


def other_schema(document: Document, record: Mapping[str, Any]) -> list[str]:
    """Columns that drawing reads today and that the rows behind the written page lack: empty for the same schema."""
    return [column for column in document.columns if column not in record["columns"]]


def linked_tables(text: str) -> set[str]:
    """Names of the tables under results/tables that a page links to."""
    return set(re.findall(r"\]\([./]*results/tables/(\w+)\.csv\)", text))
