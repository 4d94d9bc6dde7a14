"""The parts that solve: overhead against memory, the ablation, memory at 10 %, and the recorded results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import remat
from experiments.monet import algorithms
from experiments.monet.cases import (
    ALGORITHMS,
    CONV,
    CPU,
    GIST,
    MILP,
    NO_WINOGRAD,
    NONE,
    OURS,
    PROGRAM,
    WINOGRAD,
    Case,
    Context,
    asked_budgets,
    budgets_of,
    graph_of,
    graph_run_of,
    joint_levels,
    published_graph,
    pytorch_trace,
    solve,
    solve_gist,
)
from experiments.monet.published import GIB, RECORDS, Network
from experiments.parts import instances_folder
from experiments.row import Row
from remat.errors import InvalidInput
from remat.files import read_json
from remat.frontends.monet import LEVELS, plain_pytorch
from remat.programs.monet import estimate_columns


def overhead(context: Context) -> dict[str, Any]:
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


def ablation(context: Context) -> dict[str, Any]:
    """A row for each network, level and method at the smallest budgets that default implementations can meet."""
    cases, scale = [], context.scale
    levels = tuple({LEVELS[-1]: NO_WINOGRAD}.get(level, level) for level in scale.levels)
    for network in context.networks:
        own = [level for level in levels if level != CONV or network.name in WINOGRAD]
        default = graph_of(context, network, NONE)
        least = default.largest_working_set()[0]  # below it the levels have no plans to compare
        for budget in sorted(b for b in budgets_of(context, network) if b >= least)[: scale.ablation_budgets]:
            for level in own:
                cases.append(Case(network.name, level, OURS, budget))
                if scale.all_budgets and estimate_columns(graph_of(context, network, level)) <= scale.monet_columns:
                    cases.append(Case(network.name, level, PROGRAM, budget))
    return {"rows": solve(context, cases), "levels": list(levels)}


SHARE = 0.10
WIDER = (NONE, CPU, NO_WINOGRAD)  # each contains every plan of those before it, at the same cost or less
NEAR = 1.01  # bisection stops when the ratio of the ends is below it


def ten_percent(context: Context) -> dict[str, Any]:
    """The smallest budget with a plan of at most 10 % over PyTorch's own step, by bisection: final brackets and rows.

    The lower end of a bracket is the largest budget without a plan found within the overhead, or the largest working
    set; the upper end is the smallest peak of a plan found. A search that finds no plan in time proves nothing.
    """
    caps = {n.name: int((1 + SHARE) * pytorch_trace(context, n).cost) for n in context.networks}
    brackets = {(n.name, level): _begin(context, n, level, caps[n.name]) for n in context.networks for level in WIDER}
    rows: list[dict[str, Any]] = []
    for _ in range(context.scale.halvings):
        _carry(brackets)
        cases = [
            Case(name, level, OURS, round((low * high) ** 0.5), cost_cap=caps[name])
            for (name, level), (low, high) in brackets.items() if high > NEAR * low
        ]  # fmt: skip
        rows += solve(context, cases)
        for case in cases:
            row = context.rows.get(case)
            if row is None:  # the command line leaves the portfolio out
                continue
            low, high = brackets[case.network, case.level]
            if _is_enough(row, caps[case.network]):
                high = min(high, row.peak_bytes or high)
            else:
                low = case.budget_bytes
            brackets[case.network, case.level] = low, max(low, high)
    _carry(brackets)
    found = [{"network": name, "level": level, "not_found_bytes": low, "found_bytes": high}
             for (name, level), (low, high) in brackets.items()]  # fmt: skip
    return {"overhead": SHARE, "found": found, "rows": rows}


def _carry(brackets: dict[tuple[str, str], tuple[int, int]]) -> None:
    """Narrow the brackets, because a plan with fewer implementations is also one with more."""
    for (name, level), (low, high) in brackets.items():
        least = min(brackets[name, inner][1] for inner in WIDER[: WIDER.index(level) + 1])
        brackets[name, level] = min(low, least), min(high, least)


def _begin(context: Context, network: Network, level: str, cap: int) -> tuple[int, int]:
    """The first bracket, from the rows of earlier parts."""
    graph = graph_of(context, network, level)
    plain = remat.Plan.from_order(graph, range(len(graph))) if level == NONE else plain_pytorch(graph)
    known = [(case, row) for case, row in context.rows.items() if (case.network, case.level) == (network.name, level)]
    peaks = [row.peak_bytes for _, row in known if _is_enough(row, cap) and row.peak_bytes is not None]
    high = min([remat.simulate(graph, plain).peak_bytes, *peaks])
    tried = {case.budget_bytes for case, _ in known if case.strategy == OURS and case.budget_bytes < high}
    return max([graph.largest_working_set()[0], *tried]), high


def _is_enough(row: Row, cap: int) -> bool:
    """Whether the row has a plan that costs at most `cap`."""
    return row.cost is not None and row.cost <= cap


STRATEGIES = (OURS, MILP, PROGRAM)
FIELDS = ("instance", "budget_bytes", "cost_ns", "bound_ns", "status", "solve_s", "t_within_5pct_s", "peer")


def records(context: Context) -> dict[str, Any]:
    """A row for each record and strategy; no rows without the published graphs."""
    records = _records(context)
    cases, kept = [], []
    for network in context.networks:
        if published_graph(context, network) is None:
            continue
        own = [r for r in records if network.instance == f"{r['instance']}.json"]
        solved = [r["budget_bytes"] for r in own if r["cost_ns"] is not None] or [0]
        if not context.scale.all_budgets or asked_budgets(context):
            budgets = {*budgets_of(context, network), *([] if asked_budgets(context) else [min(solved)])}
            own = [record for record in own if record["budget_bytes"] in budgets]
        for record in sorted(own, key=lambda r: r["budget_bytes"]):
            kept.append({"network": network.name, **record})
            cases += [Case(network.name, NONE, strategy, record["budget_bytes"]) for strategy in STRATEGIES]
    absent = "" if kept else why_absent(context)
    if absent:
        context.print(f"records: skipped, {absent}")
    return {"records": kept, "rows": solve(context, cases), "absent": absent}


def why_absent(context: Context) -> str:
    """Why there are no records for this run."""
    folder = instances_folder(context.settings)
    if folder is None:
        return "the published graphs are not at hand (give instances=FOLDER, or set REMAT_INSTANCES)"
    if not (folder / RECORDS).is_file():
        return f"{folder} has no {RECORDS}"
    return f"{folder} has no published graph of these networks for gpu={context.settings.gpu.name}"


def _records(context: Context) -> list[dict[str, Any]]:
    """The recorded results with their `FIELDS`; none without the file."""
    folder = instances_folder(context.settings)
    file = None if folder is None else folder / RECORDS
    if file is None or not file.is_file():
        return []
    try:
        return [{field: record[field] for field in FIELDS} for record in read_json(file)]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{file}: not a list of recorded results ({error!r})") from None
