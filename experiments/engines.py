"""The engines by name: local worker processes, a Ray cluster, or a SLURM job."""

from __future__ import annotations

import os

from experiments.arguments import one_of
from experiments.engine import ENGINES, Engine, LocalEngine
from experiments.ray_engine import RayEngine
from remat.cost.profile import cpu_count


def make_engine(name: str, jobs: int | None, threads: int = 1, address: str | None = None) -> Engine:
    """The engine of that name.

    Args:
        jobs: solves at once; None for as many as there are cores for.
        threads: of each solve.
        address: of a Ray cluster; see `experiments.ray_engine`.

    Raises:
        MissingPackage: Ray is not installed.
        UnknownName: there is no such engine.
    """
    if name == "ray":
        return RayEngine(jobs, threads, address)
    one_of("engine", name, ENGINES)
    return LocalEngine(jobs or max(1, _cores() // threads))  # slurm too: inside the SLURM job, solves are local


def _cores() -> int:
    """Cores that this process may use: a SLURM job may use only some of its node's."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isdigit():
        return int(given)
    return cpu_count()
