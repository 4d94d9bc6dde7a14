"""The Ray engine: each solve is a Ray task, which starts the same worker process as the local engine does.

So a crash or an ignored time limit is met on the node, and only the loss of a node is left to mend. Tasks have
no effects: rows are written by the driver alone, so a task that runs twice still gives one row.
"""

from __future__ import annotations

import copy
import os
import platform
import socket
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

from experiments.engine import WAKE_S, Job, failed
from experiments.provenance import cpu_name, versions
from experiments.store import source_hash
from remat.errors import InvalidInput, MissingPackage, RematError
from remat.registry import get_strategy
from remat.solution import Family, Solution
from remat.solving.worker import GRACE_S

RETRIES = 3  # of a task whose node died


def import_ray() -> ModuleType:
    """The package, or `MissingPackage` with the command that installs it."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingPackage("engine=ray needs Ray: pip install ray (or pip install 'remat[ray]')") from None
    return ray


class RayEngine:
    """Tasks on a Ray cluster, `threads` CPUs each; entering it connects, leaving it disconnects.

    Args:
        jobs: solves at once; None for as many as the nodes have CPUs for.
        address: ``host:port``, ``auto`` (a cluster must be there) or None: what RAY_ADDRESS says, else the
            cluster of this machine, else one started for this run.

    Raises:
        MissingPackage: Ray is not installed.
    """

    def __init__(self, jobs: int | None, threads: int, address: str | None = None):
        self._ray = import_ray()
        self._jobs, self._threads, self._address = jobs, threads, address
        self._waiting: deque[Job] = deque()
        self._sent: dict[Any, Job] = {}
        self._losses: Counter[str] = Counter()  # [key] nodes that died under it

    @property
    def at_once(self) -> int:
        """Asked of the cluster each time: nodes come and go."""
        if self._jobs is not None:
            return self._jobs
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        return max(1, sum(int(node["Resources"].get("CPU", 0)) // self._threads for node in nodes))

    def submit(self, job: Job) -> None:
        self._waiting.append(job)

    def results(self) -> Iterator[tuple[Job, Family | Solution] | None]:
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

    def running(self) -> list[Job]:
        return list(self._sent.values())

    def interrupt(self) -> list[tuple[Job, Family | Solution]]:
        self._waiting.clear()
        for task in self._sent:
            self._ray.cancel(task)  # raises KeyboardInterrupt in it, at which the solver hands over what it has
        done: list[Any] = []
        if self._sent:
            done, _ = self._ray.wait(list(self._sent), num_returns=len(self._sent), timeout=2 * GRACE_S)
        ended = []
        for task in done:
            job = self._sent.pop(task)
            try:
                ended.append((job, copy.deepcopy(self._ray.get(task))))
            except self._ray.exceptions.RayError:  # cancelled before it had anything
                continue
        return ended

    def __enter__(self) -> RayEngine:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of our own tells nobody
        try:
            _knock(self._address or os.environ.get("RAY_ADDRESS", ""))
            self._ray.init(
                address=self._address, log_to_driver=False, logging_level="ERROR", include_dashboard=False,
            )  # fmt: skip
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = self._address or os.environ.get("RAY_ADDRESS") or "a cluster on this machine"
            raise RematError(f"engine=ray: cannot connect to {where}: {_summary(error)}") from None
        largest = max((node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]), default=0)
        if self._jobs is None and largest < self._threads:  # with a number, the cluster may grow to what is asked
            self._ray.shutdown()
            raise InvalidInput(
                f"threads={self._threads}: the largest node of the Ray cluster has {largest:g} CPUs, so that nothing "
                "would ever start; if nodes are added on demand, say how many solves at once: engine.jobs=N"
            )
        # When a node dies we write one line, instead of Ray's forty on standard output; checked with 2.60.0.
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

    def _send(self) -> None:
        """Hand tasks to Ray, in order, up to what it can run now.

        Not all of them at once, although Ray would queue them: a job's plan to begin from is looked up
        here, when it is sent, and comes from the budgets that have finished by then.
        """
        room = self.at_once - len(self._sent) if self._waiting else 0
        while self._waiting and room > 0:
            job = self._waiting.popleft()
            start = job.warm_start() if job.warm_start is not None else None
            known = job.known() if job.known is not None else None
            how = replace(job.how, warm_start=start, progress=None)  # functions stay here
            sent = replace(job, how=how, warm_start=None, known=None if known is None else lambda known=known: known)
            task = self._run.remote(sent, source_hash(), versions())
            self._sent[task] = job
            room -= 1

    def _result(self, job: Job, task: Any) -> Family | Solution | None:
        """What a task returned; None if it was lost with its node, and waits again.

        Ray's own retries are off: they have no end for a task that it killed because memory ran out.
        """
        errors = self._ray.exceptions
        try:
            # A copy: the arrays of the original lie in Ray's memory, which is gone after the run.
            return copy.deepcopy(self._ray.get(task))
        except (errors.RayTaskError, errors.OutOfMemoryError) as error:
            return failed(job, f"the Ray task failed: {_summary(error)}")
        except errors.RayError as error:
            self._losses[job.key] += 1
            if self._losses[job.key] > RETRIES:
                return failed(job, f"{self._losses[job.key]} nodes were lost under it; the last: {_summary(error)}")
            warnings.warn(f"{job.label}: lost with its node; solving it again ({_summary(error)})", stacklevel=2)
            self._waiting.appendleft(job)
            return None


def run_job(job: Job, code: str, installed: dict[str, str]) -> Family | Solution:
    """`Job.run`, on a node of the cluster; a failure if what is installed there would make other rows."""
    if source_hash() != code:
        return failed(job, f"node {platform.node()} has another version of remat; install the same on every node")
    here = versions()
    other = sorted(name for name in installed.keys() | here.keys() if installed.get(name) != here.get(name))
    if other:
        what = f"{other[0]} {here.get(other[0], '(none)')}, not {installed.get(other[0], '(none)')}"
        return failed(job, f"node {platform.node()} has {what}; install the same on every node")
    get_strategy(job.strategy)  # the imports of a fresh process, which take seconds, are not the solve's time
    result = job.run()
    if isinstance(result, Family):
        return result
    return replace(result, stats={**result.stats, "node": platform.node(), "cpu": cpu_name()})


def _knock(address: str) -> None:
    """Raise OSError if nobody listens at ``host:port``: Ray itself would try for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _summary(error: BaseException) -> str:
    """Ray's messages run over many lines: the last of a traceback, the first sentence of the others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (lines[-1] if "Traceback" in str(error) else lines[0].partition(". ")[0])[:300]
