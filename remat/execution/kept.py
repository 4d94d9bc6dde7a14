"""Plans that were searched, kept beside the measurements, so that a later process need not search again.

A file's name is a hash of all that the search read: the graph with its costs and workspaces, the budget, the options,
and the version of the strategy. Whatever a file holds, the simulator judges its plan before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remat.cost.records import write_record
from remat.errors import DiskFull, InvalidInput, InvalidPlan, warn
from remat.files import digest_of, read_json, unsealed
from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.registry import get_strategy
from remat.simulator import Trace, simulate

FORMAT = "remat-kept-plan/1"


def path_of(folder: Path, graph: Graph, budget_bytes: int, strategy: str, options: Mapping[str, Any]) -> Path:
    """The file of a search's plan.

    Args:
        options: of the search that may change its plan; JSON-ready.
    """
    asked = [FORMAT, graph.sha256(), budget_bytes, strategy, get_strategy(strategy).version, dict(options)]
    return folder / f"{digest_of(asked)[:40]}.plan.json"


def kept_plan(path: Path, graph: Graph, budget_bytes: int, scope: Scope) -> tuple[Plan, Trace] | None:
    """The plan of a file, simulated; None if there is no file, or it holds no plan within budget and scope."""
    try:
        if not path.exists():
            return None
        document = unsealed(read_json(path), path)
        plan = Plan.from_document(document.get("plan", {}), graph, str(path))
    except OSError:  # no permission to read the folder
        return None
    except (InvalidInput, InvalidPlan) as error:
        warn(f"{error}; searching again")
        return None
    trace = simulate(graph, plan)
    fits = trace.peak_bytes <= budget_bytes and scope.contains(plan.scope)
    return (plan, trace) if fits and document.get("graph_sha256") == graph.sha256() else None


def keep_plan(path: Path, graph: Graph, plan: Plan) -> None:
    """Write the file of a plan."""
    keep(path, {"format": FORMAT, "graph_sha256": graph.sha256(), "plan": plan.document()}, "plan")


def keep(path: Path, document: Mapping[str, Any], what: str) -> None:
    """Write a sealed file; a folder that takes none is named in a warning, and the next process works again."""
    try:
        write_record(path, document)
    except (OSError, DiskFull, InvalidInput) as error:
        warn(f"{path}: the {what} is not kept for later processes: {error}")
