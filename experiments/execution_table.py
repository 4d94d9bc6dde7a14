"""``python -m experiments.execution_table``: plans that run in PyTorch, measured: memory, time, and bits.

Every model at several budgets, at sizes for a CPU: the plain step's peak, what was promised, predicted and measured,
predicted and measured overhead of a step, and whether loss, gradients, buffers and random state are the plain
step's bit for bit. Prints a Markdown table; ``--out`` also writes the rows as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.execution import ON_A_CPU, SAME, for_a_cpu, torch_model
from experiments.execution_subject import Subject, measure
from experiments.provenance import cpu_name, versions
from experiments.store import rows_of_other_models, write_json
from remat.cost import CostWarning
from remat.errors import InvalidInput
from remat.files import read_json

FRACTIONS = (0.8, 0.6, 0.45)
HEADER = """\
| model, batch (operations) | plain MB | budget | predicted MB | measured MB | measured / predicted | predicted overhead | measured overhead | same bits |
| --- | --: | --: | --: | --: | --: | --: | --: | --- |"""  # noqa: E501


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.execution_table", description="plans that run in PyTorch, measured"
    )
    parser.add_argument("--models", default=",".join(ON_A_CPU), help="comma-separated; all by default")
    parser.add_argument("--budgets", default=",".join(map(str, FRACTIONS)), help="fractions of the plain peak")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per plan")
    parser.add_argument("--cost", default="profile")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for the rows; those of other models that it has stay")
    parser.add_argument("--show", type=Path, help="only print the table of rows that --out wrote")
    given = parser.parse_args(arguments)
    if given.show:
        print("\n".join([HEADER, *map(_line, read_json(given.show)["rows"])]))
        return
    warnings.simplefilter("ignore", CostWarning)
    head = {"date": datetime.date.today().isoformat(), "cpu": cpu_name(), "versions": versions(),
            "threads": given.threads}  # fmt: skip
    rows = rows_of_other_models(given.out, given.models.split(","))
    print(HEADER)
    with tempfile.TemporaryDirectory() as cache:
        for name in given.models.split(","):
            for row in rows_of(name, [float(f) for f in given.budgets.split(",")], given, cache):
                rows.append(row)
                print(_line(row), flush=True)
                if given.out:
                    write_json(given.out, head | {"rows": rows})


def rows_of(name: str, fractions: list[float], given: argparse.Namespace, cache: str) -> Any:
    """One row per fraction of the plain step's peak."""
    spec = for_a_cpu(torch_model(name))
    subject = Subject({
        "spec": asdict(spec), "device": "cpu", "cost": given.cost, "time_limit_s": given.time_limit, "seed": 0,
        "threads": given.threads, "cache": cache,
    })  # fmt: skip
    plain = subject.followed("plain", "", subject.module, subject.module)
    what = {"model": name, "batch": spec.batch_size, "operations": len(subject.graph)}
    row = measure(subject, plain, given.rounds)
    plain_bytes = row["predicted_peak_bytes"] or row["measured_peak_bytes"]
    yield what | {"fraction": None, "budget_bytes": None} | row
    for fraction in fractions:
        budget = int(fraction * plain_bytes)
        try:
            method = subject.best_within(budget, f"{fraction:g}")
        except InvalidInput as error:
            yield what | {"fraction": fraction, "budget_bytes": budget, "note": str(error)}
            continue
        overhead = method.ns / subject.graph.total_cost - 1 if method.ns else None
        row = measure(subject, method, given.rounds)
        yield what | {"fraction": fraction, "budget_bytes": budget, "predicted_overhead": overhead} | row


def _line(row: dict[str, Any]) -> str:
    name = f"{row['model']}, {row['batch']} ({row['operations']})"
    if "note" in row:
        why = "INFEASIBLE" if "INFEASIBLE" in row["note"] else "no plan found"
        return f"| {name} | | {row['fraction']:g}: {row['budget_bytes'] / 1e6:.1f} MB | {why} | | | | | |"
    peak, measured = row["predicted_peak_bytes"], row["measured_peak_bytes"]
    budget = "plain" if row["fraction"] is None else f"{row['fraction']:g}: {row['budget_bytes'] / 1e6:.1f} MB"
    predicted = "" if row["fraction"] is None else f"{row['predicted_overhead']:+.1%}"
    plain = f"{measured / 1e6:.1f}" if row["fraction"] is None else ""
    cells = [
        name, plain, budget, f"{peak / 1e6:.1f}" if peak else "", f"{measured / 1e6:.1f}",
        f"{measured / peak:.4f}" if peak else "", predicted, f"{row['measured_ratio'] - 1:+.1%}",
        SAME[row["same"]],
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main(sys.argv[1:])
