"""Sweeps among faults: whatever a solver, the disk or another run does, the sweep goes on and the rows say why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import install_package
from sweep_helpers import MIRROR

import remat
from experiments.store import Store

ROOT = Path(__file__).parents[1]
PLUGIN = '''
import ctypes, os, signal, time
from remat.registry import strategy

@strategy("breaks_memory")
def breaks_memory(problem):
    """Segmentation fault."""
    ctypes.string_at(0)

@strategy("breaks_as_family", ignores_budget=True)
def breaks_as_family(problem):
    """Segmentation fault before any budget is known."""
    ctypes.string_at(0)

@strategy("is_killed")
def is_killed(problem):
    """What the system does to a process when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)

@strategy("never_ends")
def never_ends(problem):
    """Ignores its time limit, and that it is asked to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)
'''
# How each ends, and words of the reason.
ENDS = {
    "breaks_memory": ("FAILED", "SIGSEGV"),
    "breaks_as_family": ("FAILED", "SIGSEGV"),
    "is_killed": ("FAILED", "memory runs out"),
    "never_ends": ("TIMEOUT", "did not stop by itself; killed after"),
    "checkpoint_all": ("OPTIMAL", ""),
}


def rows_of(store: Path) -> list[dict]:
    return [row for path in sorted((store / "rows").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def run_command(here: Path, *arguments: str, paths: tuple[Path, ...] = ()) -> subprocess.Popen[str]:
    remat.save_graph(MIRROR, here / "mirror.json")
    path = os.pathsep.join(map(str, [*paths, ROOT]))
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), "graph=mirror.json", *arguments], cwd=here, text=True,
        env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_solvers_that_crash_and_hang_cost_their_rows(tmp_path: Path, engine: str) -> None:
    if engine == "ray":
        pytest.importorskip("ray", reason="ray is not installed: pip install 'remat[ray]'")
    plugin, here = tmp_path / "plugin", tmp_path / "here"
    plugin.mkdir()
    here.mkdir()
    install_package(plugin, PLUGIN)
    where = ["engine=ray", "engine.address=local"] if engine == "ray" else ["engine.jobs=2"]
    run = run_command(here, "points=2", "time_limit=10", f"strategies=[{','.join(ENDS)}]", *where, paths=(plugin,))
    out, errors = run.communicate(timeout=300)
    assert run.returncode == 0, out + errors
    assert "Traceback" not in out + errors
    assert "6 of 10 solves failed or were cut short, the first of them breaks_as_family at" in out
    rows = rows_of(here / "runs/store")
    largest = max(row["budget_bytes"] for row in rows)
    assert len(rows) == 2 * len(ENDS)
    for row in rows:
        status, words = ENDS[row["strategy"]]
        if row["strategy"] != "checkpoint_all" or row["budget_bytes"] == largest:
            assert row["status"] == status, row
            assert words in row["message"], row


@pytest.mark.slow
def test_two_runs_of_one_store_at_once(tmp_path: Path) -> None:
    """The same question twice, at the same time: each row once, whole, and with its own plan."""
    asked = ["points=4", "strategies=[checkpoint_all,chen_sqrtn,checkmate_milp]", "engine.jobs=2"]
    runs = [run_command(tmp_path, *asked) for _ in range(2)]
    for run in runs:
        out, errors = run.communicate(timeout=300)
        assert run.returncode == 0, out + errors
        assert "warning" not in out
    store = Store(tmp_path / "runs/store")
    keys = [path.stem for path in (store.folder / "rows").iterdir()]
    found = [store.read_row(key) for key in keys]
    assert all(found)
    solved = [row for row in found if row is not None and row.plan_from is None]
    budgets = {row.budget_bytes for row in solved}
    assert len(budgets) >= 3
    assert len({(row.strategy, row.budget_bytes) for row in solved}) == len(solved) == 3 * len(budgets)
    for row in solved:
        if row.plan_file is not None:
            trace = remat.simulate(MIRROR, store.read_plan(row, MIRROR))
            assert (trace.cost, trace.peak_bytes) == (row.cost, row.peak_bytes)
    assert not list(tmp_path.rglob("*.part"))
