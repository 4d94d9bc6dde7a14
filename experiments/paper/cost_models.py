"""The loss of a plan that is chosen under one cost model and judged by another: FLOPs, roofline, this CPU's costs."""

from __future__ import annotations

from typing import Any

from experiments.paper.graphs import Context, budgets_at, extracted
from remat.plan import Plan
from remat.simulator import simulate

COSTS = ("flops", "roofline", "profile")
NETWORKS = ("vgg16", "mobilenet")
BATCH = 2  # of both, because a CPU has to run it
STEPS = (1, 3, 6)  # tenths of the way from the smallest budget to checkpoint-all's peak


def run(context: Context) -> dict[str, Any]:
    """Solve at a few budgets under each cost model, and judge every plan by the costs of the others."""
    rows, skipped = [], []
    for network in context.networks:
        if network.name not in NETWORKS:
            continue
        subjects = {cost: extracted(context, network, cost=cost, batch_size=BATCH) for cost in COSTS}
        plans: dict[tuple[str, int], Any] = {}
        budgets: list[int] = []
        for cost, subject in subjects.items():
            graph_run = context.graph_run(subject, "paper/cost_models", strategies=("portfolio",))
            budgets = budgets_at(graph_run, STEPS)
            for row in graph_run.run_budgets(["portfolio"], budgets)["portfolio"]:
                if row.cost is None:
                    skipped.append(f"{network.label}, {cost} costs: {row.status} {row.message}")
                else:
                    plans[cost, row.budget_bytes] = context.store.read_plan(row, subject.graph), row.gap
        for judge, subject in subjects.items():
            for step, budget in zip(STEPS, budgets, strict=True):
                found = {cost: plans[cost, budget] for cost in COSTS if (cost, budget) in plans}
                # The same computations in the same order, with the judge's costs.
                spent = {cost: simulate(subject.graph, Plan.from_order(subject.graph, plan.order.tolist())).cost
                         for cost, (plan, _) in found.items()}  # fmt: skip
                for cost, value in spent.items():
                    rows.append({
                        "network": network.label, "step": step, "budget_bytes": budget, "chosen_under": cost,
                        "judged_by": judge, "cost": value, "best": min(spent.values()), "gap": found[cost][1],
                    })  # fmt: skip
    return {"rows": rows, "skipped": skipped, "batch": BATCH, "costs": COSTS}
