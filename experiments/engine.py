"""The engine: takes independent jobs, solves or cases of an experiment, and returns each one when it finishes.

A job runs in a process of its own, so that a solve that crashes or ignores its limit costs one row. With the Ray
engine each job is a Ray task, which starts the same process on a node, so that the engine handles only the loss of a
node. Only the driver writes rows, so that a task that runs twice still gives one row.
"""

import copy
import os
import platform
import socket
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import baselines
import remat
from experiments.arguments import import_optional, one_of
from experiments.provenance import versions
from experiments.settings import ENGINES
from remat.cost.profile import cpu_count, cpu_name
from remat.errors import InvalidInput, InvalidPlan, RematError, shortened
from remat.files import digest_of_source
from remat.frontends.spec import ModelSpec
from remat.plan import Plan
from remat.problem import Problem, SolveOptions
from remat.registry import get_strategy
from remat.solution import Family, Solution, Status
from remat.solving.dispatch import new_context
from remat.solving.judgement import name_minimum, without_plan
from remat.solving.worker import GRACE_S, Known, interrupt_workers, run_family_isolated, solve_isolated, stop_workers

RETRIES = 3  # of a task whose node died, on a Ray cluster
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

    def sent(self) -> "Task":
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
            return name_minimum(solution, self.problem, context.deadline, takes_start=False)
        except RematError as error:
            return self.failed(str(error), contradicted=isinstance(error, InvalidPlan))

    def stop(self) -> None:
        stop_workers()

    def failed(self, message: str, *, contradicted: bool = False) -> Family | Solution:
        if get_strategy(self.strategy).ignores_budget:
            return Family(self.strategy, status=Status.FAILED, message=message)
        return without_plan(self.problem, self.strategy, Status.FAILED, message, contradicted=contradicted)

    def sent(self) -> "Job":
        start = self.warm_start() if self.warm_start is not None else None
        known = self.known() if self.known is not None else None
        how = replace(self.how, warm_start=start, progress=None)  # functions cannot be sent
        return replace(self, how=how, warm_start=None, known=None if known is None else lambda: known)

    def run_on(self, node: str, cpu: str) -> Family | Solution:
        get_strategy(self.strategy)  # imports take seconds in a new process; do them before the solve's clock starts
        found = self.run()
        return found if isinstance(found, Family) else replace(found, stats={**found.stats, "node": node, "cpu": cpu})


class LocalEngine:
    """Threads of this process; each waits for one process.

    A context manager, which stops the running jobs when an exception leaves it.

    Attributes:
        at_once: number of jobs that run at once.
    """

    def __init__(self, jobs: int):
        self.at_once = jobs
        self._pool = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="remat-engine")
        self._pending: dict[Future[Any], Task] = {}

    def submit(self, job: Task) -> None:
        """Queue a job; jobs start in the order submitted, as room allows."""
        self._pending[self._pool.submit(job.run)] = job

    def results(self) -> Iterator[tuple[Any, Any] | None]:
        """Jobs in the order in which they finish, until none is left; None from time to time while waiting."""
        while self._pending:
            done, _ = wait(self._pending, timeout=WAKE_S, return_when=FIRST_COMPLETED)
            if not done:
                yield None
            for future in done:
                yield self._pending.pop(future), future.result()

    def running(self) -> list[Task]:
        """The running jobs."""
        return [job for future, job in self._pending.items() if future.running()]

    def interrupt(self) -> list[tuple[Any, Any]]:
        """Drop the waiting jobs and end the running ones; (job, its result) for those that end within seconds."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        interrupt_workers()
        waited = {future: job for future, job in self._pending.items() if not future.cancelled()}
        done, _ = wait(waited, timeout=GRACE_S + 2 * WAKE_S)
        self._pending.clear()
        return [(waited[future], future.result()) for future in done]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if error is not None:
            for job in self._pending.values():
                job.stop()
        self._pool.shutdown(wait=True)


class RayEngine:
    """As `LocalEngine`, with tasks on a Ray cluster, `threads` CPUs each; entering connects, leaving disconnects.

    Args:
        jobs: solves at once; None for as many as the nodes have CPUs for.
        address: ``host:port``, ``auto`` (a cluster must run), ``local`` (a new one for this run), or None for
            RAY_ADDRESS, else the cluster of this machine, else a new one. Other machines cannot reach a new one.

    Raises:
        MissingPackage: Ray is not installed.
    """

    def __init__(self, jobs: int | None, threads: int, address: str | None = None):
        self._ray = import_optional("ray", "engine=ray needs Ray")
        self._jobs, self._threads, self._address = jobs, threads, address
        self._waiting: deque[Task] = deque()
        self._sent: dict[Any, Task] = {}
        self._losses: Counter[str] = Counter()  # [key] number of nodes that died while they ran the job

    @property
    def at_once(self) -> int:
        """Computed from the cluster's nodes each time, because nodes come and go."""
        if self._jobs is not None:
            return self._jobs
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        return max(1, sum(int(node["Resources"].get("CPU", 0)) // self._threads for node in nodes))

    def submit(self, job: Task) -> None:
        self._waiting.append(job)

    def results(self) -> Iterator[tuple[Any, Any] | None]:
        while self._waiting or self._sent:
            self._send()
            done, _ = self._ray.wait(list(self._sent), timeout=WAKE_S)
            if not done:
                yield None
            for task in done:
                job = self._sent.pop(task)
                result = self._result(job, task)
                if result is not None:
                    yield job, result

    def running(self) -> list[Task]:
        return list(self._sent.values())

    def interrupt(self) -> list[tuple[Any, Any]]:
        self._waiting.clear()
        for task in self._sent:
            self._ray.cancel(task)  # raises KeyboardInterrupt in the task; the solver then returns its best plan
        done: list[Any] = []
        if self._sent:
            done, _ = self._ray.wait(list(self._sent), num_returns=len(self._sent), timeout=2 * GRACE_S)
        ended = []
        for task in done:
            job = self._sent.pop(task)
            try:
                ended.append((job, copy.deepcopy(self._ray.get(task))))
            except self._ray.exceptions.RayError:  # cancelled before it had a result
                continue
        return ended

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that we start sends no usage statistics
        named = self._address or os.environ.get("RAY_ADDRESS", "")
        try:
            _knock(named)
            self._connect(named)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = named or "a cluster on this machine"
            raise RematError(f"engine=ray: cannot connect to {where}: {_summary(error)}") from None
        largest = max((node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]), default=0)
        if self._jobs is None and largest < self._threads:  # with engine.jobs=N, larger nodes may still be added
            self._ray.shutdown()
            raise InvalidInput(
                f"threads={self._threads}: the largest node of the Ray cluster has {largest:g} CPUs, so that nothing "
                "would ever start; if nodes are added on demand, say how many solves at once: engine.jobs=N"
            )
        # When a node dies, we warn in one line; Ray would print forty. Checked with Ray 2.60.0.
        self._printing = getattr(self._ray._private.worker, "print_to_stdstream", None)
        self._ray._private.worker.print_to_stdstream = lambda *_, **__: None
        run = self._ray.remote(run_job)
        self._run = run.options(num_cpus=self._threads, max_retries=0, name="remat")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for task in self._sent:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()
        self._ray._private.worker.print_to_stdstream = self._printing

    def _connect(self, named: str) -> None:
        """Connect to the cluster that is named or runs here; else start one that listens on this machine alone."""
        how = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
        if named != "local":
            try:
                self._ray.init(address=self._address or "auto", **how)
                return
            except ConnectionError:
                if named:
                    raise
        # Ray's switch for systems whose firewalls ask: everything that it starts listens on 127.0.0.1. Without it Ray
        # replaces a loopback address by the machine's, and listens on all interfaces. Checked with Ray 2.60.0.
        constants = self._ray._private.ray_constants
        before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
        try:
            self._ray.init(address="local", **how)
        finally:
            constants.ENABLE_RAY_CLUSTER = before

    def _send(self) -> None:
        """Hand jobs to Ray in order, as many as it can run now.

        Ray could queue all of them. But a job's warm start is looked up when the job is sent, and the longer it
        waits, the more budgets have finished.
        """
        room = self.at_once - len(self._sent) if self._waiting else 0
        while self._waiting and room > 0:
            job = self._waiting.popleft()
            self._sent[self._run.remote(job.sent(), source_hash(), versions())] = job
            room -= 1

    def _result(self, job: Task, task: Any) -> Any:
        """The result of a task; None if it was lost with its node and is queued again.

        Ray's own retries are off, because Ray repeats forever a task that it killed for lack of memory.
        """
        errors = self._ray.exceptions
        try:
            # A copy, because Ray frees the arrays of the original after the run.
            return copy.deepcopy(self._ray.get(task))
        except (errors.RayTaskError, errors.OutOfMemoryError) as error:
            return job.failed(f"the Ray task failed: {_summary(error)}")
        except errors.RayError as error:
            self._losses[job.key] += 1
            if self._losses[job.key] > RETRIES:
                lost = self._losses[job.key]
                return job.failed(f"{lost} nodes were lost while they ran it; the last: {_summary(error)}")
            warnings.warn(f"{job.label}: lost with its node; solving it again ({_summary(error)})", stacklevel=2)
            self._waiting.appendleft(job)
            return None


Engine: TypeAlias = LocalEngine | RayEngine


def make_engine(name: str, jobs: int | None, threads: int = 1, address: str | None = None) -> Engine:
    """The engine of that name.

    Args:
        jobs: solves at once; None for as many as there are cores for.
        threads: of each solve.
        address: of a Ray cluster; see `RayEngine`.

    Raises:
        MissingPackage: Ray is not installed.
        UnknownName: there is no such engine.
    """
    if name == "ray":
        return RayEngine(jobs, threads, address)
    one_of("engine", name, ENGINES)
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")  # a SLURM job, in which solves are local, may use only these
    cores = int(given) if given.isdigit() else cpu_count()
    return LocalEngine(jobs or max(1, cores // threads))


def run_job(job: Task, code: str, installed: dict[str, str]) -> Any:
    """Run a job on a node of the cluster; fails if the node's packages differ from the driver's."""
    if source_hash() != code:
        return job.failed(f"node {platform.node()} has another version of remat; install the same on every node")
    here = versions()
    other = sorted(name for name in installed.keys() | here.keys() if installed.get(name) != here.get(name))
    if other:
        what = f"{other[0]} {here.get(other[0], '(none)')}, not {installed.get(other[0], '(none)')}"
        return job.failed(f"node {platform.node()} has {what}; install the same on every node")
    return job.run_on(platform.node(), cpu_name())


@cache
def source_hash() -> str:
    """Hash of the source of library and baselines; equal hashes mean that two nodes run the same code."""
    return "-".join(digest_of_source(Path(package.__path__[0]))[:16] for package in (remat, baselines))


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at ``host:port``, because Ray itself would try for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _summary(error: BaseException) -> str:
    """One line of Ray's long messages: the last line of a traceback, the first sentence of any other."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return shortened(lines[-1] if "Traceback" in str(error) else lines[0].partition(". ")[0], 300)
