"""``python -m remat._profile_worker FRAMEWORKS``: measure operations by signature; write a file once each is done.

Reads paths of jobs from standard input, one a line, and prints ``end`` after each. A job may ask for several passes
over all operations, because a machine's speed drifts and operations are compared with each other. An operation that
another process disturbed is measured again. Until the last pass, and while its times are not steady, an operation's
file holds only its samples; a later process continues from them.

Prints ``start KEY`` before each operation, so that the parent knows which one ended this process, and
``failed KEY REASON`` if an operation cannot be rebuilt.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from remat.cost.records import read_fields, read_samples, write_record
from remat.cost.timing import SLOW_NS, steady_ns
from remat.errors import shortened

# Extra passes for disturbed operations, and the rest before each, because most disturbances are short. No extra pass
# begins after LEAST_S, or after as long as the requested passes took if that is longer.
MORE_PASSES, REST_S, LEAST_S = 6, 0.1, 3.0


def main(job_path: str) -> None:
    """Measure every signature of the job; an error ends only the signature that raised it."""
    job = json.loads(Path(job_path).read_text())
    _set_threads(job["frameworks"], job["threads"])
    failed: set[str] = set()
    if "torch" in job["frameworks"]:
        _runner("torch").prepare(map(json.loads, _unfinished(job, failed).values()))
    began = time.monotonic()
    for n_pass in range(1, job["passes"] + 1):
        _measure(job, n_pass, failed)
    until = time.monotonic() + max(LEAST_S, time.monotonic() - began)
    for n_pass in range(job["passes"] + 1, job["passes"] + MORE_PASSES + 1):
        if not _unfinished(job, failed) or time.monotonic() > until:
            return
        time.sleep(REST_S)
        _measure(job, n_pass, failed)


def _measure(job: dict[str, Any], n_pass: int, failed: set[str]) -> None:
    """Make one pass over the unfinished signatures; add the keys that cannot be measured to `failed`."""
    for key, signature in _unfinished(job, failed).items():
        path = _path(job, key)
        if n_pass < job["passes"] and len(read_samples(path)) >= n_pass:
            continue
        print("start", key, flush=True)
        description = json.loads(signature)
        try:
            measured = _measured(job["quantity"], description, job["device"])
        except Exception as error:  # operations raise errors of any class; the parent names the class in a warning
            reason = shortened(f"{type(error).__name__}: {error}", 160)
            print("failed", key, reason, flush=True)
            failed.add(key)
            continue
        if description["fw"] == "keras":
            gc.collect()  # traced functions hold their layer's variables in cycles
        if read_fields(path, job["fields"]):
            continue  # another process finished it in the meantime
        if job["quantity"] == "time":
            measured = _with_samples(measured, read_samples(path), n_pass, job["passes"])
        write_record(path, measured | {"signature": signature} | job["provenance"])


def _runner(framework: str) -> Any:
    """The module that rebuilds and times a framework's operations; its import takes seconds."""
    if framework == "torch":
        from remat.torch.measuring import timing
    elif framework == "tensorflow":
        from remat.tf import timing
    else:
        from remat.tf import layer_timing as timing
    return timing


def _unfinished(job: dict[str, Any], failed: set[str]) -> dict[str, str]:
    """{key: signature} of the operations that have no finished file and have not failed."""
    return {
        key: signature for key, signature in job["signatures"].items()
        if key not in failed and read_fields(_path(job, key), job["fields"]) is None
    }  # fmt: skip


def _path(job: dict[str, Any], key: str) -> Path:
    return Path(job["folder"], f"{key}{job['suffix']}")


def _with_samples(measured: dict[str, Any], before: list[tuple[int, int]], n_pass: int, passes: int) -> dict[str, Any]:
    """The fields to store: the latest samples, and the time once it is known.

    A slow operation's time is known after its first pass, any other's after the last pass.
    """
    if measured["disturbed"]:
        return {"samples": before}
    samples = [*before, (measured["ns"], measured["best_ns"])][-(passes + MORE_PASSES) :]
    slow = measured["ns"] > SLOW_NS
    ns = steady_ns(samples, 1 if slow else passes) if slow or n_pass >= passes else None
    if ns is None:
        return {"samples": samples}
    return {"ns": ns, "best_ns": min(best for _, best in samples), "samples": samples}


def _measured(quantity: str, description: dict[str, Any], device: str) -> dict[str, Any]:
    """The time or the workspace of an operation."""
    runner = _runner(description["fw"])
    if quantity == "workspace":
        return {"workspace_bytes": runner.workspace(description, device)}
    timing = runner.time(description, device)
    return {"ns": round(timing.median_ns), "best_ns": round(timing.best_ns), "disturbed": timing.disturbed}


def _set_threads(frameworks: list[str], threads: int) -> None:
    if "torch" in frameworks:
        import torch

        torch.set_num_threads(threads)
    if "tensorflow" in frameworks or "keras" in frameworks:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.random.set_seed(0)


if __name__ == "__main__":
    for framework in sys.argv[1:]:
        _runner(framework)
    for line in sys.stdin:
        main(line.removesuffix("\n"))
        print("end", flush=True)
