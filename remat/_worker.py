"""``python -m remat._worker JOB RESULT``: the other side of `remat.worker`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from remat.frontends.json import graph_from_dict
from remat.plan import Plan
from remat.solve import solve_sweep
from remat.worker import solution_to_row


def main(job_path: str, result_path: str) -> None:
    """Read the job, solve, write the rows in one step."""
    job = json.loads(Path(job_path).read_text())
    graph = graph_from_dict(job["graph"])
    warm_start = Plan.load(job["warm_start"], graph) if job["warm_start"] else None
    solutions = solve_sweep(
        graph,
        job["budgets"],
        job["strategy"],
        scope=job["scope"],
        time_limit_s=max(0.01, job["ends_at"] - time.time()),
        seed=job["seed"],
        threads=job["threads"],
        accounting=job["accounting"],
        work_limit=job["work_limit"],
        deterministic=job["deterministic"],
        warm_start=warm_start,
        isolate=False,
        **job["options"],
    )
    scratch = Path(f"{result_path}.part")
    scratch.write_text(json.dumps([solution_to_row(solution) for solution in solutions], default=float))
    os.replace(scratch, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
