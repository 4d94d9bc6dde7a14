"""Progress for a waiting user: a live bar on a terminal, elsewhere one line for each finished solve."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

WIDTH_WITHOUT_TERMINAL = 120
SAY_EVERY_S = 15.0  # without a terminal, seconds between lines about running solves


def make_console() -> Console:
    """Standard output; without a terminal it is wide enough for the tables."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)


def say_written(console: Console, paths: Iterable[Path]) -> None:
    """Print a line for each written table and page, and for each folder of figures."""
    for path in dict.fromkeys(path.parent if path.suffix in (".png", ".pdf") else path for path in paths):
        what = {".html": "page", ".md": "page", ".csv": "table"}.get(path.suffix, "figures")
        console.print(f"{what:<8} {path}", markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """``42 s`` or ``3 min 20 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class SolveProgress:
    """Counts finished solves, shows the running ones and estimates the remaining time; a context manager.

    The estimate is the mean time of this batch's finished jobs, times the jobs left, divided by the jobs at once; it
    never exceeds the time limits.
    """

    def __init__(self, console: Console, at_once: int):
        self._console = console
        self._at_once = at_once
        self._limits: list[float] = []
        self._spent: list[float] = []
        self._batch_from = 0  # only the current batch counts: heuristics take less time than exact solves
        self._began = time.monotonic()
        self._live = console.is_terminal
        self._said: set[str] = set()
        self._said_at = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"),
            console=console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=0)

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bar.stop()

    def expect(self, time_limits_s: Sequence[float]) -> None:
        """Announce a new batch of jobs with these limits; the batch before it has ended."""
        self._batch_from = len(self._limits)
        self._limits += time_limits_s
        self._bar.update(self._task, total=len(self._limits))

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, markup=False)

    def left_s(self) -> float | None:
        """Estimated seconds left; None while nothing has finished."""
        left = self._limits[len(self._spent) :]
        if not left:
            return 0.0
        spent = self._spent[self._batch_from :]
        if not spent:
            return None
        mean = sum(spent) / len(spent)
        return sum(min(mean, limit) for limit in left) / min(self._at_once, len(left))

    def tick(self, running: Sequence[str]) -> None:
        """Show the running jobs; without a terminal, from time to time those with a new result."""
        left = self.left_s()
        about = f" · about {duration(left)} left" if left is not None else ""
        waiting = len(self._limits) - len(self._spent) - len(running)
        queue = f" · {waiting} waiting" if waiting > 0 else ""
        self._bar.update(self._task, description=f"{', '.join(running)}{queue}{about}")
        if not self._live and time.monotonic() - self._said_at > SAY_EVERY_S:
            self._said_at = time.monotonic()
            elapsed = self._said_at - self._began
            for line in running:
                if "(" in line and line not in self._said:
                    self._console.print(f"[running, {elapsed:.0f} s] {line}", markup=False, soft_wrap=True)
            self._said = set(running)

    def finished(self, line: str, spent_s: float) -> None:
        """Count a finished job; without a terminal, print its line."""
        self._spent.append(spent_s)
        self._bar.update(self._task, completed=len(self._spent))
        if not self._live:
            elapsed = time.monotonic() - self._began
            self._console.print(
                f"[{len(self._spent)}/{len(self._limits)}, {elapsed:.0f} s] {line}", markup=False, soft_wrap=True
            )
