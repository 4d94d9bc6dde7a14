"""Names come from files: whatever is in them is shown as it is, never read as markup or mathematics."""

from __future__ import annotations

import html
from dataclasses import replace
from pathlib import Path

import fake_run
from rich.console import Console

import analysis
from analysis import interactive
from analysis.results import load_run
from remat import Plan
from remat.simulator import plain_peak

NAME = "a [/b] [bold] <script>alert(1)</script> <b>c</b> ${x}_$y^2 %{x} &amp;"


def test_awkward_names_are_drawn_printed_and_escaped(tmp_path: Path) -> None:
    graph = fake_run.chain(4, cost_unit=NAME)
    operations = tuple(replace(op, name=f"{op.name} {NAME}") for op in graph.operations)
    graph = replace(graph, name=NAME, operations=operations)
    plan = Plan.from_order(graph, range(len(graph)))
    for budgets in (1, 2):
        solved = [
            (fake_run.row(graph, "checkpoint_all", plain_peak(graph) + i, "OPTIMAL", plan), plan)
            for i in range(budgets)
        ]
        folder = fake_run.write_run(tmp_path / str(budgets), graph, solved)
        written = {path.name for path in analysis.draw_run(folder)}
        assert {"overhead.png", "network.pdf", "page.html", "table.csv"} <= written
        assert "<script>alert" not in (folder / "page.html").read_text()
        console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(analysis.terminal_table(folder))
        assert NAME in " ".join(console.export_text().split())  # a title may run over two lines
    # Plotly reads ``<b>`` in a label as bold, and ``%{x}`` in a template as a field.
    figure, payload = interactive.network_figure(graph), interactive.plan_payload(load_run(folder))
    labels = [*figure["layout"]["xaxis"]["ticktext"], *payload["names"]]
    labels += [text for bars in figure["data"] for text in bars["text"]]
    assert len(labels) > 3 * len(graph) - 1
    for text in labels:
        assert NAME in html.unescape(text)
        assert "<" not in text
    assert NAME in html.unescape(figure["data"][0]["hovertemplate"])
    assert all(bars["hovertemplate"].count("%{") == 2 for bars in figure["data"])


def test_operations_of_one_name_stay_apart() -> None:
    """Names are labels: in a figure each operation has its place, whatever it is called."""
    graph = fake_run.chain(4)
    graph = replace(graph, operations=tuple(replace(op, name="same") for op in graph.operations))
    figure = interactive.network_figure(graph)
    places = [x for bars in figure["data"][: len(figure["data"]) // 2] for x in bars["x"]]
    assert sorted(places) == list(range(len(graph)))
    assert figure["layout"]["xaxis"]["ticktext"] == ["same"] * len(graph)
