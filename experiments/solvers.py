"""The solvers on published graphs with recorded results and on large ones: cost, bound, gap, times and memory.

Also the two formulations of Checkmate's MILP, and the search against the size of the graph.
"""

import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from experiments.arguments import pattern
from experiments.documents import Column, Drawing, grouped, links, long_table, made, markdown_table, table_of, values_of
from experiments.measure_solve import graph_of, share_of_peak, solve_case
from experiments.registry import Case, Row, experiment
from experiments.settings import RUNS_FOLDER
from experiments.solver_cases import Instance, above_once, asked_for, goals, instances
from remat.errors import InvalidInput
from remat.incumbent import GAP_TOLERANCE, is_closed, relative_gap

PAGE = "results/solvers.md"
FOLDERS = ("layered", "p100", "v100", "large")  # of instances, in the order of the tables
FORMS = ("trimmed", "published")  # formulations of checkmate_milp
GROWTH_SHARE = 0.9
COLUMNS = (  # of the long table
    "instance", "budget", "budget_bytes", "scope", "strategy", "status", "cost", "overhead", "bound", "gap",
    "proven_by", "certified_bound", "start_s", "first_plan_s", "within_1pct_s", "wall_s", "peak_memory_bytes",
    "record_cost", "record_proven", "record_s", "published_overhead", "time_limit_s", "threads", "seed", "machine",
    "date",
)  # fmt: skip


@experiment(page=PAGE)
def solvers(
    strategies: Sequence[str] = ("portfolio",), only: str = "", time_limit: float = 60.0, seeds: int = 1,
    threads: int = 2, target_gap: float = 1e-4, gaps: bool = False,
) -> Iterator[Case]:  # fmt: skip
    """The solvers on published graphs (of REMAT_INSTANCES, otherwise generated ones) and on large ones; half an hour.

    ``only`` is a regular expression on "instance budget scope". ``gaps=true`` takes the cases with a goal for the
    gap, and ends each solve there.
    """
    for instance in chosen(only):
        goal = goals(instance.name, instance.budget, instance.scope, time_limit)[0]
        for strategy in strategies if goal is not None or not gaps else ():
            for seed in range(seeds):
                yield solve_case(
                    instance.source, instance.graph, strategy, instance.budget_bytes, scope=instance.scope,
                    time_limit_s=time_limit, threads=threads, seed=seed,
                    target_gap=goal if gaps and goal is not None else target_gap, instance=instance.name,
                    budget=instance.budget, **instance.record,
                    certificate=str(RUNS_FOLDER / "solvers" / "bounds" / f"{instance.certificate_name}.json.gz"),
                )  # fmt: skip


def chosen(only: str) -> list[Instance]:
    """The instances that a regular expression selects; the published ones if REMAT_INSTANCES names their folder.

    Raises:
        InvalidInput: there is none, or it is no regular expression.
    """
    wanted = re.compile(pattern(only))
    folder = os.environ.get("REMAT_INSTANCES")
    if folder and not Path(folder).is_dir():
        raise InvalidInput(f"no folder '{folder}'; REMAT_INSTANCES is to name that of the published graphs, or nothing")
    every = instances(Path(folder) if folder else None)
    found = [each for each in every if wanted.search(f"{each.name} {each.budget} {each.scope}")]
    if not found:
        raise InvalidInput(f"no instance matches only='{only}'")
    return found


@solvers.draws
def page(rows: Sequence[Row]) -> Drawing:
    """Tables of each strategy. Of several seeds, the solve of the median gap counts."""
    filled = [
        {**dict.fromkeys((*COLUMNS, "record_gap")), **row, "machine": row["cpu"]} for row in sorted(rows, key=_place)
    ]
    long = long_table("solvers_time_limit", [{column: row[column] for column in COLUMNS} for row in filled])
    parts = [_tables([row for row in filled if row["strategy"] == name])
             for name in dict.fromkeys(row["strategy"] for row in filled)]  # fmt: skip
    text = "\n\n".join([*parts, f"Tables: {links(PAGE, long)}."])
    return Drawing(text, [long])


def _place(row: Row) -> tuple[float, int]:
    folder = row["instance"].partition("/")[0]
    return row["time_limit_s"], FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


def _tables(rows: Sequence[dict[str, Any]]) -> str:
    medians, stale = _without_stale(_medians(rows))
    seeds = len({row["seed"] for row in rows})
    shown = "one seed" if seeds == 1 else f"up to {seeds} seeds; the solve of the median gap is shown"
    what = f"{values_of(rows, 'strategy')}, {values_of(rows, 'time_limit_s')} s for each solve"
    return "\n\n".join([
        f"{made(rows)}: {what}, {values_of(rows, 'threads')} threads, {shown}.{stale}",
        markdown_table(["instances", "seconds", "recorded or published by", "solves", "as good or better", "proven",
                        "bounds as asked for", "seconds to 1 % of the final cost, median"], _summary(medians)),
        markdown_table(["instance", "scope", "budget", "seconds", "bound above once, %", "gap, %", "asked for",
                        "proven by", "certified, %", "Gurobi"], _open(medians)),
    ])  # fmt: skip


def _medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The row of the median gap of each case; a solve without a gap counts as the widest."""
    cases = grouped(rows, itemgetter("time_limit_s", "target_gap", "instance", "budget", "scope"))
    ordered = (sorted(own, key=lambda row: (row["gap"] is None, row["gap"] or 0.0)) for own in cases.values())
    return [own[(len(own) - 1) // 2] for own in ordered]


def _without_stale(medians: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """(the rows without those whose case has a newer one with a smaller gap in a shorter time, a sentence about these).

    The search has become better since.
    """

    def case(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["instance"], row["budget"], row["scope"]

    def is_stale(row: dict[str, Any]) -> bool:
        return any(
            case(r) == case(row) and r["time_limit_s"] < row["time_limit_s"] and r["date"] > row["date"]
            and None not in (r["gap"], row["gap"]) and r["gap"] < row["gap"] for r in medians
        )  # fmt: skip

    stale = [row for row in medians if is_stale(row)]
    if not stale:
        return list(medians), ""
    seconds = ", ".join(f"{limit:g}" for limit in dict.fromkeys(row["time_limit_s"] for row in stale))
    words = (
        f" {len(stale)} older solves of {seconds} s are left out here, because a newer solve of the case has a smaller "
        "gap in less time."
    )
    return [row for row in medians if row not in stale], words


def as_good(row: dict[str, Any]) -> bool | None:
    """Whether a solve is as good as the recorded or published result; None without one."""
    if row["published_overhead"] is not None:
        return row["overhead"] is not None and round(100 * row["overhead"], 1) <= row["published_overhead"]
    if row["record_cost"] is None:
        return None
    if row["cost"] is None:
        return False
    if not row["record_proven"]:
        return row["cost"] < row["record_cost"]
    return row["cost"] <= row["record_cost"] * (1 + GAP_TOLERANCE)


def _summary(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for each folder of instances, scope and time limit."""
    groups = grouped(rows, lambda row: (row["instance"].partition("/")[0], row["scope"], row["time_limit_s"]))
    lines = []
    for (folder, scope, limit_s), mine in groups.items():
        judged = [good for row in mine if (good := as_good(row)) is not None]
        met = [is_met for row in mine if (is_met := asked_for(row)[1]) is not None]
        source = "published overheads" if mine[0]["published_overhead"] is not None else "Gurobi, up to 24 h"
        times = [row["within_1pct_s"] for row in mine if row["within_1pct_s"] is not None]
        lines.append([
            f"{folder}, scope {scope}", f"{limit_s:g}", source if judged else "none", str(len(mine)),
            f"{sum(judged)} of {len(judged)}" if judged else "",
            f"{sum(row['status'] == 'INFEASIBLE' or is_closed(row['gap']) for row in mine)}",
            f"{sum(met)} of {len(met)}" if met else "",
            f"{statistics.median_high(times):.1f}" if times else "",
        ])  # fmt: skip
    return lines


def _open(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for each solve whose gap, or certified gap, is not closed, or whose bound is not as asked for."""
    lines = []
    for row in rows:
        cost, bound = row["cost"], row["certified_bound"]
        certified = None if cost is None or bound is None else relative_gap(cost, bound)
        if row["gap"] is None or not row["proven_by"] or max(row["gap"], certified or 0.0) <= GAP_TOLERANCE:
            continue
        text, is_met = asked_for(row)
        record_gap, record_s = row["record_gap"], row["record_s"]
        lines.append([
            row["instance"], row["scope"], row["budget"], f"{row['time_limit_s']:g}",
            f"{100 * above_once(row):.3f}", f"{100 * row['gap']:.3f}",
            f"{text}, not met" if is_met is False else text, row["proven_by"],
            "" if certified is None else f"{100 * certified:.3f}",
            "" if record_gap is None else f"{100 * record_gap:.3f} %, {record_s:,.0f} s",
        ])  # fmt: skip
    return lines


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
def formulations_page(rows: Sequence[Row]) -> Drawing:
    """A line for each instance and budget; medians of the seeds, without the start of the process."""
    seconds: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        of = seconds.setdefault(f"{row['instance']}, {row['budget']}", {form: [] for form in FORMS})
        of[row["options"]["formulation"]].append(row["wall_s"] - row["start_s"] if is_closed(row["gap"]) else None)
    lines = []
    for name, of in seconds.items():
        medians = [statistics.median(of[form]) if of[form] and None not in of[form] else None for form in FORMS]
        trimmed, published = medians
        faster = "" if trimmed is None or published is None else f"{published / trimmed:.0f}"
        lines.append([name, *("not proven" if x is None else f"{x:.1f}" for x in medians), faster])
    return Drawing(f"{made(rows)}.\n\n{markdown_table(['instance', *FORMS, 'times faster'], lines)}")


@experiment()
def growth(
    layered: Sequence[int] = (250, 1000, 4000, 16_000), chains: Sequence[int] = (100, 1000, 10_000),
    strategies: Sequence[str] = ("search",), time_limit: float = 20.0, threads: int = 2,
) -> Iterator[Case]:  # fmt: skip
    """A strategy against the size of the graph: seconds to a plan, quality, memory."""
    sources = [{"function": "layered", "n": n, "name": f"layered_n{n}"} for n in layered]
    sources += [{"function": "chain", "n": n // 2, "name": f"chain_n{n}"} for n in chains]
    for source in sources:
        graph = graph_of(source)
        for strategy in strategies:
            yield solve_case(source, graph, strategy, share_of_peak(graph, GROWTH_SHARE), time_limit_s=time_limit,
                             threads=threads, kind=source["function"])  # fmt: skip


@growth.draws
def growth_page(rows: Sequence[Row]) -> Drawing:
    """A line for each graph, of the last time limit."""
    latest = [row for row in rows if row["time_limit_s"] == rows[-1]["time_limit_s"]]
    columns: Mapping[str, Column] = {
        "graph": "{kind}", "strategy": "{strategy}", "operations": "{n_operations:,}", "edges": "{n_edges:,}",
        "first plan, s": "{first_plan_s:.1f}", "within 1 %, s": "{within_1pct_s:.1f}",
        f"overhead after {latest[-1]['time_limit_s']:g} s":
        lambda row: "no plan" if row["overhead"] is None else f"{row['overhead']:.2%}",
        "MiB": "{peak_memory_bytes:.0f/MiB}",
    }  # fmt: skip
    return Drawing(table_of(latest, columns, "llrrrrrr"))
