"""Run an experiment: measure the cases that no table has, store their rows, and draw the page.

Keys of every experiment: ``draw=true`` measures nothing; ``keep=true`` writes rows to ``results/`` and drawings into
``docs/``; ``again=true`` measures finished cases, too.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from experiments.documents import DOCS, ROOT, Drawing, write_drawing, write_tables
from experiments.progress import duration
from experiments.registry import Case, Experiment, Listed, module_of
from experiments.settings import RUNS_FOLDER
from experiments.store import write_json
from experiments.table import Table
from remat.errors import InvalidInput, RematError
from remat.files import read_json, write_text

REFUSED = 3  # exit code of a worker whose case cannot be measured, for a reason of one line


def run_experiment(listed: Listed, values: Mapping[str, Any], console: Console) -> int:
    """Run, store and draw; returns the exit code: 1 if a case failed.

    Args:
        values: keys of the experiment and of all experiments.
    """
    experiment = listed.load()
    keeps, draws_only, again = (bool(values.get(key)) for key in ("keep", "draw", "again"))
    table = Table(listed.name, keep=keeps)
    failed = (
        [] if draws_only or not experiment.measures else _measure(listed, experiment, values, table, again, console)
    )
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    if experiment.draw is not None and (draws_only or table.rows()):
        _draw(listed.name, experiment, keeps, console)
    return 1 if failed else 0


def _measure(
    listed: Listed, experiment: Experiment, values: Mapping[str, Any], table: Table, again: bool, console: Console
) -> list[str]:  # fmt: skip
    """Measure missing cases; returns a line for each that failed."""
    cases = list(experiment.cases(**listed.arguments(values)))
    missing = cases if again else table.missing(cases)
    failed = list[str]()
    bar = Progress(
        SpinnerColumn(), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"),
        TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=len(cases), completed=len(cases) - len(missing))
        for case in missing:
            bar.update(task, description=case.label)
            began = time.monotonic()
            try:
                rows = measured(listed.file, case)
            except RematError as error:
                failed.append(f"{listed.name}, {case.label}: {error}")
            else:
                table.put(case, rows, time.monotonic() - began)
            console.print(f"{case.label}: {duration(time.monotonic() - began)}", markup=False, soft_wrap=True)
            bar.advance(task)
    console.print(
        f"{len(missing) - len(failed)} cases measured now, {len(cases) - len(missing)} taken from {table.path.parent}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    return failed


def measured(file: Path, case: Case) -> list[dict[str, Any]]:
    """The rows of a case, measured in a process of its own.

    Raises:
        RematError: it cannot be measured, or its process ended otherwise; one line.
    """
    with tempfile.TemporaryDirectory(prefix="remat-case-") as folder:
        told, made = Path(folder, "case.json"), Path(folder, "rows.json")
        module, _, function = case.function.rpartition(".")
        where = {"file": str(file), "module": module, "function": function}
        write_json(told, where | {"what": dict(case.what)})
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        done = subprocess.run(
            [sys.executable, "-m", "experiments.runner", str(told), str(made)],
            capture_output=True, text=True, errors="replace", check=False, env=env,
        )  # fmt: skip
        if done.returncode == 0:
            return read_json(made)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise InvalidInput(last if done.returncode == REFUSED else f"its process ended with {done.returncode}: {last}")


def _draw(name: str, experiment: Experiment, keeps: bool, console: Console) -> None:
    drawing = drawing_of(name, experiment)
    if keeps and experiment.page is not None:
        write_drawing(name, DOCS / experiment.page, drawing)
        console.print(f"page     {DOCS / experiment.page}", markup=False, soft_wrap=True)
        return
    path = RUNS_FOLDER / name / f"{name}.md"
    write_text(path, drawing.text + "\n")
    console.print(drawing.text, markup=False, soft_wrap=True)
    for drawn in (path, *write_tables(drawing, path.parent), *drawing.figures.values()):
        kind = {".md": "page", ".csv": "table"}.get(drawn.suffix, "figure")
        console.print(f"{kind:<8} {drawn}", markup=False, soft_wrap=True)


def drawing_of(name: str, experiment: Experiment) -> Drawing:
    """The drawing of an experiment's stored rows.

    Raises:
        InvalidInput: there are none.
    """
    rows = Table(name).rows() if experiment.measures else []
    if experiment.measures and not rows:
        raise InvalidInput(f"no rows of {name}; run it without draw=true: python run.py experiment={name}")
    assert experiment.draw is not None
    return experiment.draw(rows)


def _work(told: Path, made: Path) -> int:
    """Measure the case of a file, in this process."""
    case = read_json(told)
    module_of(Path(case["file"]))  # a file of another folder is no module of a package
    measure = getattr(importlib.import_module(case["module"]), case["function"])
    try:
        rows = list(measure(**case["what"]))
    except RematError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return REFUSED
    write_json(made, rows)
    return 0


if __name__ == "__main__":
    sys.exit(_work(*map(Path, sys.argv[1:])))
