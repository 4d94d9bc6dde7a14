"""Progress for a waiting user: a live bar on a terminal, elsewhere one line for each finished solve."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

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
    """Counts finished jobs, shows the running ones and estimates the remaining time; a context manager."""

    def __init__(self, console: Console):
        self._console = console
        self._began = self._said_at = time.monotonic()
        self._live = console.is_terminal
        self._said: set[str] = set()
        self._bar = Progress(
            SpinnerColumn(), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"),
            TextColumn("·"), TimeRemainingColumn(), TextColumn("left"), console=console, transient=True,
        )  # fmt: skip
        self._bar.add_task("", total=0)
        (self._task,) = self._bar.tasks

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bar.stop()

    def expect(self, jobs: int) -> None:
        """Announce more jobs."""
        self._bar.update(self._task.id, total=(self._task.total or 0) + jobs)

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, markup=False)

    def tick(self, running: Sequence[str]) -> None:
        """Show the running jobs; without a terminal, from time to time those with a new result."""
        waiting = int(self._task.remaining or 0) - len(running)
        queue = f" · {waiting} waiting" if waiting > 0 else ""
        self._bar.update(self._task.id, description=f"{', '.join(running)}{queue}")
        if not self._live and time.monotonic() - self._said_at > SAY_EVERY_S:
            self._said_at = time.monotonic()
            elapsed = self._said_at - self._began
            for line in running:
                if "(" in line and line not in self._said:
                    self._console.print(f"[running, {elapsed:.0f} s] {line}", markup=False, soft_wrap=True)
            self._said = set(running)

    def finished(self, line: str) -> None:
        """Count a finished job; without a terminal, print its line."""
        self._bar.advance(self._task.id)
        if not self._live:
            done = f"{self._task.completed:.0f}/{self._task.total:.0f}, {time.monotonic() - self._began:.0f} s"
            self._console.print(f"[{done}] {line}", markup=False, soft_wrap=True)
