"""Arguments of the wrong kind and extreme numbers: every public function says in one line what is wrong."""

# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import OF_ANY_KIND, rich_graph

import remat

GRAPH = remat.Graph.from_nodes("tiny", [[], [0], [1], [0, 2]], [2, 2, 3, 2], [1, 5, 1, 1], cost_unit="unit")
PLAN = remat.Plan.from_order(GRAPH, range(4))
BOUND = remat.BoundCertificate("tiny", GRAPH.sha256(), 8, remat.Scope.STAGED, 0, 1, {"edge": [[0, 0, 1, 1]]})


WRONG = (*OF_ANY_KIND, PLAN, GRAPH)
OPERATION = {
    "name": "a", "kind": "k", "inputs": (), "outputs": (0,), "cost": 1, "workspace_bytes": 0, "is_backward": False,
    "run_once": False, "work": None, "implementations": (),
}  # fmt: skip


def graph_of(operation: dict[str, Any] = OPERATION, value: dict[str, Any] | None = None) -> str:
    value = {"name": "v", "bytes": 1} if value is None else value
    return remat.Graph("g", (remat.Operation(**operation),), (remat.Value(**value),)).sha256()


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "load_graph": (remat.load_graph, {"path": "graph.json"}),
    "save_graph": (remat.save_graph, {"graph": GRAPH, "path": "out.json"}),
    "simulate": (remat.simulate, {"graph": GRAPH, "plan": PLAN}),
    "Graph.from_nodes": (remat.Graph.from_nodes, {
        "name": "g", "deps": [[], [0]], "bytes": [1, 2], "costs": [1, 2], "names": ["a", "b"], "kinds": ["a", "b"],
        "backward": [False, True], "workspace_bytes": [0, 1], "works": [None, None], "keep": [1], "fixed_bytes": 0,
        "cost_unit": "ns", "loss": 0, "source": "",
    }),
    "Graph": (remat.Graph, {
        "name": "g", "operations": (remat.Operation(**OPERATION),), "values": (remat.Value("v", 1),), "loss": 0,
        "fixed_bytes": 0, "cost_unit": "ns", "source": "",
    }),
    "Operation": (lambda **given: graph_of(given), OPERATION),
    "Value": (lambda **given: graph_of(value=given), {"name": "v", "bytes": 1, "keep": False}),
    "with_costs": (GRAPH.with_costs, {"costs": [1, 2, 3, 4], "cost_unit": "ns"}),
    "with_workspaces": (GRAPH.with_workspaces, {"sizes": [1, 2, 3, 4]}),
    "Plan.from_order": (remat.Plan.from_order, {
        "graph": GRAPH, "order": [0, 1, 2, 3], "budget_bytes": 9, "implementations": (),
    }),
    "Plan.from_steps": (remat.Plan.from_steps, {"graph": GRAPH, "steps": [(0, 0), (0, 1)], "budget_bytes": 9}),
    "Plan.from_matrices": (remat.Plan.from_matrices, {
        "graph": GRAPH, "R_TN": np.eye(4, dtype=bool), "S_TV": None, "budget_bytes": 9,
    }),
    "Plan.load": (remat.Plan.load, {"path": "plan.json", "graph": GRAPH}),
    "Plan.save": (PLAN.save, {"path": "out.json"}),
    "Plan.matrices": (PLAN.matrices, {"graph": GRAPH}),
    "solve": (remat.solve, {
        "graph": GRAPH, "budget": 8, "strategy": "chen_sqrtn", "scope": "staged", "accounting": "exact",
        "time_limit_s": 1.0, "seed": 0, "threads": 1, "work_limit": 5, "deterministic": False, "warm_start": None,
        "target_gap": 1e-4, "progress": None, "isolate": False,
    }),
    "solve_sweep": (remat.solve_sweep, {"graph": GRAPH, "budgets": [8], "strategy": "chen_sqrtn"}),
    "family": (remat.family, {
        "graph": GRAPH, "strategy": "checkpoint_all", "scope": "staged", "accounting": "exact", "time_limit_s": 1.0,
    }),
    "min_budget": (remat.min_budget, {"graph": GRAPH, "scope": "staged", "time_limit_s": 0.1}),
    "verify_bound": (remat.verify_bound, {"graph": GRAPH, "certificate": BOUND, "budget": 8, "scope": "staged"}),
    "BoundCertificate.load": (remat.BoundCertificate.load, {"path": "plan.json"}),
    "BoundCertificate.save": (BOUND.save, {"path": "out.json"}),
    "zoo.names": (remat.zoo.names, {"kind": "graph"}),
    "zoo.describe": (remat.zoo.describe, {"name": "x", "kind": "graph"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_argument_is_one_line(name: str, here: Path) -> None:
    remat.save_graph(GRAPH, "graph.json")
    PLAN.save("plan.json")
    function, good = FUNCTIONS[name]
    told = list[tuple[str, Any, str]]()
    for argument in good:
        for wrong in WRONG:
            try:
                function(**good | {argument: wrong})
            except remat.RematError as error:
                told.append((argument, wrong, str(error)))
            except OSError:
                assert argument == "path"  # the system's words, with the file
            except remat.Skip:
                pass
    assert len(told) > len(WRONG) / 2
    for argument, wrong, line in told:
        is_own_path = argument in ("path", "certificate") and isinstance(wrong, str)
        assert is_own_path or (line.isprintable() and len(line) < 2000), (argument, line)
    if name not in ("zoo.describe", "BoundCertificate.load", "verify_bound"):  # the others' arguments are right
        function(**good)


def test_what_has_no_meaning_is_refused() -> None:
    for keep in ([-1], [2], [0.0], ["0"]):
        with pytest.raises(remat.InvalidGraph, match=r"keep names value .*, but there are 2 nodes"):
            remat.Graph.from_nodes("g", [[], [0]], [1, 1], [1, 1], keep=keep)
    for seconds in (0, float("nan"), "3"):
        with pytest.raises(remat.InvalidInput, match="time limit must be a positive number of seconds"):
            remat.family(GRAPH, "checkpoint_all", time_limit_s=seconds)
    for isolate in ("yes", 1, []):
        with pytest.raises(remat.InvalidInput, match="isolate must be True, False or None"):
            remat.solve(GRAPH, 8, "checkpoint_all", isolate=isolate)
    for budget in (-1, "5GiB", True):
        with pytest.raises(remat.InvalidPlan, match="budget_bytes must be a number of bytes or None"):
            remat.Plan.from_order(GRAPH, range(4), budget)
    with pytest.raises(remat.InvalidPlan, match=r"step 1: not a .* pair: \(0, 1\.5\)"):
        remat.Plan.from_steps(GRAPH, [(0, 0), (0, 1.5)])


def test_the_steps_of_a_plan_are_steps_of_a_plan() -> None:
    """`Plan.steps` has names, and implementations where there are some."""
    again = remat.Plan.from_steps(GRAPH, PLAN.steps, 9)
    assert (again.steps, again.scope, again.budget_bytes) == (PLAN.steps, PLAN.scope, 9)
    graph = rich_graph()
    plan = remat.Plan.from_order(graph, [0], implementations=["fast"])
    assert plan.steps[0] == ("compute", 0, "fast")
    assert remat.Plan.from_steps(graph, plan.steps).steps == plan.steps


def test_numpys_numbers_are_numbers() -> None:
    plan = remat.Plan.from_order(GRAPH, np.arange(4), np.int64(9))
    assert (plan.steps, type(plan.budget_bytes)) == (PLAN.steps, int)
