"""Processes of our own that end when the process which started them does, however it ends.

The parent runs `command`. That starts this very file, before any package is imported: it asks the kernel (Linux) to
kill this process with its parent, or else watches for the parent's end in a thread, and then becomes
``python -m MODULE``. On Linux a solver that never returns to Python ends too.
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

WATCH_S = 0.2  # how soon a child notices where the kernel does not tell it
_PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: str) -> list[str]:
    """The command line of ``python -m module arguments``, as a process that ends with this one."""
    # -P: a file of this folder, or of the current one, must not shadow a module of the child.
    return [sys.executable, "-P", os.path.abspath(__file__), str(os.getpid()), module, *arguments]


def environment(changes: Mapping[str, str], *, here: bool = False) -> dict[str, str]:
    """The environment for `command`: modules are found where this process finds them.

    Args:
        here: and before that in the current folder, where a user's own modules are.
    """
    folders = [*([os.getcwd()] if here else []), *map(os.path.abspath, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders)), **changes}


def end_with_parent(parent: int) -> None:
    """Let this process end when `parent`, the process that started it, does."""
    kernel_ends_us = sys.platform == "linux" and _kernel_kills_us_too()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)
    if kernel_ends_us:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _kernel_kills_us_too() -> bool:
    # The kernel means the thread that started us, not its process. Each of our threads waits for what it started.
    try:
        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0
    except (OSError, AttributeError):  # a C library without it
        return False


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
