"""Numbers in pages: text that an experiment draws stands between two marks of its page, long tables in CSV files."""

import csv
import json
import shutil
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, TypeVar

from experiments.settings import RUNS_FOLDER
from remat.errors import InvalidInput
from remat.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TABLES = ROOT / "results" / "tables"
UNITS = {"MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}

# A column of a table: a row's text, or a format of its values: ``{overhead:.2%}``, ``{peak_bytes:.1f MB}``, or
# ``{peak_bytes:.1f/MB}`` without the unit.
Column = str | Callable[[Any], str]
Columns = Mapping[str, Column] | Sequence[tuple[str, Column]]  # by their heads; pairs if two heads are equal


@dataclass(frozen=True, slots=True)
class LongTable:
    """A table for ``results/tables/<name>.csv``: `heads` above `rows`, all text."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Drawing:
    """What an experiment draws.

    Attributes:
        text: Markdown for the page, between the marks.
        figures: [name in docs/figures, without ``.png``] each figure.
        files: other drawn files, which are not kept.
        kept: [file of the checkout] the drawn file that becomes it.
        holes: [name] the parts of `text`, if the page has prose between them; `# name` ends the command of their marks.
    """

    text: str
    tables: Sequence[LongTable] = ()
    figures: Mapping[str, "Figure"] = field(default_factory=dict)
    files: Sequence[Path] = ()
    kept: Mapping[Path, Path] = field(default_factory=dict)
    holes: Mapping[str, str] = field(default_factory=dict)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """A Markdown table. `align` has "l" or "r" for each column; by default the first is left, the others right."""
    rule = [{"l": "---", "r": "--:"}[side] for side in align or "l" + "r" * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def table_of(rows: Iterable[Mapping[str, Any]], columns: Columns, align: str = "") -> str:
    """A Markdown table with a line for each row; '' without rows."""
    of = long_table("", rows, columns)
    return markdown_table(of.heads, of.rows, align) if of.rows else ""


def table_by_heads(lines: Iterable[Mapping[str, str]]) -> str:
    """A Markdown table of lines, whose keys are the heads; '' without lines."""
    lines = [*lines]
    return markdown_table([*lines[0]], [[*line.values()] for line in lines]) if lines else ""


def long_table(name: str, rows: Iterable[Mapping[str, Any]], columns: Columns | None = None) -> LongTable:
    """`table_of` as a long table; without `columns` those of the first row, as they are."""
    rows = [*rows]
    if columns is None:
        columns = {column: f"{{{column}}}" for row in rows[:1] for column in row}
    columns = [*columns.items()] if isinstance(columns, Mapping) else columns
    return LongTable(name, [head for head, _ in columns], [cells(row, [c for _, c in columns]) for row in rows])


def cells(row: Mapping[str, Any], columns: Iterable[Column]) -> list[str]:
    """The cells of a row; that of a format is '' where one of its values is None."""
    return [column(row) if callable(column) else _FORMAT.cell(column, row) for column in columns]


class _Format(Formatter):
    """Formats that may end with a unit of `UNITS`."""

    def cell(self, column: str, row: Mapping[str, Any]) -> str:
        names = (name for _, name, *_ in self.parse(column) if name)
        return "" if any(self.get_field(name, (), row)[0] is None for name in names) else self.vformat(column, (), row)

    def format_field(self, value: Any, format_spec: str) -> str:
        for sign, shown in ((" ", True), ("/", False)):
            number, _, unit = format_spec.partition(sign)
            if unit:
                return f"{value / UNITS[unit]:{number}}" + f" {unit}" * shown
        return format(value, format_spec)


_FORMAT = _Format()


def links(page: str, *tables: LongTable) -> str:
    """Links from a page of docs/ to the CSV files of tables, with their numbers of rows."""
    folder = "../" * (page.count("/") + 1) + "results/tables"
    return ", ".join(f"[{table.name}.csv]({folder}/{table.name}.csv) ({len(table.rows)} rows)" for table in tables)


def command_of(name: str, hole: str = "") -> str:
    """The command that draws an experiment into its page, or one hole of it; the page's marks contain it."""
    command = f"python run.py experiment={name} draw=true keep=true"
    return f"{command} # {hole}" if hole else command


def marks(command: str) -> tuple[str, str]:
    """The lines before and after the output of `command` in a page."""
    return f"<!-- tables: {command} -->", "<!-- end of tables -->"


def write_between_marks(page: Path, command: str, text: str) -> None:
    """Replace the text of `page` between the marks of `command`.

    Raises:
        InvalidInput: `page` lacks the marks.
    """
    first, last = marks(command)
    before, found, rest = page.read_text(encoding="utf-8").partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise InvalidInput(f"{page}: lacks the lines '{first}' and '{last}'")
    page.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}", encoding="utf-8")


def write_drawing(name: str, page: Path, drawing: Drawing) -> None:
    """Write an experiment's drawing into its page, its tables under results/tables, its figures under docs/figures."""
    for hole, text in (drawing.holes or {"": drawing.text}).items():
        write_between_marks(page, command_of(name, hole), text)
    write_tables(drawing, TABLES)
    figures = {DOCS / "figures" / drawn.name: drawn for drawn in write_figures(drawing, RUNS_FOLDER / name)}
    for file, drawn in (figures | dict(drawing.kept)).items():
        shutil.copyfile(drawn, file)


def write_figures(drawing: Drawing, folder: Path) -> list[Path]:
    """Write the figures of a run into its folder, as PNG and PDF; returns the PNGs."""
    from analysis.charts import save  # late: it imports matplotlib

    return [save(figure, folder / "figures" / name)[0] for name, figure in drawing.figures.items()]


def write_tables(drawing: Drawing, folder: Path) -> list[Path]:
    """Write the long tables as CSV files; returns these."""
    paths = [folder / f"{table.name}.csv" for table in drawing.tables]
    for path, table in zip(paths, drawing.tables, strict=True):
        with replacing(path) as scratch, scratch.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([table.heads, *table.rows])
    return paths


def made(rows: Sequence[Mapping[str, Any]], *packages: str, **words: str) -> str:
    """Dates of rows, versions of packages, processors, e.g. ``2026-11-25, PyTorch 2.13.0, AMD EPYC, 2 threads``.

    Args:
        words: of columns, after their values: ``threads="threads"``.
    """
    dates = sorted(row["date"] for row in rows)
    parts = [" to ".join(dict.fromkeys((dates[0], dates[-1])))]
    for package in packages:
        found = dict.fromkeys(str(json.loads(row["versions"]).get(package, "unknown")) for row in rows)
        parts.append(f"{'PyTorch' if package == 'torch' else package} {' and '.join(found)}")
    values = (f"{values_of(rows, column)} {word}" for column, word in words.items())
    return ", ".join([*parts, values_of(rows, "cpu"), *values])


def grouped(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """[key] the rows that have it, in their order."""
    groups: dict[K, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def values_of(rows: Sequence[Mapping[str, Any]], column: str) -> str:
    """The values of a column, e.g. ``2`` or ``2 and 4``."""
    found = dict.fromkeys(row[column] for row in rows if row[column] is not None)
    return " and ".join(each if isinstance(each, str) else f"{each:g}" for each in found)
