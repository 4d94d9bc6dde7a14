"""The page of a paper's run: each part has prose, figures and tables, made from the documents of the run's folder.

A part is a function of (document, folder). Its prose is in the Markdown file of its name.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from analysis import html_page
from analysis.charts import save, style_context
from analysis.results import read_json
from analysis.table import cell
from remat.files import replacing, write_text

LEADS = ("**Published.** ", "**Ours.** ", "**Why they differ.** ")
PX_PER_INCH = 84  # so that letters have the same size in all figures
LONG = 24  # a table with more rows scrolls


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A table of text: `heads` above `rows`."""

    name: str
    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A section of the page.

    Attributes:
        published, ours, why: the published result, ours, and why they differ.
        figures: (name of the file, caption, figure) of each.
    """

    title: str
    published: str
    ours: str
    why: str
    figures: Sequence[tuple[str, str, Figure]] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Front:
    """The text above the parts: title, subtitle, a paragraph and smaller notes."""

    title: str
    subtitle: str
    lead: str
    notes: Sequence[str]


Reports: TypeAlias = Mapping[str, Callable[[Any, Path], Part]]


def prose(module_file: str, part: str, **values: object) -> tuple[str, str, str, str]:
    """(title, published, ours, why they differ) from ``PART.md`` beside a module; `values` fill in ``{name}``."""
    title, *texts = _paragraphs(Path(module_file).with_name(f"{part}.md"), values)
    published, ours, why = (text.removeprefix(lead) for text, lead in zip(texts, LEADS, strict=True))
    return title, published, ours, why


def front(module_file: str, **values: object) -> Front:
    """The front of a page, from ``front.md`` beside a module: title, subtitle, paragraph, notes."""
    title, subtitle, lead, *notes = _paragraphs(Path(module_file).with_name("front.md"), values)
    return Front(title, subtitle, lead, notes)


def _paragraphs(path: Path, values: Mapping[str, object]) -> list[str]:
    text = path.read_text(encoding="utf-8").format(**values)
    return [" ".join(paragraph.split()).removeprefix("# ") for paragraph in text.strip().split("\n\n")]


def percent(share: float | None, digits: int = 2) -> str:
    """``12.34 %``; '' for None."""
    return "" if share is None else f"{100 * share:.{digits}f} %"


def read_parts(reports: Reports, folder: Path) -> list[tuple[str, Part]]:
    """(name, part) of every report with a document in the folder, in the order of `reports`.

    Call it inside `analysis.charts.style_context`, because it draws figures.

    Raises:
        InvalidInput: a file of the folder cannot be read.
    """
    return [
        (name, report(read_json(folder / f"{name}.json"), folder))
        for name, report in reports.items()
        if (folder / f"{name}.json").is_file()
    ]


def draw_parts(reports: Reports, folder: Path, head: Mapping[str, Any], first: Front) -> list[Path]:
    """Write ``figures/``, ``tables/`` and ``page.html`` for the parts in the folder; returns the paths."""
    written: list[Path] = []
    (folder / "tables").mkdir(exist_ok=True)
    with style_context():
        parts = read_parts(reports, folder)
        for _, part in parts:
            for file, _, figure in part.figures:
                written += save(figure, folder / "figures" / file)
            written += [_write_csv(table, folder / "tables" / f"{table.name}.csv") for table in part.tables]
    write_text(folder / "page.html", _page(head, parts, folder, first))
    return [*written, folder / "page.html"]


def _write_csv(table: Table, path: Path) -> Path:
    with replacing(path) as scratch, scratch.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(map(cell, row) for row in (table.heads, *table.rows))
    return path


def _page(head: Mapping[str, Any], parts: Sequence[tuple[str, Part]], folder: Path, first: Front) -> str:
    body = [f"<h1>{escape(first.title)}</h1>", f'<p class="lead">{escape(first.subtitle)}</p>']
    body.append(f"<p>{escape(first.lead)}</p>")
    body += [f'<p class="note">{escape(text)}</p>' for text in first.notes]
    links = " · ".join(f'<a href="#{name}">{escape(part.title)}</a>' for name, part in parts)
    body.append(f'<p class="note">{links}</p>')
    body += [_section(name, part, folder) for name, part in parts]
    source = {key: str(value) for key, value in head["provenance"].items()}
    if source.get("versions"):
        source["versions"] = ", ".join(f"{k} {v}" for k, v in json.loads(source["versions"]).items())
    body.append(html_page.section("Provenance", "provenance", html_page.facts(source.items())))
    return html_page.page(first.title, body)


def _section(name: str, part: Part, folder: Path) -> str:
    body = "".join(
        f"<p><strong>{lead.strip('* ')}</strong> {escape(text)}</p>"
        for lead, text in zip(LEADS, (part.published, part.ours, part.why), strict=True)
    )
    for file, caption, figure in part.figures:
        width = round(PX_PER_INCH * figure.get_figwidth())
        body += html_page.figure(folder / "figures" / f"{file}.png", caption, width)
    body += "".join(html_of(table) for table in part.tables)
    body += f'<p class="note">{escape(made_words(folder / f"{name}.json"))}</p>'
    return html_page.section(part.title, name, body)


def html_of(table: Table) -> str:
    """The table with its caption; columns of numbers align right."""
    is_number = [all(_is_number(row[i]) for row in table.rows) for i in range(len(table.heads))]
    body = html_page.table(table.heads, table.rows, is_number, tall=len(table.rows) > LONG)
    return f'<p class="note">{escape(table.caption)}</p>{body}'


def _is_number(text: str) -> bool:
    return not text or text.replace(",", "").removesuffix(" %").replace(".", "", 1).removeprefix("-").isdigit()


def made_words(path: Path) -> str:
    """The day and commit of a part, and its solving time."""
    made = read_json(path).get("made")
    if made is None:
        return "Made by an earlier version, which did not record the date."
    changed = ", changed" if made["git_dirty"] else ""
    commit = f" by commit {made['git_commit'][:10]}{changed}" if made["git_commit"] else ""
    return f"Made {made['at'][:10]}{commit}: {made['solved']} solves of {made['seconds']:.0f} s in all."
