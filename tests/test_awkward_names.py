"""Names come from files: whatever is in them is shown as it is, never read as markup or mathematics."""

from __future__ import annotations

import html
from dataclasses import replace

import fake_run
import pytest
from rich.console import Console

import analysis
from analysis import interactive
from analysis.results import load_run
from remat import Graph, Plan
from remat.simulator import plain_peak

NAME = "a [/b] [bold] <script>alert(1)</script> <b>c</b> ${x}_$y^2 %{x} &amp;"


@pytest.fixture
def awkward() -> Graph:
    graph = fake_run.chain(4, cost_unit=NAME)
    operations = tuple(replace(op, name=f"{op.name} {NAME}") for op in graph.operations)
    return replace(graph, name=NAME, operations=operations)


@pytest.mark.parametrize("budgets", [1, 2])
def test_awkward_names_are_drawn_printed_and_escaped(awkward: Graph, tmp_path, budgets: int) -> None:
    plan = Plan.from_order(awkward, range(len(awkward)))
    peak = plain_peak(awkward)
    solved = [(fake_run.row(awkward, "checkpoint_all", peak + i, "OPTIMAL", plan), plan) for i in range(budgets)]
    folder = fake_run.write_run(tmp_path, awkward, solved)
    written = {path.name for path in analysis.draw_run(folder)}
    assert {"overhead.png", "network.pdf", "page.html", "table.csv"} <= written
    assert "<script>alert" not in (folder / "page.html").read_text()
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(analysis.terminal_table(folder))
    assert NAME in " ".join(console.export_text().split())  # a title may run over two lines


def test_plotly_is_given_no_markup_of_names(awkward: Graph, tmp_path) -> None:
    """It reads ``<b>`` in a label as bold, and ``%{x}`` in a template as a field."""
    plan = Plan.from_order(awkward, range(len(awkward)))
    solved = [(fake_run.row(awkward, "checkpoint_all", plain_peak(awkward), "OPTIMAL", plan), plan)]
    run = load_run(fake_run.write_run(tmp_path, awkward, solved))
    figure, payload = interactive.network_figure(awkward), interactive.plan_payload(run)
    labels = [*figure["layout"]["xaxis"]["ticktext"], *payload["names"]]
    labels += [text for bars in figure["data"] for text in bars["text"]]
    assert len(labels) > 3 * len(awkward) - 1
    for text in labels:
        assert NAME in html.unescape(text)
        assert "<" not in text
    assert all(NAME in html.unescape(bars["hovertemplate"]) for bars in figure["data"][:1])
    assert all(bars["hovertemplate"].count("%{") == 2 for bars in figure["data"])


def test_operations_of_one_name_stay_apart(tmp_path) -> None:
    """Names are labels: in a figure each operation has its place, whatever it is called."""
    graph = fake_run.chain(4)
    graph = replace(graph, operations=tuple(replace(op, name="same") for op in graph.operations))
    figure = interactive.network_figure(graph)
    places = [x for bars in figure["data"][: len(figure["data"]) // 2] for x in bars["x"]]
    assert sorted(places) == list(range(len(graph)))
    assert figure["layout"]["xaxis"]["ticktext"] == ["same"] * len(graph)
