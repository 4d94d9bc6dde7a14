"""Self-contained HTML files: a page opens from the disk and sends no request to any server."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any


def page(title: str, body: str, data: Any, scripts: Sequence[str]) -> str:
    """The whole page; `scripts` read `data` as JSON."""
    code = f'<script type="application/json" id="data">{script_json(data)}</script>\n'
    code += "".join(f"<script>{script}</script>\n" for script in scripts)
    return Template(read("page.html")).substitute(title=escape(title), css=read("page.css"), body=body, scripts=code)


def read(name: str) -> str:
    """A file of this package."""
    return (resources.files("analysis") / name).read_text(encoding="utf-8")


def filled(name: str, values: Mapping[str, str]) -> str:
    """A file of this package with text or `Html` in its holes; its blocks that lack a value are left out."""
    known = {hole: escaped(text) for hole, text in values.items()}
    blocks = map(Template, read(name).split("\n\n"))
    return "\n".join(block.substitute(known) for block in blocks if known.keys() >= {*block.get_identifiers()})


def script_json(data: Any) -> str:
    """JSON that is safe inside a script element: no text from a result can close the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class Html(str):
    """Text that is already HTML; `escaped` escapes any other text."""

    __slots__ = ()


def escaped(text: str) -> str:
    """The text as HTML."""
    return text if isinstance(text, Html) else escape(text)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], is_number: Sequence[bool], *, name: str = "") -> Html:
    """A table of text or `Html`; columns of numbers align right."""

    def line(tag: str, texts: Sequence[str]) -> str:
        kinds = [' class="n"' if number else "" for number in is_number]
        return "".join(f"<{tag}{kind}>{escaped(text)}</{tag}>" for text, kind in zip(texts, kinds, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    anchor = f' id="{name}"' if name else ""
    inner = f"<table{anchor}><thead><tr>{line('th', heads)}</tr></thead><tbody>{body}</tbody></table>"
    return Html(f'<div class="scroll">{inner}</div>')


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """(term, text) pairs as a list, without the pairs that have no text."""
    rows = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in pairs if text)
    return Html(f'<dl class="facts">{rows}</dl>')
