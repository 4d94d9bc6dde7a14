"""Timing of one callable: warm-up, then the median of repeated runs, with warm caches or with those of a step."""

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

SAMPLE_NS = 1_000_000  # a sample of a fast operation is a loop of about this duration
TOTAL_NS = 50_000_000  # about the sum of all samples
MIN_SAMPLES, MAX_SAMPLES = 5, 50
SLOW_NS = 1_000_000_000  # a call that takes longer is timed once, after the warm-up
STEP_SAMPLES = 5  # in each pass over the operations
LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
DEFAULT_CACHE_BYTES = 32 * 2**20  # where that file is absent
MIN_NS = 1000.0  # for operations too short to stand out from the function call around them
# Medians up to this factor times the shortest time, plus a constant for short times, count as undisturbed.
DISTURBED, SLACK_NS = 1.5, 10_000
TURN_NS = 20_000_000  # a sample is disturbed if other processes interrupted it more often than once in this time


class Timing(NamedTuple):
    """Median and shortest time of one call in ns; the shortest is far below where other processes were running.

    `disturbed`: other processes took the processor away in every sample.
    """

    median_ns: float
    best_ns: float
    disturbed: bool = False

    @property
    def noise(self) -> float:
        """Median time divided by the shortest time."""
        return self.median_ns / max(1.0, self.best_ns)

    def less(self, other: Timing) -> Timing:
        """The time without `other`, which is part of every call; at least `MIN_NS`. Both noises count, of the whole."""
        left = max(MIN_NS, self.median_ns - other.median_ns)
        above_ns = self.median_ns - self.best_ns + other.median_ns - other.best_ns
        noise = 1 + above_ns / max(1.0, self.best_ns)
        return Timing(left, left / noise, self.disturbed or other.disturbed)

    def each(self, n: int) -> Timing:
        """The time of one of the `n` equal parts of the call, with the call's noise; at least `MIN_NS`."""
        part = max(MIN_NS, self.median_ns / n)
        return Timing(part, part / self.noise, self.disturbed)


def is_steady(median_ns: float, best_ns: float) -> bool:
    """Whether a median is so near to the shortest time that nothing else can have been running."""
    return median_ns <= DISTURBED * best_ns + SLACK_NS


def steady_ns(samples: Sequence[tuple[int, int]], passes: int) -> int | None:
    """The time of an operation from (median, shortest) ns of each pass over it; None if it was disturbed too often.

    A pass whose median is far from the shortest time of all passes was disturbed and does not count. More than half
    of the requested `passes` must be left.
    """
    best_ns = min(best for _, best in samples)
    medians = [median for median, _ in samples if is_steady(median, best_ns)]
    return round(statistics.median(medians)) if 2 * len(medians) > passes else None


def measure(
    run: Callable[[], object], elapsed_ns: Callable[[Callable[[], object], int], float] | None = None
) -> Timing:
    """Time `run` after two warm-up calls; if each takes over a second, the second of them is the time.

    Args:
        run: the operation with its inputs bound.
        elapsed_ns: (run, n) -> ns of n calls; by default the wall clock.
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
    """Time `run` after two warm-up calls; before each run the caches are emptied, then `touch` reads some operands.

    In a training step an operation finds in the caches the outputs of the operation before it, and nothing older.
    Repeated calls would find all operands, and operations that only move data would seem several times too fast.
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
    """(mean ns of `n` calls, whether the wall clock also counted time in which other processes had the processor)."""
    before = _preemptions()
    ns = elapsed_ns(run, n)
    return ns / n, elapsed_ns is wall_ns and (_preemptions() - before) * TURN_NS > ns


def _timing_of(samples: Sequence[tuple[float, bool]], first_ns: float = float("inf")) -> Timing:
    """The timing of the undisturbed samples, or of all if there are none; the first call may be the shortest."""
    times = [ns for ns, disturbed in samples if not disturbed] or [ns for ns, _ in samples]
    return Timing(statistics.median(times), min(first_ns, *times), all(disturbed for _, disturbed in samples))


def _preemptions() -> int:
    """How often this process, with all its threads, had to leave a processor to another; 0 where it is not counted."""
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw  # pyright: ignore[reportOptionalCall]


def _empty_caches() -> None:
    """Overwrite twice as much memory as the last cache holds, on this core; other cores keep their smaller caches."""
    np.add(_ballast(), 1.0, out=_ballast())


@functools.cache
def _ballast() -> np.ndarray:
    try:
        size = int(LAST_LEVEL_CACHE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):  # not Linux, or a virtual machine that hides it
        size = DEFAULT_CACHE_BYTES
    return np.zeros(2 * size // 8)


def wall_ns(run: Callable[[], object], n: int) -> float:
    """Wall-clock ns of `n` calls."""
    started = time.perf_counter_ns()
    for _ in range(n):
        run()
    return time.perf_counter_ns() - started
