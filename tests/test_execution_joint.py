"""Plans that choose implementations, measured: a network that trains in milliseconds, at one budget."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from analysis.execution import implementation_figure
from experiments import implementations
from experiments.steps import offers as offers_of
from experiments.steps import torch_sizes
from experiments.steps.measure import NOTHING, measured
from experiments.steps.table import cells
from experiments.table import Table
from remat.graph import Graph, Operation, Value
from remat.implementation import Implementation

TINY = {"length": 8, "vocabulary": 20, "context": 8, "width": 16, "n_layers": 1, "n_heads": 2, "dropout": 0.0}
G = {**NOTHING, "steps": "torch", "model": "g", "device": "cpu", "batch": 1, "operations": 3, "plain_bytes": None,
     "fixed_bytes": None}  # fmt: skip


@pytest.mark.slow
def test_a_joint_plan_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(torch_sizes.ON_A_CPU, "gpt2", {"batch_size": 8, "options": TINY})
    (case,) = implementations.implementations.cases(("gpt2",), ("joint",), (0.8,), rounds=1, time_limit_s=1.0)
    what = {**case.what, "cost": "roofline"}
    facts = {"date": "2026-11-28", "cpu": "a", "versions": "{}"}
    found = [{**what, **row, **facts} for row in measured(**what)]
    rows = {(row["method"], row["parameter"], row["implementations"]): row for row in found}
    assert set(rows) == {("plain", "", "default"), ("offered", "", "joint"), ("portfolio", "0.8", "joint")}
    plain, joint = rows["plain", "", "default"], rows["portfolio", "0.8", "joint"]
    offers = rows["offered", "", "joint"]["offered"]
    assert joint["measured_peak_bytes"] <= min(joint["budget_bytes"], 1.03 * joint["predicted_peak_bytes"])
    assert joint["gradient_error"] < 1e-4
    assert 0 < plain["gradient_error"] < 1e-4
    assert joint["plain_bytes"] == plain["measured_peak_bytes"]
    assert joint["chosen"]
    assert offers["layer_norm_from_output"]["offers"] == 3
    assert offers.keys() <= {row[0] for row in implementations.every_implementation()}
    drawing = implementations.page(found)
    assert "| `joint` | 1 |" in drawing.text
    assert drawing.text.endswith(").")
    measured_table = next(table for table in drawing.tables if table.name == "implementations_measured")
    assert [row[2] for row in measured_table.rows] == ["", "joint"]
    assert all(name in measured_table.rows[1][-2] for name in joint["chosen"])


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
    row = {**G, "method": "offered", "implementations": "joint", "offered": offers}
    reasons = {name: reason for name, *_, reason in implementations.never_chosen([row])}
    assert reasons["slow"] == "1 of 1: not faster than the default, and saves no memory"
    assert reasons["over"] == "1 of 1: a later operation reads the value that it overwrites"
    assert reasons["packed"].startswith("1 of 1: 1.05 of the default's time, to save at most")


def test_joint_plans_are_compared_with_default_ones() -> None:
    def row(choice: str, budget: str, peak: int, overhead: float, ratio: float) -> dict[str, Any]:
        return {
            **G, "method": "portfolio", "parameter": budget, "implementations": choice, "budget_bytes": 110,
            "predicted_peak_bytes": 100, "chosen": {}, "measured_peak_bytes": peak, "predicted_overhead": overhead,
            "measured_ratio": ratio, "same_as": "plain", "ratio_quartiles": [ratio - 0.05, ratio + 0.1],
            "gradient_error": 0.0,
        }  # fmt: skip

    note = "no plan of 'g' within 50 B (UNKNOWN)"
    none = {**G, "method": "portfolio", "parameter": "0.5", "implementations": "default", "budget_bytes": 50}
    none["note"] = note
    rows = [row("default", "0.8", 100, 0.1, 1.2), none, row("joint", "0.8", 104, 0.045, 1.08)]
    rows.append(row("joint", "0.5", 90, 0.5, 1.5))
    assert "+20.0% (+15 to +30)" in cells(rows[0], implementations.MEASURED)
    *_, default, joint, _, beside = implementations.summary(rows).splitlines()
    assert default == "| `default` | 1 | 1.0000 | 1 of 1 | 0.0e+00 | 1.09 to 1.09 (median 1.09) |"  # 1.2 / 1.1
    assert joint == "| `joint` | 2 | 1.0400 | 2 of 2 | 0.0e+00 | 1.00 to 1.03 (median 1.02) |"
    assert "0.95 to 0.95 (median 0.95) of the default plan's time by prediction and 0.90 to 0.90" in beside
    assert beside.endswith("Budgets with a joint plan only: 1; with a default plan only: 0.")
    without = dict(zip(implementations.MEASURED, cells(none, implementations.MEASURED), strict=True))
    filled = {"model, batch (operations)": "g, 1 (3)", "budget": "0.5: 0.0 MB", "implementations": "default"}
    assert {column: cell for column, cell in without.items() if cell} == filled | {"remark": note}


def test_the_figure_marks_a_budget_without_a_plan() -> None:
    """And no mark covers another of the same panel."""
    rows = Table("implementations").rows()
    marks: dict[str, dict[str, list[float]]] = {"D": {}, "o": {}, "x": {}}
    for axes in implementation_figure(rows).axes:
        for line in axes.lines:
            if line.get_marker() in marks:
                marks[str(line.get_marker())].setdefault(axes.get_title(), []).extend(line.get_xdata())
    without = [row["model"] for row in rows if row["method"] == "portfolio" and not row["predicted_peak_bytes"]]
    assert {model: len(x) for model, x in marks["x"].items() if x} == collections.Counter(without)
    for model in marks["o"]:
        x = sorted(place for kind in marks.values() for place in kind.get(model, ()))
        assert min(b - a for a, b in itertools.pairwise(x)) > 0.1


def test_every_committed_row_has_a_measurement_or_says_why_not() -> None:
    for name in ("executed_steps", "implementations"):
        rows = Table(name).rows()
        assert all(row["cpu"] and row["versions"] for row in rows)
        assert all(row["measured_peak_bytes"] or row["offered"] is not None or row["note"] for row in rows)
