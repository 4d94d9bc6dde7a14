"""``experiment=execution``: every method to train a PyTorch model within less memory, predicted and measured.

Rows are stored as they come (see `experiments.steps.launch`), so that a stopped run continues where it was and a
finished one is only redrawn.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from analysis.execution import draw_execution
from experiments.progress import say_written
from experiments.provenance import provenance
from experiments.settings import Settings
from experiments.steps.job import Job
from experiments.steps.launch import measured
from experiments.steps.row import FORMAT, as_json
from experiments.steps.table import BESIDE, BUDGET, METHOD, REMARK, beside, terminal_table
from experiments.steps.torch_sizes import for_a_cpu, torch_model
from experiments.store import write_json
from remat.errors import InvalidInput
from remat.frontends.spec import ModelSpec

ROUNDS, QUICK_ROUNDS = 7, 3
SHARES = (0.6, 0.8, 0.45, 0.9, 0.7, 0.5)  # of the plain peak; a quick run takes the first three
COLUMNS = (METHOD, BUDGET, "predicted MB", "measured MB", "measured / predicted", "predicted overhead",
           "measured overhead", "bits of", REMARK)  # fmt: skip


def run_execution(cfg: DictConfig, settings: Settings, console: Console, folder: Path) -> int:
    """Measure, store and draw; returns the exit code 0."""
    if settings.cost != "profile":
        raise InvalidInput("experiment=execution compares predicted with measured seconds: keep cost=profile")
    device = settings.device or "cpu"
    job = job_of(
        _spec(cfg, settings, device), device, quick=cfg.scale == "quick", time_limit_s=settings.time_limit_s,
        seed=settings.seed, threads=settings.threads,
    )  # fmt: skip
    execute(job, folder, console)
    say_written(console, draw_execution(folder))
    return 0


def job_of(spec: ModelSpec, device: str, *, quick: bool, time_limit_s: float, seed: int = 0, threads: int = 2) -> Job:
    """The job of `execute`: all budgets and other methods, with fewer budgets and rounds if `quick`."""
    rounds, fractions = (QUICK_ROUNDS, SHARES[:3]) if quick else (ROUNDS, SHARES)
    return Job(
        "torch", spec.name, spec.batch_size, asdict(spec), device, time_limit_s=time_limit_s, seed=seed,
        threads=threads, rounds=rounds, fractions=fractions, peers=True,
    )  # fmt: skip


def execute(job: Job, folder: Path, console: Console) -> dict[str, Any]:
    """Measure the rows that are not stored yet, print the table, write ``run.json``; returns the file's content."""
    assert job.spec is not None
    sizes = ", ".join(f"{k} {v}" for k, v in (("batch", job.batch), *job.spec["options"].items()) if v)
    console.print(f"{job.model} on {job.device} ({sizes}); costs: {job.cost}", markup=False)
    rows = measured(job, folder, console)
    run = {"format": FORMAT, "experiment": "execution", "job": asdict(job), "provenance": asdict(provenance()),
           "rows": as_json(rows)}  # fmt: skip
    write_json(folder / "run.json", run)
    console.print(terminal_table(rows, COLUMNS))
    comparison = Table(*BESIDE)
    for line in beside(rows):
        comparison.add_row(*line)
    console.print(comparison)
    return run


def _spec(cfg: DictConfig, settings: Settings, device: str) -> ModelSpec:
    """The PyTorch model of that name; on a CPU it is small unless the command line gives a size."""
    spec = settings.spec
    if spec is None:
        raise InvalidInput("experiment=execution runs models, not graph files; give model=")
    if spec.framework != "torch":
        spec = torch_model(spec.name)
        given = {"batch_size": cfg.batch_size, "input_size": cfg.input_size and tuple(cfg.input_size)}
        spec = replace(spec, **{key: value for key, value in given.items() if value})
    return spec if device != "cpu" or cfg.batch_size or cfg.input_size else for_a_cpu(spec)
