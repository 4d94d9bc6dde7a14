"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# TensorFlow uses oneDNN by itself only where the CPU has AVX-512. Without it, convolutions need other workspaces, and
# grouped ones have no gradient.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import ortools.sat.python.cp_model  # noqa: F401  before TensorFlow, or interval_cp needs a process for each solve
import pytest
from browser import started

import remat
from remat import registry
from remat.search import __main__ as search_main

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

if find_spec("torch") is None:
    collect_ignore_glob = ["test_torch_*"]

# What follows "test_" in the names of files that `make test` leaves to `make test-all`, but for tests marked `short`.
LONG = (
    "torch_", "tf_", "keras_", "tensorflow_", "cost", "device_results", "fuzz.",  # steps
    "dtr_log", "import_monet", "interval_cp", "joint", "lp_rounding", "monet_",
    "portfolio", "rivals", "search_blocks", "time_limits", "windows", "zoo",  # solves
    "analysis", "awkward_names", "benchmark", "leaderboard", "max_batch_size", "paper", "queries",
    "tables",  # results and their pages
    "healing", "ray_engine", "sharing", "strangers_file", "wheel",  # disturbed runs
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as long. Options of pytest, as ``-m``, choose among them afterwards."""
    for item in items:
        if item.path.name.removeprefix("test_").startswith(LONG) and item.get_closest_marker("short") is None:
            item.add_marker("long")


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of later garbage collections: a measured peak begins with one."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, which is the current one, as where a command line of `run.py` begins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    return tmp_path


@pytest.fixture(scope="session")
def warm_search() -> None:
    """The compiled search is loaded, which takes more than the time that short solves have."""
    search_main.main()


@pytest.fixture(scope="module")
def torch_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements of PyTorch's operations are shared by the tests of a session, in whatever process they run.

    Workspaces are measured in the test's process, because another one takes seconds to start. `test_cost` has tests of
    that process, and `test_torch_loops` one that both measure the same.
    """
    from remat.cost import profile
    from remat.torch.measuring.carried import measured_here

    in_a_child = profile._measure

    def measure(missing: dict[str, str], job: dict[str, Any], *rest: Any) -> dict[str, str]:
        if job["quantity"] != "workspace":
            return in_a_child(missing, job, *rest)
        here = partial(measured_here, device="cpu")
        return profile._measure_here(
            missing, here, "workspace_bytes", Path(job["folder"]), job["suffix"], job["provenance"]
        )

    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # of one worker; of all sessions
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_CACHE", str(shared / "torch_cache"))
        patch.setattr(profile, "_measure", measure)
        yield


@pytest.fixture(scope="module")
def tf_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements of TensorFlow's steps are shared by the tests of a process: each session measures what it claims."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_CACHE", str(tmp_path_factory.getbasetemp() / "tf_cache"))
        yield


@pytest.fixture
def kernels_not_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of TensorFlow are taken to need no memory, except in tests marked `needs_compiler`: measuring is slow."""
    if request.node.get_closest_marker("skipif") is None:
        from remat.tf import _plan
        from remat.tf._workspace import Footprint

        monkeypatch.setattr(_plan, "measure_footprint", lambda step: Footprint(step.graph, step.planned, ()))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers a strategy, named "scripted", that does what it is told; gone after the test."""
    remat.strategies()  # the others are found first, or they would be gone after the test too
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    return lambda run, **flags: remat.strategy("scripted", **flags)(run)


@pytest.fixture
def torch_seed() -> None:
    """PyTorch's random numbers are the same in every run."""
    pytest.importorskip("torch").manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels of attention have workspaces for each thread, which a followed step leaves out."""
    pytest.importorskip("torch")
    from torch_helpers import threads

    with threads(1):
        yield


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless browser; without one, its tests are skipped."""
    yield from started(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="session")
def instances() -> Path:
    """Folder of published graphs; not part of the project, so tests that need it may be skipped."""
    folder = Path(os.environ.get("REMAT_INSTANCES", Path(__file__).parents[2] / "shared" / "instances"))
    if not folder.is_dir():
        pytest.skip("published instances are absent: set REMAT_INSTANCES to their folder")
    return folder
