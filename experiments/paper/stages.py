"""Frontier-advancing stages: the published MILP with and without them on the paper's chain of 8 layers."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from experiments.paper.lab import Lab
from experiments.paper.unpartitioned import solve_published
from remat.exhaustive import exhaustive
from remat.frontends import synthetic
from remat.graph import Graph

LAYERS = 8
FORMS = {"frontier-advancing": True, "unpartitioned": False}


def unit_chain(layers: int) -> Graph:
    """A chain with its backward pass, where every operation costs 1 and every value has 1 byte."""
    graph = synthetic.chain(n=layers)
    deps = [sorted({graph.producer[v] for v in op.inputs}) for op in graph.operations]
    return Graph.from_nodes(f"unit_chain_{layers}", deps, [1] * len(deps), [1] * len(deps))


def run(lab: Lab) -> dict[str, Any]:
    """Relaxation and MILP of both forms; the optimum itself by A*, which is neither of them."""
    graph, limit = unit_chain(LAYERS), lab.scale.unpartitioned_s
    least = next(b for b in range(1, len(graph)) if exhaustive(graph, b).plan is not None)

    def solve(case: tuple[int, str]) -> dict[str, Any]:
        budget, form = case
        determines = {"part": "stages", "graph": graph.sha256(), "budget": budget, "form": form, "limit": limit}
        answer = lab.remember(determines, lambda: asdict(
            solve_published(graph, budget, frontier_advancing=FORMS[form], time_limit_s=limit)
        ))  # fmt: skip
        lab.say(f"budget {budget}, {form}: {'proven' if answer['proven'] else 'not proven'}, {answer['seconds']:.2f} s")
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in answer.items()}

    cases = [(budget, form) for budget in (least, least + 1) for form in FORMS]
    with ThreadPoolExecutor(lab.engine.at_once) as pool:  # the solver runs outside Python's lock
        answers = list(pool.map(solve, cases))
    rows = []
    for (budget, form), answer in zip(cases, answers, strict=True):
        optimum = {scope: exhaustive(graph, budget, scope).bound for scope in ("staged", "fixed_order")}
        rows.append({"budget": budget, "form": form, "optimum": optimum["staged"],
                     "optimum_fixed_order": optimum["fixed_order"], "total": graph.total_cost, "limit_s": limit / 2,
                     **answer})  # fmt: skip
    return {"rows": rows, "layers": LAYERS, "operations": len(graph)}
