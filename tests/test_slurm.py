"""engine=slurm: what is said before anything is submitted, and runs through the launcher where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import cli
from experiments.config import register
from experiments.engine import LocalEngine, make_engine

ROOT = Path(__file__).parents[1]


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
def test_runs_are_jobs_and_one_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit", reason="pip install hydra-submitit-launcher")
    monkeypatch.chdir(tmp_path)
    register()
    assert cli.check(["engine=slurm", "hydra/launcher=submitit_local", "model=chain"], multirun=True)
    asked = ["-m", "model=chain", "model.options.n=4,5", "strategies=[checkpoint_all]", "engine=slurm",
             "hydra/launcher=submitit_local"]  # fmt: skip
    for budget, code in (("sweep", 0), ("3", 1)):
        done = subprocess.run(
            [sys.executable, str(ROOT / "run.py"), *asked, f"budget={budget}", "points=2"], cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert ("a run failed; its output is under runs/.submitit" in done.stderr) == bool(code)
        assert "Traceback" not in done.stderr
    assert len(list(tmp_path.glob("runs/*/run.json"))) == 2
