"""Claims that a plan refutes, across strategies, runs and scopes."""

from collections.abc import Iterable
from typing import Any

from remat.plan import Scope
from remat.units import format_size


def contradictions(rows: Iterable[Any]) -> list[str]:
    """A line for each bound above the cost of a plan that fits, and for each INFEASIBLE where a plan fits.

    A claim at a budget covers every plan with a peak within it, in its scope and in narrower ones. Any strategy
    may have found that plan. Accountings are never mixed.

    Args:
        rows: objects with the store's columns as attributes; an absent value is None.
    """
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((row.graph_sha256, row.accounting), []).append(row)
    lines = list[str]()
    for group in groups.values():
        plans = sorted((row for row in group if row.cost is not None), key=lambda row: row.cost)
        for claim in group:
            scope = Scope(claim.scope)
            fitting = (p for p in plans if p.peak_bytes <= claim.budget_bytes and scope.contains(Scope(p.scope)))
            if (plan := next(fitting, None)) is None:
                continue
            if claim.status == "INFEASIBLE":
                text = "that no plan fits"
            elif claim.bound is not None and claim.bound > plan.cost:
                text = f"the bound {claim.bound:,}"
            else:
                continue
            lines.append(
                f"{claim.strategy} claims {text} at {format_size(int(claim.budget_bytes))} ({claim.scope}, "
                f"{claim.graph_name}), but a plan of {plan.strategy} fits and costs {plan.cost:,}"
            )
    return list(dict.fromkeys(lines))
