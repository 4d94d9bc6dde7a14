"""``python -m experiments.execution_batch JOB``: the largest batch that trains, plain and rematerialized.

Batches are found by bisection on predicted peaks, then trained: what is reported ran within the memory. The rule for
rematerialized batches is Checkmate's: recomputing costs at most as much as one more forward pass.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import remat
from experiments.execution_subject import Method, Subject
from remat.cost import CostWarning

MARGIN = 0.97  # of the device's free memory: what fragmentation is left
TRIES = 6  # measured batches, each SHRINK of the one before, if memory runs out in earnest
SHRINK = 0.97


def largest(fits: Callable[[int], bool], first: int) -> int:
    """The largest batch that fits, by doubling from `first` and bisection; 0 if not even one example does."""
    good, bad = 0, first
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def main(job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    warnings.simplefilter("ignore", CostWarning)
    capacity = job["capacity_bytes"] or int(MARGIN * torch.cuda.mem_get_info()[0])
    for name, make in MAKERS.items():
        batch = largest(lambda batch, make=make: make(_subject(job, batch), capacity) is not None,
                        job["spec"]["batch_size"])  # fmt: skip
        row = None
        for _ in range(TRIES if batch else 0):
            row = _trained(_subject(job, batch), make, capacity)
            if row is not None:
                break
            batch = max(1, int(SHRINK * batch))
        if row is None:
            print(f"note {name}: no batch trains within {capacity} bytes", flush=True)
        else:
            print("row", json.dumps({"method": name, "parameter": f"batch {batch}"} | row), flush=True)


def _subject(job: dict[str, Any], batch: int) -> Subject:
    """The model at this batch; what the one before took is given back."""
    torch._dynamo.reset()
    gc.collect()
    if job["device"] == "cuda":
        torch.cuda.empty_cache()
    return Subject(job | {"spec": job["spec"] | {"batch_size": batch}, "cost": "flops"})


def _plain(subject: Subject, capacity: int) -> Method | None:
    plain = subject.followed("plain", "", subject.module, subject.module)
    return plain if plain.peak_bytes is not None and plain.peak_bytes <= capacity else None


def _planned(subject: Subject, capacity: int) -> Method | None:
    try:
        method = subject.best_within(capacity, "", subject.mincut.values())
    except remat.InvalidInput:
        return None
    assert method.ns is not None
    forward = sum(op.cost for op in subject.graph.operations if not op.is_backward)
    return method if method.ns <= subject.graph.total_cost + forward else None


MAKERS: dict[str, Callable[[Subject, int], Method | None]] = {"plain": _plain, "portfolio": _planned}


def _trained(subject: Subject, make: Callable[[Subject, int], Method | None], capacity: int) -> dict[str, Any] | None:
    """Measurements of a batch; None if it does not stay within the memory."""
    method = make(subject, capacity)
    if method is None:
        return None
    try:
        peak = subject.measured_peak(method.module)
        times = [subject.seconds(method.module) for _ in range(subject.job["rounds"])]
    except torch.OutOfMemoryError:
        return None
    batch, seconds = subject.job["spec"]["batch_size"], statistics.median(times)
    return None if peak > capacity else {
        "batch_size": batch, "capacity_bytes": capacity, "predicted_peak_bytes": method.peak_bytes,
        "measured_peak_bytes": peak, "measured_s": seconds, "samples_per_s": batch / seconds,
        "recomputed": method.recomputed,
    }  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
