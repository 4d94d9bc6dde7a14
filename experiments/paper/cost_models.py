"""The loss of a plan that is chosen under one cost model and judged by another: FLOPs, roofline, this CPU's costs."""

from __future__ import annotations

from typing import Any

from experiments.paper.graphs import Context, budgets_at, extracted
from experiments.paper.networks import Network
from remat.plan import Plan
from remat.simulator import simulate

NETWORKS = ("vgg16", "mobilenet", "unet", "resnet50", "vgg19")
# The cost models compared at the published batch, and at a batch at which a CPU can run every operation.
COSTS = {None: ("flops", "roofline"), 2: ("flops", "roofline", "profile")}
STEPS = (1, 3, 6)  # tenths of the way from the smallest budget to checkpoint-all's peak


def run(context: Context) -> dict[str, Any]:
    """Solve at a few budgets under each cost model, and judge every plan by the costs of the others."""
    rows, skipped = list[dict[str, Any]](), list[str]()
    for network in context.networks:
        if network.name in NETWORKS:
            for batch in COSTS:
                _compare(context, network, batch, rows, skipped)
    return {"rows": rows, "skipped": skipped}


def _compare(
    context: Context, network: Network, batch: int | None, rows: list[dict[str, Any]], skipped: list[str]
) -> None:
    """Add a row for each budget, model that chose and model that judges, and a line for each budget without a plan."""
    costs, plans, budgets = COSTS[batch], dict[tuple[str, int], Any](), list[int]()
    subjects = {cost: extracted(context, network, cost=cost, batch_size=batch) for cost in costs}
    for cost, subject in subjects.items():
        graph_run = context.graph_run(subject, "paper/cost_models", strategies=("portfolio",))
        budgets = budgets_at(graph_run, STEPS)
        for row in graph_run.run_budgets(["portfolio"], budgets)["portfolio"]:
            if row.cost is None:
                skipped.append(f"{network.label}, batch {subject.batch_size}, {cost} costs: {row.status} {row.message}")
            else:
                plans[cost, row.budget_bytes] = context.run.store.read_plan(row, subject.graph), row.gap
    for judge, subject in subjects.items():
        for step, budget in zip(STEPS, budgets, strict=True):
            found = {cost: plans[cost, budget] for cost in costs if (cost, budget) in plans}
            # The same computations in the same order, with the judge's costs.
            spent = {cost: simulate(subject.graph, Plan.from_order(subject.graph, plan.order.tolist())).cost
                     for cost, (plan, _) in found.items()}  # fmt: skip
            rows += [
                {"network": network.label, "batch": subject.batch_size, "step": step, "budget_bytes": budget,
                 "chosen_under": cost, "judged_by": judge, "cost": value, "best": min(spent.values()),
                 "gap": found[cost][1]} for cost, value in spent.items()
            ]  # fmt: skip
