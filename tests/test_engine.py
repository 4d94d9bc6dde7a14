"""The local engine and SLURM: results as they complete, an interrupt stops everything, jobs use the cores they have."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from helpers import ROOT, run_py, wait_for

import remat
from experiments import cli
from experiments.config import register
from experiments.engine import Job, LocalEngine, make_engine
from experiments.solving import finished
from remat.errors import RematError
from remat.frontends import synthetic
from remat.problem import Problem, SolveOptions
from remat.simulator import plain_peak
from remat.solution import Ending, Family, Solution, Status
from remat.solvers.search import fixed_moves
from remat.solving import worker
from remat.solving.dispatch import new_context


@pytest.fixture
def problem() -> Problem:
    graph = remat.Graph.from_nodes("chain", [[], [0], [1], [2]], [1, 1, 1, 1], [1, 1, 1, 1])
    return Problem(graph, budget_bytes=100)


@dataclass(frozen=True, slots=True)
class Sleeper(Job):
    """A job that takes `time_limit_s` seconds and needs no process."""

    def run(self) -> Family:
        time.sleep(self.how.time_limit_s)
        return Family(self.strategy)


def test_results_come_as_they_finish(problem: Problem) -> None:
    others_are_done = threading.Event()

    @dataclass(frozen=True, slots=True)
    class Ordered(Job):
        def run(self) -> Family:
            assert self.key != "slow" or others_are_done.wait(20)
            return Family(self.strategy)

    found = []
    with LocalEngine(2) as engine:
        for name in ("slow", "fast", "next"):
            engine.submit(Ordered(name, name, problem, name, SolveOptions(1.0)))
        for item in engine.results():
            found += [item[0].key] if item else []
            if len(found) == 2:
                others_are_done.set()
    assert sorted(found[:2]) == ["fast", "next"]
    assert found[2:] == ["slow"]


def test_as_many_jobs_as_asked_for_run_at_once_and_no_more(problem: Problem) -> None:
    both, lock, running, most = threading.Barrier(2), threading.Lock(), [], []

    @dataclass(frozen=True, slots=True)
    class Paired(Job):
        def run(self) -> Family:
            with lock:
                running.append(self.key)
                most.append(len(running))
            both.wait(20)  # raises where no other job comes
            time.sleep(0.05)  # a third job would show itself
            with lock:
                running.remove(self.key)
            return Family(self.strategy)

    with LocalEngine(2) as engine:
        for name in "abcd":
            engine.submit(Paired(name, name, problem, name, SolveOptions(1.0)))
        assert len([item for item in engine.results() if item]) == 4
    assert max(most) == 2


def test_a_deterministic_job_makes_the_moves_of_its_time_limit_or_says_that_the_clock_cut_it_short() -> None:
    graph = synthetic.layered(n=40)
    problem, how = Problem(graph, int(0.8 * plain_peak(graph))), SolveOptions(20.0, threads=1, deterministic=True)
    expected = fixed_moves(new_context(problem, how))
    solution = Job("s", "s", problem, "search", how).run()
    assert expected <= solution.stats["moves"] < 2 * expected
    assert not solution.cut_by_clock
    assert Job("s", "s", problem, "search", SolveOptions(5.0, threads=1, work_limit=10**12)).run().cut_by_clock


def test_a_worker_that_dies_is_one_failed_result(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(command: list[str], *_: object, **_more: object) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-c", "import os; os.abort()"], capture_output=True)
        return done.returncode, "it went wrong"

    monkeypatch.setattr(worker, "_run", dying)
    for strategy, kind in (("checkpoint_all", Family), ("checkmate_milp", Solution)):
        result = Job("k", "k", problem, strategy, SolveOptions(5.0)).run()
        assert isinstance(result, kind)
        assert result.status is Status.FAILED
        assert "SIGABRT" in result.message
        assert "it went wrong" in result.message


def test_an_interrupt_drops_what_waits_and_kills_what_runs(problem: Problem) -> None:
    started = time.monotonic()
    ended: list[float] = []

    def long_worker() -> None:
        context = new_context(problem, SolveOptions(60.0))
        worker._run([sys.executable, "-c", "import time; time.sleep(60)"], 60.0, worker._Events(context, context))
        ended.append(time.monotonic())

    thread = threading.Thread(target=long_worker)
    thread.start()
    wait_for(lambda: worker._running)
    ran: list[str] = []

    @dataclass(frozen=True, slots=True)
    class Counted(Sleeper):
        def run(self) -> Family:
            ran.append(self.key)
            return Sleeper.run(self)

    def interrupted() -> None:
        with LocalEngine(1) as engine:
            for name in ("first", "second", "third"):
                engine.submit(Counted(name, name, problem, name, SolveOptions(0.3)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    thread.join(timeout=20)
    assert ended
    assert ended[0] - started < 20  # not the 60 s that it wanted
    assert "third" not in ran


def test_only_a_finished_solve_is_a_result_to_keep() -> None:
    graph = synthetic.chain(n=6)
    found = remat.solve(graph, "1GB", "checkpoint_all")
    assert finished(found) is found
    with pytest.raises(KeyboardInterrupt):
        finished(replace(found, ended=Ending.INTERRUPTED))
    for cut in (replace(found, ended=Ending.CRASHED), replace(found, status=Status.FAILED, message="out of memory")):
        with pytest.raises(RematError, match="repeat the command"):
            finished(cut)


def test_a_job_uses_the_cores_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    for threads, at_once in ((1, 6), (4, 1), (8, 1)):
        with make_engine("slurm", None, threads) as engine:
            assert isinstance(engine, LocalEngine)
            assert engine.at_once == at_once
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    with make_engine("local", None, 1) as engine:
        assert engine.at_once >= 1


@pytest.mark.slow
def test_runs_are_jobs_and_one_that_fails_is_told(here: Path) -> None:
    pytest.importorskip("submitit", reason="pip install hydra-submitit-launcher")
    register()
    assert cli.check(["engine=slurm", "hydra/launcher=submitit_local", "model=chain"], multirun=True)
    asked = ["-m", "model=chain", "model.options.n=4,5", "strategies=[checkpoint_all]", "engine=slurm",
             "hydra/launcher=submitit_local"]  # fmt: skip
    for budget, code in (("sweep", 0), ("3", 1)):
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = run_py(here, *asked, f"budget={budget}", "points=2", PYTHONPATH=path)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("a run failed; its output is under runs/.submitit" in done.stderr) == bool(code)
        assert "Traceback" not in done.stderr
    assert len(list(here.glob("runs/*/run.json"))) == 2
