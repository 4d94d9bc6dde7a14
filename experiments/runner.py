"""Run an experiment: measure the cases that no table has, store their rows, and draw the page.

Keys of every experiment: ``draw=true`` measures nothing; ``keep=true`` writes rows to ``results/`` and drawings into
``docs/``; ``again=true`` measures finished cases, too, each once, also if Ctrl-C comes between.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exc
from typing import Any

from rich.console import Console

from experiments.documents import DOCS, ROOT, Drawing, write_drawing, write_figures, write_tables
from experiments.engine import Engine, make_engine
from experiments.progress import SolveProgress, duration, say_written
from experiments.registry import Case, Experiment, Listed, Row
from experiments.settings import RUNS_FOLDER, STORE_FOLDER, Settings
from experiments.solving import Solves, finished_jobs
from experiments.store import Store, Table, key_of, write_json
from experiments.worker import REFUSED
from remat.errors import InvalidInput, RematError
from remat.files import read_json, write_text


def run_experiment(listed: Listed, values: Mapping[str, Any], settings: Settings, console: Console) -> int:
    """Run, store and draw; returns the exit code: 1 if a case failed.

    Args:
        values: keys of the experiment and of all experiments.
    """
    experiment = listed.load()
    keeps, draws_only = bool(values.get("keep")), bool(values.get("draw")) or not experiment.measures
    table = Table(listed.name, keep=keeps, again=bool(values.get("again")))
    failed = [] if draws_only else _measure(listed, experiment, values, settings, table, console)
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    if failed:
        console.print("nothing is drawn, because cases failed; draw=true draws the stored rows", markup=False)
    elif experiment.draw is not None and (draws_only or table.rows()):
        _draw(listed.name, experiment, keeps, console)
    return 1 if failed else 0


def _measure(
    listed: Listed, experiment: Experiment, values: Mapping[str, Any], settings: Settings, table: Table,
    console: Console,
) -> list[str]:  # fmt: skip
    """Measure missing cases; returns a line for each that failed."""
    with console.status("listing the cases ..."):
        given = (settings,) if listed.takes_settings else ()
        cases = list(experiment.cases(*given, **listed.arguments(values)))
    if settings.engine != "local" and any(case.on_this_machine for case in cases):
        raise InvalidInput(f"{listed.name} measures this machine; leave engine={settings.engine} out")
    missing = table.missing(cases)
    failed = _measured(listed, missing, settings, table, console) if missing else []
    table.finish()
    table.keep(cases)
    console.print(
        f"{len(missing) - len(failed)} cases measured now, {len(cases) - len(missing)} taken from {table.path.parent}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    return failed


def _measured(listed: Listed, cases: Sequence[Case], settings: Settings, table: Table, console: Console) -> list[str]:
    """Measure cases, and store their rows as they finish; returns a line for each that failed."""
    failed = list[str]()
    with _engine(listed, cases, settings) as engine, SolveProgress(console) as progress:
        jobs = [CaseJob(listed.file, case) for case in cases]
        alone = [job for job in jobs if job.case.solves is None]
        progress.expect(len(alone))
        for job in alone:
            engine.submit(job)
        for job, result in finished_jobs(engine, progress):
            progress.finished(f"{job.label}: {duration(job.wall_s)}")
            failed += _put(listed, table, job, result)
        for job in jobs:
            if job.case.solves is not None:
                solves = Solves(job.case.solves, Store(STORE_FOLDER), engine, progress, console)
                failed += _put(listed, table, job, job.run_here(solves))
    return failed


def _engine(listed: Listed, cases: Sequence[Case], settings: Settings) -> Engine:
    """The engine of the configuration; cases that measure times have this machine to themselves."""
    if any(case.on_this_machine for case in cases):
        return make_engine("local", 1)
    jobs = settings.jobs
    if settings.engine != "ray" and not listed.takes_settings:
        jobs = jobs or 1
    return make_engine(settings.engine, jobs, settings.threads, settings.address)


def _put(listed: Listed, table: Table, job: "CaseJob", result: list[dict[str, Any]] | RematError) -> list[str]:
    """Store the rows of a case, and return the line of its error; the output of one that crashed becomes a file."""
    output = RUNS_FOLDER / listed.name / "failed" / f"{job.key}.txt"
    output.unlink(missing_ok=True)
    if not isinstance(result, RematError):
        table.put(job.case, result, job.wall_s, job.load)
        return []
    where = ""
    if isinstance(result, Unfinished):
        if result.rows:
            table.put(job.case, result.rows, job.wall_s, job.load, is_whole=False)
        if result.output:
            write_text(output, result.output)
            where = f"; its output: {output}"
    return [f"{listed.name}, {job.label}: {result}{where}"]


class Unfinished(RematError):
    """A case that was not measured to its end.

    Attributes:
        rows: those that it yielded before.
        output: of its process with the traceback, if it crashed.
    """

    def __init__(self, message: str, rows: Sequence[Row] = (), output: str = ""):
        super().__init__(message)
        self.rows, self.output = rows, output


@dataclass(slots=True, eq=False)
class CaseJob:
    """A case for the engine; its result is its rows, or the error for which it has none.

    Attributes:
        load: of the machine in the minute before the case began: processes that run or wait to.
    """

    file: Path
    case: Case
    wall_s: float = 0.0
    load: float | None = None
    _process: subprocess.Popen[str] | None = None

    @property
    def key(self) -> str:
        return key_of(self.case)

    @property
    def label(self) -> str:
        return self.case.label

    def run(self) -> list[dict[str, Any]] | RematError:
        return self._timed(self.measured)

    def run_here(self, solves: Solves) -> list[dict[str, Any]] | RematError:
        """Measure a case that sends its solves to the engine."""
        assert not isinstance(self.case.measure, str)
        measure, rows = self.case.measure, list[dict[str, Any]]()

        def measured() -> list[dict[str, Any]]:
            try:
                for row in measure(solves, **self.case.what):
                    rows.append(dict(row))  # one by one: those before an error are kept
            except RematError as error:
                raise Unfinished(str(error), rows) from error
            except Exception as error:  # a case that crashes costs its own rows only, as one in its own process
                raise Unfinished(f"it crashed: {type(error).__name__}: {error}", rows, format_exc()) from error
            return rows

        return self._timed(measured)

    def _timed(self, measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]] | RematError:
        began, self.load = time.monotonic(), round(os.getloadavg()[0], 2)
        try:
            return measure()
        except RematError as error:
            return error
        finally:
            self.wall_s = time.monotonic() - began

    def measured(self) -> list[dict[str, Any]]:
        """The rows of a case, measured in a process of its own.

        Raises:
            Unfinished: it cannot be measured, or its process ended otherwise; one line.
        """
        with tempfile.TemporaryDirectory(prefix="remat-case-") as folder:
            asked, made = Path(folder, "case.json"), Path(folder, "rows.json")
            module, _, function = self.case.function.rpartition(".")
            where = {"file": str(self.file), "module": module, "function": function}
            write_json(asked, where | {"what": dict(self.case.what)})
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "experiments.worker", str(asked), str(made)],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", env=env,
            )  # fmt: skip
            try:
                _, errors = self._process.communicate()
            finally:
                self.stop()
            code, rows = self._process.returncode, read_json(made) if made.exists() else []
        if code == 0:
            return rows
        last = (errors.strip().splitlines() or ["no message"])[-1]
        if code == REFUSED:
            raise Unfinished(last, rows)
        raise Unfinished(f"its process ended with {code}: {last}", rows, errors)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()

    def failed(self, message: str) -> RematError:
        return RematError(message)

    def sent(self) -> "CaseJob":
        return CaseJob(self.file, self.case)

    def run_on(self, node: str, cpu: str) -> list[dict[str, Any]] | RematError:
        result = self.run()
        where = {"node": node, "cpu": cpu, "case_s": round(self.wall_s, 3), "load": self.load}
        if isinstance(result, Unfinished):
            result.rows = [dict(row) | where for row in result.rows]
        return result if isinstance(result, RematError) else [row | where for row in result]


def _draw(name: str, experiment: Experiment, keeps: bool, console: Console) -> None:
    drawing = drawing_of(name, experiment)
    if keeps and experiment.page is not None:
        write_drawing(name, DOCS / experiment.page, drawing)
        say_written(console, [DOCS / experiment.page])
        return
    path = RUNS_FOLDER / name / f"{name}.md"
    write_text(path, drawing.text + "\n")
    console.print(drawing.text, markup=False, soft_wrap=True)
    written = [*write_tables(drawing, path.parent), *write_figures(drawing, path.parent)]
    say_written(console, [path, *written, *drawing.files])


def drawing_of(name: str, experiment: Experiment) -> Drawing:
    """The drawing of an experiment's stored rows.

    Raises:
        InvalidInput: there are none.
    """
    from analysis.charts import style_context  # late: it imports matplotlib

    rows = Table(name).rows() if experiment.measures else []
    if experiment.measures and not rows:
        raise InvalidInput(f"no rows of {name}; run it without draw=true: python run.py experiment={name}")
    assert experiment.draw is not None
    with style_context():
        return experiment.draw(rows)
