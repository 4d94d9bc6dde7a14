"""Seconds that each formulation of checkmate_milp needs to prove its optimum."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from experiments.documents import Drawing, markdown_table
from experiments.measure_solve import solve_case, where_made
from experiments.registry import Case, Row, experiment
from experiments.solvers import chosen
from remat.incumbent import is_closed

FORMS = ("trimmed", "published")


@experiment()
def formulations(only: str = "", time_limit: float = 150.0, seeds: int = 1, threads: int = 2) -> Iterator[Case]:
    """The MILP's two formulations on the staged cases of experiment=solvers: seconds to the proven optimum."""
    for instance in chosen(only):
        if instance.scope == "staged":
            for form in FORMS:
                for seed in range(seeds):
                    yield solve_case(
                        instance.source, instance.graph, "checkmate_milp", instance.budget_bytes,
                        time_limit_s=time_limit, threads=threads, seed=seed, options={"formulation": form},
                        instance=instance.name, budget=instance.budget,
                    )  # fmt: skip


@formulations.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each instance and budget; medians of the seeds, without the start of the process."""
    seconds: dict[str, dict[str, list[float | None]]] = {}
    for row in rows:
        of = seconds.setdefault(f"{row['instance']}, {row['budget']}", {form: [] for form in FORMS})
        of[row["options"]["formulation"]].append(row["wall_s"] - row["start_s"] if is_closed(row["gap"]) else None)
    lines = []
    for name, of in seconds.items():
        medians = [statistics.median(found) if (found := _all(of[form])) else None for form in FORMS]
        trimmed, published = medians
        faster = "" if trimmed is None or published is None else f"{published / trimmed:.0f}"
        lines.append([name, *("not proven" if x is None else f"{x:.1f}" for x in medians), faster])
    return Drawing(f"{where_made(rows)}.\n\n{markdown_table(['instance', *FORMS, 'times faster'], lines)}")


def _all(seconds: Sequence[float | None]) -> list[float]:
    """The seconds if every solve was proven."""
    proven = [x for x in seconds if x is not None]
    return proven if len(proven) == len(seconds) else []
