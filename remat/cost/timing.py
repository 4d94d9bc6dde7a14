"""Timing one callable: warm-up, then the median of repeated runs, with warm caches or with those of a step."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

try:
    import resource
except ImportError:  # Windows
    resource = None

SAMPLE_NS = 1_000_000  # a sample of a fast operation is a loop of about this long
TOTAL_NS = 50_000_000  # samples are taken until they add up to this
MIN_SAMPLES, MAX_SAMPLES = 5, 50
SLOW_NS = 1_000_000_000  # from here on one sample after the warm-up is enough
STEP_SAMPLES = 3  # in each pass over the operations
LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
DEFAULT_CACHE_BYTES = 32 * 2**20  # where that is not there
MIN_NS = 1000.0  # for what is too short to stand out from the function call around it
# Medians within this factor of the shortest time, and as much beside for short times, count as undisturbed.
DISTURBED, SLACK_NS = 1.5, 10_000
TURN_NS = 20_000_000  # samples in which another process took its turn more often than this count as disturbed


class Timing(NamedTuple):
    """Of one call in ns: the median of the samples, and the shortest (far below it: something else was running).

    `disturbed` says that other processes took the processor away in every sample.
    """

    median_ns: float
    best_ns: float
    disturbed: bool = False

    @property
    def noise(self) -> float:
        """The median over the shortest."""
        return self.median_ns / max(1.0, self.best_ns)

    def less(self, other: Timing) -> Timing:
        """What is left when `other` is part of every call, at least `MIN_NS`; its noise is both's of the whole call."""
        left = max(MIN_NS, self.median_ns - other.median_ns)
        above_ns = self.median_ns - self.best_ns + other.median_ns - other.best_ns
        noise = 1 + above_ns / max(1.0, self.best_ns)
        return Timing(left, left / noise, self.disturbed or other.disturbed)

    def each(self, n: int) -> Timing:
        """Of one of the `n` equal parts of the call, with its noise; at least `MIN_NS`."""
        part = max(MIN_NS, self.median_ns / n)
        return Timing(part, part / self.noise, self.disturbed)


def is_steady(median_ns: float, best_ns: float) -> bool:
    """Whether a median is near enough to the shortest time that nothing else can have been running."""
    return median_ns <= DISTURBED * best_ns + SLACK_NS


def steady_ns(samples: Sequence[tuple[int, int]], passes: int) -> int | None:
    """The time of an operation from (median, shortest) ns of each pass over it; None if it was disturbed too often.

    Passes whose median is far from the shortest time of all passes were disturbed and do not count; most of the
    `passes` that are asked for must be left.
    """
    best_ns = min(best for _, best in samples)
    medians = [median for median, _ in samples if is_steady(median, best_ns)]
    return round(statistics.median(medians)) if 2 * len(medians) > passes else None


def measure(
    run: Callable[[], object], elapsed_ns: Callable[[Callable[[], object], int], float] | None = None
) -> Timing:
    """Time `run`, after two warm-up calls; if these take over a second, the second of them is the time.

    Args:
        run: the operation, its inputs bound.
        elapsed_ns: (run, n) -> ns that n calls take; by default the wall clock.
    """
    elapsed_ns = elapsed_ns or wall_ns
    first = elapsed_ns(run, 1)  # allocates, selects kernels, traces
    if first > SLOW_NS:
        second = _sample(run, 1, elapsed_ns)
        if second[0] > SLOW_NS:
            return _timing_of([second], first)
    once = max(1.0, elapsed_ns(run, 1))
    n = max(1, min(1000, round(SAMPLE_NS / once)))
    n_samples = max(MIN_SAMPLES, min(MAX_SAMPLES, round(TOTAL_NS / (n * once))))
    return _timing_of([_sample(run, n, elapsed_ns) for _ in range(n_samples)])


def measure_as_in_step(run: Callable[[], object], touch: Callable[[], object]) -> Timing:
    """Time `run`, after two warm-up calls, each time with its operands out of the caches but what `touch` reads.

    In a training step an operation finds in the caches what the one before it made, and nothing of what was made long
    ago. Repeated calls would find all of it, and make operations that only move data several times too short.
    """
    first = wall_ns(run, 1)  # allocates, selects kernels
    second = _sample(run, 1, wall_ns)
    if second[0] > SLOW_NS:
        return _timing_of([second], first)
    samples = []
    for _ in range(STEP_SAMPLES):
        _empty_caches()
        touch()
        samples.append(_sample(run, 1, wall_ns))
    return _timing_of(samples)


def _sample(
    run: Callable[[], object], n: int, elapsed_ns: Callable[[Callable[[], object], int], float]
) -> tuple[float, bool]:
    """(ns of one of `n` calls, whether the wall clock says so while other processes had the processor)."""
    before = _preemptions()
    ns = elapsed_ns(run, n)
    return ns / n, elapsed_ns is wall_ns and (_preemptions() - before) * TURN_NS > ns


def _timing_of(samples: Sequence[tuple[float, bool]], first_ns: float = float("inf")) -> Timing:
    """Of the samples that were not disturbed, if there are any; the first call may have been shorter."""
    times = [ns for ns, disturbed in samples if not disturbed] or [ns for ns, _ in samples]
    return Timing(statistics.median(times), min(first_ns, *times), all(disturbed for _, disturbed in samples))


def _preemptions() -> int:
    """How often this process, with all its threads, has had to leave a processor to another; 0 where nobody counts."""
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw  # pyright: ignore[reportOptionalCall]


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
