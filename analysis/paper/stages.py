"""Frontier-advancing stages: integrality gaps and times of both forms of the MILP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.parts import Part, Table, prose


def report(document: Mapping[str, Any], _: Path) -> Part:
    """A row for each budget and form."""
    rows = [[
        str(row["budget"]), row["form"], f"{row['columns']:,}", _number(row["lp"]), f"{row['lp_s']:.2f}",
        str(row["optimum"]),
        _gap(row), _number(row["cost"]), _number(row["bound"]),
        f"{row['seconds']:.2f}" if row["proven"] else f"not proven in {row['limit_s']:.0f}",
    ] for row in document["rows"]]  # fmt: skip
    by_form = {form: [row for row in document["rows"] if row["form"] == form]
               for form in ("frontier-advancing", "unpartitioned")}  # fmt: skip
    gaps = {form: " and ".join(map(_gap, of)) for form, of in by_form.items()}
    times = ", ".join(f"{row['seconds']:.2f} s" for row in by_form["frontier-advancing"] if row["proven"])
    proven = [row for row in by_form["unpartitioned"] if row["proven"]]
    limit = document["rows"][0]["limit_s"]
    unpartitioned = (
        "the unpartitioned form took " + ", ".join(f"{row['seconds']:.0f} s" for row in proven) if proven
        else f"the unpartitioned form is not solved after {limit:.0f} s"
    )  # fmt: skip
    wider = sorted({row["budget"] for row in document["rows"] if row["optimum_fixed_order"] != row["optimum"]})
    outside = f"; at budget {wider} a plan outside the stages is cheaper" if wider else ""
    return Part(
        *prose(
            __file__, layers=document["layers"], operations=document["operations"], gap_without=gaps["unpartitioned"],
            gap_with=gaps["frontier-advancing"], times=times or "no case", unpartitioned=unpartitioned, wider=outside,
        ),
        tables=[Table("stages", "Relaxation and MILP, costs in runs of an operation", [
            "budget bytes", "form", "columns", "LP value", "LP seconds", "optimum", "integrality gap", "MILP's plan",
            "MILP's bound", "seconds",
        ], rows)],
    )  # fmt: skip


def _gap(row: Mapping[str, Any]) -> str:
    """The optimum over the relaxation's value."""
    return f"{row['optimum'] / row['lp']:.2f}" if row["lp"] else "unknown"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
