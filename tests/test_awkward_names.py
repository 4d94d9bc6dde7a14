"""Names come from files: whatever is in them is shown as it is, never read as markup or mathematics."""

from __future__ import annotations

from dataclasses import replace

import fake_run
import pytest
from rich.console import Console

import analysis
from remat import Graph, Plan

NAME = "a [/b] [bold] <script>alert(1)</script> ${x}_$y^2"


@pytest.fixture
def awkward() -> Graph:
    graph = fake_run.chain(4, cost_unit=NAME)
    operations = tuple(replace(op, name=f"{op.name} {NAME}") for op in graph.operations)
    return replace(graph, name=NAME, operations=operations)


@pytest.mark.parametrize("budgets", [1, 2])
def test_awkward_names_are_drawn_printed_and_escaped(awkward: Graph, tmp_path, budgets: int) -> None:
    plan = Plan.from_order(awkward, range(len(awkward)))
    peak = fake_run.store_all_peak(awkward)
    solved = [(fake_run.row(awkward, "checkpoint_all", peak + i, "OPTIMAL", plan), plan) for i in range(budgets)]
    folder = fake_run.write_run(tmp_path, awkward, solved)
    written = {path.name for path in analysis.draw_run(folder)}
    assert {"overhead.png", "network.pdf", "page.html", "table.csv"} <= written
    assert "<script>alert" not in (folder / "page.html").read_text()
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(analysis.format_table([row for row, _ in solved], title=NAME))
    assert NAME in console.export_text()
