"""``python -m remat._worker JOB RESULT``: the other side of `remat.worker`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from remat.frontends.json import graph_from_dict
from remat.plan import Plan
from remat.solve import Problem, parse_scope, run_family, solve_sweep
from remat.worker import family_to_row, solution_to_row


def main(job_path: str, result_path: str) -> None:
    """Read the job, solve, write the rows in one step."""
    job = json.loads(Path(job_path).read_text())
    graph = graph_from_dict(job["graph"])
    warm_start = Plan.load(job["warm_start"], graph) if job["warm_start"] else None
    _die_with_parent()
    deadline_s = max(0.01, job["ends_at"] - time.time())
    if job["family"]:
        problem = Problem(
            graph, job["budgets"][0], parse_scope(job["scope"]), job["accounting"], time.monotonic() + deadline_s,
            job["seed"], job["threads"], job["work_limit"], job["deterministic"], warm_start,
        )  # fmt: skip
        rows = [family_to_row(run_family(problem, job["strategy"], job["options"]))]
    else:
        solutions = solve_sweep(
            graph,
            job["budgets"],
            job["strategy"],
            scope=job["scope"],
            time_limit_s=deadline_s,
            seed=job["seed"],
            threads=job["threads"],
            accounting=job["accounting"],
            work_limit=job["work_limit"],
            deterministic=job["deterministic"],
            warm_start=warm_start,
            isolate=False,
            **job["options"],
        )
        rows = [solution_to_row(solution) for solution in solutions]
    scratch = Path(f"{result_path}.part")
    scratch.write_text(json.dumps(rows, default=float))
    os.replace(scratch, result_path)


def _die_with_parent() -> None:
    """End this process when its parent is gone, so that a killed run leaves no solver behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
