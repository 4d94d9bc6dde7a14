"""Tables as CSV and as HTML."""

from __future__ import annotations

import csv
from html import escape
from pathlib import Path

from analysis.paper.part import Table
from remat.files import replacing

LONG = 24  # rows, above which the table scrolls


def write_table(table: Table, path: Path) -> Path:
    """Write the table as CSV, atomically."""
    with replacing(path) as scratch, scratch.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([table.heads, *table.rows])
    return path


def html(table: Table) -> str:
    """The table with its caption; columns of numbers to the right."""
    numeric = [all(_is_number(row[i]) for row in table.rows) for i in range(len(table.heads))]

    def cells(tag: str, row: list[str]) -> str:
        return "".join(f"<{tag}{' class=n' if numeric[i] else ''}>{escape(text)}</{tag}>" for i, text in enumerate(row))

    body = "".join(f"<tr>{cells('td', list(row))}</tr>" for row in table.rows)
    inner = f"<table><thead><tr>{cells('th', list(table.heads))}</tr></thead><tbody>{body}</tbody></table>"
    kind = "tall" if len(table.rows) > LONG else "scroll"
    return f'<p class="note">{escape(table.caption)}</p><div class="{kind}">{inner}</div>'


def _is_number(text: str) -> bool:
    return not text or text.replace(",", "").removesuffix(" %").replace(".", "", 1).removeprefix("-").isdigit()
