"""Time to the first plan, to within 5 % and 1 % of the best known plan, and to the proof."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.parts import Part, Table, prose
from analysis.results import WITH_PLAN, as_objects, read_rows
from analysis.solver_seconds import draw, reached
from analysis.style import BLUE, ORANGE, WINE
from remat.incumbent import is_closed

FORMS = {"published MILP": (ORANGE, "s"), "trimmed MILP": (BLUE, "o"), "portfolio": (WINE, "*")}
CAPTION = "Seconds to a plan, a good plan and the proof; hollow: not reached within the limit"
MARKS = ("first plan", "within 5 %", "within 1 %", "proof")


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """A row for each network, budget and form."""
    cases = _cases(document, folder)
    rows = [[
        case["network"], f"{case['budget_bytes'] / 1e9:.2f}", case["form"], case["status"],
        *("" if case[mark] is None else f"{case[mark]:.2f}" for mark in MARKS), f"{case['limit_s']:.0f}",
    ] for case in cases]  # fmt: skip
    counts = "; ".join(
        f"{form}: {sum(c[MARKS[0]] is not None for c in of)} of {len(of)} with a plan, "
        f"{sum(c[MARKS[3]] is not None for c in of)} proven"
        for form in FORMS if (of := [c for c in cases if c["form"] == form])
    )  # fmt: skip
    return Part(
        *prose(__file__, counts=counts),
        [("solver_time", CAPTION, _figure(cases))],
        [Table("solver_time", "Seconds; empty: not reached within the limit", [
            "network", "budget GB", "form", "status", *MARKS, "limit",
        ], rows)],
    )  # fmt: skip


def _cases(document: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Each solve of the document that the store has, with the seconds to each of `MARKS`, None if not reached."""
    stored = read_rows(folder / document["store"], [row["key"] for row in document["rows"]])
    by_key = {row.key: row for row in as_objects(stored)}
    known = [(entry, by_key[entry["key"]]) for entry in document["rows"] if entry["key"] in by_key]
    costs: dict[tuple[str, int], list[int]] = defaultdict(list)
    for entry, row in known:
        costs[entry["network"], row.budget_bytes] += [row.cost] if row.status in WITH_PLAN else []
    cases = []
    for entry, row in known:
        steps = [(s, cost) for s, cost, _ in json.loads(row.stats).get("trajectory", [])]
        cost = row.cost if row.status in WITH_PLAN else None
        case: dict[str, Any] = {"network": entry["network"], "form": entry["form"], "status": row.status,
                                "budget_bytes": row.budget_bytes, "limit_s": row.time_limit_s}  # fmt: skip
        best = min(costs[entry["network"], row.budget_bytes], default=0)
        for mark, at_most in zip(MARKS, (None, 1.05 * best, 1.01 * best), strict=False):
            case[mark] = reached(steps, cost, row.wall_s, at_most)
        case[MARKS[3]] = row.wall_s if row.status == "INFEASIBLE" or is_closed(row.gap) else None
        cases.append(case)
    return cases


def _figure(cases: list[dict[str, Any]]) -> Figure:
    panels = {
        mark: {form: [(case["network"], case[mark]) for case in cases if case["form"] == form] for form in FORMS}
        for mark in MARKS
    }
    networks = list(dict.fromkeys(case["network"] for case in cases))
    limit = max((case["limit_s"] for case in cases), default=1.0)
    return draw(panels, FORMS, networks, limit, (8.2, 3.4))
