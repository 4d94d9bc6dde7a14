"""A copy of a run for Weights & Biases: configuration, rows, figures. The store remains the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.arguments import import_optional
from experiments.row import Row


def import_wandb() -> ModuleType:
    """The package; raises `MissingPackage` if it is not installed."""
    return import_optional("wandb", "logger=wandb needs wandb")


def log_run(
    folder: Path, rows: Sequence[Row], config: Mapping[str, Any], drawn: Sequence[Path], *, project: str, mode: str
) -> str:
    """Log a finished run; returns its folder (offline) or its address."""
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
