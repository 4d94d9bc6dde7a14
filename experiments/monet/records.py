"""Checkpointing only, on the published graphs with their P100 costs: our solvers beside the recorded ones."""

from __future__ import annotations

from typing import Any

from experiments.monet.desk import NONE, Case, Desk
from experiments.monet.published import RECORDS
from remat.errors import InvalidInput
from remat.files import read_json

STRATEGIES = ("portfolio", "checkmate_milp", "monet")
FIELDS = ("instance", "budget_bytes", "cost_ns", "bound_ns", "status", "solve_s", "t_within_5pct_s", "peer")


def run(desk: Desk) -> dict[str, Any]:
    """A row for each record and strategy; none without the published graphs."""
    records = _records(desk)
    cases, kept = [], []
    for network in desk.networks:
        if desk.published_graph(network) is None or network.instance is None:
            continue
        own = [r for r in records if network.instance == f"{r['instance']}.json"]
        solved = [r["budget_bytes"] for r in own if r["cost_ns"] is not None] or [0]
        if not desk.scale.all_budgets or desk.asked_bytes:
            budgets = {*desk.budgets(network), *([] if desk.asked_bytes else [min(solved)])}
            own = [record for record in own if record["budget_bytes"] in budgets]
        for record in sorted(own, key=lambda r: r["budget_bytes"]):
            kept.append({"network": network.name, **{field: record[field] for field in FIELDS}})
            cases += [Case(network.name, NONE, strategy, record["budget_bytes"]) for strategy in STRATEGIES]
    if not kept:
        desk.say(f"records: skipped, {why_absent(desk)}")
    return {"records": kept, "rows": desk.solve(cases), "absent": "" if kept else why_absent(desk)}


def why_absent(desk: Desk) -> str:
    """Why there is nothing to compare with."""
    if desk.instances is None:
        return "the published graphs are not at hand (instances=FOLDER, or the variable REMAT_INSTANCES)"
    if not (desk.instances / RECORDS).is_file():
        return f"{desk.instances} has no {RECORDS}"
    return f"{desk.instances} has no published graph of these networks for gpu={desk.settings.gpu.name}"


def _records(desk: Desk) -> list[dict[str, Any]]:
    file = None if desk.instances is None else desk.instances / RECORDS
    if file is None or not file.is_file():
        return []
    try:
        found = read_json(file)
        return [{field: record[field] for field in FIELDS} for record in found]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{file}: not a list of recorded results ({error!r})") from None
