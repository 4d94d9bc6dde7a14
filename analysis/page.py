"""Draws the table, the figures and the self-contained HTML page of one run."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis import html_page, interactive, matrices, memory, network, overhead
from analysis.charts import save, style_context
from analysis.html_page import section
from analysis.overhead_data import overhead_data
from analysis.page_sections import failures, header, how_to_repeat, provenance, results_table, summary_table
from analysis.results import Run, chosen_plan, load_run, store_all
from analysis.table import write_csv
from remat.files import write_text

FIGURES = ("overhead", "memory", "matrices", "network")


def draw_run(folder: Path) -> list[Path]:
    """See `analysis.draw_run`."""
    run = load_run(folder)
    written = [write_csv(run, folder / "table.csv")]
    target = folder / "figures"
    drawn = set()
    with style_context():
        for name, figure in figures(run):
            written += save(figure, target / name)
            drawn.add(name)
    for name in set(FIGURES) - drawn:  # an earlier call drew it, but these results do not support it
        for ending in (".png", ".pdf"):
            (target / name).with_suffix(ending).unlink(missing_ok=True)
    write_text(folder / "page.html", page(run))
    return [*written, folder / "page.html"]


def figures(run: Run) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every figure that the run's results support."""
    data = overhead_data(run)
    if data is not None:
        yield "overhead", overhead.draw(data, run)
    if run.graph is None:
        return
    shown = chosen_plan(run)
    if shown is not None:
        yield "memory", memory.draw(run.graph, shown, store_all(run.graph, str(shown.row.accounting)))
        if len(run.graph) <= matrices.MAX_OPERATIONS:
            yield "matrices", matrices.draw(run.graph, shown)
    yield "network", network.draw(run.graph)


def page(run: Run) -> str:
    """The page as HTML, with plotly's script (4.8 MB) and the data as JSON inside."""
    from plotly.offline import get_plotlyjs

    data = overhead_data(run)
    plots: dict[str, Any] = {}
    parts = [header(run)]
    if len(run.rows):
        parts.append(section("Strategies", "strategies", summary_table(run)))
    if data is not None:
        plots["overhead"] = interactive.overhead_figure(data, run)
        notes = (
            "Overhead is a plan's cost over the cost of running every operation once, minus 1. Filled markers are "
            "proven optimal, by any strategy; hollow ones are not. The steps of a family show its cheapest member "
            "that fits; small faint markers are its members. Below is the status of every solve. Click a legend entry "
            "to hide it."
        )
        if data.above:
            beyond = ", ".join(f"{label} up to {100 * v:,.0f} %" for label, v in data.above.items())
            notes += f" Above the axis: {beyond} (double-click the plot to see all)."
        parts.append(section("Overhead against budget", "overhead-section", f'<div id="overhead" class="plot"></div>'
                              f'<p class="note">{escape(notes)}</p>'))  # fmt: skip
    payload = interactive.plan_payload(run)
    if payload["plans"]:
        parts.append(_plans(payload))
    if run.graph is not None:
        plots["network"] = interactive.network_figure(run.graph)
        parts.append(section("The network", "network-section", '<div id="network" class="plot"></div>'))
    if len(run.rows):
        parts.append(section("All results", "results-section", results_table(run)))
        parts.append(section("What did not work, and why", "failures-section", failures(run)))
    parts += [
        section("How to repeat this", "repeat-section", how_to_repeat(run)),
        section("Provenance", "provenance-section", provenance(run)),
    ]
    shared = {"figures": plots, "font": interactive.FONT, "grid": interactive.GRID} | payload
    scripts = get_plotlyjs(), html_page.read("page.js")
    return html_page.page(run.title, parts, data=shared, scripts=scripts)


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
            '<div id="matrix" class="plot"></div><p class="note">R and S together: a stage ends with the first '
            f"computation of an operation; light cells are resident when the stage starts.{each}</p>"
        )
    return section("Plans", "plans-section", body)
