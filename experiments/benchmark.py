"""``experiment=benchmark``: every strategy on every graph of a benchmark, each solve by itself.

No solve starts from the plan of another, or ends by its proof: rows compare what strategies do in equal time. The rows
of a graph are one file, ``results/benchmark/NAME/INSTANCE.parquet``, written after every solve. A row that is there is
not solved again, in any checkout, until `remat.solvers.VERSION` is raised.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

import remat
from experiments.arguments import names_of, one_of
from experiments.build import Subject, build_quietly
from experiments.config import BenchmarkConfig, InstanceConfig, group_options
from experiments.engine import Engine
from experiments.engines import make_engine
from experiments.progress import SolveProgress, say_written
from experiments.row import Row
from experiments.settings import RUNS_FOLDER, STORE_FOLDER, Settings, configured_model, find_graph
from experiments.solving import GraphRun, is_final, keeping_interrupted, row_line, run_jobs
from experiments.store import ROW_SCHEMA, Store
from remat.cost import load_gpu
from remat.cost.gpu import gpu_names
from remat.errors import InvalidInput
from remat.files import read_table, write_table
from remat.registry import get_strategy
from remat.simulator import plain_peak, simulate
from remat.solution import Solution
from remat.units import format_size

RESULTS = Path("results", "benchmark")
NOT_KEPT = ("stats", "plan_file", "versions", "experiment")  # of a row: long, or of this machine only
SCHEMA = pa.schema(
    [
        *(f for f in ROW_SCHEMA if f.name not in NOT_KEPT),
        pa.field("instance", pa.string()), pa.field("family", pa.string()), pa.field("share", pa.float64()),
        pa.field("start_s", pa.float64()), pa.field("trajectory", pa.string()), pa.field("memory", pa.string()),
    ]
)  # fmt: skip
ASKED = (  # a row takes the place of one of the same solve
    "graph_sha256", "scope", "accounting", "strategy", "options", "budget_bytes", "time_limit_s", "seed", "threads",
)  # fmt: skip
POINTS = 128  # of the line of memory over time


@dataclass(slots=True)
class Piece:
    """The finished rows of one instance, and their file.

    Attributes:
        rows: [what was asked] the newest row.
    """

    path: Path
    rows: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Piece:
        """The piece in a file, empty without one.

        Raises:
            InvalidInput: the file cannot be read or has other columns.
        """
        piece = cls(path)
        if path.is_file():
            table = read_table(path)
            if not table.schema.equals(SCHEMA):
                raise InvalidInput(f"{path}: has other columns than this version writes; remove it to solve it again")
            piece.rows = {_asked(row): row for row in table.to_pylist()}
        return piece

    def has(self, key: str, asked: tuple[Any, ...]) -> bool:
        return asked in self.rows and self.rows[asked]["key"] == key

    def keep(self, row: dict[str, Any]) -> None:
        """Add a row in place of an older one, and write the file."""
        self.rows[_asked(row)] = row
        rows = sorted(self.rows.values(), key=lambda row: (row["time_limit_s"], row["strategy"], row["budget_bytes"]))
        write_table(self.path, pa.Table.from_pylist(rows, schema=SCHEMA))


def _asked(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ASKED)


def run_benchmark(cfg: DictConfig, settings: Settings, console: Console, _folder: Path) -> int:
    """Solve what is missing and draw the leaderboard; returns the exit code 0."""
    from analysis.leaderboard import draw_benchmark  # imported late: pandas takes a second

    bench = cfg.benchmark
    _check(bench)
    names = list(bench.instances) if cfg.networks is None else names_of("instance", cfg.networks, bench.instances)
    folder = RESULTS / bench.name
    engine = make_engine(settings.engine, settings.jobs, settings.threads, settings.address)
    with engine, SolveProgress(console, engine.at_once) as progress:
        for i, name in enumerate(names, start=1):
            instance: InstanceConfig = bench.instances[name]
            try:
                with console.status(f"building {name} ..."):
                    subject, mine = _subject(instance, settings)
            except InvalidInput as error:
                console.print(f"left out: {name}: {error}", markup=False, soft_wrap=True)
                continue
            console.print(f"{i}/{len(names)}  {name}: {len(subject.graph)} operations, plain peak "
                          f"{format_size(plain_peak(subject.graph))}", markup=False)  # fmt: skip
            run = _InstanceRun(name, instance, subject, Piece.read(folder / f"{name}.parquet"), engine, progress)
            run.solve(mine, _budgets(bench, instance, subject), _limits(bench, instance, settings))
    with console.status("drawing ..."):
        drawn = draw_benchmark(folder, RUNS_FOLDER / f"benchmark_{bench.name}")
    say_written(console, drawn)
    return 0


def _check(bench: BenchmarkConfig) -> None:
    """Refuse a benchmark that would fail after the first solve.

    Raises:
        InvalidInput: names the instance and the value.
    """

    def check_shares(where: str, shares: Sequence[float]) -> None:
        if not shares or not all(0 < share <= 1 for share in shares):
            raise InvalidInput(f"{where}.shares must be numbers above 0 and at most 1, not {list(shares)}")

    if OmegaConf.is_missing(bench, "name") or not re.fullmatch(r"[\w-]+", bench.name):
        raise InvalidInput("benchmark.name must be a word; the folder of the rows has it")
    if not bench.long_time_limit > 0:
        raise InvalidInput(f"benchmark.long_time_limit must be positive, not {bench.long_time_limit:g}")
    check_shares("benchmark", bench.shares)
    for name, instance in bench.instances.items():
        where = f"benchmark.instances.{name}"
        if OmegaConf.is_missing(instance, "family"):
            raise InvalidInput(f"{where}.family is missing")
        if (instance.graph is None) == (instance.model is None):
            raise InvalidInput(f"{where} needs a graph or a model, and not both")
        if instance.model is not None:
            one_of("model", instance.model, group_options("model"))
        one_of("gpu", instance.gpu, gpu_names())
        if instance.shares is not None:
            check_shares(where, instance.shares)


def _subject(instance: InstanceConfig, settings: Settings) -> tuple[Subject, Settings]:
    """The graph of an instance, and the settings with which it is solved."""
    mine = replace(settings, spec=None, graph_file=None, gpu=load_gpu(instance.gpu), budget_bytes=None)
    if instance.graph is not None:
        mine = replace(mine, graph_file=find_graph(instance.graph, settings.instances), cost="file")
    else:
        spec = configured_model(str(instance.model))
        given = {"batch_size": instance.batch_size, "input_size": instance.input_size and tuple(instance.input_size)}
        options = {**spec.options, **dict(instance.options)}
        mine = replace(mine, spec=replace(spec, options=options, **{k: v for k, v in given.items() if v is not None}))
    subject, _ = build_quietly(mine)
    return subject, mine


def _budgets(bench: BenchmarkConfig, instance: InstanceConfig, subject: Subject) -> dict[int, float]:
    """[budget] its share of the way from what one operation needs to the plain peak."""
    graph = subject.graph
    least, most = max(graph.largest_working_set()[0], graph.final_bytes), plain_peak(subject.graph)
    return {least + int(share * (most - least)): share for share in sorted(instance.shares or bench.shares)}


def _limits(bench: BenchmarkConfig, instance: InstanceConfig, settings: Settings) -> list[float]:
    return [settings.time_limit_s, *([bench.long_time_limit] if instance.is_long else [])]


@dataclass(slots=True)
class _InstanceRun:
    """The solves of one instance."""

    name: str
    instance: InstanceConfig
    subject: Subject
    piece: Piece
    engine: Engine
    progress: SolveProgress

    def solve(self, settings: Settings, budgets: dict[int, float], limits: Sequence[float]) -> None:
        """Solve what the piece lacks. What ignores the budget has no use for the longer limits."""
        Store(STORE_FOLDER).write_graph(self.subject.graph)
        for limit in dict.fromkeys(limits):
            run = GraphRun(self.subject, replace(settings, time_limit_s=limit), "benchmark", Store(STORE_FOLDER),
                           self.engine, self.progress, plain_peak(self.subject.graph), serves=len(budgets))  # fmt: skip
            missing = [
                (name, budget) for budget in budgets for name in settings.strategies
                if not self.piece.has(run.key(name, budget), self._asked(run, name, budget))
                and not (limit != limits[0] and get_strategy(name).ignores_budget)
            ]  # fmt: skip
            self._run_families(run, missing, budgets)
            self._run_budgets(run, missing, budgets)

    def _asked(self, run: GraphRun, name: str, budget: int) -> tuple[Any, ...]:
        s = run.settings
        options = json.dumps(s.options.get(name, {}), sort_keys=True)
        graph = self.subject.graph.sha256()
        return graph, s.scope, s.accounting, name, options, budget, s.time_limit_s, s.seed, s.threads

    def _run_families(self, run: GraphRun, missing: Sequence[tuple[str, int]], budgets: dict[int, float]) -> None:
        names = [name for name in dict.fromkeys(name for name, _ in missing) if get_strategy(name).ignores_budget]
        for family in run.run_families(names).values():
            for row in run.family_rows(family, list(budgets)):
                if _is_kept(row):
                    self._keep(run, row, family.wall_s, budgets)

    def _run_budgets(self, run: GraphRun, missing: Sequence[tuple[str, int]], budgets: dict[int, float]) -> None:
        jobs = [
            run.job(name, budget, lambda: None) for name, budget in missing if not get_strategy(name).ignores_budget
        ]  # fmt: skip
        with keeping_interrupted(self.engine, lambda key: run):
            for job, solution in run_jobs(jobs, self.engine, self.progress):
                assert isinstance(solution, Solution)
                row = run.keep(job.key, solution)
                self.progress.finished(f"{self.name}, {job.label}: {row_line(row)}", solution.wall_s)
                if _is_kept(row):
                    self._keep(run, row, solution.wall_s, budgets)

    def _keep(self, run: GraphRun, row: Row, wall_s: float, budgets: dict[int, float]) -> None:
        stats, plan = json.loads(row.stats), run.plan_of(row)
        record = {name: value for name, value in asdict(row).items() if name not in NOT_KEPT}
        self.piece.keep(record | {
            "message": row.message[:200], "wall_s": wall_s, "instance": self.name,
            "family": self.instance.family, "share": budgets[row.budget_bytes], "start_s": stats.get("start_s"),
            "trajectory": json.dumps([step[:2] for step in stats.get("trajectory", [])]),
            "memory": None if plan is None else memory_line(run, plan),
        })  # fmt: skip


def _is_kept(row: Row) -> bool:
    """Whether another attempt would only repeat the row."""
    return is_final(row) or row.status == "SKIPPED"


def memory_line(run: GraphRun, plan: remat.Plan) -> str:
    """Base64 of [POINTS] bytes: the most memory in each part of a plan's time, in 255ths of the plain peak."""
    from analysis.memory import timeline

    line = timeline(run.subject.graph, simulate(run.subject.graph, plan))
    levels = bytes(round(255 * held / max(1, run.store_all_peak_bytes)) for held in line.highest(POINTS))
    return base64.b64encode(levels).decode()
