"""``python -m remat.cost._profile_worker JOB``: measures signatures, one cache file each, as soon as it is done.

Times of PyTorch's operations on a CPU are taken in several passes over all of them: the speed of a machine drifts, and
operations are compared with each other. The file of an operation that is not through yet holds its samples, with which
a later process goes on.

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

from remat.cost._timing import SLOW_NS
from remat.files import replacing

PASSES = 3
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
    for n_passes in range(1, passes_of(job) + 1):
        for key, signature in job["signatures"].items():
            path = Path(job["folder"], f"{key}{job['suffix']}")
            if key in failed or _is_through(path, job["quantity"], n_passes):
                continue
            print("start", key, flush=True)
            description = json.loads(signature)
            try:
                runner = importlib.import_module(RUNNERS[description["fw"]])
                measured = MEASURES[job["quantity"]](runner, description, job, path)
            except Exception as error:  # operators raise whatever they like; the parent names the kind in a warning
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
                print("failed", key, reason, flush=True)
                failed.add(key)
                continue
            if description["fw"] == "keras":
                gc.collect()  # traced functions hold their layer's variables in cycles
            write_atomically(path, measured | {"signature": signature} | job["provenance"])


def passes_of(job: dict[str, Any]) -> int:
    """How often the operations of a job are gone through."""
    as_in_step = job["quantity"] == "time" and job["device"] == "cpu" and job["frameworks"] == ["torch"]
    return PASSES if as_in_step else 1


def _known(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
        return {}


def _is_through(path: Path, quantity: str, n_passes: int) -> bool:
    """Whether a file holds what is asked for, or the samples of as many passes."""
    known = _known(path)
    done = "ns" in known if quantity == "time" else "workspace_bytes" in known
    return done or len(known.get("samples", ())) >= n_passes


def _time(runner: Any, description: dict[str, Any], job: dict[str, Any], path: Path) -> dict[str, Any]:
    """The samples so far, (median, shortest) of each pass; with the last pass also what comes of them."""
    timing = runner.time(description, job["device"])
    samples = [*_known(path).get("samples", ()), [round(timing.median_ns), round(timing.best_ns)]]
    if len(samples) < passes_of(job) and timing.median_ns <= SLOW_NS:
        return {"samples": samples}
    medians, best = zip(*samples, strict=True)
    return {"ns": round(statistics.median(medians)), "best_ns": min(best)}


def _workspace(runner: Any, description: dict[str, Any], job: dict[str, Any], path: Path) -> dict[str, Any]:
    return {"workspace_bytes": runner.workspace(description, job["device"])}


MEASURES = {"time": _time, "workspace": _workspace}


def _set_threads(frameworks: list[str], threads: int) -> None:
    if "torch" in frameworks:
        import torch

        torch.set_num_threads(threads)
    if "tensorflow" in frameworks or "keras" in frameworks:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.random.set_seed(0)


def write_atomically(path: Path, record: dict[str, Any]) -> None:
    """Write `record` as JSON so that a reader finds all of it or nothing."""
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1])
