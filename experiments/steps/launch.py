"""Jobs measured in processes of their own, with a store of rows: a stopped job continues, a finished one is read."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from experiments.provenance import cpu_name, versions
from experiments.settings import RUNS_FOLDER
from experiments.steps.job import Job
from experiments.steps.row import StepLog, StepRow
from experiments.store import code_of, row_key, write_json
from remat.child import command, environment
from remat.errors import RematError, shortened
from remat.execution.planning import DEFAULT_STRATEGY
from remat.files import read_lines, write_lines

COST_CACHE = RUNS_FOLDER / "cache" / "costs"


def measured(job: Job, folder: Path, console: Console) -> list[StepRow]:
    """All rows of a job: from the store, or else measured now by a process of its own.

    Args:
        folder: for the job's file and the log of the process.

    Raises:
        RematError: the process failed.
    """
    code = code_of(DEFAULT_STRATEGY, "torch_mincut", whole=True)
    determines = {"job": asdict(job), "code": code, "versions": versions(), "cpu": cpu_name()}
    path = RUNS_FOLDER / "store" / "steps" / f"{row_key(determines)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "job.json", asdict(job))
    write_lines(path, read_lines(path))  # drop damaged lines here, because the child's warnings go to its log
    arguments = [str(file.resolve()) for file in (folder / "job.json", path, COST_CACHE)]
    _run(command("experiments.steps.measure", *arguments), folder / "execution.log", console)
    return StepLog(path).rows


def _run(child_command: Sequence[str], log_path: Path, console: Console) -> None:
    """Run the measuring process; the console names each row that is done."""
    with log_path.open("w") as log, console.status("capturing and planning ...") as status:
        child = subprocess.Popen(
            child_command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment({}, here=True)
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("row "):
                    status.update(f"{line[4:].strip()} done ...")
        except BaseException:
            child.kill()
            raise
        finally:
            child.wait()
    if child.returncode:
        last = shortened((log_path.read_text().strip().splitlines() or ["it printed nothing"])[-1], 300)
        raise RematError(f"the measuring process ended with code {child.returncode}: {last} (see {log_path})")
