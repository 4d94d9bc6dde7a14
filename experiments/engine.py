"""The engine: independent jobs in, finished jobs out as they complete.

A job is a solve in a process of its own (`remat.worker`), so that one that crashes or ignores its
limit costs one row, whichever engine runs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from remat.errors import InvalidPlan, RematError, unknown_name
from remat.plan import Plan
from remat.registry import get_strategy
from remat.solve import Family, Problem, Solution, Status, name_minimum
from remat.worker import GRACE_S, Known, interrupt_workers, run_family_isolated, solve_isolated, stop_workers

ENGINES = ("local", "ray", "slurm")
WAKE_S = 0.25  # how often a waiting engine lets Ctrl-C and the progress display through


@dataclass(frozen=True, slots=True)
class Job:
    """One solve: `strategy` on `problem`, whose deadline is set when it starts.

    Attributes:
        label: for people, e.g. ``checkmate_milp at 8.00 GB``.
        options: of the strategy.
        warm_start: asked for a plan to begin from when the job starts; None for none.
        known: asked, while it runs, for what other strategies have proven of its problem; None for nothing.
    """

    key: str
    label: str
    problem: Problem
    strategy: str
    time_limit_s: float
    options: Mapping[str, Any] = field(default_factory=dict)
    warm_start: Callable[[], Plan | None] | None = None
    known: Callable[[], Known | None] | None = None

    def run(self) -> Family | Solution:
        """Solve in a worker process; a family if the strategy ignores the budget. Never raises `RematError`."""
        problem = replace(self.problem, deadline=time.monotonic() + self.time_limit_s, time_limit_s=self.time_limit_s)
        if self.warm_start is not None:
            problem = replace(problem, warm_start=self.warm_start())
        try:
            if get_strategy(self.strategy).ignores_budget:
                return run_family_isolated(problem, self.strategy, self.options)
            known = self.known or (lambda: None)
            return name_minimum(solve_isolated(problem, self.strategy, self.options, known=known), problem)
        except RematError as error:
            return failed(self, str(error), contradicted=isinstance(error, InvalidPlan))


def failed(job: Job, message: str, *, contradicted: bool = False) -> Family | Solution:
    """The result of a job that could not be done, for a row that says why."""
    if get_strategy(job.strategy).ignores_budget:
        return Family(job.strategy, status=Status.FAILED, message=message)
    problem = job.problem
    return Solution(
        Status.FAILED, job.strategy, problem.graph.name, problem.budget_bytes, problem.scope,
        problem.accounting, message=message, stats={"contradicted": contradicted},
    )  # fmt: skip


class Engine(Protocol):
    """Runs jobs; used as a context manager, which stops what still runs when left by an exception."""

    @property
    def at_once(self) -> int:
        """How many jobs it runs at once."""
        ...

    def submit(self, job: Job) -> None:
        """Queue a job; it starts when there is room, in the order submitted."""
        ...

    def results(self) -> Iterator[tuple[Job, Family | Solution] | None]:
        """Finished jobs in the order they finish, until none is left; None now and then while waiting."""
        ...

    def running(self) -> list[Job]:
        """The jobs that run now."""
        ...

    def interrupt(self) -> list[tuple[Job, Family | Solution]]:
        """Drop what waits and end what runs; (job, what it has found) of those that end in a moment."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...


class LocalEngine:
    """Threads of this process, each waiting for one worker process."""

    def __init__(self, jobs: int):
        self.at_once = jobs
        self._pool = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="remat-engine")
        self._pending: dict[Future[Family | Solution], Job] = {}

    def submit(self, job: Job) -> None:
        self._pending[self._pool.submit(job.run)] = job

    def results(self) -> Iterator[tuple[Job, Family | Solution] | None]:
        while self._pending:
            done, _ = wait(self._pending, timeout=WAKE_S, return_when=FIRST_COMPLETED)
            if not done:
                yield None
            for future in done:
                yield self._pending.pop(future), future.result()

    def running(self) -> list[Job]:
        return [job for future, job in self._pending.items() if future.running()]

    def interrupt(self) -> list[tuple[Job, Family | Solution]]:
        self._pool.shutdown(wait=False, cancel_futures=True)
        interrupt_workers()
        waited = {future: job for future, job in self._pending.items() if not future.cancelled()}
        done, _ = wait(waited, timeout=GRACE_S + 2 * WAKE_S)
        self._pending.clear()
        return [(waited[future], future.result()) for future in done]

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if error is not None:
            stop_workers()
        self._pool.shutdown(wait=True)


def make_engine(name: str, jobs: int | None, threads: int = 1, address: str | None = None) -> Engine:
    """The engine of that name.

    Args:
        jobs: solves at once; None for as many as there are cores for.
        threads: of each solve.
        address: of a Ray cluster; see `experiments.ray_engine`.

    Raises:
        MissingPackage: Ray is not installed.
        UnknownName: there is no such engine.
    """
    if name == "ray":
        from experiments.ray_engine import RayEngine  # imports this module

        return RayEngine(jobs, threads, address)
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    return LocalEngine(jobs or max(1, _cores() // threads))  # slurm: the run is a SLURM job, its solves are local


def _cores() -> int:
    """Cores that this process may use: a SLURM job has some of its node."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isdigit():
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
