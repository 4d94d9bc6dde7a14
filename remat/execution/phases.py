"""Where the seconds of planning went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

CAPTURE, LOWERING, MEASURING, SEARCH, FIRST_STEP = "capture", "lowering", "measuring", "search", "first step"
SHOWN_S = 0.05  # shorter phases are not shown


class Phases(dict[str, float]):
    """[phase] seconds; those of a phase within another one count for the inner one only."""

    def __init__(self) -> None:
        super().__init__()
        self._inner_s = 0.0  # of the phases within the present one

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Count the seconds that this takes."""
        began, outer_s, self._inner_s = time.perf_counter(), self._inner_s, 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self[phase] = self.get(phase, 0.0) + seconds - self._inner_s
            self._inner_s = outer_s + seconds

    def __str__(self) -> str:
        parts = [f"{phase} {seconds:.1f}" for phase, seconds in self.items() if seconds >= SHOWN_S]
        return f"{sum(self.values()):.1f} s: {', '.join(parts) or 'nothing took long'}"
