"""Claims that stored plans refute, across runs and scopes."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.results import WITH_PLAN, Frame
from remat.plan import Scope
from remat.units import format_size


def contradictions(rows: Frame) -> list[str]:
    """A line for each bound above the cost of a plan that fits, and each INFEASIBLE where a plan fits.

    A claim at a budget is about every plan whose peak is within it, whichever run (column ``run``, if there is one)
    and strategy found the plan, and about the plans of narrower scopes too. Accountings are never mixed.
    """
    lines = []
    for _, group in rows.groupby(["graph_sha256", "accounting"], sort=False):
        claims = group[(group["status"] == "INFEASIBLE") | group["bound"].notna()]
        plans = group[group["status"].isin(WITH_PLAN) & group["cost"].notna()].sort_values("cost", kind="stable")
        plans = list(plans.itertuples())
        for claim in claims.itertuples():
            about = Scope(claim.scope)
            plan = next(
                (p for p in plans if p.peak_bytes <= claim.budget_bytes and about.contains(Scope(p.scope))), None
            )
            if plan is None:
                continue
            if claim.status == "INFEASIBLE":
                what = "that no plan fits"
            elif not pd.isna(claim.bound) and claim.bound > plan.cost:
                what = f"the bound {claim.bound:,}"
            else:
                continue
            lines.append(
                f"{_who(claim)} claims {what} at {format_size(int(claim.budget_bytes))} ({claim.scope}, "
                f"{claim.graph_name}), but a plan of {_who(plan)} fits and costs {plan.cost:,}"
            )
    return list(dict.fromkeys(lines))


def _who(row: Any) -> str:
    run = getattr(row, "run", "")
    return f"{run}: {row.strategy}" if run else str(row.strategy)
