"""The experiment on execution and the command for a device, on a network that trains in milliseconds."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments import cli, device_results
from experiments.steps import torch_sizes
from remat.cost import CostWarning, apply_cost, load_gpu, stored
from remat.cost.records import cache_key, write_record
from remat.errors import InvalidInput
from remat.torch import graphs as frontend

TINY = {"length": 8, "vocabulary": 20, "context": 8, "width": 16, "n_layers": 1, "n_heads": 2}
METHODS = {"plain", "checkpoint_blocks", "selective_checkpoint", "torch_mincut", "portfolio"}


@pytest.fixture
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(torch_sizes.ON_A_CPU, "gpt2", {"batch_size": 8, "options": TINY})


@pytest.mark.usefixtures("_tiny")
@pytest.mark.slow
def test_every_method_is_measured_and_drawn(tmp_path: Path) -> None:
    assert cli.main(["experiment=execution", "scale=quick", "time_limit=1"]) == 0
    assert next(tmp_path.glob("runs/*/figures/execution.png")).stat().st_size > 10_000
    rows = json.loads(next(tmp_path.glob("runs/*/run.json")).read_text())["rows"]
    measured = [row for row in rows if "measured_peak_bytes" in row]
    assert {row["method"] for row in measured} == METHODS
    assert {row["same_as"] for row in measured} == {"plain"}


@pytest.mark.slow
@pytest.mark.usefixtures("_tiny")
def test_all_of_a_device_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--device", "cpu", "--models", "gpt2", "--memory", "300kB", "--quick", "--time-limit", "1"]
    device_results.main([*arguments, "--out", str(tmp_path / "results")])
    (written,) = (tmp_path / "results" / "cpu").glob("*_gpt2.json")
    run = json.loads(written.read_text())
    assert {row["method"] for row in run["rows"]} == METHODS
    plain, ours = run["largest_batches"]
    assert plain["method"] == "plain"
    assert plain["batch"] < ours["batch"]
    assert max(plain["measured_peak_bytes"], ours["measured_peak_bytes"]) <= 300_000

    # The costs serve a machine that cannot measure.
    found = stored.load_stored("cpu", tmp_path / "results")
    assert found is not None
    monkeypatch.setattr(stored, "RESULTS_FOLDER", tmp_path / "results")
    graph = frontend.extract(torch_sizes.for_a_cpu(torch_sizes.torch_model("gpt2")))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CostWarning)
        costed = apply_cost(graph, "profile", load_gpu("cpu"))
    with_kernel = [op for op in costed.operations if op.work and op.work.signature and not op.work.is_free]
    assert [op.cost for op in with_kernel] == [found.ns[op.work.signature] for op in with_kernel if op.work]


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInput, match="needs --memory"):
        device_results.main(["--device", "cpu"])


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    assert stored.load_stored("h200", tmp_path) is None
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "profile.parquet").write_text("no parquet")
    with pytest.raises(InvalidInput, match="is no table of measured costs"):
        stored.load_stored("h200", tmp_path)
    with pytest.raises(InvalidInput, match="nothing was measured"):
        stored.store(tmp_path, "h200", {"device": "NVIDIA H200", "versions": {"torch": "2.13.0"}}, tmp_path)

    # records of the same device whose times were taken otherwise, or of another, are left out
    now = {"device": "cpu", "versions": {"torch": "2.13.0"}, "caches": "as in a step"}
    before = {key: now[key] for key in ("device", "versions")}
    for ns, provenance in ((7, now), (3, before), (2, now | {"device": "other"})):
        record = {"ns": ns, "best_ns": ns, "signature": "mm"} | provenance
        write_record(tmp_path / "cache" / f"{cache_key('mm', provenance)}.json", record)
    stored.store(tmp_path / "cache", "cpu", now, tmp_path)
    found = stored.load_stored("cpu", tmp_path)
    assert found is not None
    assert found.ns == {"mm": 7}
