"""Claims that plans refute, across strategies, runs and scopes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from remat.plan import Scope
from remat.units import format_size


def contradictions(rows: Iterable[Any]) -> list[str]:
    """A line for each bound above the cost of a plan that fits, and each INFEASIBLE where a plan fits.

    A claim at a budget is about every plan whose peak is within it, whichever run (attribute ``run``, if there is
    one) and strategy found the plan, and about the plans of narrower scopes too. Accountings are never mixed.

    Args:
        rows: objects with the store's columns as attributes; what is absent is None.
    """
    subjects: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        subjects.setdefault((row.graph_sha256, row.accounting), []).append(row)
    return list(dict.fromkeys(line for about in subjects.values() for line in _refuted(about)))


def _refuted(rows: Sequence[Any]) -> Iterable[str]:
    """The lines of one graph and accounting."""
    plans = sorted((row for row in rows if row.cost is not None), key=lambda row: row.cost)
    for claim in rows:
        about = Scope(claim.scope)
        fits = (p for p in plans if p.peak_bytes <= claim.budget_bytes and about.contains(Scope(p.scope)))
        plan = next(fits, None)
        if plan is None:
            continue
        if claim.status == "INFEASIBLE":
            what = "that no plan fits"
        elif claim.bound is not None and claim.bound > plan.cost:
            what = f"the bound {claim.bound:,}"
        else:
            continue
        yield (
            f"{_who(claim)} claims {what} at {format_size(int(claim.budget_bytes))} ({claim.scope}, "
            f"{claim.graph_name}), but a plan of {_who(plan)} fits and costs {plan.cost:,}"
        )


def _who(row: Any) -> str:
    run = getattr(row, "run", "")
    return f"{run}: {row.strategy}" if run else str(row.strategy)
