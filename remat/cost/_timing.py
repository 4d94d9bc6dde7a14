"""Timing one callable: warm-up, then the median of repeated runs, with warm caches or with those of a step."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

SAMPLE_NS = 1_000_000  # a sample of a fast operation is a loop of about this long
TOTAL_NS = 50_000_000  # samples are taken until they add up to this
MIN_SAMPLES, MAX_SAMPLES = 5, 50
SLOW_NS = 1_000_000_000  # from here on one sample after the warm-up is enough
STEP_SAMPLES = 3  # in each pass over the operations
LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
DEFAULT_CACHE_BYTES = 32 * 2**20  # where that is not there
MIN_NS = 1000.0  # for what is too short to stand out from the function call around it


class Timing(NamedTuple):
    """Of one call in ns: the median of the samples, and the shortest (far below it: something else was running)."""

    median_ns: float
    best_ns: float

    def less(self, other: Timing) -> Timing:
        """What is left when `other` is part of every call; at least `MIN_NS`."""
        return Timing(max(MIN_NS, self.median_ns - other.median_ns), max(MIN_NS, self.best_ns - other.best_ns))

    def each(self, n: int) -> Timing:
        """Of one of the `n` equal parts of the call; at least `MIN_NS`."""
        return Timing(max(MIN_NS, self.median_ns / n), max(MIN_NS, self.best_ns / n))


def measure(
    run: Callable[[], object], elapsed_ns: Callable[[Callable[[], object], int], float] | None = None
) -> Timing:
    """Time `run`, after two warm-up calls (one if it takes over a second).

    Args:
        run: the operation, its inputs bound.
        elapsed_ns: (run, n) -> ns that n calls take; by default the wall clock.
    """
    elapsed_ns = elapsed_ns or wall_ns
    if elapsed_ns(run, 1) > SLOW_NS:  # the first call allocates, selects kernels, traces
        slow = elapsed_ns(run, 1)
        return Timing(slow, slow)
    once = max(1.0, elapsed_ns(run, 1))
    n = max(1, min(1000, round(SAMPLE_NS / once)))
    n_samples = max(MIN_SAMPLES, min(MAX_SAMPLES, round(TOTAL_NS / (n * once))))
    samples = [elapsed_ns(run, n) / n for _ in range(n_samples)]
    return Timing(statistics.median(samples), min(samples))


def measure_as_in_step(run: Callable[[], object], touch: Callable[[], object]) -> Timing:
    """Time `run`, after two warm-up calls, each time with its operands out of the caches but what `touch` reads.

    In a training step an operation finds in the caches what the one before it made, and nothing of what was made long
    ago. Repeated calls would find all of it, and make operations that only move data several times too short.
    """
    run()  # the first call allocates, selects kernels
    slow = wall_ns(run, 1)
    if slow > SLOW_NS:
        return Timing(slow, slow)
    samples = []
    for _ in range(STEP_SAMPLES):
        _empty_caches()
        touch()
        samples.append(wall_ns(run, 1))
    return Timing(statistics.median(samples), min(samples))


def _empty_caches() -> None:
    """Write over twice as much memory as the last cache holds, on this core: others keep their own smaller caches."""
    np.add(_ballast(), 1.0, out=_ballast())


@functools.cache
def _ballast() -> np.ndarray:
    try:
        size = int(LAST_LEVEL_CACHE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):  # not Linux, or a virtual machine that does not say
        size = DEFAULT_CACHE_BYTES
    return np.zeros(2 * size // 8)


def wall_ns(run: Callable[[], object], n: int) -> float:
    """Wall-clock ns of `n` calls."""
    started = time.perf_counter_ns()
    for _ in range(n):
        run()
    return time.perf_counter_ns() - started
