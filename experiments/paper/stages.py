"""Frontier-advancing stages: the published MILP with and without them on the paper's chain of 8 layers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
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
    answer = solve_published(graph, budget, frontier_advancing=FORMS[form], time_limit_s=limit_s)
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(answer).items()}
    optimum = {scope: exhaustive(graph, budget, scope).bound for scope in ("staged", "fixed_order")}
    row = {"budget": budget, "form": form, "optimum": optimum["staged"], "optimum_fixed_order": optimum["fixed_order"],
           "total": graph.total_cost, "limit_s": limit_s / 2, **finite}  # fmt: skip
    yield {"kind": DOCUMENT, "document": row}


def merged(rows: Iterable[Row]) -> dict[str, Any]:
    """The document of the part, from the last row of each case."""
    found = {(row["budget"], row["form"]): row["document"] for row in rows}
    return {"rows": list(found.values()), "layers": LAYERS, "operations": 2 * LAYERS + 1}


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of one form of the MILP within its time.

    Attributes:
        columns, rows: of the model.
        lp: value of the relaxation, in the graph's cost unit; None if it was not solved.
        cost, bound: of the MILP; None if there is none.
        proven: whether the MILP was solved to its optimum.
    """

    columns: int
    rows: int
    lp: float | None
    lp_s: float
    cost: float | None
    bound: float | None
    seconds: float
    proven: bool


def solve_published(graph: Graph, budget_bytes: int, *, frontier_advancing: bool, time_limit_s: float) -> Answer:
    """Solve the relaxation and the MILP of `graph` within the budget, each in at most half of the time."""
    equations = build(graph, frontier_advancing=frontier_advancing)
    program = equations.program((budget_bytes - graph.fixed_bytes) // equations.unit_bytes)
    options = {"time_limit": time_limit_s / 2, "threads": 1}
    unit = equations.cost_unit / equations.cost_scale
    began = time.monotonic()
    relaxed = solve_program(replace(program, is_integer=None), options)
    lp_s = time.monotonic() - began
    began = time.monotonic()
    solved = solve_program(program, options)
    seconds = time.monotonic() - began
    return Answer(
        len(program.cost), len(program.row_lower),
        float(program.cost @ relaxed.x) * unit if relaxed.x is not None and relaxed.optimal else None, lp_s,
        None if solved.x is None else float(program.cost @ solved.x) * unit, solved.bound * unit, seconds,
        solved.optimal,
    )  # fmt: skip
