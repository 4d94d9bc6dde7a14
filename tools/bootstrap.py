"""Make ./.venv with the pinned versions, for `make setup`. Uses only the standard library.

Runs again only when requirements.txt or a pyproject.toml changes; the next run continues an interrupted one. PIP_ARGS
passes more arguments to pip, e.g. an index with the CPU build of torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / ".remat-ready"
OLDEST, NEWEST = (3, 11), (3, 13)
# Sum of the wheels on Linux x86_64, Python 3.11, where PyPI's torch is the CUDA build.
DOWNLOAD = "about 1.1 GB with the CPU build of torch, about 4 GB with PyPI's default (CUDA) build on Linux"


def main() -> int:
    """Create or complete the environment; returns an exit status."""
    wanted = fingerprint()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        return fail(
            f"Python 3.11 to 3.13 is needed, this is {platform.python_version()}; "
            "choose one with: make setup PYTHON=python3.12"
        )
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return fail(
            f"this Python has no ensurepip; install it with: sudo apt install python{version}-venv (Debian, Ubuntu)"
        )
    print(f"Setting up {VENV} with Python {platform.python_version()} (once).")
    print(f"This downloads {DOWNLOAD}; it needs about 5 GB of disk (10 GB with CUDA).", flush=True)
    start = time.monotonic()
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    has_pip = [str(python), "-m", "pip", "--version"]
    if not python.exists() or subprocess.call(has_pip, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        # --clear: an interrupted first run may have left an environment without pip.
        code = run([sys.executable, "-m", "venv", "--clear", str(VENV)])
        if code:
            return fail(f"python -m venv failed (exit {code}); see the message above")
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    quiet = [] if sys.stdout.isatty() else ["--quiet"]  # progress bars only on a terminal
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *quiet, *extra]
    pinned = str(ROOT / "requirements.txt")
    if install(pip, "remat itself", "-c", pinned, "--editable", str(ROOT), "--editable", str(ROOT / "baselines")):
        return 1
    compile_search = [str(python), "-m", "remat.search"]
    compiling = begin(compile_search)  # pip uses one core
    if install(pip, "the pinned packages", "-r", pinned):
        compiling.terminate()
        return 1
    print("Compiling the search ...", flush=True)
    code = compiling.wait() and run(compile_search)  # a half-installed package may have made it fail
    if code:
        return fail(f"the search could not be compiled (exit {code}); see the message above")
    STAMP.write_text(wanted)
    print(f"Ready after {time.monotonic() - start:.0f} s.", flush=True)
    return 0


def install(pip: list[str], what: str, *arguments: str) -> int:
    """pip's exit status, after a message where it failed."""
    print(f"Installing {what} ...", flush=True)
    code = run([*pip, *arguments])
    if code:
        fail(f"pip could not install {what} (exit {code}); fix the cause above and run make again")
    return code


def fingerprint() -> str:
    """A hash of the files that determine the environment; when it changes, the environment is made again."""
    files = (ROOT / "requirements.txt", ROOT / "pyproject.toml", ROOT / "baselines" / "pyproject.toml")
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def begin(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)


def run(command: list[str]) -> int:
    return subprocess.call(command)


def fail(message: str) -> int:
    print(f"setup: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
