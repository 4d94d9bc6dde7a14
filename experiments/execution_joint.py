"""``python -m experiments.execution_joint``: plans that choose implementations against those that only recompute.

Every PyTorch model at several budgets, with ``implementations=`` default, exact and joint: predicted and measured peak,
predicted overhead and measured step time beside the plain step's in the same rounds, the largest error of a gradient,
and which implementations run. On the CPU, at sizes for it, and on a GPU if one is at hand. Each model is measured in a
process of its own; its rows are kept as they come, so that a stopped run goes on. Prints Markdown; ``--write`` puts it
into docs/implementations.md, ``--out`` also writes the rows as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.documents import DOCS, write_between_marks
from experiments.execution import ON_A_CPU, for_a_cpu, measured_rows, torch_model
from experiments.execution_joint_tables import document, line_of, shown
from experiments.provenance import cpu_name, versions
from experiments.settings import RUNS_FOLDER
from experiments.store import write_json
from remat.errors import RematError
from remat.files import read_json

COMMAND = "python -m experiments.execution_joint --write"
DOCUMENT = DOCS / "implementations.md"
FRACTIONS, OPERATORS = (0.8, 0.6, 0.45), ("default", "exact", "joint")
ROUNDS = 21
MODELS = tuple(name for name in ON_A_CPU if name != "lstm")  # whose step is one kernel, without implementations


def main(arguments: list[str] | None = None) -> int:
    """Measure what is not stored yet and print it; 1 if the process of a model failed."""
    given = _parser().parse_args(arguments)
    if given.show:
        run = read_json(given.show)
        _finish(run, given.write)
        return 0
    run = _head(given)
    if given.out and given.out.exists():
        known = read_json(given.out)["models"]
        run["models"] = {key: measured for key, measured in known.items() if key not in _keys(given)}
    console, failed = Console(stderr=True), False
    for device in given.devices.split(","):
        for name in filter(None, given.models.split(",")):
            try:
                run["models"][f"{device}/{name}"] = measured = _measured(name, device, given, console)
            except RematError as error:
                console.print(f"{name}: {error}", markup=False, soft_wrap=True)
                failed = True
                continue
            for row in shown(measured):
                print(line_of(measured, row), file=sys.stderr, flush=True)
            if given.out:
                write_json(given.out, run)
    _finish(run, given.write)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.execution_joint", description="plans that choose implementations, measured"
    )
    parser.add_argument(
        "--models", default=",".join(MODELS), help="comma-separated, '' for none; by default all but lstm"
    )
    parser.add_argument("--budgets", default=",".join(map(str, FRACTIONS)), help="fractions of the plain peak")
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--devices", default=_devices(), help="cpu, cuda, or both; by default what is at hand")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds per plan")
    parser.add_argument("--cost", default="profile")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed steps of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for the rows; those of other models that it has stay")
    parser.add_argument("--show", type=Path, help="measure nothing, take the rows that --out wrote")
    parser.add_argument("--write", action="store_true", help=f"into docs/{DOCUMENT.name}")
    return parser


def _devices() -> str:
    import torch

    return "cpu,cuda" if torch.cuda.is_available() else "cpu"


def _keys(given: argparse.Namespace) -> set[str]:
    return {f"{device}/{name}" for device in given.devices.split(",") for name in given.models.split(",")}


def _head(given: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(), "cpu": cpu_name(), "versions": versions(), "threads": given.threads,
        "time_limit_s": given.time_limit, "rounds": given.rounds, "models": {},
    }  # fmt: skip


def _measured(name: str, device: str, given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """What a model is, and its rows, those that are stored and those made now."""
    spec = torch_model(name) if device == "cuda" else for_a_cpu(torch_model(name))
    job = {
        "spec": asdict(spec), "device": device, "cost": given.cost, "time_limit_s": given.time_limit, "seed": 0,
        "threads": given.threads, "rounds": given.rounds, "operators": given.operators.split(","),
        "fractions": [float(fraction) for fraction in given.budgets.split(",")],
    }  # fmt: skip
    folder = RUNS_FOLDER / f"joint_{device}_{name}"
    rows = measured_rows("experiments.execution_ways", "joint", job, folder, console)
    return {
        "model": name, "device": device, "batch": spec.batch_size, "date": datetime.date.today().isoformat(),
        "rows": rows,
    }  # fmt: skip


def _finish(run: dict[str, Any], write: bool) -> None:
    text = document(run)
    if write:
        write_between_marks(DOCUMENT, COMMAND, text)
    print(text)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RematError as error:
        sys.exit(str(error))
