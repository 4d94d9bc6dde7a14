"""``experiment=execution``: every way to train a PyTorch model within less memory, predicted and measured.

The work is done by `experiments.execution_torch` in a process of its own. Its rows are kept as they come, under a name
that says what determines them, so that a stopped run goes on and a finished one is only redrawn.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from analysis.execution import draw_execution
from experiments.config import CONF_FOLDER
from experiments.provenance import cpu_name, provenance, versions
from experiments.settings import RUNS_FOLDER, Settings, configured_model
from experiments.store import code_version, write_json
from remat.child import command as child_command
from remat.child import environment
from remat.errors import InvalidInput, RematError
from remat.files import read_lines, write_lines
from remat.frontends.spec import ModelSpec

COST_CACHE = RUNS_FOLDER / "cache" / "costs"
SAME = {True: "yes", False: "NO", None: "the plain step differs from itself"}
ROUNDS, QUICK_ROUNDS = 7, 3
# What two CPU cores train in about a second: the networks of these names, narrower and on smaller inputs.
ON_A_CPU: dict[str, dict[str, Any]] = {
    "gpt2": {
        "batch_size": 8,
        "options": {"length": 256, "vocabulary": 4000, "width": 192, "n_layers": 6, "n_heads": 6},
    },
    "vit": {
        "batch_size": 16, "input_size": (3, 96, 96), "options": {"patch": 8, "width": 192, "n_layers": 6, "n_heads": 6},
    },
    "resnet50": {"batch_size": 16, "input_size": (3, 128, 128)},
    "unet": {"batch_size": 2, "input_size": (3, 128, 128)},
    "mobilenet_v2": {"batch_size": 16, "input_size": (3, 128, 128)},
    "vgg16": {"batch_size": 32, "input_size": (3, 96, 96)},
    "densenet121": {"batch_size": 8, "input_size": (3, 96, 96)},
    "lstm": {"batch_size": 16, "options": {"length": 48, "vocabulary": 1000, "width": 128}},
}  # fmt: skip


def run_execution(cfg: DictConfig, settings: Settings, console: Console, folder: Path) -> int:
    """Measure, store, draw; the exit code."""
    if settings.cost != "profile":
        raise InvalidInput("experiment=execution compares predicted with measured seconds: leave cost=profile")
    device = settings.device or "cpu"
    job = job_of(
        _spec(cfg, settings, device), device, quick=cfg.scale == "quick", time_limit_s=settings.time_limit_s,
        seed=settings.seed, threads=settings.threads,
    )  # fmt: skip
    execute(job, folder, console)
    for path in draw_execution(folder):
        what = {".html": "page", ".csv": "table"}.get(path.suffix, "figure")
        console.print(f"{what:<8} {path}", markup=False, soft_wrap=True)
    return 0


def job_of(
    spec: ModelSpec, device: str, *, quick: bool, time_limit_s: float, seed: int = 0, threads: int = 2
) -> dict[str, Any]:
    """What `execute` takes: everything that its rows depend on beside code, versions and machine."""
    return {
        "spec": asdict(spec), "device": device, "cost": "profile", "time_limit_s": time_limit_s, "seed": seed,
        "threads": threads, "rounds": QUICK_ROUNDS if quick else ROUNDS, "shares": 3 if quick else 6,
    }  # fmt: skip


def execute(job: dict[str, Any], folder: Path, console: Console) -> dict[str, Any]:
    """Measure what is not stored yet, write ``run.json`` into the folder and print the table; what was written."""
    source, spec = asdict(provenance()), job["spec"]
    sizes = ", ".join(f"{k} {v}" for k, v in (("batch", spec["batch_size"]), *spec["options"].items()) if v)
    console.print(f"{spec['name']} on {job['device']} ({sizes}); costs: {job['cost']}", markup=False)
    rows = measured_rows("experiments.execution_torch", "execution", job, folder, console)
    run = {"experiment": "execution", "job": job, "provenance": source, "rows": rows}
    write_json(folder / "run.json", run)
    _print_table(console, rows)
    _print_comparison(console, rows)
    return run


def _spec(cfg: DictConfig, settings: Settings, device: str) -> ModelSpec:
    """The PyTorch model of that name; on a CPU, of a size for it where the command line does not say."""
    spec = settings.spec
    if spec is None:
        raise InvalidInput("experiment=execution runs models, not graph files; give model=")
    if spec.framework != "torch":
        spec = torch_model(spec.name)
        given = {"batch_size": cfg.batch_size, "input_size": cfg.input_size and tuple(cfg.input_size)}
        spec = replace(spec, **{key: value for key, value in given.items() if value})
    return spec if device != "cpu" or cfg.batch_size or cfg.input_size else for_a_cpu(spec)


def torch_model(name: str) -> ModelSpec:
    """The configured PyTorch model ``torch_<name>``.

    Raises:
        InvalidInput: there is none.
    """
    twin = CONF_FOLDER / "model" / f"torch_{name}.yaml"
    if not twin.exists():
        known = sorted(p.stem.removeprefix("torch_") for p in twin.parent.glob("torch_*.yaml"))
        raise InvalidInput(f"experiment=execution: no PyTorch model '{name}'; known: {', '.join(known)}")
    return configured_model(twin.stem)


def for_a_cpu(spec: ModelSpec) -> ModelSpec:
    """The same model at a size that two CPU cores train in about a second, if one is known."""
    return resized(spec, ON_A_CPU)


def resized(spec: ModelSpec, sizes: Mapping[str, Mapping[str, Any]]) -> ModelSpec:
    """The same model at the size that a table gives for its name, if it does."""
    size = sizes.get(spec.name.removeprefix("torch_"), {})
    return replace(spec, **{**size, "options": spec.options | size.get("options", {})})


def measured_rows(
    module: str, kind: str, job: Mapping[str, Any], folder: Path, console: Console
) -> list[dict[str, Any]]:
    """All rows of a job: those that are stored as `kind`, and those that a measuring module makes now."""
    made_by = [job, code_version(whole=True), versions(), cpu_name()]
    key = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:16]
    path = RUNS_FOLDER / "store" / f"{kind}_{key}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "job.json", {**job, "rows": str(path.resolve()), "cache": str(COST_CACHE.resolve())})
    write_lines(path, read_lines(path))  # without damaged lines, of which the child could not warn
    run_child(module, folder, console)
    return read_lines(path)


def run_child(module: str, folder: Path, console: Console) -> list[dict[str, Any]]:
    """Run a measuring module on the folder's ``job.json`` in a process of its own; the rows it made."""
    command = child_command(module, str(folder / "job.json"))
    rows: list[dict[str, Any]] = []
    with (folder / "execution.log").open("w") as log, console.status("capturing and planning ...") as status:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment({}, here=True))
        try:
            assert child.stdout is not None
            for line in child.stdout:
                kind, _, text = line.rstrip("\n").partition(" ")
                if kind == "row":
                    row = json.loads(text)
                    rows.append(row)
                    status.update(f"{row['method']} {row['parameter']} done ...")
                elif kind == "note":
                    console.print(f"note: {text}", markup=False, soft_wrap=True)
        except BaseException:
            child.kill()
            raise
        finally:
            child.wait()
    if child.returncode:
        last = (Path(folder, "execution.log").read_text().strip().splitlines() or ["it printed nothing"])[-1]
        raise RematError(f"the measuring process ended with code {child.returncode}: {last[:300]} (see {log.name})")
    return rows


def _print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table("method", "point", "predicted MB", "measured MB", "measured / predicted", "predicted time",
                  "measured time", "same bits")  # fmt: skip
    plain_ns = next(row["predicted_ns"] for row in rows if row["method"] == "plain")
    for row in rows:
        if "note" in row:
            console.print(f"note: {row['method']} {row['parameter']}: {row['note']}", markup=False, soft_wrap=True)
            continue
        peak, ns = row["predicted_peak_bytes"], row["predicted_ns"]
        table.add_row(
            row["method"], row["parameter"], f"{peak / 1e6:.1f}" if peak else "",
            f"{row['measured_peak_bytes'] / 1e6:.1f}",
            f"{row['measured_peak_bytes'] / peak:.4f}" if peak else "", f"{ns / plain_ns:.3f}" if ns else "",
            f"{row['measured_ratio']:.3f}", SAME[row["same"]],
        )  # fmt: skip
    console.print(table)


def _print_comparison(console: Console, rows: list[dict[str, Any]]) -> None:
    """At the peak of every peer: its time and that of the fastest of our plans which stay within that peak."""
    rows = [row for row in rows if "note" not in row and row["predicted_ns"]]
    plain_ns = next(row["predicted_ns"] for row in rows if row["method"] == "plain")
    ours = [row for row in rows if row["method"] == "portfolio"]
    table = Table("at the peak of", "MB", "its predicted time", "portfolio's", "its measured time", "portfolio's")
    for row in rows:
        within = [r for r in ours if r["predicted_peak_bytes"] <= (row["predicted_peak_bytes"] or 0)]
        if row["method"] != "portfolio" and within:
            best = min(within, key=lambda r: r["predicted_ns"])
            table.add_row(
                f"{row['method']} {row['parameter']}", f"{row['predicted_peak_bytes'] / 1e6:.1f}",
                f"{row['predicted_ns'] / plain_ns:.3f}", f"{best['predicted_ns'] / plain_ns:.3f}",
                f"{row['measured_ratio']:.3f}", f"{best['measured_ratio']:.3f}",
            )  # fmt: skip
    console.print(table)
