"""Plans that choose implementations, measured: a network that trains in milliseconds, at one budget."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

import pytest

pytest.importorskip("torch")

from analysis.execution import implementation_figure
from experiments import implementation_tables
from experiments.documents import DOCS
from experiments.execution_joint import COMMAND
from experiments.step_tables import newest
from experiments.steps import offers as offers_of
from experiments.steps import torch_sizes
from experiments.steps.row import StepRow, as_json, read_rows, write_rows
from experiments.steps.table import cells, table
from remat.errors import InvalidInput
from remat.graph import Graph, Operation, Value
from remat.implementation import Implementation

STEP_ROWS = {*(DOCS.parent / "results" / "cpu").glob("*.json")}
TINY = {"length": 8, "vocabulary": 20, "context": 8, "width": 16, "n_layers": 1, "n_heads": 2, "dropout": 0.0}
HERE = [
    "--models", "gpt2", "--budgets", "0.8", "--operators", "joint", "--devices", "cpu", "--time-limit", "1",
    "--rounds", "1", "--cost", "roofline", "--out", "rows.json",
]  # fmt: skip


@pytest.mark.slow
def test_a_joint_plan_is_measured_and_written_into_the_page(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(torch_sizes.ON_A_CPU, "gpt2", {"batch_size": 8, "options": TINY})
    assert COMMAND.main(HERE) == 0
    printed = capsys.readouterr().out
    measured = read_rows(Path("rows.json"))
    rows = {row.key: row for row in measured}
    assert set(rows) == {("plain", ""), ("offered", "", "joint"), ("portfolio", "0.8", "joint")}
    joint, offers = rows["portfolio", "0.8", "joint"], rows["offered", "", "joint"].offered
    assert joint.measured_peak_bytes <= min(joint.budget_bytes, 1.03 * joint.predicted_peak_bytes)
    assert joint.gradient_error < 1e-4
    assert 0 < rows["plain", ""].gradient_error < 1e-4
    assert joint.plain_bytes == rows["plain", ""].measured_peak_bytes
    assert joint.chosen
    assert offers["layer_norm_from_output"]["offers"] == 3
    for name in (*joint.chosen, "| joint |", "| `joint` | 1 |"):
        assert name in printed
    assert offers.keys() <= {row[0] for row in implementation_tables.implementations()}

    # What is stored is not measured again; what a file holds is only printed.
    assert COMMAND.main(HERE) == 0
    assert capsys.readouterr().out == printed
    assert read_rows(Path("rows.json")) == measured
    assert COMMAND.main(["--show", "rows.json"]) == 0
    assert capsys.readouterr().out == printed
    drawing = implementation_tables.draw(["rows.json"])
    assert drawing.text.endswith(").")
    measured_table = next(table for table in drawing.tables if table.name == "implementations_measured")
    assert [row[2] for row in measured_table.rows] == ["", "joint"]


def test_why_an_implementation_is_in_no_plan_is_computed() -> None:
    """``a`` -> ``b`` -> loss, and b's backward operation, with ways that lose for different reasons."""

    def way(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], cost: int, **more) -> Implementation:
        return Implementation(name, inputs, outputs, cost, **more)

    operations = (
        Operation("a", "a", (), (0,), 10),
        Operation("b", "b", (0,), (1,), 10, implementations=(
            way("packed", (0,), (1, 4), 11), way("slow", (0,), (1,), 12), way("over", (0,), (1,), 10, overwrites=0))),
        Operation("loss", "loss", (1,), (2,), 10),
        Operation("b'", "b'", (0, 2), (3,), 10, is_backward=True, implementations=(way("packed", (2, 4), (3,), 10),)),
    )  # fmt: skip
    values = (Value("a", 800), Value("b", 800), Value("loss", 8), Value("b'", 800, keep=True), Value("bits", 100))
    offers = offers_of.offered(Graph("g", operations, values))
    assert {name: (o["operations"], o["offers"]) for name, o in offers.items()} == {
        "packed": (2, 1), "slow": (1, 1), "over": (1, 1)
    }  # fmt: skip
    assert offers["packed"]["spares_kept_bytes"] == 700
    assert offers["packed"]["slower"] == pytest.approx(0.05)
    assert offers["slow"]["worse_than"] == {"default": 1}
    assert offers["over"]["needed_later"] == 1
    row = StepRow("torch", "g", "cpu", "offered", "", "joint", offered=offers)
    reasons = {name: reason for name, *_, reason in implementation_tables.never_chosen([row])}
    assert reasons["slow"] == "1 of 1: not faster than the default, and saves no memory"
    assert reasons["over"] == "1 of 1: a later operation reads the value that it overwrites"
    assert reasons["packed"].startswith("1 of 1: 1.05 of the default's time, to save at most")


def test_joint_plans_are_compared_with_default_ones() -> None:
    def row(implementations: str, budget: str, peak: int, overhead: float, ratio: float) -> StepRow:
        return StepRow(
            "torch", "g", "cpu", "portfolio", budget, implementations, 1, 3, 110, predicted_peak_bytes=100, chosen={},
            measured_peak_bytes=peak, predicted_overhead=overhead, measured_ratio=ratio, same_as="plain",
            ratio_quartiles=[ratio - 0.05, ratio + 0.1], gradient_error=0.0,
        )  # fmt: skip

    note = "no plan of 'g' within 50 B (UNKNOWN)"
    none = StepRow("torch", "g", "cpu", "portfolio", "0.5", "default", 1, 3, 50, note=note)
    rows = [row("default", "0.8", 100, 0.1, 1.2), none, row("joint", "0.8", 104, 0.045, 1.08)]
    rows.append(row("joint", "0.5", 90, 0.5, 1.5))
    assert " | +20.0% (+15 to +30) | " in table(rows, COMMAND.columns)
    *_, default, joint, _, beside = implementation_tables.summary(rows).splitlines()
    assert default == "| `default` | 1 | 1.0000 | 1 of 1 | 0.0e+00 | 1.09 to 1.09 (median 1.09) |"  # 1.2 / 1.1
    assert joint == "| `joint` | 2 | 1.0400 | 2 of 2 | 0.0e+00 | 1.00 to 1.03 (median 1.02) |"
    assert "0.95 to 0.95 (median 0.95) of the default plan's time by prediction and 0.90 to 0.90" in beside
    assert beside.endswith("Budgets with a joint plan only: 1; with a default plan only: 0.")
    without = dict(zip(COMMAND.columns, cells(none, COMMAND.columns), strict=True))
    filled = {"model, batch (operations)": "g, 1 (3)", "budget": "0.5: 0.0 MB", "implementations": "default"}
    assert {column: cell for column, cell in without.items() if cell} == filled | {"remark": note}


def test_the_figure_marks_a_budget_without_a_plan() -> None:
    """And no mark covers another of the same panel."""
    rows = as_json(read_rows(newest("torch_joint")))
    marks: dict[str, dict[str, list[float]]] = {"D": {}, "o": {}, "x": {}}
    for axes in implementation_figure(rows).axes:
        for line in axes.lines:
            if line.get_marker() in marks:
                marks[str(line.get_marker())].setdefault(axes.get_title(), []).extend(line.get_xdata())
    without = [row["model"] for row in rows if row["method"] == "portfolio" and "predicted_peak_bytes" not in row]
    assert {model: len(x) for model, x in marks["x"].items() if x} == collections.Counter(without)
    for model in marks["o"]:
        x = sorted(place for kind in marks.values() for place in kind.get(model, ()))
        assert min(b - a for a, b in itertools.pairwise(x)) > 0.1


@pytest.mark.parametrize("path", sorted(STEP_ROWS), ids=lambda path: path.stem)
def test_committed_rows_are_read_and_written_as_they_are(path: Path, tmp_path: Path) -> None:
    rows = read_rows(path)
    assert all(row.cpu and row.versions for row in rows)
    assert {row.framework for row in rows} == {"torch" if "torch" in path.stem else "tensorflow"}
    assert all(row.measured_peak_bytes or row.offered is not None or row.note for row in rows)
    write_rows(tmp_path / "rows.json", rows)
    assert read_rows(tmp_path / "rows.json") == rows


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"rows": []}')
    with pytest.raises(InvalidInput, match="holds no rows of the format remat-steps/1; measure again"):
        read_rows(tmp_path / "x.json")
