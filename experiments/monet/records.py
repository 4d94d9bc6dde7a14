"""Checkpointing only, on the published graphs with their P100 costs: our solvers beside the recorded ones."""

from __future__ import annotations

from typing import Any

from experiments.monet.cases import (
    MILP,
    NONE,
    OURS,
    PROGRAM,
    Case,
    Context,
    asked_budgets,
    budgets_of,
    published_graph,
    solve,
)
from experiments.monet.published import RECORDS
from experiments.parts import instances_folder
from remat.errors import InvalidInput
from remat.files import read_json

STRATEGIES = (OURS, MILP, PROGRAM)
FIELDS = ("instance", "budget_bytes", "cost_ns", "bound_ns", "status", "solve_s", "t_within_5pct_s", "peer")


def run(context: Context) -> dict[str, Any]:
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
