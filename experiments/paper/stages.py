"""Frontier-advancing stages: the published MILP with and without them on the paper's chain of 8 layers."""

from __future__ import annotations

import json
import math
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.paper.graphs import Context, remember
from remat.child import command as child_command
from remat.child import environment
from remat.errors import RematError, shortened
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


def run(context: Context) -> dict[str, Any]:
    """Relaxation and MILP of both forms; A*, which is neither of them, gives the optimum."""
    graph, limit = unit_chain(LAYERS), context.scale.unpartitioned_s
    children: list[subprocess.Popen[str]] = []

    def solve(case: tuple[int, str]) -> dict[str, Any]:
        budget, form = case
        determines = {"part": "stages", "graph": graph.sha256(), "budget": budget, "form": form, "limit": limit}
        answer = remember(context, determines, lambda: _in_child(children, LAYERS, budget, form, limit))
        proven = "proven" if answer["proven"] else "not proven"
        context.print(f"budget {budget}, {form}: {proven}, {answer['seconds']:.2f} s")
        return answer

    cases = [(budget, form) for budget in BUDGETS for form in FORMS]
    with ThreadPoolExecutor(context.engine.at_once) as pool:
        try:
            answers = list(pool.map(solve, cases))
        except BaseException:  # the solver ignores Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.kill()
            raise
    rows = []
    for (budget, form), answer in zip(cases, answers, strict=True):
        optimum = {scope: exhaustive(graph, budget, scope).bound for scope in ("staged", "fixed_order")}
        rows.append({"budget": budget, "form": form, "optimum": optimum["staged"],
                     "optimum_fixed_order": optimum["fixed_order"], "total": graph.total_cost, "limit_s": limit / 2,
                     **answer})  # fmt: skip
    return {"rows": rows, "layers": LAYERS, "operations": len(graph)}


def _in_child(children: list[subprocess.Popen[str]], *case: object) -> dict[str, Any]:
    """`answer_of` in a process that can be killed."""
    command = child_command("experiments.paper.stages_worker", *map(str, case))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment({}))
    children.append(child)
    output, _ = child.communicate()
    if child.returncode:
        raise RematError(f"the unpartitioned MILP ended with exit code {child.returncode}: {shortened(output)}")
    return json.loads(output)


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


def answer_of(layers: int, budget: int, form: str, limit_s: float) -> dict[str, Any]:
    """The answer of `solve_published` for a chain, for JSON: None replaces numbers that are not finite."""
    answer = solve_published(unit_chain(layers), budget, frontier_advancing=FORMS[form], time_limit_s=limit_s)
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(answer).items()}
