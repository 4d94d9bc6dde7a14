"""The command line that the tables of executed steps share: measure, or read measured rows; print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from experiments.settings import RUNS_FOLDER
from experiments.steps.job import Job
from experiments.steps.launch import measured
from experiments.steps.row import StepRow, read_rows, write_rows
from experiments.steps.table import cells
from experiments.steps.torch_sizes import for_a_cpu, torch_model
from remat.errors import RematError

Rows = Sequence[StepRow]


@dataclass(frozen=True, slots=True)
class TableCommand:
    """A table of models and budgets, and how its rows are measured.

    Attributes:
        name: of the module that runs it, ``python -m experiments.<name>``.
        models: those measured by default.
        columns: of the table, see `experiments.steps.table.COLUMNS`.
        text: what is printed of all rows.
        usual: the job of any model, with the usual values of the options.
        devices: where it is measured by default.
    """

    name: str
    description: str
    models: Callable[[], Iterable[str]]
    columns: Sequence[str]
    text: Callable[[Rows], str]
    usual: Job
    devices: Callable[[], str] = lambda: "cpu"

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure what is not stored yet and print all; 1 if the process of a model failed."""
        given = self._parser().parse_args(arguments)
        if given.show:
            print(self.text(read_rows(given.show)))
            return 0
        models = list(self.models()) if given.models is None else [name for name in given.models.split(",") if name]
        wanted = [(device, name) for device in given.devices.split(",") for name in models]
        rows = read_rows(given.out) if given.out and given.out.exists() else []
        rows = [row for row in rows if (row.device, row.model) not in wanted]
        console, failed = Console(stderr=True), False
        for device, name in wanted:
            try:
                found = measured(self._job(name, device, given), RUNS_FOLDER / f"{self.name}_{device}_{name}", console)
            except RematError as error:
                console.print(f"{name}: {error}", markup=False, soft_wrap=True)
                failed = True
                continue
            rows += found
            for row in found:
                print(" | ".join(cells(row, self.columns)), file=sys.stderr, flush=True)
            if given.out:
                write_rows(given.out, rows)
        print(self.text(rows))
        return int(failed)

    def run(self) -> None:
        """`main` as a process."""
        try:
            sys.exit(self.main())
        except RematError as error:
            sys.exit(f"error: {error}")

    def _parser(self) -> argparse.ArgumentParser:
        usual = self.usual
        parser = argparse.ArgumentParser(prog=f"python -m experiments.{self.name}", description=self.description)
        parser.add_argument("--models", help="comma-separated, '' for none; all by default")
        parser.add_argument(
            "--budgets", default=",".join(map(str, usual.fractions)), help="fractions of the plain peak"
        )
        parser.add_argument("--implementations", "--operators", default=",".join(usual.implementations))
        parser.add_argument("--devices", default=self.devices(), help="cpu, cuda, or both")
        parser.add_argument("--batch", type=int, default=usual.batch, help="the usual one of each model by default")
        parser.add_argument("--time-limit", type=float, default=usual.time_limit_s, help="seconds per plan")
        parser.add_argument("--cost", default=usual.cost)
        parser.add_argument("--rounds", type=int, default=usual.rounds, help="timed steps of each")
        parser.add_argument("--threads", type=int, default=usual.threads)
        parser.add_argument("--out", type=Path, help="JSON file for the rows; those of other models that it has stay")
        parser.add_argument("--show", type=Path, help="measure nothing, take the rows that --out wrote")
        return parser

    def _job(self, name: str, device: str, given: argparse.Namespace) -> Job:
        changes = {
            "model": name, "device": device, "batch": given.batch, "cost": given.cost, "rounds": given.rounds,
            "time_limit_s": given.time_limit, "threads": given.threads,
            "implementations": given.implementations.split(","),
            "fractions": [float(fraction) for fraction in given.budgets.split(",")],
        }  # fmt: skip
        if self.usual.subject == "torch":
            spec = torch_model(name) if device == "cuda" else for_a_cpu(torch_model(name))
            spec = spec if given.batch is None else replace(spec, batch_size=given.batch)
            changes |= {"spec": asdict(spec), "batch": spec.batch_size}
        return replace(self.usual, **changes)
