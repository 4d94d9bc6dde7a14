"""Figures and tables of a stored run, against hand-computed and brute-force values."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import fake_run
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from helpers import run_python
from rich.console import Console

import analysis
import remat
from analysis import matrices, memory, network, results, scales, style
from analysis.__main__ import main as redraw
from analysis.overhead_data import overhead_data
from analysis.page import page
from analysis.results import load_run
from analysis.table import pick
from remat import Graph, Plan, simulate
from remat.errors import InvalidInput
from remat.simulator import plain_peak


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = fake_run.full_run(tmp_path_factory.mktemp("full"))
    return folder, analysis.draw_run(folder)


@pytest.fixture(scope="module")
def full(drawn: tuple[Path, list[Path]]) -> tuple[Any, Any]:
    """(a run, what its figure of overheads shows)."""
    run = load_run(drawn[0])
    return run, overhead_data(run)


def test_draws_everything(drawn: tuple[Path, list[Path]]) -> None:
    folder, written = drawn
    names = {str(path.relative_to(folder)) for path in written}
    figures = {f"figures/{n}.{e}" for n in ("overhead", "memory", "matrices", "network") for e in ("png", "pdf")}
    assert names == figures | {"table.csv", "page.html"}
    for path in written:
        head = path.read_bytes()[:8]
        if path.suffix == ".png":
            assert head == b"\x89PNG\r\n\x1a\n"
        if path.suffix == ".pdf":
            assert head.startswith(b"%PDF-")


IN_ANOTHER_PROCESS = """
import runpy, sys
try:
    runpy.run_module("analysis", run_name="__main__")
except SystemExit as ended:
    print(ended.code)
from analysis.style import style_of
print(style_of("my_newcomer"))
solvers = ("torch", "tensorflow", "cvxpy", "highspy", "experiments", "hydra", "wandb", "baselines")
print([m for m in solvers if m in sys.modules])
"""


def test_a_run_of_failures_is_drawn_in_a_process_without_solvers_or_frameworks(tmp_path: Path) -> None:
    failed = fake_run.failed_run(tmp_path)
    (failed / "figures").mkdir()
    (failed / "figures" / "overhead.png").write_text("of an earlier call")
    code, newcomer, solvers = run_python(IN_ANOTHER_PROCESS, str(failed)).splitlines()[-3:]
    assert (code, newcomer, solvers) == ("0", str(style.style_of("my_newcomer")), "[]")
    assert {p.name for p in (failed / "figures").iterdir()} == {"network.png", "network.pdf"}
    text = (failed / "page.html").read_text()
    shown = ("No strategy has a plan", "operation 3 alone needs more", 'id="overhead"', 'id="plan"')
    assert [each in text for each in shown] == [True, True, False, False]
    table = text_of(analysis.terminal_table(failed))
    assert "INFEASIBLE" in table
    assert "operation 3 alone needs more" in table


def test_csv_holds_every_row(drawn: tuple[Path, list[Path]], full: tuple[Any, Any]) -> None:
    table = pd.read_csv(drawn[0] / "table.csv")
    assert len(table) == len(full[0].rows) == 25
    one = table[(table["strategy"] == "my_newcomer") & (table["status"] == "FEASIBLE")].iloc[0]
    assert one["overhead"] == pytest.approx(one["cost"] / fake_run.chain().total_cost - 1)


def test_the_figure_shows_the_cheapest_members_that_fit_and_the_bounds_by_definition(full: tuple[Any, Any]) -> None:
    run, data = full
    at, over = next(c for c in data.curves if c.strategy == "chen_greedy").steps
    members = run.families[run.families["strategy"] == "chen_greedy"]
    for budget in range(int(at[0]), plain_peak(fake_run.chain()) + 5000, 5000):
        fitting = [m.overhead for m in members.itertuples() if m.peak_bytes <= budget]
        assert over[np.searchsorted(at, budget, side="right") - 1] == pytest.approx(min(fitting))
    assert members["peak_bytes"].min() == at[0]
    for budget, value in zip(*data.bound, strict=True):  # a bound holds for smaller budgets
        known = [r.bound for r in run.rows.itertuples() if not pd.isna(r.bound) and r.budget_bytes >= budget]
        assert value == pytest.approx(max(known) / run.total_cost - 1)
    # By hand: the fixed 100 kB, and grad reads its mirror and the gradient above: 60 + 50 + 50 kB at most.
    assert data.impossible_bytes == 100_000 + 160_000
    shown = results.chosen_plan(run)
    assert shown.row.overhead > 0
    assert shown.strategy == "checkmate_milp"  # ties in cost go to the proven plan
    assert shown.trace.cost == shown.row.cost


@pytest.mark.parametrize(("above", "status"), [(50, "OPTIMAL"), (150, "FEASIBLE")])
def test_a_mark_is_hollow_only_above_the_best_bound(tmp_path: Path, above: int, status: str) -> None:
    graph = fake_run.chain()
    bound = 2 * graph.total_cost
    costs = {"chen_sqrtn": bound + bound * above // 10**6, "checkmate_milp": 2 * bound}
    rows = [fake_run.row(graph, name, budget, "FEASIBLE", cost=cost, overhead=cost / graph.total_cost - 1)
            for name, cost in costs.items() for budget in (300_000, 400_000)]  # fmt: skip
    rows[3] = replace(rows[3], bound=bound)  # of the larger budget, by the other strategy
    data = overhead_data(load_run(fake_run.write_run(tmp_path, graph, [(row, None) for row in rows])))
    drawn = {curve.strategy: curve.rows["status"].tolist() for curve in data.curves}
    assert drawn == {"chen_sqrtn": [status] * 2, "checkmate_milp": ["FEASIBLE"] * 2}


def small() -> tuple[Graph, Plan]:
    """a -> b -> c and d reads a and c; a is dropped and computed again before d."""
    graph = Graph.from_nodes(
        "small", [[], [0], [1], [0, 2]], [5, 3, 2, 1], [10, 20, 30, 40], backward=[False, False, False, True],
        fixed_bytes=100,
    )  # fmt: skip
    return graph, Plan.from_order(graph, [0, 1, 2, 0, 3])


def test_timeline_by_hand() -> None:
    graph, plan = small()
    line = memory.timeline(graph, simulate(graph, plan))
    assert line.edges.tolist() == [0, 10, 30, 60, 70, 110]
    assert line.held_bytes.tolist() == [105, 108, 105, 107, 108]
    assert line.again.tolist() == [False, False, False, True, False]
    assert (line.by_cost, line.backward_at) == (True, 70)
    free = graph.with_costs([0] * 4, "ns")
    line = memory.timeline(free, simulate(free, Plan.from_order(free, [0, 1, 2, 0, 3])))
    assert not line.by_cost
    assert line.edges.tolist() == [0, 1, 2, 3, 4, 5]


def test_matrix_cells_by_hand() -> None:
    graph, plan = small()
    R, S, block = matrices.cells(graph, plan, 10)
    n, c, r = matrices.NOTHING, matrices.COMPUTED, matrices.RECOMPUTED
    assert block == 1
    assert R.tolist() == [[c, n, n, n], [n, c, n, n], [n, n, c, n], [r, n, n, c]]
    assert S.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    R, S, block = matrices.cells(graph, plan, 2)
    assert block == 2
    assert R.tolist() == [[c, n], [r, c]]
    assert S.tolist() == [[0.25, 0], [0.25, 0.25]]


@pytest.mark.parametrize("most", [7, 100])
def test_no_recomputation_vanishes_in_large_matrices(most: int) -> None:
    graph = fake_run.chain(150)
    plan = Plan.from_order(graph, [*range(299), 0, 299, 300])
    R, _, _ = matrices.cells(graph, plan, most)
    assert (R == matrices.RECOMPUTED).sum() == 1


def test_styles_differ_and_cover_every_name() -> None:
    assert set(remat.strategies()) <= set(style.STYLES)
    colours = [*(s.colour for s in style.STYLES.values()), *style.SPARE_COLOURS]
    assert len(set(colours)) == len(colours)  # one colour, one strategy
    assert len({s.label for s in style.STYLES.values()}) == len(style.STYLES)
    for name in [*style.STYLES, "someone_1", "someone_2"]:
        s = style.style_of(name)
        go.Scatter(marker={"symbol": [s.symbol, s.symbol + "-open"]}, line={"dash": s.dash})  # plotly validates


@pytest.mark.parametrize(
    ("cost", "unit", "text"),
    [(32_200_000, "ns", "32.20 ms"), (32_200_000, "flop", "32.20 MFLOP"), (1500, "file unit", "1,500 file unit"),
     (None, "ns", "–")],
)  # fmt: skip
def test_only_ns_is_shown_as_time(cost: int | None, unit: str, text: str) -> None:
    assert scales.show_cost(cost, unit) == text


def text_of(table: object) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_terminal_table_of_a_sweep(drawn: tuple[Path, list[Path]], full: tuple[Any, Any]) -> None:
    text = text_of(analysis.terminal_table(drawn[0]))
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    rows = full[0].rows
    budgets = pick(sorted(set(rows["budget_bytes"])), 4)
    shown = rows[(rows["strategy"] == "checkmate_milp") & rows["budget_bytes"].isin(budgets) & rows["cost"].notna()]
    assert len(shown) == 3
    for row in shown.itertuples():
        star = "*" if row.status == "OPTIMAL" else " "
        assert f" {scales.show_percent(row.overhead)}{star}" in lines["checkmate_milp"]
    assert max(map(len, text.splitlines())) <= 80
    assert "infeas." in lines["checkmate_milp"]
    assert "4/5" in lines["checkmate_milp"]
    assert lines["griewank"].count("skipped") == 4
    assert "failed" in lines["my_newcomer"]
    assert "timeout" in lines["my_newcomer"]


def test_missing_and_broken_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert redraw([str(tmp_path)]) == 1
    assert re.fullmatch(r"error: .*no run\.json.*\n", capsys.readouterr().err)
    folder = fake_run.failed_run(tmp_path)
    info = json.loads((folder / "run.json").read_text())
    row = tmp_path / "store" / "rows" / f"{info['keys'][0]}.parquet"
    row.unlink()
    assert load_run(folder).missing == (info["keys"][0],)
    row.write_bytes(b"not parquet")
    with pytest.raises(InvalidInput, match=row.name):
        load_run(folder)
    (folder / "run.json").write_text(json.dumps(info | {"keys": []}))
    text = page(load_run(folder))
    assert "Nothing has been solved yet" in text
    assert 'id="results"' not in text
    assert "no results" in text_of(analysis.terminal_table(folder))


def test_names_in_the_network_figure_do_not_overlap() -> None:
    names = [f"_scaled_dot_product_flash_attention_for_cpu_backward_{k}" for k in range(200)]
    numbers = list(range(200))
    graph = Graph.from_nodes(
        "g", [[] for _ in names], [k * 73 % 200 for k in numbers], [k * 37 % 200 for k in numbers], names=names
    )
    figure = network.draw(graph)
    figure.draw_without_rendering()
    assert figure.axes
    for axes in figure.axes:
        boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.x0)
        assert len(boxes) > 1
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
