"""Overhead against memory: Checkmate's problem, Gist, MONeT's program and the portfolio, beside plain training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from experiments.monet import algorithms
from experiments.monet.cases import (
    ALGORITHMS,
    GIST,
    MILP,
    NO_WINOGRAD,
    NONE,
    OURS,
    PROGRAM,
    Case,
    Context,
    budgets_of,
    graph_of,
    graph_run_of,
    joint_levels,
    pytorch_trace,
    solve,
    solve_gist,
)
from experiments.monet.published import GIB, Network
from remat.programs.monet import estimate_columns


def run(context: Context) -> dict[str, Any]:
    """A row for each network, budget and method; the tightest budgets first."""
    cases = []
    for network in context.networks:
        budgets = budgets_of(context, network)
        for budget in sorted(budgets):
            cases += [Case(network.name, NONE, name, budget) for name in (MILP, OURS)]
            cases += [Case(network.name, level, OURS, budget) for level in joint_levels(network)]
            small = estimate_columns(graph_of(context, network, NO_WINOGRAD)) <= context.scale.monet_columns
            if small or budget == budgets[0]:
                cases.append(Case(network.name, NO_WINOGRAD, PROGRAM, budget))
            if ALGORITHMS in joint_levels(network):
                cases.append(Case(network.name, ALGORITHMS, PROGRAM, budget))
    rows = [row for network in context.networks for row in solve_gist(context, network)]
    rows += solve(context, cases)
    return {"networks": [facts(context, network) for network in context.networks], "rows": rows}


def facts(context: Context, network: Network) -> dict[str, Any]:
    """The published numbers of a network, its sizes, and the simulated peak and cost of plain training."""
    graphs = {level: graph_of(context, network, level) for level in (NONE, *joint_levels(network), GIST)}
    graph = graphs[NO_WINOGRAD]
    trace = pytorch_trace(context, network)
    graph_run = graph_run_of(context, network, NONE)
    return {
        **asdict(network),
        "costs": graph_run.subject.cost_model,
        "operations": len(graph),
        "implementations": sum(len(op.implementations) for op in graph.operations),
        "logged": _logged(network, budgets_of(context, network)),
        "columns": {level: estimate_columns(graphs[level]) for level in (NONE, NO_WINOGRAD)},
        "fixed_bytes": graph.fixed_bytes,
        "total_cost": graph.total_cost,
        "default_peak_bytes": graph_run.store_all_peak_bytes,
        "pytorch_peak_bytes": trace.peak_bytes,
        "pytorch_cost": trace.cost,
        "budgets_bytes": list(budgets_of(context, network)),
        "graphs": {level: one.sha256() for level, one in graphs.items()},
    }


def _logged(network: Network, budgets: Sequence[int]) -> dict[str, Any]:
    """Ms of PyTorch's own step and, by budget in bytes, of the plans of MONeT's program, from its logs; {} without."""
    if network.name != algorithms.NETWORK:
        return {}
    known = {round(gib * GIB): logged.program_ms for gib, logged in algorithms.LOGGED.items()}
    return {"pytorch_ms": algorithms.pytorch_ms(), "program_ms": {str(b): known[b] for b in budgets if b in known}}
