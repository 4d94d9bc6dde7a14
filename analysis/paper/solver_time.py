"""Time to the first plan, to within 5 % and 1 % of the best known plan, and to the proof."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from analysis.parts import Part, Table, prose
from analysis.results import read_rows
from analysis.style import BLUE, ORANGE, WINE

FORMS = {"published MILP": (ORANGE, "s"), "trimmed MILP": (BLUE, "o"), "portfolio": (WINE, "*")}
CAPTION = "Seconds until a plan, a good plan and the proof; hollow: not reached within the limit"
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
    stored = read_rows(folder / document["store"], [row["key"] for row in document["rows"]])
    by_key = {row.key: row for row in stored.itertuples()}
    known = [(entry, by_key[entry["key"]]) for entry in document["rows"] if entry["key"] in by_key]
    best: dict[tuple[str, int], int] = {}
    for entry, row in known:
        if row.status in ("OPTIMAL", "FEASIBLE"):
            place = entry["network"], int(row.budget_bytes)
            best[place] = min(int(row.cost), best.get(place, int(row.cost)))
    cases = []
    for entry, row in known:
        least = best.get((entry["network"], int(row.budget_bytes)))
        steps = json.loads(row.stats).get("trajectory", [])
        done = float(row.wall_s)
        case: dict[str, Any] = {"network": entry["network"], "form": entry["form"], "status": row.status,
                                "budget_bytes": int(row.budget_bytes), "limit_s": float(row.time_limit_s)}  # fmt: skip
        has_plan = row.status in ("OPTIMAL", "FEASIBLE")
        for mark, factor in zip(MARKS, (float("inf"), 1.05, 1.01), strict=False):
            reached = [s for s, cost, _ in steps if least is not None and cost <= factor * least]
            # A plan that came with the answer alone has no step of its own.
            at_end = done if has_plan and least is not None and int(row.cost) <= factor * least else None
            case[mark] = min(reached) if reached else at_end
        case[MARKS[3]] = done if row.status in ("OPTIMAL", "INFEASIBLE") else None
        cases.append(case)
    return cases


def _figure(cases: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    all_axes = figure.subplots(1, len(MARKS), sharey=True)
    labels = list(dict.fromkeys(case["network"] for case in cases))
    for axes, mark in zip(all_axes, MARKS, strict=True):
        for number, (form, (colour, marker)) in enumerate(FORMS.items()):
            points = [(case[mark], labels.index(case["network"])) for case in cases
                      if case["form"] == form and case[mark] is not None]  # fmt: skip
            axes.plot([max(x, 0.1) for x, _ in points], [y + 0.22 * (number - 1) for _, y in points], ls="",
                      marker=marker, color=colour, ms=5 if marker != "*" else 8, label=form)  # fmt: skip
            missed = [labels.index(case["network"]) for case in cases if case["form"] == form and case[mark] is None]
            limit = max((case["limit_s"] for case in cases), default=1.0)
            axes.plot([1.15 * limit] * len(missed), [y + 0.22 * (number - 1) for y in missed], ls="", marker=marker,
                      mfc="none", mec=colour, mew=0.8, ms=4 if marker != "*" else 6)  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(0.1, 1.5 * max((case["limit_s"] for case in cases), default=1.0))
        axes.set_title(mark, loc="left")
        axes.set_xlabel("Seconds")
    all_axes[0].set_yticks(range(len(labels)), labels)
    all_axes[0].set_ylim(len(labels) - 0.5, -0.5)
    handles, names = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    return figure
