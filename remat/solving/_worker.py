"""``remat.solving._worker JOB RESULT EVENTS``: the other side of `remat.solving.worker`."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from remat.files import write_text
from remat.frontends.json import graph_from_dict
from remat.incumbent import Found, Incumbent
from remat.plan import Plan, parse_scope
from remat.problem import Problem, SolveOptions
from remat.registry import get_strategy
from remat.solving.dispatch import new_context
from remat.solving.here import run_family, solve_here
from remat.solving.worker import family_to_row, solution_to_row

WATCH_S = 1.0


def main(job_path: str, result_path: str, events_path: str) -> None:
    """Read the job, solve, write the rows in one step; report plans and bounds as they are found."""
    job = json.loads(Path(job_path).read_text())
    graph = graph_from_dict(job["graph"])
    events = Events(events_path)
    events.watch()
    problem = Problem(graph, **job["problem"] | {"scope": parse_scope(job["problem"]["scope"])})
    warm_start = Plan.from_document(job["warm_start"], graph, "warm_start") if job["warm_start"] else None
    options = SolveOptions(**job["options_of_solve"], warm_start=warm_start)
    context = new_context(problem, options).until(time.monotonic() + max(0.01, job["ends_at"] - time.time()))
    if job["family"]:
        rows = [family_to_row(run_family(context, job["strategy"], job["options"]))]
    else:
        incumbent = Incumbent(graph, problem.budget_bytes, problem.scope, record=events.found)
        get_strategy(job["strategy"])  # its imports belong to the start of the process
        began = time.time()
        solution = solve_here(context.about(problem, incumbent), job["strategy"], job["options"])
        held = peak_memory_bytes() + solution.stats.get("member_peak_memory_bytes", 0)
        stats = {**solution.stats, "solver_began": began, "solver_peak_memory_bytes": held}
        rows = [solution_to_row(replace(solution, stats=stats))]
    write_text(result_path, json.dumps(rows, default=float))


class Events:
    """Appends lines of JSON to a file, each in one write, so that a reader sees whole lines."""

    def __init__(self, path: str):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(self, event: dict[str, Any]) -> None:
        """Append one line; it outlives this process."""
        os.write(self._file, json.dumps(event).encode() + b"\n")

    def found(self, found: Found) -> None:
        """A plan, as the order of its computations, or a bound."""
        progress = found.progress
        event: dict[str, Any] = {"at": time.time(), "who": progress.who}
        if found.plan is not None:
            event |= {"cost": progress.cost, "order": found.plan.order.tolist(), "ways": found.plan.choices}
        else:
            event["bound"] = progress.bound
        self.tell(event)

    def watch(self) -> None:
        """Tell now and then how much memory was needed: a solver that runs out of it leaves its last peak behind."""

        def run() -> None:
            reported = 0
            while True:
                peak = peak_memory_bytes()
                if peak > reported:
                    self.tell({"peak_memory_bytes": peak})
                    reported = peak
                time.sleep(WATCH_S)

        threading.Thread(target=run, daemon=True).start()


def peak_memory_bytes() -> int:
    """Largest resident set of this process so far.

    Where the kernel tells it apart: a fresh process's ``ru_maxrss`` is that of the parent it was started from.
    """
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if found:
            return 1024 * int(found[1])
    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked in the workers of Ray, and inherited
    main(*sys.argv[1:])
