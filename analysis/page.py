"""One self-contained HTML page per run: opens from a file, asks no server for anything."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from analysis import interactive
from analysis.page_parts import failures, header, results_table, summary_table
from analysis.page_provenance import how_to_repeat, provenance
from analysis.panel import panel_of
from analysis.results import Run
from remat.files import replacing


def write_page(run: Run, path: Path) -> Path:
    """Write the page of `run`, atomically."""
    with replacing(path) as scratch:
        scratch.write_text(page(run), encoding="utf-8")
    return path


def page(run: Run) -> str:
    """The page as HTML: plotly's script (4.8 MB) once, data as JSON, everything inline."""
    from plotly.offline import get_plotlyjs

    panel = panel_of(run)
    plots: dict[str, Any] = {}
    parts = [header(run)]
    if len(run.shown):
        parts.append(_section("Strategies", "strategies", summary_table(run)))
    if panel is not None:
        plots["overhead"] = interactive.overhead_figure(panel, run)
        notes = (
            "Overhead is a plan's cost over the cost of running every operation once, minus 1. Filled markers are "
            "proven optimal, hollow ones are plans without a proof. Families are drawn as steps, the cheapest member "
            "that fits; small faint markers are their members. Below, every solve's status. Click a legend entry to "
            "hide it."
        )
        if panel.above:
            beyond = ", ".join(f"{label} up to {100 * v:,.0f} %" for label, v in panel.above.items())
            notes += f" Above the axis: {beyond} (double-click the plot to see all)."
        parts.append(_section("Overhead against budget", "overhead-section", f'<div id="overhead" class="plot"></div>'
                              f'<p class="note">{escape(notes)}</p>'))  # fmt: skip
    payload = interactive.plan_payload(run)
    if payload["plans"]:
        parts.append(_plans(payload))
    if run.graph is not None:
        plots["network"] = interactive.network_figure(run.graph)
        parts.append(_section("The network", "network-section", '<div id="network" class="plot"></div>'))
    if len(run.rows):
        parts.append(_section("All results", "results-section", results_table(run)))
        parts.append(_section("What did not work, and why", "failures-section", failures(run)))
    parts += [
        _section("How to repeat this", "repeat-section", how_to_repeat(run)),
        _section("Provenance", "provenance-section", provenance(run)),
    ]
    return Template(_read("page.html")).substitute(
        title=escape(run.title),
        css=_read("page.css"),
        body="\n".join(parts),
        data=script_json({"figures": plots} | payload),
        plotly=get_plotlyjs(),
        js=_read("page.js"),
    )


def script_json(data: Any) -> str:
    """JSON that is safe inside a script element: no text of a result can close it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(title: str, anchor: str, body: str) -> str:
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{body}</section>'


def _plans(payload: dict[str, Any]) -> str:
    options = "".join(
        f'<option value="{i}"{" selected" * (i == payload["first"])}>{escape(p["title"])}</option>'
        for i, p in enumerate(payload["plans"])
    )
    body = (
        f'<div class="tools"><label>Plan <select id="plan">{options}</select></label>'
        '<span id="planfacts" class="note"></span></div><div id="memory" class="plot"></div>'
    )
    if "cells" in payload["plans"][0]:
        block = payload["plans"][0]["block"]
        each = f" One cell stands for {block} x {block}." if block > 1 else ""
        body += (
            '<div id="matrix" class="plot"></div><p class="note">R and S in one: a stage ends with the first '
            f"computation of an operation; light cells are held when the stage starts.{each}</p>"
        )
    return _section("Plans", "plans-section", body)


def _read(name: str) -> str:
    return (resources.files("analysis") / name).read_text(encoding="utf-8")
