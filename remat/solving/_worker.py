"""``remat.solving._worker JOB RESULT EVENTS``: the worker process of `remat.solving.worker`."""

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

from remat.context import incumbent_of
from remat.files import write_text
from remat.frontends.json import graph_from_dict
from remat.frontends.spec import ModelSpec
from remat.incumbent import Found
from remat.link import Link
from remat.plan import Plan, parse_scope
from remat.problem import Problem, SolveOptions
from remat.registry import get_strategy, import_alone
from remat.solution import Member
from remat.solving.dispatch import new_context
from remat.solving.here import run_family, solve_here
from remat.solving.worker import family_to_row, member_to_row, solution_to_row

WATCH_S = 1.0


def main(job_path: str, result_path: str, events_path: str) -> None:
    """Read the job, solve it, write the result atomically; report plans and bounds as they are found."""
    job = json.loads(Path(job_path).read_text())
    graph = graph_from_dict(job["graph"])
    events = Events(events_path)
    events.watch()
    asked = job["problem"]
    link = None if asked["link"] is None else Link.from_document(asked["link"])
    problem = Problem(graph, **asked | {"scope": parse_scope(asked["scope"]), "link": link})
    warm_start = Plan.from_document(job["warm_start"], graph, "warm_start") if job["warm_start"] else None
    options = SolveOptions(**job["options_of_solve"], warm_start=warm_start)
    if "module" in job:
        import_alone(job["strategy"], job["module"])
    prepare = get_strategy(job["strategy"]).prepare  # imports the strategies, as part of the start of the process
    _kept = prepare(ModelSpec.from_json(job["spec"]), graph) if prepare is not None and job["spec"] else None
    began = time.time()
    events.append({"began": began})
    left_s = job["limit_s"] if job["ends_at"] is None else job["ends_at"] - began
    context = new_context(problem, options).until(time.monotonic() + max(0.01, left_s))
    if job["family"]:
        row = family_to_row(run_family(context, job["strategy"], job["options"], events.member))
    else:
        incumbent = incumbent_of(problem, record=events.found)
        solution = solve_here(context.about(problem, incumbent), job["strategy"], job["options"])
        solution = replace(solution, solver_memory_bytes=peak_memory_bytes() + solution.solver_memory_bytes)
        row = {"solution": solution_to_row(solution), "began": began}
    write_text(result_path, json.dumps(row, default=float))


class Events:
    """Append lines of JSON to a file, each in one write, so that a reader sees whole lines."""

    def __init__(self, path: str):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def append(self, event: dict[str, Any]) -> None:
        """Append one line; it outlives this process."""
        os.write(self._file, json.dumps(event).encode() + b"\n")

    def found(self, found: Found) -> None:
        """Report a plan, as the order of its computations or with copies as its steps, or a bound."""
        progress = found.progress
        event: dict[str, Any] = {"at": time.time(), "who": progress.who}
        if found.plan is not None:
            event["cost"] = progress.cost
            if found.plan.has_copies:
                event["steps"] = found.plan.steps
            else:
                event |= {"order": found.plan.order.tolist(), "implementations": found.plan.choices}
        else:
            event |= {"bound": found.bound, "by": found.proven_by}
        self.append(event)

    def member(self, member: Member) -> None:
        """Report a plan of a family."""
        self.append({"member": member_to_row(member)})

    def watch(self) -> None:
        """Report the peak memory now, and again whenever it has grown, so that it is known even if the solver dies."""
        first = peak_memory_bytes()
        self.append({"peak_memory_bytes": first})

        def run() -> None:
            reported = first
            while True:
                time.sleep(WATCH_S)
                peak = peak_memory_bytes()
                if peak > reported:
                    self.append({"peak_memory_bytes": peak})
                    reported = peak

        threading.Thread(target=run, daemon=True).start()


def peak_memory_bytes() -> int:
    """Largest resident set of this process so far.

    From the kernel's VmHWM, if there is one, because a new process inherits the ``ru_maxrss`` of its parent.
    """
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if found:
            return 1024 * int(found[1])
    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's workers block it, and children inherit that
    main(*sys.argv[1:])
