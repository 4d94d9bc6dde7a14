"""The engines by name; and the Ray engine: each job is a Ray task, which starts the same process as the local engine.

The process handles a crash or an ignored time limit on the node, so that the engine handles only the loss of a node.
Only the driver writes rows, so that a task that runs twice still gives one row.
"""

from __future__ import annotations

import copy
import os
import platform
import socket
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from experiments.arguments import import_optional, one_of
from experiments.engine import ENGINES, WAKE_S, Engine, LocalEngine, Task
from experiments.provenance import cpu_name, versions
from experiments.store import source_hash
from remat.cost.profile import cpu_count
from remat.errors import InvalidInput, RematError, shortened
from remat.solving.worker import GRACE_S

RETRIES = 3  # of a task whose node died


class RayEngine:
    """Tasks on a Ray cluster, `threads` CPUs each; entering the engine connects, leaving it disconnects.

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

    def __enter__(self) -> RayEngine:
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
    return LocalEngine(jobs or max(1, _cores() // threads))  # slurm too: inside the SLURM job, solves are local


def _cores() -> int:
    """Cores that this process may use: a SLURM job may use only some of its node's."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isdigit():
        return int(given)
    return cpu_count()


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


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at ``host:port``, because Ray itself would try for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _summary(error: BaseException) -> str:
    """One line of Ray's long messages: the last line of a traceback, the first sentence of any other."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return shortened(lines[-1] if "Traceback" in str(error) else lines[0].partition(". ")[0], 300)
