"""Plans that choose implementations, measured: a network that trains in milliseconds, at one budget."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments import implementations
from experiments.steps import offers as offers_of
from experiments.steps import torch_sizes
from experiments.steps.measure import NOTHING, measured
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


def test_every_committed_row_has_a_measurement_or_says_why_not() -> None:
    for name in ("executed_steps", "implementations"):
        rows = Table(name).rows()
        assert all(row["cpu"] and row["versions"] for row in rows)
        assert all(row["measured_peak_bytes"] or row["offered"] is not None or row["note"] for row in rows)
