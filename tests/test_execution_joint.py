"""Plans that choose implementations, measured: a network that trains in milliseconds, at one budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments import execution, execution_joint, execution_joint_tables, execution_ways
from experiments.documents import marks
from remat.graph import Graph, Operation, Value
from remat.implementation import Implementation

TINY = {"length": 8, "vocabulary": 20, "context": 8, "width": 16, "n_layers": 1, "n_heads": 2, "dropout": 0.0}
HERE = [
    "--models", "gpt2", "--budgets", "0.8", "--operators", "joint", "--devices", "cpu", "--time-limit", "1",
    "--rounds", "1", "--cost", "roofline", "--out", "rows.json",
]  # fmt: skip


@pytest.mark.slow
def test_a_joint_plan_is_measured_and_written_into_the_page(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(execution.ON_A_CPU, "gpt2", {"batch_size": 8, "options": TINY})
    assert execution_joint.main(HERE) == 0
    table = capsys.readouterr().out
    run = json.loads(Path("rows.json").read_text())
    rows = {(row["method"], row["parameter"]): row for row in run["models"]["cpu/gpt2"]["rows"]}
    assert set(rows) == {("plain", ""), ("offered", "joint"), ("joint", "0.8")}
    joint, offers = rows["joint", "0.8"], rows["offered", "joint"]["offered"]
    assert joint["measured_peak_bytes"] <= min(joint["budget_bytes"], 1.03 * joint["predicted_peak_bytes"])
    assert joint["gradient_error"] < 1e-4
    assert 0 < rows["plain", ""]["gradient_error"] < 1e-4
    assert joint["chosen"]
    assert offers["layer_norm_from_output"]["offers"] == 3
    for name in (*joint["chosen"], *offers, "| joint |"):
        assert name in table

    # What is stored is not measured again; what a file holds is only printed.
    monkeypatch.setattr(execution_ways, "measure", None)
    (document := tmp_path / "page.md").write_text("\n".join(marks(execution_joint.COMMAND)))
    monkeypatch.setattr(execution_joint, "DOCUMENT", document)
    assert execution_joint.main(["--show", "rows.json", "--write"]) == 0
    assert capsys.readouterr().out.strip() == table.strip()
    assert table.strip() in document.read_text()


def test_the_page_has_the_marks() -> None:
    first, last = marks(execution_joint.COMMAND)
    assert (
        execution_joint_tables.implementations()
        in execution_joint.DOCUMENT.read_text().partition(first)[2].partition(last)[0]
    )


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
    offers = execution_ways.offered(Graph("g", operations, values))
    assert {name: (o["operations"], o["offers"]) for name, o in offers.items()} == {
        "packed": (2, 1), "slow": (1, 1), "over": (1, 1)
    }  # fmt: skip
    assert offers["packed"]["spares_kept_bytes"] == 700
    assert offers["packed"]["slower"] == pytest.approx(0.05)
    assert offers["slow"]["worse_than"] == {"default": 1}
    assert offers["over"]["needed_later"] == 1
    measured = {"model": "g", "device": "cpu", "rows": [{"method": "offered", "offered": offers}]}
    table = execution_joint_tables.never_chosen([measured])
    assert "1 of 1: not faster than the default, and spares no memory" in table
    assert "1 of 1: what it overwrites is read again later" in table
    assert "1 of 1: 1.05 of the default's time, to spare at most" in table


def test_joint_plans_are_compared_with_default_ones() -> None:
    def row(method: str, budget: str, peak: int, overhead: float, ratio: float) -> dict:
        return {
            "method": method, "parameter": budget, "budget_bytes": 110, "predicted_peak_bytes": 100, "chosen": {},
            "measured_peak_bytes": peak, "predicted_overhead": overhead, "measured_ratio": ratio, "same": True,
            "ratio_quartiles": [ratio - 0.05, ratio + 0.1], "gradient_error": 0.0,
        }  # fmt: skip

    none = {"method": "default", "parameter": "0.5", "budget_bytes": 50, "note": "no plan of 'g' within 50 B (UNKNOWN)"}
    plain = {"method": "plain", "parameter": "", "operations": 3}
    rows = [plain, row("default", "0.8", 100, 0.1, 1.2), none, row("joint", "0.8", 104, 0.045, 1.08)]
    measured = {"model": "g", "device": "cpu", "batch": 1, "rows": [*rows, row("joint", "0.5", 90, 0.5, 1.5)]}
    assert " | +20.0% (+15 to +30) | " in execution_joint_tables.line_of(measured, rows[1])
    default, joint, both, only = execution_joint_tables.summary([measured])
    assert "at most 1.0000 (g at 0.8);" in default
    assert "at most 1.0400 (g at 0.8): MORE THAN 3% ABOVE" in joint
    assert "in 0 of 1 plans at most 3% above" in default  # 1.2 / 1.1
    assert "in 1 of 2 plans at most 3% above" in joint  # 1.08 / 1.045, and 1.5 / 1.5
    assert "0.95 to 0.95 (median 0.95) of the time of the default one by prediction, 0.90 to 0.90" in both
    assert only == "At 1 budgets only the joint plan exists, at 0 only the default one"
    assert "| 50 B (UNKNOWN) |" in execution_joint_tables.line_of(measured, none)
