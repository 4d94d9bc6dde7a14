"""``experiment=leaderboard``: ranks every strategy over every stored problem; missing rows can be solved first.

The problems come from the store: each graph at each budget of any row. Nothing is solved unless ``strategies=`` names
strategies; these run on every problem for which the store lacks their row with this code, time limit, seed and options.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from analysis.leaderboard import FILE, draw_leaderboard
from analysis.leaderboard_page import EMPTY, read_leaderboard, tables
from analysis.scales import show_count
from experiments.build import Subject
from experiments.engines import make_engine
from experiments.progress import SolveProgress, duration, say_written
from experiments.row import Row
from experiments.settings import RUNS_FOLDER, STORE_FOLDER, Settings
from experiments.solving import GraphRun
from experiments.store import Store, write_json
from remat.cost.gpu import Gpu, gpu_names, load_gpu
from remat.errors import InvalidInput
from remat.registry import get_strategy


def run_leaderboard(cfg: DictConfig, settings: Settings, console: Console, folder: Path) -> int:
    """Solve the missing rows of the named strategies, rank and draw; returns the exit code 0."""
    store = Store(STORE_FOLDER)
    if not any((STORE_FOLDER / "rows").glob("*.parquet")):
        raise InvalidInput(f"{STORE_FOLDER} {EMPTY}")
    if cfg.strategies != "default":
        run_missing(store, settings, console)
    folder = RUNS_FOLDER / f"leaderboard_{folder.name.rpartition('_')[2]}"  # the hash of the configuration
    write_json(folder / FILE, {"experiment": "leaderboard", "store": os.path.relpath(STORE_FOLDER, folder)})
    with console.status("drawing ..."):
        drawn = draw_leaderboard(folder)
    for part in tables(read_leaderboard(STORE_FOLDER)):
        console.print(part, soft_wrap=True)
    say_written(console, drawn)
    return 0


def run_missing(store: Store, settings: Settings, console: Console) -> None:
    """Solve the stored problems of the settings' scope and accounting with the settings' strategies."""
    problems = stored_problems(store, settings)
    if not problems:
        raise InvalidInput(
            f"{store.folder} holds no problem of {settings.scope} scope and {settings.accounting} accounting"
        )
    n_budgets = sum(len(budgets) for _, budgets in problems)
    dependent = [name for name in settings.strategies if not get_strategy(name).ignores_budget]
    n_solves = (len(settings.strategies) - len(dependent)) * len(problems) + len(dependent) * n_budgets
    engine = make_engine(settings.engine, settings.jobs, settings.threads, settings.address)
    solved = reused = 0
    with engine, SolveProgress(console, engine.at_once) as progress:
        console.print(
            f"{', '.join(settings.strategies)}: {show_count(n_solves, 'solve')} for "
            f"{show_count(n_budgets, 'problem')} on {show_count(len(problems), 'graph')}, "
            f"at most {duration(n_solves * settings.time_limit_s / engine.at_once)} minus the stored ones",
            markup=False,
            soft_wrap=True,
        )
        for row, budgets in problems:
            graph = store.read_graph(row.graph_sha256)
            subject = Subject(graph, row.model, row.framework, row.granularity, row.batch_size, row.cost_model,
                              row.cost_source)  # fmt: skip
            mine = replace(settings, gpu=_gpu(row, settings.gpu), spec=None)  # a network is not stored
            graph_run = GraphRun(subject, mine, "leaderboard", store, engine, progress, row.store_all_peak_bytes)
            for family in graph_run.run_families(settings.strategies).values():
                graph_run.family_rows(family, budgets)
            graph_run.run_budgets(dependent, budgets)
            solved, reused = solved + graph_run.solved, reused + graph_run.reused
    console.print(f"{solved} solved now, {reused} taken from the store", markup=False)


def stored_problems(store: Store, settings: Settings) -> list[tuple[Row, list[int]]]:
    """(latest row of a graph, budgets of all its rows, ascending), in the scope and accounting of the settings."""
    latest: dict[str, Row] = {}
    budgets: dict[str, set[int]] = {}
    for path in sorted((store.folder / "rows").glob("*.parquet")):
        row = store.read_row(path.stem)
        if row is None or (row.scope, row.accounting) != (settings.scope, settings.accounting):
            continue
        if row.cost_cap is not None:
            continue  # its solve ended once the cost cap was decided, so that it has no result to rank
        sha = row.graph_sha256
        budgets.setdefault(sha, set()).add(row.budget_bytes)
        if sha not in latest or (row.finished_at, row.key) > (latest[sha].finished_at, latest[sha].key):
            latest[sha] = row
    for sha in list(latest):
        try:
            store.read_graph(sha)
        except InvalidInput as error:
            warnings.warn(f"{error}; its problems are left out until a run of that graph writes it again", stacklevel=2)
            del latest[sha]
    ordered = sorted(latest.values(), key=lambda row: (row.graph_name, row.graph_sha256))
    return [(row, sorted(budgets[row.graph_sha256])) for row in ordered]


def _gpu(row: Row, otherwise: Gpu) -> Gpu:
    """The device of the row's costs, because it is part of a row's key."""
    return load_gpu(row.gpu) if row.gpu in gpu_names() else replace(otherwise, name=row.gpu)
