"""A small graph, rows and whole sweeps of it, for the tests of the harness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import remat
from experiments.budget_sweep import run_sweep
from experiments.build import Subject
from experiments.engine import LocalEngine
from experiments.progress import SolveProgress, make_console
from experiments.settings import Settings
from experiments.solving import GraphRun
from experiments.store import Row, Store
from remat.cost.gpu import load_gpu

# 4 forward nodes of 1 byte and their gradients: the gradient of node i reads node i and the gradient before.
N = 4
DEPS = [[i - 1] if i else [] for i in range(N)] + [[N - 1 - i] + ([N + i - 1] if i else []) for i in range(N)]
MIRROR = remat.Graph.from_nodes("mirror", DEPS, [1] * 2 * N, [1] * 2 * N, cost_unit="unit",
                               backward=[i >= N for i in range(2 * N)])  # fmt: skip


def make_row(key: str = "k", **changes: object) -> Row:
    row = Row(
        key=key, experiment="budget_sweep", model="chain", framework=None, granularity=None, batch_size=None,
        dtype=None, graph_name="chain", graph_sha256="0" * 64, gpu="v100", gpu_memory_bytes=16_000_000_000,
        cost_model="file", cost_source="file", cost_unit="ns", strategy="chen_sqrtn", parameters='{"k": 2}',
        options="{}", budget_bytes=2**53 + 1,
        status="FEASIBLE", cost=11, bound=10, gap=1 / 11, overhead=0.1, peak_bytes=2**53 - 1, plan_file=None,
        plan_from=None, message="ünïcode", ended="", cut_by_clock=None, contradicted=False, proof_from=None,
        proven_by=None, certified_bound=None, peak_bound_bytes=None, wall_s=0.25, time_limit_s=60.0, seed=0,
        threads=1, scope="staged", accounting="exact", cost_cap=None, stats="{}", total_cost=10,
        store_all_peak_bytes=7, fixed_bytes=0, n_operations=3, n_edges=2,
        git_commit=None, git_dirty=None, versions="{}", cpu="a cpu", solver_build="", finished_at="2026-01-01T00:00:00",
    )  # fmt: skip
    return replace(row, **changes)


def at(budget: int, cost: int | None, bound: int | None, status: str = "FEASIBLE") -> Row:
    gap = (cost - bound) / cost if cost is not None and bound is not None else None
    plan = f"plans/{budget}.json" if cost is not None else None
    peak = budget - 1 if cost is not None else None
    overhead = None if cost is None else cost / 100 - 1
    return make_row(str(budget), budget_bytes=budget, cost=cost, bound=bound, gap=gap, status=status, plan_file=plan,
                    peak_bytes=peak, total_cost=100, message="", overhead=overhead)  # fmt: skip


def settings(**changes: object) -> Settings:
    base = Settings(
        spec=None, graph_file=None, cost="file", gpu=load_gpu("v100"), device=None, budget_bytes=None, points=3,
        strategies=("checkpoint_all", "chen_sqrtn", "checkmate_milp"),
        options={name: {} for name in ("checkpoint_all", "chen_sqrtn", "checkmate_milp")}, scope="staged",
        accounting="exact", time_limit_s=60.0, work_limit=None, seed=0, threads=1, deterministic=False, jobs=2,
        logger="none", wandb_mode="offline", wandb_project="remat",
    )  # fmt: skip
    return replace(base, **changes)


@contextmanager
def graph_run_of(
    folder: Path, engine: LocalEngine, graph: remat.Graph = MIRROR, **changes: object
) -> Iterator[GraphRun]:  # fmt: skip
    """The solves of a graph, whose rows are kept in a folder."""
    peak = remat.family(graph, "checkpoint_all")[0].peak_bytes
    with SolveProgress(make_console()) as progress, engine:
        yield GraphRun(Subject(graph), settings(**changes), "test", Store(folder), engine, progress, peak)


def sweep(folder: Path, **changes: object) -> tuple[list[Row], list[str], GraphRun]:
    with graph_run_of(folder, LocalEngine(2), **changes) as graph_run:
        return *run_sweep(graph_run), graph_run
