"""What several test modules share: nothing here is a test."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remat.context import Context
from remat.graph import Graph
from remat.problem import Problem, SolveOptions
from remat.solving.dispatch import new_context


def context_of(graph: Graph, budget_bytes: int, *, seconds: float = 60.0, **more: Any) -> Context:
    """A solve that starts now; `more` are fields of the `Problem` or of the `SolveOptions`."""
    question = {name: more.pop(name) for name in ("scope", "accounting", "cost_cap") if name in more}
    return new_context(Problem(graph, budget_bytes, **question), SolveOptions(time_limit_s=seconds, **more))


def install_package(folder: Path, code: str, entry_points: str = "[remat.strategies]\nmine = my_package\n") -> None:
    """Leave in `folder` what pip leaves there: `my_package`, whose module `heuristics` holds `code`."""
    package = folder / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "heuristics.py").write_text(textwrap.dedent(code))
    metadata = folder / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)


def wait_for(condition: Callable[[], object], patience_s: float = 20.0, every_s: float = 0.02) -> float:
    """Seconds until `condition` holds; an AssertionError where it does not hold in time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patience_s, f"waited {patience_s} s in vain"
        time.sleep(every_s)
    return time.monotonic() - began
