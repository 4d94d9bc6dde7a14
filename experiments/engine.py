"""The engine: takes independent jobs, solves or cases of an experiment, and returns each one when it finishes.

A job runs in a process of its own, so that a solve that crashes or ignores its limit costs one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from remat.errors import InvalidPlan, RematError
from remat.frontends.spec import ModelSpec
from remat.plan import Plan
from remat.problem import Problem, SolveOptions
from remat.registry import get_strategy
from remat.solution import Family, Solution, Status
from remat.solving.dispatch import new_context
from remat.solving.judgement import name_minimum, without_plan
from remat.solving.worker import GRACE_S, Known, interrupt_workers, run_family_isolated, solve_isolated, stop_workers

ENGINES = ("local", "ray", "slurm")
WAKE_S = 0.25  # how often a waiting engine lets Ctrl-C and the progress display through


class Task(Protocol):
    """What an engine runs."""

    @property
    def key(self) -> str: ...

    @property
    def label(self) -> str:
        """Text for people."""
        ...

    def run(self) -> Any:
        """The result, which says why if there is none; raises no `RematError`."""
        ...

    def stop(self) -> None:
        """End what runs."""
        ...

    def failed(self, message: str) -> Any:
        """The result if it could not run."""
        ...

    def sent(self) -> Task:
        """The same for another machine."""
        ...

    def run_on(self, node: str, cpu: str) -> Any:
        """`run` on another machine; the result names it."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One solve: `strategy` on `problem`; its clock starts with it.

    Attributes:
        label: e.g. ``checkmate_milp at 8.00 GB``.
        how: the time limit and the other options of every solve.
        options: of the strategy.
        warm_start: called when the job starts, for a plan to start from; None for none.
        known: called while the job runs, for proofs of other strategies about its problem; None for none.
        spec: of the PyTorch network behind the graph, for a strategy with `prepare`; None for none.
    """

    key: str
    label: str
    problem: Problem
    strategy: str
    how: SolveOptions
    options: Mapping[str, Any] = field(default_factory=dict)
    warm_start: Callable[[], Plan | None] | None = None
    known: Callable[[], Known | None] | None = None
    spec: ModelSpec | None = None

    def run(self) -> Family | Solution:
        """Solve in a worker process; a family if the strategy ignores the budget."""
        context = new_context(self.problem, self.how)
        if self.warm_start is not None:
            context = context.with_options(warm_start=self.warm_start())
        try:
            if get_strategy(self.strategy).ignores_budget:
                return run_family_isolated(context, self.strategy, self.options, self.spec)
            solution = solve_isolated(context, self.strategy, self.options, known=self.known or (lambda: None))
            return name_minimum(solution, self.problem, context.deadline)
        except RematError as error:
            return self.failed(str(error), contradicted=isinstance(error, InvalidPlan))

    def stop(self) -> None:
        stop_workers()

    def failed(self, message: str, *, contradicted: bool = False) -> Family | Solution:
        if get_strategy(self.strategy).ignores_budget:
            return Family(self.strategy, status=Status.FAILED, message=message)
        return without_plan(self.problem, self.strategy, Status.FAILED, message, contradicted=contradicted)

    def sent(self) -> Job:
        start = self.warm_start() if self.warm_start is not None else None
        known = self.known() if self.known is not None else None
        how = replace(self.how, warm_start=start, progress=None)  # functions cannot be sent
        return replace(self, how=how, warm_start=None, known=None if known is None else lambda: known)

    def run_on(self, node: str, cpu: str) -> Family | Solution:
        get_strategy(self.strategy)  # imports take seconds in a new process; do them before the solve's clock starts
        result = self.run()
        return (
            result if isinstance(result, Family) else replace(result, stats={**result.stats, "node": node, "cpu": cpu})
        )


class Engine(Protocol):
    """Runs jobs; a context manager that stops the running jobs when an exception leaves it."""

    @property
    def at_once(self) -> int:
        """Number of jobs that run at once."""
        ...

    def submit(self, job: Task) -> None:
        """Queue a job; jobs start in the order submitted, as room allows."""
        ...

    def results(self) -> Iterator[tuple[Any, Any] | None]:
        """Jobs in the order in which they finish, until none is left; None from time to time while waiting."""
        ...

    def running(self) -> list[Task]:
        """The running jobs."""
        ...

    def interrupt(self) -> list[tuple[Any, Any]]:
        """Drop the waiting jobs and end the running ones; (job, its result) for those that end within seconds."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...


class LocalEngine:
    """Threads of this process; each waits for one process."""

    def __init__(self, jobs: int):
        self.at_once = jobs
        self._pool = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="remat-engine")
        self._pending: dict[Future[Any], Task] = {}

    def submit(self, job: Task) -> None:
        self._pending[self._pool.submit(job.run)] = job

    def results(self) -> Iterator[tuple[Any, Any] | None]:
        while self._pending:
            done, _ = wait(self._pending, timeout=WAKE_S, return_when=FIRST_COMPLETED)
            if not done:
                yield None
            for future in done:
                yield self._pending.pop(future), future.result()

    def running(self) -> list[Task]:
        return [job for future, job in self._pending.items() if future.running()]

    def interrupt(self) -> list[tuple[Any, Any]]:
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
            for job in self._pending.values():
                job.stop()
        self._pool.shutdown(wait=True)
