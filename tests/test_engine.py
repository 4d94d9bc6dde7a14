"""The local engine and SLURM: results as they complete, jobs use the cores they have."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from helpers import ROOT, run_py

import remat
from experiments import cli
from experiments.config import register
from experiments.engine import Job, LocalEngine, make_engine
from experiments.solving import finished
from remat.errors import RematError
from remat.frontends import synthetic
from remat.problem import Problem, SolveOptions
from remat.simulator import plain_peak
from remat.solution import Ending, Family, Status
from remat.solvers.search import fixed_moves
from remat.solving.dispatch import new_context


def test_results_come_as_they_finish_of_as_many_jobs_at_once_as_asked_for() -> None:
    others_are_done, running, most, problem = threading.Event(), [], [], Problem(synthetic.chain(n=4), 10**9)

    @dataclass(frozen=True, slots=True)
    class Ordered(Job):
        def run(self) -> Family:
            running.append(self.key)
            most.append(len(running))
            assert self.key != "slow" or others_are_done.wait(20)
            time.sleep(0.05)  # a third job would show itself
            running.remove(self.key)
            return Family(self.strategy)

    found = []
    with LocalEngine(2) as engine:
        for name in ("slow", "fast", "next"):
            engine.submit(Ordered(name, name, problem, name, SolveOptions(1.0)))
        for item in engine.results():
            found += [item[0].key] if item else []
            if len(found) == 2:
                others_are_done.set()
    assert found == ["fast", "next", "slow"]
    assert max(most) == 2


def test_a_deterministic_job_makes_the_moves_of_its_time_limit_or_says_that_the_clock_cut_it_short() -> None:
    graph = synthetic.layered(n=40)
    problem, how = Problem(graph, int(0.8 * plain_peak(graph))), SolveOptions(10.0, threads=1, deterministic=True)
    expected = fixed_moves(new_context(problem, how))
    solution = Job("s", "s", problem, "search", how).run()
    assert expected <= solution.stats["moves"] < 2 * expected
    assert not solution.cut_by_clock
    assert Job("s", "s", problem, "search", SolveOptions(1.5, threads=1, work_limit=10**12)).run().cut_by_clock


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
