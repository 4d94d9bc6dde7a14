"""Cases in processes of their own, until the time is up."""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from experiments.device.folder import Case
from remat.child import command, environment, last_line
from remat.errors import InvalidInput

# Segments that can grow are split at every 512 bytes, so that the allocator counts what a tensor takes. Other blocks
# keep a rest of up to 1 MiB. PyTorch ignores the setting on a CPU.
ALLOCATOR = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
ALLOCATOR_BEFORE = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(slots=True)
class Clock:
    """How long a command may take, and what its finished cases took.

    Attributes:
        minutes: None for no limit.
    """

    minutes: float | None
    began: float = field(default_factory=time.monotonic)
    took_s: list[float] = field(default_factory=list)

    def left_s(self) -> float | None:
        """Seconds left; None without a limit."""
        return None if self.minutes is None else max(0.0, self.began + 60 * self.minutes - time.monotonic())

    @property
    def is_up(self) -> bool:
        return self.left_s() == 0

    def estimate(self, n_left: int) -> str:
        """How long the other cases take if they are as the finished ones."""
        return f"about {sum(self.took_s) / len(self.took_s) * n_left / 60:.1f} minutes for {n_left} more"


def describe(device: str, size: str) -> dict[str, Any]:
    """The device at hand; for a GPU a process asks, so that this one takes no memory of it.

    Raises:
        InvalidInput: there is no such device.
    """
    if device == "cpu":
        from experiments.device.subject import describe_device

        return describe_device(device, size)
    job = json.dumps({"work": "describe", "folder": ".", "model": "", "backend": "", "device": device, "size": size})
    with tempfile.TemporaryFile() as errors:
        asked = subprocess.run(_command(job), stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment())
        if asked.returncode:
            raise InvalidInput(last_line(errors) or f"PyTorch ended with code {asked.returncode}")
    return json.loads(asked.stdout.splitlines()[-1])


def run(
    cases: list[Case], clock: Clock, what: str, job: Callable[[Case], dict[str, Any]],
    n_missing: Callable[[Case], int], failed: Callable[[Case, str], None],
) -> bool:  # fmt: skip
    """Do the work of each case; after an error that goes on with what is missing, then with the next case.

    Args:
        job: of a case, see `experiments.device.work`.
        n_missing: number of rows that the case lacks; while it shrinks, another process goes on after an error.
        failed: is told the last line of an error.

    Returns:
        Whether every case had its turn before the time was up.
    """
    for i, case in enumerate(cases):
        if clock.is_up:
            print(f"the time is up: {len(cases) - i} left; the same command goes on from here")
            return False
        print(f"{what} {case.name} ({i + 1} of {len(cases)})", flush=True)
        began, before, now = time.monotonic(), math.inf, n_missing(case)
        while 0 < now < before and not clock.is_up:
            before, error = now, _child(job(case), clock)
            if not error:
                break
            if not clock.is_up:
                print(f"  failed: {error}", flush=True)
                failed(case, error)
            now = n_missing(case)
        clock.took_s.append(time.monotonic() - began)
        if i + 1 < len(cases):
            print(f"  {clock.took_s[-1]:.0f} s; {clock.estimate(len(cases) - i - 1)}", flush=True)
    return not clock.is_up


def _child(job: dict[str, Any], clock: Clock) -> str:
    """Run a job; returns the last line of its error, '' without one."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(_command(json.dumps(job)), stderr=errors, env=_environment())
        try:
            child.wait(clock.left_s())
        except subprocess.TimeoutExpired:
            child.kill()
            return "the time was up"
        except BaseException:
            child.kill()
            raise
        finally:
            child.wait()
        if not child.returncode:
            return ""
        return last_line(errors) or f"its process ended with code {child.returncode}"


def _command(job: str) -> list[str]:
    return command("experiments.device.work", job)


def _environment() -> dict[str, str]:
    given = environment({}, here=True)
    return given if ALLOCATOR_BEFORE in given else dict([ALLOCATOR]) | given
