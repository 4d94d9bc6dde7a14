"""What is said of the cache of compiled code is what Numba does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from helpers import run_python

SOURCE = """
from numba import njit

@njit(cache=True)
def triple(x):
    return 3 * x
"""
ASK = """
from small import triple
from remat.compiled import is_compiled

said = is_compiled(triple)
triple(2)
print(said, sum(triple.stats.cache_hits.values()) > 0, is_compiled(triple))
"""


def ask(folder: Path, **more: str) -> list[str]:
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return run_python(ASK, PYTHONPATH=path, NUMBA_CACHE_DIR=str(folder / "cache"), **more).split()


def test_said_is_what_numba_does(tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text(SOURCE)
    assert ask(tmp_path) == ["False", "False", "True"]
    assert ask(tmp_path) == ["True", "True", "True"]
    assert ask(tmp_path, NUMBA_CPU_NAME="generic") == ["False", "False", "True"]  # the cache is of another processor
    later = file.stat().st_mtime + 1000
    os.utime(file, (later, later))  # as after a checkout: which Numba compiles again depends on its version
    said, loaded, _ = ask(tmp_path)
    assert said == loaded
    file.write_text(SOURCE.replace("3", "5"))
    assert ask(tmp_path) == ["False", "False", "True"]
