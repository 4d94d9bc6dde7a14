"""Plans that choose implementations, measured: a network that trains in milliseconds, at one budget."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments import implementations
from experiments.steps import torch_sizes
from experiments.steps.measure import measured
from experiments.store import Table

TINY = {"length": 8, "vocabulary": 20, "context": 8, "width": 16, "n_layers": 1, "n_heads": 2, "dropout": 0.0}


@pytest.mark.slow
def test_a_joint_plan_is_measured_and_drawn(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_every_committed_row_has_a_measurement_or_says_why_not() -> None:
    for name in ("executed_steps", "implementations"):
        rows = Table(name).rows()
        assert all(row["cpu"] and row["versions"] for row in rows)
        assert all(row["measured_peak_bytes"] or row["offered"] is not None or row["note"] for row in rows)
