"""``python -m remat.cost._profile_worker JOB``: measures signatures, one cache file each, as soon as it is done.

A job may ask for several passes over all operations: the speed of a machine drifts, and operations are compared with
each other. Until the last pass the file of an operation holds its samples only, with which a later process goes on.

Prints ``start KEY`` before each and ``failed KEY REASON`` where an operation cannot be rebuilt, so that the
parent knows which one ended this process.
"""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from remat.cost._records import read_fields, read_samples, write_record
from remat.cost._timing import SLOW_NS

RUNNERS = {
    "torch": "remat.cost._runners_torch",
    "tensorflow": "remat.cost._runners_tensorflow",
    "keras": "remat.cost._runners_keras",
}


def main(job_path: str) -> None:
    """Measure every signature of the job; whatever one of them raises ends only that one."""
    job = json.loads(Path(job_path).read_text())
    _set_threads(job["frameworks"], job["threads"])
    failed = set()
    for n_pass in range(1, job["passes"] + 1):
        for key, signature in job["signatures"].items():
            path = Path(job["folder"], f"{key}{job['suffix']}")
            is_through = n_pass < job["passes"] and len(read_samples(path)) >= n_pass
            if key in failed or is_through or read_fields(path, job["fields"]):
                continue
            print("start", key, flush=True)
            description = json.loads(signature)
            try:
                runner = importlib.import_module(RUNNERS[description["fw"]])
                measured = MEASURES[job["quantity"]](runner, description, job["device"])
            except Exception as error:  # operators raise whatever they like; the parent names the kind in a warning
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
                print("failed", key, reason, flush=True)
                failed.add(key)
                continue
            if description["fw"] == "keras":
                gc.collect()  # traced functions hold their layer's variables in cycles
            if read_fields(path, job["fields"]):
                continue  # another process has finished it meanwhile
            if job["quantity"] == "time":
                measured = _with_samples(measured, read_samples(path), n_pass == job["passes"])
            write_record(path, measured | {"signature": signature} | job["provenance"])


def _with_samples(measured: dict[str, Any], before: list[tuple[int, int]], is_last: bool) -> dict[str, Any]:
    """The samples so far; after the last pass, or once for a slow operation, what comes of them."""
    samples = [*before, (measured["ns"], measured["best_ns"])]
    if not is_last and measured["ns"] <= SLOW_NS:
        return {"samples": samples}
    medians, best = zip(*samples, strict=True)
    return {"ns": round(statistics.median(medians)), "best_ns": min(best)}


def _time(runner: Any, description: dict[str, Any], device: str) -> dict[str, int]:
    timing = runner.time(description, device)
    return {"ns": round(timing.median_ns), "best_ns": round(timing.best_ns)}


def _workspace(runner: Any, description: dict[str, Any], device: str) -> dict[str, int]:
    return {"workspace_bytes": runner.workspace(description, device)}


MEASURES = {"time": _time, "workspace": _workspace}


def _set_threads(frameworks: list[str], threads: int) -> None:
    if "torch" in frameworks:
        import torch

        torch.set_num_threads(threads)
    if "tensorflow" in frameworks or "keras" in frameworks:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.random.set_seed(0)


if __name__ == "__main__":
    main(sys.argv[1])
