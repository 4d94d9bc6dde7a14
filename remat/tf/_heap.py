"""Memory measured in fresh child processes whose heap is counted (by `_heap.c`, which is compiled once).

On a CPU TensorFlow allocates through the C library, once its oneDNN pool uses that too. A child inherits the
environment, so that it runs the same kernels as this process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remat import child
from remat.errors import MissingPackage, RematError, shortened
from remat.execution import default_cache
from remat.files import replacing, write_text

_SOURCE = Path(__file__).with_name("_heap.c")


def can_measure() -> str:
    """'' if memory can be measured here, else the reason why not."""
    if not sys.platform.startswith("linux"):
        return "memory is measured on Linux only"
    return "" if _compiler() else "there is no C compiler (cc, gcc or clang)"


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "cc", "gcc", "clang"))), None)


def heap_library() -> Path:
    """The counting library, compiled on first use.

    Raises:
        MissingPackage: no C compiler.
    """
    missing = can_measure()
    if missing:
        raise MissingPackage(f"remat.tf measures the memory of kernels, but {missing}; install gcc")
    library = default_cache() / f"heap_{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if library.is_file():
        return library
    with replacing(library) as scratch:
        command = [str(_compiler()), "-O2", "-shared", "-fPIC", "-o", str(scratch), str(_SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RematError(f"{command[0]} could not compile the heap counter: {shortened(done.stderr, 300)}")
    return library


def why_it_failed(done: subprocess.CompletedProcess[str]) -> str:
    """How a child process ended, and the last line that it wrote to stderr."""
    how = f"killed by {_signal_name(-done.returncode)}" if done.returncode < 0 else f"code {done.returncode}"
    lines = done.stderr.strip().splitlines()
    return f"{how}: {shortened(lines[-1], 300)}" if lines else f"{how}, without a message"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def run_child(job: Mapping[str, Any], counted: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``remat.tf._measure`` on a job (see there) and return its output, whatever the exit code.

    Args:
        counted: run under the heap counter. Times need a child without it, which has the user's allocators.
    """
    counting = {
        "LD_PRELOAD": " ".join(filter(None, (str(heap_library()), os.environ.get("LD_PRELOAD")))),
        "REMAT_HEAP": str(heap_library()),
        "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
    } if counted else {}  # fmt: skip
    environment = child.environment(counting | {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "KERAS_BACKEND": "tensorflow",
    })  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="remat-measure-") as folder:
        path = Path(folder, "job.json")
        write_text(path, json.dumps(job))
        return subprocess.run(
            child.command("remat.tf._measure", str(path)), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", check=False, env=environment,
        )  # fmt: skip
