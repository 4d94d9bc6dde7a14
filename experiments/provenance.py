"""The provenance of a row: commit, versions, machine."""

import json
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from remat.cost.profile import cpu_name

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = (
    "remat", "numpy", "scipy", "cvxpy", "highspy", "mosek", "gurobipy", "pyscipopt", "ortools",
    "torch", "transformers", "tensorflow", "tensorflow-cpu", "keras", "pandas", "pyarrow", "hydra-core",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Provenance:
    """The state of code and machine during a run; `versions` is a JSON object."""

    git_commit: str | None
    git_dirty: bool | None
    versions: str
    cpu: str


@cache
def provenance() -> Provenance:
    """The provenance of this process, read once. Commit and dirtiness are None outside a git checkout."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain")
    return Provenance(commit, None if changes is None else bool(changes), json.dumps(versions()), cpu_name())


def solver_build(solver: str | None) -> str:
    """A solver's name and version, e.g. ``highs 1.14.0``; '' without a solver."""
    if not solver:
        return ""
    package = {"highs": "highspy", "gurobi": "gurobipy", "scip": "pyscipopt"}.get(solver, solver)
    return f"{solver} {versions().get(package, 'of unknown version')}"


def versions() -> dict[str, str]:
    """Installed versions of Python and of the packages that can change a result; imports none of them."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
