"""Run the tests of PyTorch with another version of it, for `make test-torch`. Uses only the standard library.

The version and the project's other pins are installed into a temporary environment, which is deleted at the end, also
after Ctrl-C. PyPI's builds for Linux contain CUDA: about 3 GB to download and 6 GB on the disk. PIP_ARGS passes more
arguments to pip, e.g. an index with CPU builds.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("numpy", "scipy", "numba", "highspy", "ortools", "transformers", "pytest", "pytest-xdist", "hypothesis")
NEEDED_BYTES = 12 * 10**9  # includes pip's downloads, which are on the disk during the installation
TESTS = tuple(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/test_torch_*.py")))


def main() -> int:
    """Run the tests; returns the exit status of pytest, or 1 if pytest could not run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", help="of PyTorch, e.g. 2.15.0")
    parser.add_argument(
        "pytest", nargs=argparse.REMAINDER, help="arguments of pytest; without tests/... all tests of PyTorch run"
    )
    given = parser.parse_args()
    if not re.fullmatch(r"\d+\.\d+\.\d+\S*", given.version):
        return fail(
            f"the version of PyTorch must look like 2.15.0, not {given.version!r}: make test-torch TORCH=2.15.0"
        )
    names_tests = any(argument.startswith("tests/") for argument in given.pytest)
    where = tempfile.gettempdir()
    free = shutil.disk_usage(where).free
    if free < NEEDED_BYTES:
        return fail(f"{where} has {free / 1e9:.0f} GB free, {NEEDED_BYTES / 1e9:.0f} are needed; set TMPDIR")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as after Ctrl-C, the environment is deleted
    folder = Path(tempfile.mkdtemp(prefix=f"remat-torch-{given.version}-"))
    try:
        return tested(given.version, folder, [*given.pytest, *(() if names_tests else TESTS)])
    except KeyboardInterrupt:
        return fail("stopped")
    finally:
        delete(folder)


def tested(version: str, folder: Path, tests: list[str]) -> int:
    """Install the version into `folder` and run the tests; returns an exit status."""
    started = time.monotonic()
    print(f"Installing PyTorch {version} into {folder} ...", flush=True)
    code = install(version, folder)
    if code:
        return fail(f"PyTorch {version} could not be installed (exit {code}); see the message above")
    print(f"Installed after {time.monotonic() - started:.0f} s. Running the tests ...", flush=True)
    cache = {"REMAT_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [str(python_of(folder)), "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", *tests]
    code = run(command, os.environ | cache)
    verdict = "passed" if not code else f"failed (exit {code})"
    print(f"PyTorch {version}: tests {verdict} after {time.monotonic() - started:.0f} s.", flush=True)
    return code


def install(version: str, folder: Path) -> int:
    """Make the environment with that PyTorch, the project's other pins and the checkout; returns an exit status."""
    constraints = folder / "constraints.txt"
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")) + "\n", encoding="utf-8")
    code = run([sys.executable, "-m", "venv", str(folder / "venv")])
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    pip = [str(python_of(folder)), "-m", "pip", "install", "--quiet", "--no-cache-dir", *extra]
    for wanted in (
        ["--constraint", str(constraints), f"torch=={version}", *PACKAGES],
        ["--no-deps", "--editable", str(ROOT), "--editable", str(ROOT / "baselines")],
    ):
        code = code or run([*pip, *wanted])
    return code


def run(command: list[str], env: Mapping[str, str] | None = None) -> int:
    """Run a command; returns its exit status. Ctrl-C also ends its children, so that they write nothing more."""
    child = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        return child.wait()
    except KeyboardInterrupt:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise


def delete(folder: Path) -> None:
    """Delete the environment; the second attempt is for files that a killed child still finished."""
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(1)
    if folder.exists():
        shutil.rmtree(folder)
    print(f"Deleted {folder}.", flush=True)


def python_of(folder: Path) -> Path:
    return folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def fail(message: str) -> int:
    print(f"test-torch: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
