"""Frontier-advancing stages: the published MILP with and without them on the paper's chain of 8 layers."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from analysis.parts import DOCUMENT
from experiments.registry import Case, Row
from experiments.store import code_version
from remat.graph import Graph
from remat.programs.highs import solve_program
from remat.programs.published import build
from remat.search.exhaustive import exhaustive

LAYERS = 8
BUDGETS = (4, 3)  # the published one, and the smallest with a plan
FORMS = {"frontier-advancing": True, "unpartitioned": False}


def unit_chain(layers: int) -> Graph:
    """Layers, a loss and the layers' gradients, where every operation costs 1 and every value has 1 byte.

    A gradient reads its layer's output and the gradient before it. Of the chains tried, this one has the published
    integrality gaps. If a gradient also reads its layer's input, they are 31.51 and 1.73.
    """
    deps = [[k - 1] if k else [] for k in range(layers + 1)]
    deps += [[layers - 1 - k, layers + k] for k in range(layers)]
    return Graph.from_nodes(f"unit_chain_{layers}", deps, [1] * len(deps), [1] * len(deps))


def cases(limit_s: float) -> Iterator[Case]:
    """A case for each budget and form, in a process of its own: the solver ignores Ctrl-C."""
    for budget in BUDGETS:
        for form in FORMS:
            what = {"part": "stages", "layers": LAYERS, "budget": budget, "form": form, "limit_s": limit_s}
            yield Case(measure, what, [code_version(whole=True)], name=f"stages, budget {budget}, {form}")


def measure(layers: int, budget: int, form: str, limit_s: float, **_: Any) -> Iterator[Row]:
    """Relaxation and MILP of one form; A*, which is neither of the forms, gives the optimum."""
    graph = unit_chain(layers)
    found = solve_published(graph, budget, frontier_advancing=FORMS[form], time_limit_s=limit_s)
    optimum = {scope: exhaustive(graph, budget, scope).bound for scope in ("staged", "fixed_order")}
    row = {"budget": budget, "form": form, "optimum": optimum["staged"], "optimum_fixed_order": optimum["fixed_order"],
           "total": graph.total_cost, "limit_s": limit_s / 2, **found}  # fmt: skip
    yield {"kind": DOCUMENT, "document": row}


def merged(rows: Iterable[Row]) -> dict[str, Any]:
    """The document of the part, from the last row of each case."""
    found = {(row["budget"], row["form"]): row["document"] for row in rows}
    return {"rows": list(found.values()), "layers": LAYERS, "operations": 2 * LAYERS + 1}


def solve_published(
    graph: Graph, budget_bytes: int, *, frontier_advancing: bool, time_limit_s: float
) -> dict[str, Any]:  # fmt: skip
    """Solve the relaxation and the MILP of a form within the budget, each in at most half of the time.

    Returns:
        The size of the model (columns, rows); the value of the relaxation (lp), and cost and bound of the MILP, in the
        graph's cost unit, None where there is none; seconds of both; whether the MILP was solved to its optimum.
    """
    equations = build(graph, frontier_advancing=frontier_advancing)
    program = equations.program((budget_bytes - graph.fixed_bytes) // equations.unit_bytes)
    options = {"time_limit": time_limit_s / 2, "threads": 1}
    unit = equations.cost_unit / equations.cost_scale
    began = time.monotonic()
    relaxed = solve_program(replace(program, is_integer=None), options)
    lp_s = time.monotonic() - began
    began = time.monotonic()
    solved = solve_program(program, options)
    return {
        "columns": len(program.cost), "rows": len(program.row_lower),
        "lp": float(program.cost @ relaxed.x) * unit if relaxed.x is not None and relaxed.optimal else None,
        "lp_s": lp_s, "cost": None if solved.x is None else float(program.cost @ solved.x) * unit,
        "bound": solved.bound * unit if math.isfinite(solved.bound) else None, "seconds": time.monotonic() - began,
        "proven": solved.optimal,
    }  # fmt: skip
