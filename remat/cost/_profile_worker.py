"""``python -m remat.cost._profile_worker JOB``: measures signatures, one cache file each, as soon as it is done.

Prints ``start KEY`` before each and ``failed KEY REASON`` where an operation cannot be rebuilt, so that the
parent knows which one ended this process.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from remat.files import replacing

RUNNERS = {
    "torch": "remat.cost._runners_torch",
    "tensorflow": "remat.cost._runners_tensorflow",
    "keras": "remat.cost._runners_keras",
}


def main(job_path: str) -> None:
    """Measure every signature of the job; whatever one of them raises ends only that one."""
    job = json.loads(Path(job_path).read_text())
    _set_threads(job["frameworks"], job["threads"])
    for key, signature in job["signatures"].items():
        print("start", key, flush=True)
        description = json.loads(signature)
        try:
            runner = importlib.import_module(RUNNERS[description["fw"]])
            measured = MEASURES[job["quantity"]](runner, description, job["device"])
        except Exception as error:  # operators raise whatever they like; the parent names the kind in a warning
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            print("failed", key, reason, flush=True)
            continue
        if description["fw"] == "keras":
            gc.collect()  # traced functions hold their layer's variables in cycles
        record = measured | {"signature": signature} | job["provenance"]
        write_atomically(Path(job["folder"], f"{key}{job['suffix']}"), record)


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


def write_atomically(path: Path, record: dict[str, Any]) -> None:
    """Write `record` as JSON so that a reader finds all of it or nothing."""
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1])
