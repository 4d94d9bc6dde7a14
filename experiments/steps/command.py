"""The command line that all tables of executed steps share: measure or read rows, print the table."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from experiments.arguments import Parser, argument, count, fractions, names, names_of, one_name, output_file, seconds
from experiments.settings import COSTS, RUNS_FOLDER
from experiments.steps.job import WIDEST_FIRST, Job
from experiments.steps.launch import measured
from experiments.steps.row import StepRow, read_rows, write_rows
from experiments.steps.table import cells
from experiments.steps.torch_sizes import devices_here, for_a_cpu, torch_model, torch_names
from remat.cost.profile import DEVICES
from remat.errors import InvalidInput, RematError

Rows = Sequence[StepRow]


@dataclass(frozen=True, slots=True)
class TableCommand:
    """A table of models and budgets, and how its rows are measured.

    Attributes:
        name: of the module that runs it, ``python -m experiments.<name>``.
        models: names of the models that it measures by default; in Keras it knows no others.
        columns: of the table, see `experiments.steps.table.COLUMNS`.
        text: makes the printed text from all rows.
        usual: the job of any model, with the default values of the options.
        devices: those that it measures on by default.
    """

    name: str
    description: str
    models: Callable[[], Iterable[str]]
    columns: Sequence[str]
    text: Callable[[Rows], str]
    usual: Job
    devices: Callable[[], Sequence[str]] = lambda: ("cpu",)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure the rows that are not stored yet and print all; 1 if the process of a model failed."""
        options = self._parser().parse_args(arguments)
        if options.show:
            print(self.text(read_rows(options.show)))
            return 0
        devices = self.devices() if options.devices is None else options.devices
        wanted = list(itertools.product(devices, options.models or self.models()))
        rows = read_rows(options.out) if options.out and options.out.exists() else []
        console, failed = Console(stderr=True), False
        for device, name in wanted:
            folder = RUNS_FOLDER / f"{self.name}_{device}_{name}"
            try:
                found = measured(self._job(name, device, options), folder, console)
            except RematError as error:
                console.print(f"{name}: {error}", markup=False, soft_wrap=True)
                failed = True
                continue
            rows = [row for row in rows if (row.device, row.model) != (device, name)] + found
            for row in found:
                print(" | ".join(cells(row, self.columns)), file=sys.stderr, flush=True)
            if options.out:
                write_rows(options.out, rows)
        print(self.text(rows))
        return int(failed)

    def _parser(self) -> argparse.ArgumentParser:
        usual = self.usual
        in_torch = usual.subject == "torch"
        models, devices = (torch_names, devices_here) if in_torch else (self.models, _only_the_cpu)
        parser = Parser(prog=f"python -m experiments.{self.name}", description=self.description)
        parser.add_argument("--models", type=names("model", models), help="comma-separated (default: all)")
        parser.add_argument(
            "--budgets",
            type=fractions,
            default=usual.fractions,
            help="comma-separated fractions of the activation memory",
        )
        parser.add_argument(
            "--implementations", "--operators", type=names("implementations", lambda: WIDEST_FIRST if in_torch else
            ("default",)), default=usual.implementations, help="comma-separated; PyTorch's plans choose from these",
        )  # fmt: skip
        parser.add_argument("--devices", type=argument(devices), help="cpu, cuda, or both")
        parser.add_argument("--batch", type=count, default=usual.batch, help="batch size (default: each model's own)")
        parser.add_argument("--time-limit", type=seconds, default=usual.time_limit_s, help="seconds per plan")
        parser.add_argument("--cost", type=one_name("cost", lambda: COSTS), default=usual.cost)
        parser.add_argument("--rounds", type=count, default=usual.rounds, help="timed steps of each method")
        parser.add_argument("--threads", type=count, default=usual.threads)
        parser.add_argument("--out", type=output_file, help="JSON file for the rows; it keeps its rows of other models")
        parser.add_argument("--show", type=Path, help="measure nothing, print the rows that --out wrote")
        return parser

    def _job(self, name: str, device: str, options: argparse.Namespace) -> Job:
        job = replace(
            self.usual, model=name, device=device, batch=options.batch, cost=options.cost, rounds=options.rounds,
            time_limit_s=options.time_limit, threads=options.threads,
            implementations=options.implementations, fractions=options.budgets,
        )  # fmt: skip
        if job.subject != "torch":
            return job
        spec = torch_model(name) if device == "cuda" else for_a_cpu(torch_model(name))
        spec = spec if job.batch is None else replace(spec, batch_size=job.batch)
        return replace(job, spec=asdict(spec), batch=spec.batch_size)


def _only_the_cpu(given: str) -> list[str]:
    devices = names_of("device", given, DEVICES)
    if devices != ["cpu"]:
        raise InvalidInput("Keras models are measured on the CPU only; leave --devices out")
    return devices
