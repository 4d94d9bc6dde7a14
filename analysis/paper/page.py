"""The page: every part with its paragraph, figures and tables, in one file that asks no server for anything."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from analysis.paper.part import Part
from analysis.paper.tables import html
from analysis.results import read_json
from remat.files import replacing

TITLE = "Checkmate reproduced"
MARKS = ("Marks: [2nd] quoted by a third party, the paper itself was not at hand; [mem] from memory, unverified; "
         "[code] read in the authors' code; [data] computed again from a published file.")  # fmt: skip
PX_PER_INCH = 84  # one size of letters in all figures


@dataclass(frozen=True, slots=True)
class Front:
    """What stands above the parts: title, a subtitle, paragraphs and smaller notes."""

    title: str
    subtitle: str
    paragraphs: Sequence[str]
    notes: Sequence[str]


def write_page(
    head: Mapping[str, Any], parts: Sequence[tuple[str, Part]], folder: Path, front: Front | None = None
) -> Path:
    """Write ``page.html``, atomically; without a `front`, as the page of Checkmate's paper."""
    path = folder / "page.html"
    with replacing(path) as scratch:
        scratch.write_text(_page(head, parts, folder, front or _front(head)), encoding="utf-8")
    return path


def _front(head: Mapping[str, Any]) -> Front:
    scale, config = head["scale"], head["config"]
    lead = (f"scale={config['scale']}: {scale['points']} budgets of a sweep, {scale['time_limit_s']:g} s for each "
            f"solve, {scale['samples']} random roundings; costs of the GPU {config['gpu'].get('name')}; "
            f"{head['cores']} cores here.")  # fmt: skip
    subtitle = "Jain et al., MLSys 2020: what was published, what this project gets, and why they differ."
    return Front(TITLE, subtitle, (lead,), (MARKS,))


def _page(head: Mapping[str, Any], parts: Sequence[tuple[str, Part]], folder: Path, front: Front) -> str:
    css = (resources.files("analysis") / "page.css").read_text(encoding="utf-8")
    links = " · ".join(f'<a href="#{name}">{escape(part.title)}</a>' for name, part in parts)
    body = [f"<h1>{escape(front.title)}</h1>", f'<p class="lead">{escape(front.subtitle)}</p>']
    body += [f"<p>{escape(text)}</p>" for text in front.paragraphs]
    body += [f'<p class="note">{escape(text)}</p>' for text in front.notes]
    body.append(f'<p class="note">{links}</p>')
    body += [_section(name, part, folder) for name, part in parts]
    body.append(_provenance(head))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        f'<link rel="icon" href="data:,"><title>{escape(front.title)}</title>'
        f"<style>{css}\nfigure {{ margin: 14px 0; }} "
        "figure img {{ max-width: 100%; }}</style></head>".replace("{{", "{").replace("}}", "}")
        + "<body><main>" + "\n".join(body) + "</main></body></html>\n"
    )  # fmt: skip


def _section(name: str, part: Part, folder: Path) -> str:
    text = "".join(
        f"<p><strong>{what}</strong> {escape(words)}</p>"
        for what, words in (("Published.", part.published), ("Ours.", part.ours), ("Why they differ.", part.why))
    )
    figures = "".join(
        _figure(folder / "figures" / f"{file}.png", caption, round(PX_PER_INCH * figure.get_figwidth()))
        for file, caption, figure in part.figures
    )
    tables = "".join(html(table) for table in part.tables)
    made = f'<p class="note">{escape(made_words(folder / f"{name}.json"))}</p>'
    return f'<section id="{name}"><h2>{escape(part.title)}</h2>{text}{figures}{tables}{made}</section>'


def made_words(path: Path) -> str:
    """When a part was made, and in what time."""
    made = read_json(path).get("made")
    if made is None:
        return "Made by an earlier version, which did not say when."
    changed = ", changed" if made["git_dirty"] else ""
    commit = f" by commit {made['git_commit'][:10]}{changed}" if made["git_commit"] else ""
    return f"Made {made['at'][:10]}{commit}: {made['solved']} solved in {made['seconds']:.0f} s."


def _figure(path: Path, caption: str, width_px: int) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    alt = escape(caption, quote=True)
    image = f'<img alt="{alt}" style="width: {width_px}px" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _provenance(head: Mapping[str, Any]) -> str:
    source = dict(head["provenance"])
    versions = source.get("versions")
    facts = (
        {**source, "versions": ", ".join(f"{k} {v}" for k, v in json.loads(versions).items())} if versions else source
    )
    rows = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items())
    return f'<section id="provenance"><h2>Provenance</h2><dl class="facts">{rows}</dl></section>'
