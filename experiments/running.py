"""One run, from its settings to the paths of its table, figures and page."""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from experiments.arguments import import_optional
from experiments.budget_sweep import run_single, run_sweep
from experiments.build import Subject, build_quietly
from experiments.config import as_dict, keys_of, run_name
from experiments.engine import make_engine
from experiments.progress import SolveProgress, make_console, say_written
from experiments.registry import experiments, listed
from experiments.runner import run_experiment
from experiments.settings import RUNS_FOLDER, STORE_FOLDER, Settings, for_implementations
from experiments.solving import Solves, contradictions, is_final
from experiments.store import Row, Store, write_json
from remat.errors import InvalidInput
from remat.solution import Status
from remat.units import format_cost, format_size

STUDIES = ("paper", "monet")


def run(cfg: DictConfig, settings: Settings, experiment: str) -> int:
    """Build, solve, store and draw; returns the exit code: 1 if a single budget has no plan or a claim is refuted."""
    console = make_console()
    folder = RUNS_FOLDER / run_name(cfg, experiment)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: console.print(f"warning: {message}", markup=False)
        return _run(cfg, settings, experiment, console, folder)


def _run(cfg: DictConfig, settings: Settings, experiment: str, console: Console, folder: Path) -> int:
    if settings.logger == "wandb":
        import_wandb()  # so that a missing package fails before the first solve
    if settings.budgets_bytes:
        raise InvalidInput("budget: write one size, or sweep; experiment=monet has budgets=[10,9], in GiB")
    if cfg.scale == "study" and experiment not in STUDIES:
        raise InvalidInput(f"scale=study is for experiment={' or '.join(STUDIES)}; write full or quick")
    if experiment in experiments():
        return run_experiment(listed(experiment), keys_of(cfg), settings, console)
    engine = make_engine(settings.engine, settings.jobs, settings.threads, settings.address)
    what = settings.graph_file if settings.spec is None else f"{settings.spec.name} ({settings.spec.framework})"
    with console.status(f"building {what} ..."):
        subject, remarks = build_quietly(settings)
    if subject.graph.has_implementations:
        settings = for_implementations(cfg, settings)
    for remark in remarks:
        console.print(f"warning: {remark}", markup=False)
    head = _head(cfg, settings, subject, experiment, folder)
    with engine, SolveProgress(console) as progress:
        solves = Solves(settings, Store(STORE_FOLDER), engine, progress, console)
        graph_run = solves.graph_run(subject, experiment)
        _introduce(console, subject, settings, graph_run.store_all_peak_bytes)
        try:
            if settings.budget_bytes is None:
                rows, families = run_sweep(graph_run)
            else:
                rows, families = run_single(graph_run, settings.budget_bytes)
        except KeyboardInterrupt:
            _write_run(folder, head, list(graph_run.kept), [])
            if graph_run.kept:
                finished = sum(is_final(row) for row in graph_run.kept.values())
                line = (
                    f"kept {finished} of {len(graph_run.kept)} results as finished; python -m analysis {folder} draws "
                    "them; the same command continues: finished solves are not repeated, others start from their plans"
                )
                console.print(line, markup=False, soft_wrap=True)
            raise
    _write_run(folder, head, [row.key for row in rows], families)
    drawn = _draw(console, folder)
    _explain_failures(console, rows)
    _say_unfinished(console, rows)
    console.print(f"{graph_run.solved} solved now, {graph_run.reused} taken from the store", markup=False)
    say_written(console, drawn)
    if settings.logger == "wandb":
        where = log_run(folder, rows, head["config"], drawn, project=settings.wandb_project, mode=settings.wandb_mode)
        console.print(f"wandb    {where}", markup=False)
    refuted = contradictions(rows)
    for line in refuted:
        print(f"error: contradicted: {line}", file=sys.stderr)
    if refuted:
        return 1
    has_plan = any(row.cost is not None for row in rows)
    return 0 if has_plan or settings.budget_bytes is None else 1


def _introduce(console: Console, subject: Subject, settings: Settings, store_all_bytes: int) -> None:
    graph = subject.graph
    console.print(
        f"{graph.name}: {len(graph)} operations, {graph.n_edges} edges; checkpoint-all peak "
        f"{format_size(store_all_bytes)}, fixed {format_size(graph.fixed_bytes)}, one pass "
        f"{format_cost(graph.total_cost, graph.cost_unit)} ({subject.cost_model} costs"
        f"{'' if subject.cost_source == 'file' else f', {settings.gpu.name}'}"
        f"{'' if subject.dtype is None else f', {subject.dtype}'}){_scope_note(settings)}",
        markup=False,
        soft_wrap=True,
    )


def _head(cfg: DictConfig, settings: Settings, subject: Subject, experiment: str, folder: Path) -> dict[str, Any]:
    graph, gpu = subject.graph, settings.gpu
    asked = "budget sweep" if settings.budget_bytes is None else format_size(settings.budget_bytes)
    config = as_dict(cfg)
    return {
        "title": f"{graph.name}, {asked}, {subject.cost_model} costs, {gpu.name}{_scope_note(settings)}",
        "experiment": experiment,
        "model": subject.model,
        "gpu": config["gpu"],
        "config": config,
        "graph_sha256": graph.sha256(),
        "store": os.path.relpath(STORE_FOLDER, folder),
    }


def _scope_note(settings: Settings) -> str:
    scope = "" if settings.scope == "staged" else f", {settings.scope} scope"
    return scope if settings.link is None else f"{scope}, copies at {settings.link}"


def _write_run(folder: Path, head: dict[str, Any], keys: list[str], families: list[str]) -> None:
    write_json(folder / "run.json", head | {"keys": keys, "families": families})


def _draw(console: Console, folder: Path) -> list[Path]:
    """Draw the run and print its table."""
    from analysis import draw_run, terminal_table  # imported late: pandas takes a second

    with console.status("drawing ..."):
        drawn = list(draw_run(folder))
    console.print(terminal_table(folder))
    return drawn


def _explain_failures(console: Console, rows: Sequence[Row]) -> None:
    """Print why a strategy has no plan at any budget; the table of a single budget says it already."""
    if len({row.budget_bytes for row in rows}) == 1:
        return
    for name in dict.fromkeys(row.strategy for row in rows):
        own = [row for row in rows if row.strategy == name]
        if all(row.cost is None for row in own):
            console.print(f"{name}: {own[-1].status} at every budget: {own[-1].message}", markup=False, soft_wrap=True)


def _say_unfinished(console: Console, rows: Sequence[Row]) -> None:
    """Print one line about solves that failed or were cut short (killed, crashed, interrupted)."""
    unfinished = [row for row in rows if row.status != Status.SKIPPED and row.plan_from is None and not is_final(row)]
    if not unfinished:
        return
    first = unfinished[0]
    why = f": {first.message}" if first.message else ""
    console.print(
        f"warning: {len(unfinished)} of {len(rows)} solves failed or were cut short, the first of them "
        f"{first.strategy} at {format_size(first.budget_bytes)}{why}; the same command solves them again",
        markup=False, soft_wrap=True,
    )  # fmt: skip


def import_wandb() -> ModuleType:
    """The package; raises `MissingPackage` if it is not installed."""
    return import_optional("wandb", "logger=wandb needs wandb")


def log_run(
    folder: Path, rows: Sequence[Row], config: Mapping[str, Any], drawn: Sequence[Path], *, project: str, mode: str
) -> str:
    """Log a copy of a finished run to Weights & Biases; returns its folder (offline) or its address."""
    wandb = import_wandb()
    run = wandb.init(
        project=project, name=folder.name, dir=str(folder), config=dict(config), mode=mode,
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )  # fmt: skip
    try:
        columns = [field.name for field in fields(Row)]
        run.log({"rows": wandb.Table(columns=columns, data=[list(astuple(row)) for row in rows])})
        run.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in drawn if path.suffix == ".png"})
        run.summary["plans"] = sum(row.cost is not None for row in rows)
        run.summary["optimal"] = sum(row.status == "OPTIMAL" for row in rows)
    finally:
        run.finish()
    return run.url if mode == "online" else str(run.dir)
