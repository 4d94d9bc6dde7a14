"""Whether the compiled code of the search is ready, and a process that compiles it.

Compiling takes 1 to 4 minutes, and nothing can interrupt it. No solve compiles the search in its
own process: a child does, and hands the code over in Numba's cache on disk. Meanwhile the solve does what needs no
search. A child that is not done at the time limit goes on for the next solve, and ends with this process.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable

from remat import child
from remat.compiled import is_compiled
from remat.search import joint, kernel, offload, online, sequence
from remat.search.ordering import kernel as ordering

COLD_START_S = 40.0  # with less time nothing is compiled
POLL_S = 0.1  # seconds between two looks at the child

_lock = threading.Lock()
_running: subprocess.Popen[bytes] | None = None
_was_ready = False


def is_ready() -> bool:
    """Whether everything that ``python -m remat.search`` compiles is compiled, in this process or in the cache."""
    global _was_ready
    if not _was_ready:
        _was_ready = all(map(is_compiled, (kernel.anneal, online.evict_online, sequence.anneal, ordering.anneal)))
    return _was_ready


def is_joint_ready() -> bool:
    """Whether the search for storage and implementations together is compiled; the child compiles it last."""
    return is_compiled(joint.anneal)


def is_offload_ready() -> bool:
    """Whether the search for repeats and copies together is compiled."""
    return is_compiled(offload.anneal)


def begin_compiling(seconds: float, *, too: Callable[[], bool] = is_ready) -> Callable[[], bool]:
    """Let a child compile the search, unless it is ready; with fewer seconds than `COLD_START_S` none is started.

    Args:
        too: what must be ready besides, e.g. `is_joint_ready`.

    Returns:
        A function that tells cheaply whether the search became ready since; False for ever where no child runs.
    """
    process = None if is_ready() and too() else _child(seconds)
    return lambda: process is not None and process.poll() == 0


def ready_by(deadline: float, *, too: Callable[[], bool] = is_ready) -> bool:
    """Whether the search is ready; waits for a child that compiles it until the `deadline` (`time.monotonic`)."""
    if is_ready() and too():
        return True
    process = _child(deadline - time.monotonic())
    while process is not None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return process is not None and is_ready() and too()


def _child(seconds: float) -> subprocess.Popen[bytes] | None:
    """The child of this process that compiles; a new one if none runs and there are `COLD_START_S` seconds."""
    global _running
    with _lock:
        if _running is not None and _running.poll() is not None:
            _running = None
        if _running is None and seconds >= COLD_START_S:
            nowhere, command = subprocess.DEVNULL, child.command("remat.search")
            with contextlib.suppress(OSError):  # e.g. no memory for a process: then the solve does without
                _running = subprocess.Popen(
                    command, stdin=nowhere, stdout=nowhere, stderr=nowhere, env=child.environment({})
                )
        return _running
