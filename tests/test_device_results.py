"""The experiment on execution, and the three commands for a device, on networks that train in milliseconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from experiments import cli
from experiments.device import __main__ as command
from experiments.device import execute
from experiments.device.folder import (
    EXECUTE,
    LARGEST,
    LARGEST_PLANNED,
    PLAIN,
    PLANNED,
    SMALLEST,
    Case,
    Folder,
    Row,
    write_document,
)
from experiments.device.models import BACKENDS, spec_of
from experiments.device.processes import Clock, describe, run
from experiments.device.subject import is_out_of_memory
from experiments.steps import torch_sizes
from remat.cost import CostWarning, apply_cost, load_gpu, stored
from remat.cost.records import cache_key, write_record
from remat.errors import InvalidInput
from remat.plan import Plan
from remat.simulator import simulate
from remat.torch import graphs as frontend
from remat.torch.module import captured_step

ROOT = Path(__file__).parents[1]
MOST_MIB = 64  # of a checkout that is carried to a device
TINY = {"length": 8, "vocabulary": 20, "context": 8, "width": 16, "n_layers": 1, "n_heads": 2}
METHODS = {"plain", "checkpoint_blocks", "selective_checkpoint", "torch_mincut", "portfolio"}
# A Python without these packages, as on a machine that has PyTorch and NumPy alone.
BARE = """
import sys
from importlib.machinery import PathFinder

ABSENT = {
    "ortools", "highspy", "cvxpy", "hydra", "omegaconf", "rich", "pandas", "matplotlib", "seaborn", "plotly", "pyarrow",
    "scipy", "numba", "transformers", "tensorflow", "keras",
}

class Bare(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""
HERE = ["--models", "gpt2_medium", "--backends", "eager"]


@pytest.fixture
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(torch_sizes.ON_A_CPU, "gpt2", {"batch_size": 8, "options": TINY})


@pytest.fixture
def bare(tmp_path: Path) -> Callable[..., str]:
    """Runs ``python arguments`` with PyTorch and NumPy alone; returns what it prints."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE)

    def run_bare(*arguments: str) -> str:
        paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "bare"), str(ROOT)])}
        done = subprocess.run(
            [sys.executable, *arguments], env=os.environ | paths, cwd=tmp_path, capture_output=True, text=True
        )
        assert not done.returncode, done.stdout + done.stderr
        return done.stdout

    return run_bare


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
def test_a_bare_machine_captures_and_executes(
    tmp_path: Path, bare: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch and NumPy alone on the device; the plans come from this process."""
    folder, out = tmp_path / "handed", ["--out", str(tmp_path / "results")]
    on_device = ["-m", "experiments.device"]
    bare(*on_device, "capture", str(folder), "--device", "cpu", "--size", "tiny", "--cost", "flops", *HERE)
    assert command.main(["plan", str(folder), "--budgets", "0.8,0.1", "--time-limit", "1", *HERE, *out]) == 0
    told = capsys.readouterr().out
    assert "gpt2_medium eager 0.8" in told
    assert "too small" in told  # 0.1 of the peak
    printed = bare(*on_device, "execute", str(folder), "--rounds", "2", *HERE, *out)
    assert "measured / predicted" in printed

    (written,) = (tmp_path / "results" / "cpu").glob("*_gpt2_medium.json")
    rows = json.loads(written.read_text())["rows"]
    assert [(row["method"], row.get("share")) for row in rows] == [(PLAIN, None), (PLANNED, "0.8"), (PLANNED, SMALLEST)]
    plain, planned, smallest = rows
    for row in rows:
        assert row["measured_peak_bytes"] == row["predicted_peak_bytes"]
        assert row["difference"] == 0
        assert row["measured_s"] > 0
    assert planned["measured_peak_bytes"] <= planned["budget_bytes"] == int(0.8 * plain["measured_peak_bytes"])
    assert smallest["measured_peak_bytes"] < planned["measured_peak_bytes"]
    assert planned["recomputed"] > 0

    # What is finished is not done again; one plan of another step is one row, and is measured once it is right.
    case = Folder(folder).case("gpt2_medium", "eager")
    assert case.missing(EXECUTE, "another run") == []
    kept = case.plan_file("0.8").read_text()
    case.plan_file("0.8").write_text(kept.replace(json.loads(kept)["execution"]["sha256"], "0" * 64))
    case.drop(PLANNED)
    execute.execute(Folder(folder), case, "cpu", "tiny", 1, "this run")
    by_share = {row.share: row for row in case.rows()}
    assert "another model" in by_share["0.8"].error
    assert by_share[SMALLEST].measured_s
    assert case.missing(EXECUTE, "this run") == []
    assert case.missing(EXECUTE, "the next run") == [(PLANNED, "0.8")]
    case.plan_file("0.8").write_text(kept)
    execute.execute(Folder(folder), case, "cpu", "tiny", 1, "the next run")
    assert {row.share: row.error for row in case.rows()} == {"": "", "0.8": "", SMALLEST: ""}


def test_planning_needs_no_pytorch(bare: Callable[..., str]) -> None:
    bare("-c", "import sys, experiments.device.__main__, experiments.device.plan; assert 'torch' not in sys.modules")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_and_largest_batches(backend: str, tmp_path: Path, bare: Callable[..., str]) -> None:
    folder, out = str(tmp_path / "handed"), ["--out", str(tmp_path / "results")]
    case = ["--models", "gpt2_medium", "--backends", backend]
    device = ["--device", "cpu", "--size", "tiny", "--cost", "flops"]
    bare("-m", "experiments.device", "capture", folder, *device, *case)
    assert command.main(["plan", folder, "--budgets", "0.8", "--time-limit", "2", *case, *out]) == 0
    bare("-m", "experiments.device", "execute", folder, "--rounds", "2", "--memory", "1MB", "--tries", "2", *case, *out)
    (written,) = (tmp_path / "results" / "cpu").glob("*_gpt2_medium.json")
    rows = json.loads(written.read_text())["rows"]
    assert not [row for row in rows if "error" in row]
    by = {(row["method"], row.get("share", "")): row for row in rows}
    planned, plain, ours = by[PLANNED, "0.8"], by[LARGEST, ""], by[LARGEST_PLANNED, ""]
    assert planned["measured_peak_bytes"] <= planned["predicted_peak_bytes"] <= planned["budget_bytes"]
    assert planned["difference"] < 1e-4
    assert by[PLAIN, ""]["batch"] < plain["batch"] < ours["batch"]
    assert max(plain["measured_peak_bytes"], ours["measured_peak_bytes"]) <= 1_000_000


@pytest.mark.slow
def test_costs_serve_a_machine_that_cannot_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [str(tmp_path / "handed"), *HERE, "--out", str(tmp_path / "results")]
    monkeypatch.chdir(ROOT)
    assert command.main(["capture", "--device", "cpu", "--size", "tiny", *arguments]) == 0
    assert command.main(["plan", "--budgets", "0.9", "--time-limit", "1", *arguments]) == 0
    found = stored.load_stored("cpu", tmp_path / "results")
    assert found is not None
    monkeypatch.setattr(stored, "RESULTS_FOLDER", tmp_path / "results")
    graph = frontend.extract(replace(spec_of("gpt2_medium", "tiny"), name="gpt2"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CostWarning)  # extraction ends the forward pass otherwise than a module
        costed = apply_cost(graph, "profile", load_gpu("cpu"))
    known = [op for op in costed.operations if op.work and op.work.signature in found.ns and not op.work.is_free]
    assert len(known) > 0.8 * sum(1 for op in costed.operations if op.work and not op.work.is_free)
    assert [op.cost for op in known] == [found.ns[op.work.signature] for op in known if op.work]


def test_a_wrong_folder_or_machine_is_one_line(tmp_path: Path) -> None:
    given = ["--out", str(tmp_path)]
    with pytest.raises(InvalidInput, match=r"holds no captures: run .* capture .* on the device"):
        command.main(["plan", str(tmp_path / "nothing"), *given])
    with pytest.raises(InvalidInput, match="holds no captures"):
        command.main(["execute", str(tmp_path / "nothing"), *given])
    folder, here = Folder(tmp_path / "handed"), describe("cpu", "tiny")
    folder.describe(here)
    with pytest.raises(InvalidInput, match="holds no capture of unet"):
        command.main(["execute", str(folder.path), "--models", "unet", *given])
    case = folder.case("unet", "eager")
    write_document(case.capture_file, {"seconds": 1.0})
    write_document(folder.path / "device.json", here | {"torch": "2.11.0"})
    with pytest.raises(InvalidInput, match=r"was captured with PyTorch 2\.11\.0, here it is"):
        command.main(["execute", str(folder.path), *given])
    (folder.path / "device.json").write_text("{}")
    with pytest.raises(InvalidInput, match="is no file of the format remat-device/1"):
        command.main(["plan", str(folder.path), *given])
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInput, match="PyTorch finds no CUDA device here; capture with --device cpu"):
            command.main(["capture", str(tmp_path / "another"), *given])


@pytest.mark.parametrize("most", [0, 1, 7, 99, 100, 101, 180, 1000])
@pytest.mark.parametrize("estimate", [0, 1, 100])
def test_the_search_for_a_batch_ends_near_the_largest(most: int, estimate: int) -> None:
    search, tried = execute.Batches(estimate), []
    while (batch := search.next_batch()) is not None:
        assert batch not in tried
        tried.append(batch)
        search.learn(batch, trains=batch <= most)
    assert search.found <= most < search.found + max(1, execute.NEAR * search.found) + 1
    assert len(tried) < 25


def test_a_process_that_fails_goes_on_with_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row is lost with the process that measured it; while rows become fewer, another process goes on."""
    case = Folder(tmp_path).case("resnet50", "eager")
    left, told = [3, 3, 2, 2], []
    done = run(
        [case], Clock(None), "execute", lambda _: {"folder": str(tmp_path)}, lambda _: left.pop(0),
        lambda _, error: told.append(error),
    )  # fmt: skip
    assert done
    assert len(told) == 1  # 3 are still missing after the first process: it makes no sense to go on
    assert "KeyError: 'work'" in told[0]
    assert "failed" in capsys.readouterr().out
    assert not run([case], Clock(0.0), "execute", lambda _: {}, lambda _: 1, lambda *_: None)
    assert "the time is up: 1 left" in capsys.readouterr().out


def test_what_counts_as_out_of_memory() -> None:
    def wrapped() -> BaseException:
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            except torch.OutOfMemoryError as error:
                raise RuntimeError("backend failed") from error
        except RuntimeError as error:
            return error

    assert is_out_of_memory(wrapped())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
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

    step = captured_step(Attention().bfloat16(), (torch.zeros(2, 32, 64).bfloat16(),), {}, "eager", "default")
    kinds = [op.kind for op in step.graph.operations]
    forward, backward = (f"aten._scaled_dot_product_{kind}_attention{side}" for side in ("", "_backward"))
    attention, end = kinds.index(forward), kinds.index("remat.end_forward")
    assert attention < end < kinds.index(backward)
    assert not step.graph.operations[attention].run_once
    order = [*range(len(kinds))]
    order.insert(end + 1, attention)
    assert simulate(step.graph, Plan.from_order(step.graph, order, None)).computations[attention] == 2


def test_rows_replace_earlier_ones(tmp_path: Path) -> None:
    case = Case("unet", "eager", tmp_path)
    case.add(Row(PLAIN, error="its process ended", run="1"))
    assert case.missing(EXECUTE, "1") == []  # this run has tried it
    assert case.missing(EXECUTE, "2") == [(PLAIN, "")]
    case.add(Row(PLAIN, measured_s=1.0, run="2"))
    assert case.missing(EXECUTE, "3") == []
    assert [row.measured_s for row in case.rows()] == [1.0]


def test_a_checkout_is_small_enough_to_carry() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], capture_output=True, check=True).stdout
    assert len(archive) < MOST_MIB * 2**20


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
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
    found = stored.load_stored("cpu", tmp_path)
    assert found is not None
    assert found.ns == {"mm": 7}
