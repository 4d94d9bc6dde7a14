"""Child processes that end when the process that started them ends, for any reason.

The parent runs `command`, which starts this file before any package is imported. On Linux this file asks the kernel to
kill the child with its parent; elsewhere a thread watches for the parent's end. Then it runs ``python -m MODULE``. On
Linux even a solver that never returns to Python ends.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO

from remat.errors import shortened

WATCH_S = 0.2  # seconds between two looks at the parent, where the kernel does not kill the child
_PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: str) -> list[str]:
    """The command line of ``python -m module arguments``, as a process that ends with this one."""
    # -P: no file of this folder or of the current folder may shadow a module of the child.
    return [sys.executable, "-P", os.path.abspath(__file__), str(os.getpid()), module, *arguments]


def environment(changes: Mapping[str, str], *, here: bool = False) -> dict[str, str]:
    """The environment for `command`: the child finds modules where this process finds them.

    Args:
        here: look first in the current folder, where a user's own modules are.
    """
    folders = [*([os.getcwd()] if here else []), *map(os.path.abspath, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders)), **changes}


def last_line(errors: IO[bytes]) -> str:
    """The last line of a child's standard error, at most 300 characters; '' if it wrote nothing."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return shortened(lines[-1], 300) if lines else ""


def end_with_parent(parent: int) -> None:
    """End this process when `parent`, the process that started it, ends."""
    kernel_ends_us = sys.platform == "linux" and _kernel_kills_us_too()
    if os.getppid() != parent:  # the parent ended before the kernel was asked
        os._exit(1)
    if kernel_ends_us:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _kernel_kills_us_too() -> bool:
    # The kernel watches the thread that started this process. That is enough: a thread of ours waits for its children.
    try:
        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0
    except (OSError, AttributeError):  # a C library without it
        return False


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
