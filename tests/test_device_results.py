"""The experiment on executed steps, and the command for a device, on networks that train in milliseconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import ROOT

pytest.importorskip("torch")

import torch
from torch import nn

from analysis.charts import save
from analysis.execution import figure
from experiments import device, executed_steps, store
from experiments.steps import measure, torch_sizes
from experiments.steps.table import beside
from remat import Graph, Work
from remat.cost import apply_cost, load_gpu, stored
from remat.cost.records import cache_key, write_record
from remat.errors import InvalidInput
from remat.files import read_lines, write_lines
from remat.frontends import synthetic
from remat.frontends.json import save_graph
from remat.plan import Plan
from remat.simulator import simulate
from remat.torch.planning.capturing import captured_step
from remat.torch.planning.eager import Eager

# A Python without these packages, as on a machine that has PyTorch, NumPy, Numba and SciPy alone.
BARE = """
import sys
from importlib.machinery import PathFinder

ABSENT = {
    "ortools", "highspy", "cvxpy", "hydra", "omegaconf", "rich", "pandas", "matplotlib", "seaborn", "plotly", "pyarrow",
    "transformers", "tensorflow", "keras",
}

class Bare(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""
HERE = ["--device", "cpu", "--size", "tiny", "--models", "gpt2_medium", "--time-limit", "1", "--rounds", "200"]


@pytest.fixture
def bare(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts ``python -m experiments.device arguments`` on such a machine."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE)

    def start(*arguments: str) -> subprocess.Popen[str]:
        paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "bare"), str(ROOT)])}
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.device", *arguments],
            env=os.environ | paths, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return start


@pytest.mark.slow
def test_every_method_is_measured_and_drawn(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"length": 8, "vocabulary": 20, "context": 8, "width": 16, "n_layers": 1, "n_heads": 2}
    monkeypatch.setitem(torch_sizes.ON_A_CPU, "gpt2", {"batch_size": 8, "options": tiny})
    job = replace(executed_steps.STEPS["peers"].usual, model="gpt2", time_limit_s=1.0, rounds=3, fractions=[0.6, 0.8])
    rows = [job.case.what | row for row in measure.measured(**job.case.what)]
    assert save(figure(rows), here / "peers")[0].stat().st_size > 10_000
    methods = {"checkpoint_blocks", "selective_checkpoint", "torch_mincut", "plain"}
    assert {line[0].split()[0] for line in beside(rows)} == methods
    measured = [row for row in rows if row["measured_peak_bytes"]]
    assert {row["method"] for row in measured} == {*methods, "portfolio"}
    assert {row["same_as"] for row in measured} == {"plain"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", device.BACKENDS)
def test_a_bare_machine_measures_goes_on_after_a_kill_and_its_plans_are_proven(
    backend: str, here: Path, bare: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "KEPT_FOLDER", here / "results")
    options = ["rows", *HERE, *f"--backends {backend} --cost flops --budgets 0.8,0.1 --memory 1MB".split()]
    first = bare(*options)
    while not (plans := list((here / "rows" / "plans").glob("*.plan.json.gz"))):
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.02)
    first.kill()
    assert [row["case"]["method"] for row in read_lines(here / "rows" / device.ROWS)] == [device.PLAIN]
    before = plans[0].read_bytes()
    assert device.main([*options, "--minutes", "0.001"]) == 0  # no time is left
    assert len(read_lines(here / "rows" / device.ROWS)) == 1

    printed, _ = (again := bare(*options)).communicate()
    assert not again.returncode, printed
    assert printed.startswith("4 of 5 rows")
    assert f"gpt2_medium {backend} plan 0.8: batch 4" in printed
    assert plans[0].read_bytes() == before
    assert device.main(options) == 0  # nothing is missing

    plain, planned, too_small, largest, ours = rows = read_lines(here / "rows" / device.ROWS)
    assert [row["case"]["method"] for row in rows] == [device.PLAIN, device.PLANNED, device.PLANNED, *device.LARGEST]
    assert not {"measuring", "search"} & set(planned["plan_s"])  # the plan was kept
    assert planned["measured_peak_bytes"] <= planned["predicted_peak_bytes"] <= planned["budget_bytes"]
    assert planned["budget_bytes"] == int(0.8 * plain["predicted_peak_bytes"])
    assert planned["difference"] < 1e-4
    assert planned["recomputed"] > 0
    for row in (plain, planned, largest, ours):
        low, high = row["measured_quartiles_s"]
        assert 0 < low <= row["measured_s"] <= high
    assert "small" in too_small["note"]
    assert "measured_s" not in too_small
    assert plain["batch"] < largest["batch"] < ours["batch"]
    assert max(largest["measured_peak_bytes"], ours["measured_peak_bytes"]) <= 1_000_000
    if backend == "eager":
        assert planned["difference"] == 0
        assert plain["measured_peak_bytes"] == plain["predicted_peak_bytes"]

    assert device.main([*options, "--keep"]) == 0
    kept = store.Table("device").rows(kept_only=True)
    assert [row["measured_s"] for row in kept] == [row.get("measured_s") for row in rows]
    assert {row["gpu"] for row in kept} == {"cpu"}
    assert all(row["versions"] and row["date"] for row in kept)
    gaps = [row["gap"] for row in kept]
    if backend == "eager":
        assert [gap is None for gap in gaps] == [True, False, True, True, False]
        assert kept[1]["bound"] <= kept[1]["least_cost"] <= kept[1]["plan_cost"]
    else:
        assert gaps == [None] * 5


def test_a_plan_that_is_not_its_rows_is_refused_when_it_is_proven(tmp_path: Path) -> None:
    graph = synthetic.chain(n=6)
    plan = Plan.from_order(graph, range(len(graph)))
    graph_file, plan_file = device.files_of(tmp_path, "chain")
    save_graph(graph, graph_file)
    plan.save(plan_file)
    row = {"plan": "chain", "predicted_peak_bytes": simulate(graph, plan).peak_bytes - 1}
    with pytest.raises(InvalidInput, match=r"chain.plan.json.gz: its peak is \d+ B, not \d+ B"):
        device.proven(row, tmp_path, 1.0, 1)


def test_rows_of_an_earlier_version_are_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEPT_FOLDER", here / "results")
    case = {"model": "unet", "backend": "eager", "method": "plan", "device": "cuda", "cost": "flops", "share": 0.8}
    rows = [{"case": case, "gpu": gpu, "date": "2026-11-27", "measured_s": 0.1, "costs_of": {"device": gpu},
             "versions": "{}", "cpu": "a processor"} for gpu in ("h100", "h200")]  # fmt: skip
    write_lines(here / device.ROWS, [*rows, {"case": case, "error": "the time was up"}])
    for _ in range(2):
        assert device.main([str(here), "--keep"]) == 0
        kept = store.Table("device").rows(kept_only=True)
        assert [(row["gpu"], row["model"], row["share"], row["date"], row["cpu"]) for row in kept] == [
            (gpu, "unet", 0.8, "2026-11-27", "a processor") for gpu in ("h100", "h200")
        ]


def test_a_wrong_folder_or_machine_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"holds no rows: run .* on the device"):
        device.main([str(tmp_path / "nothing"), "--keep"])
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInput, match="PyTorch finds no CUDA device here; use device=cpu"):
            device.main([str(tmp_path)])


def test_a_process_that_fails_is_one_row(tmp_path: Path) -> None:
    case = {"model": "resnet50", "device": "cpu"}
    assert device._in_child(tmp_path, [case], 600) == "KeyError: 'method'"
    with pytest.raises(subprocess.TimeoutExpired):
        device._in_child(tmp_path, [case], 0.01)


def test_what_counts_as_out_of_memory() -> None:
    wrapped = RuntimeError("backend failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert device.is_out_of_memory(wrapped)
    assert device.is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
    assert not device.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
def test_the_attention_of_a_gpu_is_captured_and_repeated(kind: str) -> None:
    """By its name, on tensors without contents; so that a graph of these networks on a GPU is known to be read."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = self.layer(x).unflatten(2, (-1, 16)).transpose(1, 2)
            options = (0.0, True) if kind == "flash" else (None, True, 0.0, True)
            attend = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
            return attend(query, query, query, *options)[0].transpose(1, 2).sum()

    step = captured_step(Attention().bfloat16(), (torch.zeros(2, 32, 64).bfloat16(),), {}, Eager())
    kinds = [op.kind for op in step.graph.operations]
    forward, backward = (f"aten._scaled_dot_product_{kind}_attention{side}" for side in ("", "_backward"))
    attention, end = kinds.index(forward), kinds.index("remat.end_forward")
    assert attention < end < kinds.index(backward)
    assert not step.graph.operations[attention].run_once
    order = [*range(len(kinds))]
    order.insert(end + 1, attention)
    assert simulate(step.graph, Plan.from_order(step.graph, order, None)).computations[attention] == 2


def test_a_table_of_costs_is_stored_read_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stored.load_stored("h200", tmp_path) is None
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "profile.parquet").write_text("no parquet")
    with pytest.raises(InvalidInput, match=r"cannot be read as parquet: .*; write it again with python -m"):
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
    assert stored.load_stored("cpu", tmp_path).ns == {"mm": 7}
    monkeypatch.setattr(stored, "RESULTS_FOLDER", tmp_path)  # it serves a machine that cannot measure
    graph = Graph.from_nodes("g", [[]], [1], [1], works=[Work(5, 6, signature="mm")])
    assert apply_cost(graph, "profile", load_gpu("cpu")).costs.tolist() == [7]
