"""The Ray engine: the rows of the local one, also when a node is killed; Ctrl-C keeps what was found."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT, hide_package, processes_in, refused, start_run_py, wait_for
from sweep_helpers import settings

import remat
from experiments import engine as engines
from experiments.build import Subject
from experiments.engine import Engine, Job, LocalEngine, make_engine
from experiments.progress import SolveProgress, make_console
from experiments.solving import GraphRun
from experiments.store import Row, Store
from remat.errors import InvalidInput, MissingPackage, RematError
from remat.frontends import synthetic
from remat.problem import Problem, SolveOptions

GRAPH = synthetic.layered(n=40)
PEAK = remat.simulate(GRAPH, remat.Plan.from_order(GRAPH, range(40))).peak_bytes
BUDGETS = [PEAK * percent // 100 for percent in (80, 84, 88, 92)]
MOVES = 200_000  # some seconds of the search


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_package(monkeypatch, "ray")
    with pytest.raises(MissingPackage, match=r"pip install 'remat\[ray\]'"):
        make_engine("ray", None)


ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'remat[ray]'")


@pytest.fixture
def nodes(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A cluster of two nodes with a CPU each, and the one of them that may be killed."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield cluster, cluster.add_node(num_cpus=1)
    finally:
        cluster.shutdown()
        wait_for(lambda: not processes_in(here))


class Ticks(SolveProgress):
    """Kills a node in mid-solve: one solve has ended, and two have been running for a moment."""

    def __init__(self, kill: Any = None):
        super().__init__(make_console())
        self.kill, self.done, self.seen, self.running_since = kill, 0, [""], 0.0

    def finished(self, line: str) -> None:
        super().finished(line)
        self.done += 1

    def tick(self, running: Any) -> None:
        super().tick(running)
        if running != self.seen:
            self.seen, self.running_since = running, time.monotonic()
        long = time.monotonic() - self.running_since > 0.7
        if self.kill is not None and self.done >= 2 and len(running) == 2 and long:
            self.kill()
            self.kill = None


def sweep(folder: Path, engine: Engine, progress: SolveProgress) -> tuple[list[Row], GraphRun]:
    """Rows that repeat exactly: a limit of moves, and no solve begins from another's plan."""
    names = ("checkpoint_all", "search")
    chosen = settings(
        strategies=names, options={name: {} for name in names}, work_limit=MOVES, deterministic=True, time_limit_s=120.0
    )
    subject = Subject(GRAPH, None, None, None, None, "file", "file")
    with engine, progress:
        graph_run = GraphRun(subject, chosen, "test", Store(folder), engine, progress, PEAK)
        families = graph_run.run_families(names[:1])
        rows = graph_run.family_rows(families["checkpoint_all"], BUDGETS)
        rows += graph_run.run_budgets(names[1:], BUDGETS)["search"]
    return rows, graph_run


def told(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [(r.key, r.strategy, r.budget_bytes, r.status, r.cost, r.bound, r.peak_bytes, r.parameters) for r in rows]


@pytest.mark.usefixtures("warm_search")
@pytest.mark.slow
def test_a_node_killed_in_mid_sweep_loses_nothing_and_repeats_nothing(nodes: tuple[Any, Any], tmp_path: Path) -> None:
    cluster, second = nodes
    store = tmp_path / "store"
    with pytest.raises(InvalidInput, match="threads=2: the largest node of the Ray cluster has 1 CPUs"):
        make_engine("ray", None, 2, cluster.address).__enter__()
    progress = Ticks(lambda: cluster.remove_node(second, allow_graceful=False))
    with pytest.warns(UserWarning, match="search at .*: lost with its node; solving it again"):
        rows, graph_run = sweep(store, make_engine("ray", None, 1, cluster.address), progress)
    assert progress.kill is None  # it was killed
    assert graph_run.solved == 1 + len(BUDGETS)  # each came back once
    assert len(list((store / "rows").iterdir())) == len(rows) == 2 * len(BUDGETS)
    assert {row.status for row in rows if row.strategy == "search"} <= {"OPTIMAL", "FEASIBLE"}
    local, _ = sweep(tmp_path / "local", LocalEngine(2), Ticks())
    assert told(rows) == told(local)
    again, graph_run = sweep(store, LocalEngine(1), Ticks())
    assert graph_run.solved == 0  # the local engine goes on with the same store
    assert told(again) == told(rows)


@pytest.mark.usefixtures("warm_search")
@pytest.mark.slow
def test_ctrl_c_keeps_what_the_nodes_have_found_and_leaves_no_process(tmp_path: Path) -> None:
    run = start_run_py(tmp_path, "model=layered", "model.options.n=60", "points=2", "time_limit=100",
                       "strategies=[checkpoint_all,search]", "engine=ray", "engine.address=local")  # fmt: skip
    wait_for(lambda: len(list(tmp_path.glob("runs/store/rows/*"))) >= 2, patience_s=60)
    wait_for(lambda: any("remat.solving._worker" in command for command in processes_in(tmp_path)), patience_s=60)
    time.sleep(6)  # into the first solves that depend on the budget
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert errors.strip().startswith("stopped; finished results are kept")
    assert errors.strip().count("\n") == 0
    rows = [Store(tmp_path / "runs/store").read_row(path.stem) for path in (tmp_path / "runs/store/rows").iterdir()]
    cut = [row for row in rows if row is not None and row.ended == "interrupted"]
    assert [row.strategy for row in cut] == ["search"] * len(cut)
    assert cut
    assert all(row.cost is not None for row in cut)
    wait_for(lambda: not processes_in(tmp_path))


@pytest.mark.parametrize("address", [None, "local"])
@pytest.mark.slow
def test_a_cluster_of_this_machine_cannot_be_reached_from_others(
    address: str | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCS, raylet and its agents, workers, driver: whoever reaches one of their ports can run code."""
    psutil = pytest.importorskip("psutil")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = []
    with make_engine("ray", 1, 1, address) as engine:
        engine.submit(Job("k", "k", Problem(GRAPH, PEAK), "checkpoint_all", SolveOptions(20.0)))
        (result,) = [found for found in engine.results() if found is not None]
        assert result[1].status is None
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                listens = [each.laddr.ip for each in process.net_connections("tcp") if each.status == "LISTEN"]
                found += [(ip, process.pid) for ip in listens]
    assert len({process for _, process in found}) >= 4
    assert [ip for ip, _ in found if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback] == []


def test_a_cluster_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with refused(r"engine=ray: cannot connect to 127\.0\.0\.1:9", RematError):
        make_engine("ray", None).__enter__()


def test_a_node_with_other_versions_is_refused() -> None:
    job = Job("k", "k", Problem(GRAPH, PEAK), "checkpoint_all", SolveOptions(20.0))
    code, versions = engines.source_hash(), engines.versions()
    assert "another version of remat" in engines.run_job(job, "other", versions).message
    assert "has numpy" in engines.run_job(job, code, versions | {"numpy": "1.0"}).message
    assert engines.run_job(job, code, versions).status is None


def test_what_is_lost_is_sent_again_three_times_and_what_ran_out_of_memory_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engines.RayEngine(1, 1)
    job = Job("k", "search at 1 GB", Problem(GRAPH, PEAK), "search", SolveOptions(20.0))

    def result_of(error: Exception) -> Any:
        def get(_: Any) -> None:
            raise error

        monkeypatch.setattr(engine, "_ray", SimpleNamespace(get=get, exceptions=ray.exceptions))
        return engine._result(job, None)

    killed = result_of(ray.exceptions.OutOfMemoryError("memory ran out"))
    assert "memory" in killed.message
    assert "\n" not in killed.message
    lost = ray.exceptions.NodeDiedError("the node died. And much more")
    for _ in range(engines.RETRIES):
        with pytest.warns(UserWarning, match="search at 1 GB: lost with its node"):
            assert result_of(lost) is None
        assert list(engine._waiting) == [job]
        engine._waiting.clear()
    assert "4 nodes were lost while they ran it" in (given_up := result_of(lost)).message
    assert (str(given_up.status), str(killed.status), list(engine._waiting)) == ("FAILED", "FAILED", [])
