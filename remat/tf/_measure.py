"""``python -m remat.tf._measure JOB``: the child process of `_heap.run_child`; prints one JSON object per line.

A job is ``{"kind": "step", ...}`` (see `measure_step` in `portable`), ``{"kind": "times", ...}`` (see `time_steps`
there) or ``{"kind": "operations", ...}`` (see `_workspace`).

Peaks are of the steady state: they do not count what the first runs allocate for good.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from remat.cost.records import write_record
from remat.errors import shortened
from remat.tf._keras import without_keras

with without_keras():
    import tensorflow as tf

    from remat.tf._nodes import bytes_of, run_signature
    from remat.tf.adapter import executed_as_written
    from remat.tf.portable import load_step
    from remat.tf.timing import random_tensor

WARM_UP = 2
RUNS = 8  # kernels that work in blocks on several threads hold another number of blocks every time
SMALL_BYTES = 32768  # reuse of a smaller tensor by a kernel cannot be seen


class Heap:
    """The counters of the preloaded library."""

    def __init__(self) -> None:
        library = ctypes.CDLL(os.environ["REMAT_HEAP"])
        for name in ("live", "peak"):
            getattr(library, f"remat_heap_{name}").restype = ctypes.c_longlong
        self.live: Callable[[], int] = library.remat_heap_live
        self.peak: Callable[[], int] = library.remat_heap_peak
        self.restart: Callable[[], None] = library.remat_heap_restart

    def call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[int, int, float]:
        """(peak bytes, bytes after with the results, both less the bytes before; seconds) of one call."""
        before = self.live()
        self.restart()
        start = time.perf_counter()
        results = function(*arguments)
        seconds = time.perf_counter() - start
        peak, after = self.peak(), self.live()
        del results
        return peak - before, after - before, seconds


def main(job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    if job["kind"] == "times":
        _times(job)
    else:
        {"step": _step, "operations": _operations}[job["kind"]](job, Heap())


def _times(job: dict[str, Any]) -> None:
    """Time every step once in every round, so that other processes disturb all steps alike."""
    steps = [(load_step(Path(one["folder"])), one["as_written"]) for one in job["steps"]]
    wall: list[list[float]] = [[] for _ in steps]
    cpu: list[list[float]] = [[] for _ in steps]
    for i in range(WARM_UP + job["rounds"]):
        for s, ((function, arguments), as_written) in enumerate(steps):
            with _mode(as_written):
                start, busy = time.perf_counter(), time.process_time()
                function(*arguments)
                if i >= WARM_UP:
                    wall[s].append(time.perf_counter() - start)
                    cpu[s].append(time.process_time() - busy)
    print(json.dumps({"wall_s": wall, "cpu_s": cpu}), flush=True)


def _mode(as_written: bool) -> AbstractContextManager[None]:
    return executed_as_written() if as_written else nullcontext()


def _step(job: dict[str, Any], heap: Heap) -> None:
    function, arguments = load_step(Path(job["folder"]))
    with _mode(job["as_written"]):
        runs = [heap.call(function, arguments) for _ in range(WARM_UP + job["runs"])][WARM_UP:]
    peaks, _, times = zip(*runs, strict=True)
    print(json.dumps({"peaks": peaks, "median_s": statistics.median(times), "best_s": min(times)}), flush=True)


def _operations(job: dict[str, Any], heap: Heap) -> None:
    """Write a cache file per key: the workspace of its signature, and for keys in `sharing` which inputs are reused."""
    with executed_as_written(), tf.device("/CPU:0"):
        call_overhead = _transient(heap, tf.function(lambda: tf.constant(0), autograph=False), ())
        for key, text in job["signatures"].items():
            print(json.dumps({"start": key}), flush=True)
            description = json.loads(text)
            try:
                record = _operation(heap, description, call_overhead, key in job["sharing"])
            except Exception as error:  # a kernel may raise anything; the parent names the operation
                reason = shortened(f"{type(error).__name__}: {error}", 160)
                print(json.dumps({"failed": key, "reason": reason}), flush=True)
                continue
            write_record(Path(job["folder"], f"{key}.json"), record | {"signature": text} | job["provenance"])


def _transient(heap: Heap, function: Any, arguments: Sequence[Any]) -> int:
    runs = [heap.call(function, arguments) for _ in range(WARM_UP + RUNS)][WARM_UP:]
    return max(peak - after for peak, after, _ in runs)


def _operation(heap: Heap, description: dict[str, Any], call_overhead: int, sharing: bool) -> dict[str, Any]:
    entries = description["inputs"]
    tensors = [None if "c" in entry else random_tensor(entry["t"], entry["d"]) for entry in entries]

    def once(copied: Sequence[int]) -> tuple[int, Any]:
        """(transient bytes, results) with copies of the inputs `copied`, which nothing else holds."""

        @tf.function(autograph=False)
        def run(*values: Any) -> Any:
            rest = iter(values)
            inputs = [None if t is None else next(rest) for t in tensors]
            for i in copied:
                inputs[i] = tf.raw_ops.Snapshot(input=inputs[i])
            return run_signature(description, inputs)

        given = [t for t in tensors if t is not None]
        return max(0, _transient(heap, run, given) - call_overhead), run(*given)

    workspace, results = once(())
    record: dict[str, Any] = {"workspace_bytes": workspace}
    if not sharing:
        return record
    shares: list[tuple[int, int]] = []
    scratch: list[int] = []
    for i, tensor in enumerate(tensors):
        if tensor is None or bytes_of(tensor) < SMALL_BYTES:
            continue
        alike = [o for o, r in enumerate(results) if r.dtype == tensor.dtype and bytes_of(r) == bytes_of(tensor)]
        if not alike and workspace < bytes_of(tensor):
            continue
        # A kernel that writes its result or its scratch to the copy saves the copy's bytes.
        if once([i])[0] < workspace + bytes_of(tensor) // 2:
            if alike:
                shares.append((i, alike[0]))
            else:
                scratch.append(i)
    return record | {"shares": shares, "scratch": scratch}


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Exception as error:  # messages of TensorFlow have many lines, and the parent shows the last one
        traceback.print_exc()
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
