"""``make bench``: cost, bound, gap, times and memory of the solvers, beside the recorded results.

Instances are the files of REMAT_INSTANCES (or ``--instances``); without them, the project generates graphs of the
same kinds. Graphs of 500 to 16,000 operations follow. Budgets come from records.json; without it, they are shares of
the peak of running every operation once. Each row goes into the common store as it finishes, and the next run finds it
there. Each solve has its own process; "start s" is the time until the strategy begins in it, and is included in the
other times. With several seeds, the table has each case's solve of the median gap.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.growth import draw_growth
from experiments.arguments import Parser, argument, count, one_name, pattern, run, seconds
from experiments.bench_cases import Case, above_once, asked_for, cases, goals, median_of, share_of_peak
from experiments.budget_sweep import run_single
from experiments.build import Subject
from experiments.cli import check
from experiments.config import register
from experiments.documents import markdown_table
from experiments.engine import LocalEngine
from experiments.progress import SolveProgress
from experiments.provenance import provenance
from experiments.row import Row
from experiments.settings import STORE_FOLDER, Settings
from experiments.solving import GraphRun
from experiments.store import Store
from remat import strategies
from remat.errors import InvalidInput
from remat.files import write_text
from remat.frontends import synthetic
from remat.incumbent import GAP_TOLERANCE, is_closed, relative_gap
from remat.simulator import plain_peak

GROWTH_LAYERED, GROWTH_CHAINS = (250, 1000, 4000, 16_000), (100, 1000, 10_000)
TIME_LIMIT_S = 60.0
NEAR = 1e-4  # relative distance to a proven record that counts as equal


@dataclass(frozen=True)
class Comparison:
    """A case with its row."""

    case: Case
    row: Row

    @cached_property
    def stats(self) -> dict[str, Any]:
        """The solver's own statistics."""
        return json.loads(self.row.stats)

    @property
    def solve_s(self) -> float:
        """Wall time without the start of the solver's process."""
        return self.row.wall_s - (self.stats.get("start_s") or 0.0)

    @property
    def against_record(self) -> float | None:
        """cost / recorded cost - 1."""
        return None if self.row.cost is None or not self.case.record_cost else self.row.cost / self.case.record_cost - 1

    @property
    def goal(self) -> str:
        """Whether the result is as good as the recorded one: ``met`` or ``MISSED``; '' if nothing is recorded."""
        case, row = self.case, self.row
        if case.goal_gap is not None and case.goal_s is not None:
            met = row.gap is not None and row.gap <= case.goal_gap and self.solve_s <= case.goal_s
        elif case.record_cost:
            difference = self.against_record
            met = difference is not None and (difference <= NEAR if case.record_proven else difference < 0)
        elif case.published_overhead is not None:
            met = row.overhead is not None and round(100 * row.overhead, 2) <= case.published_overhead + 0.005
        else:
            return ""
        return _verdict(met)

    @cached_property
    def document(self) -> dict[str, Any]:
        """Case and row as one object."""
        known = {name: getattr(self.case, name) for name in Case.__dataclass_fields__ if name != "graph"}
        return {**known, **asdict(self.row)}

    @property
    def gap_goal(self) -> str:
        """The goal for the gap or the bound, and whether it is met; '' without a goal."""
        text, is_met = asked_for(self.document)
        return "" if is_met is None else f"{_verdict(is_met)}: {text}"

    def line(self) -> str:
        """Case and row as one JSON object."""
        return json.dumps(self.document)


def settings_of(strategy: str, time_limit_s: float, threads: int, *overrides: str) -> Settings:
    """The settings of one strategy with its limits."""
    register()
    asked = [f"strategies=[{strategy}]", f"time_limit={time_limit_s}", f"threads={threads}", *overrides]
    return check(asked, multirun=False)[0]


def solve(case: Case, settings: Settings, store: Store) -> Comparison:
    """The case's row, from the store or solved now in its own process, so that its memory is measured alone.

    Raises:
        SystemExit: the simulator refutes a claim of the solver.
    """
    settings = replace(settings, scope=case.scope)
    console = Console(stderr=True, quiet=not sys.stderr.isatty())
    with LocalEngine(1) as engine, SolveProgress(console, engine.at_once) as progress:
        graph_run = GraphRun(Subject(case.graph), settings, "bench", store, engine, progress, plain_peak(case.graph))
        row = run_single(graph_run, case.budget_bytes)[0][0]
    store.write_graph(case.graph)
    if row.contradicted:
        raise SystemExit(f"bench: {case.instance} at {case.budget}: {row.message}")
    return Comparison(case, row)


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


HEADER = (
    "instance", "budget", "status", "cost", "overhead %", "bound", "bound above once %", "gap %", "certified gap %",
    "gap goal", "start s", "first s", "1 % s", "wall s", "MiB", "record", "vs record %", "record gap %", "record s",
    "goal",
)  # fmt: skip


def table(results: Sequence[Comparison]) -> str:
    """The results as Markdown tables, one for each scope, because costs of different scopes do not compare."""
    parts, cases_of = [], dict[tuple[str, str, str], list[Comparison]]()
    for r in results:
        cases_of.setdefault((r.case.instance, r.case.budget, r.case.scope), []).append(r)
    medians = [median_of(found, lambda r: r.row.gap) for found in cases_of.values()]
    for scope in dict.fromkeys(r.case.scope for r in medians):
        rows = [table_row(r) for r in medians if r.case.scope == scope]
        parts.append(f"Scope {scope}:\n\n{markdown_table(HEADER, rows, 'l' * len(HEADER))}")
    return "\n\n".join(parts)


def certified_gap(cost: int | None, certified_bound: int | None) -> float | None:
    """The gap that a certificate proves; None without a plan or a certificate."""
    return None if cost is None or certified_bound is None else relative_gap(cost, certified_bound)


def table_row(compared: Comparison) -> tuple[str, ...]:
    """The cells of one row of the table."""
    case, row, stats = compared.case, compared.row, compared.stats

    def number(value: float | None, digits: int, factor: float = 1.0) -> str:
        return "" if value is None else f"{factor * value:.{digits}f}"

    record = "" if case.record_cost is None else f"{case.record_cost:,}" + ("" if case.record_proven else " (24 h)")
    if case.published_overhead is not None:
        record = f"{case.published_overhead} % (published)"
    goal = compared.goal
    if case.goal_gap is not None:
        goal = f"{goal}: {100 * case.goal_gap:g} % in {case.goal_s:g} s"
    return (
        case.instance, case.budget, row.status, "" if row.cost is None else f"{row.cost:,}",
        number(row.overhead, 3, 100), "" if row.bound is None else f"{row.bound:,}",
        number(above_once(compared.document), 3, 100), number(row.gap, 3, 100),
        number(certified_gap(row.cost, row.certified_bound), 3, 100), compared.gap_goal,
        number(stats.get("start_s"), 2), number(stats.get("first_plan_s"), 2), number(stats.get("within_1pct_s"), 1),
        number(row.wall_s, 1), number(stats.get("solver_peak_memory_bytes"), 0, 2**-20), record,
        number(compared.against_record, 4, 100), number(case.record_gap, 3, 100), number(case.record_s, 0), goal,
    )  # fmt: skip


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases that ``--only`` selects; with ``--gaps`` only those that have a goal, with that goal.

    Raises:
        InvalidInput: there is none.
    """
    found = [case for case in cases(_folder(arguments)) if _is_wanted(arguments, case)]
    if arguments.gaps:
        limit_s = arguments.time_limit
        asked = ((case, goals(case.instance, case.budget, case.scope, limit_s)[0]) for case in found)
        found = [replace(case, goal_gap=gap, goal_s=limit_s) for case, gap in asked if gap is not None]
    if not found:
        raise InvalidInput("no case; see --only, --instances and --generated")
    return found


def _is_wanted(arguments: argparse.Namespace, case: Case) -> bool:
    return bool(re.search(arguments.only, f"{case.instance} {case.budget} {case.scope}"))


def bench(arguments: argparse.Namespace) -> list[Comparison]:
    """Solve every case that is not in the store, and write the file of rows."""
    store, out, results = Store(STORE_FOLDER), Path(arguments.out), []
    lines = out.read_text().splitlines() if out.exists() else []
    settings = settings_of(arguments.strategy, arguments.time_limit, arguments.threads)
    for case, seed in itertools.product(chosen_cases(arguments), range(arguments.seeds)):
        target_gap = arguments.target_gap or case.goal_gap or GAP_TOLERANCE
        results.append(solve(case, replace(settings, seed=seed, target_gap=target_gap), store))
        print(f"| {' | '.join(table_row(results[-1]))} |", flush=True)
        lines = list(dict.fromkeys([*lines, results[-1].line()]))
        write_text(out, "\n".join(lines) + "\n")
    if arguments.certificates:
        copy_certificates(results, store, arguments.certificates)
    return results


def copy_certificates(results: Sequence[Comparison], store: Store, folder: Path) -> None:
    """Copy the best certificate of each case that is above the cost of running everything once."""
    best: dict[str, Comparison] = {}
    for result in results:
        name, bound = result.case.certificate_name, result.row.certified_bound
        if bound is not None and (name not in best or bound > (best[name].row.certified_bound or 0)):
            best[name] = result
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in best.items():
        shutil.copyfile(store.certificate_file(result.row.key), folder / f"{name}.json.gz")


def compare(arguments: argparse.Namespace) -> None:
    """Print how many seconds each formulation of checkmate_milp needs to prove its optimum, and their ratio.

    The start of the process is not counted.
    """
    limits = (arguments.time_limit, arguments.threads)
    forms = {form: settings_of("checkmate_milp", *limits, f"formulation={form}") for form in ("trimmed", "published")}
    for case in chosen_cases(arguments):
        if case.scope != "staged":
            continue
        shown, medians = {}, {}
        for form, settings in forms.items():
            seconds = []
            for _ in range(arguments.repeats):
                with tempfile.TemporaryDirectory() as folder:  # an empty store, so that every run solves again
                    compared = solve(case, settings, Store(Path(folder)))
                seconds += [compared.solve_s] if is_closed(compared.row.gap) else []
            shown[form] = f"proven in {len(seconds)} of {arguments.repeats} runs" if seconds else "not proven"
            if len(seconds) == arguments.repeats:
                medians[form] = statistics.median(seconds)
                shown[form] = f"{medians[form]:.1f} s"
        ratio = f" {medians['published'] / medians['trimmed']:.0f} times faster" if len(medians) == 2 else ""
        print(f"{case.instance} {case.budget}: trimmed {shown['trimmed']}, published {shown['published']}{ratio}",
              flush=True)  # fmt: skip


def growth(arguments: argparse.Namespace) -> None:
    """Measure how first plan, overhead and memory of `search` grow with the graph; print and draw them."""
    store, settings = Store(STORE_FOLDER), settings_of("search", arguments.time_limit, arguments.threads)
    graphs = [("layered", synthetic.layered(n=n, name=f"layered_n{n}")) for n in GROWTH_LAYERED]
    graphs += [("chain", synthetic.chain(n=n // 2, name=f"chain_n{n}")) for n in GROWTH_CHAINS]
    rows = []
    for kind, graph in graphs:
        case = Case(graph.name, graph, share_of_peak(graph, 0.9), "90%")
        if not _is_wanted(arguments, case):
            continue
        compared = solve(case, settings, store)
        row, stats = compared.row, compared.stats
        rows.append({
            "kind": kind, "operations": row.n_operations, "edges": row.n_edges, "time_limit_s": row.time_limit_s,
            "first_plan_s": stats.get("first_plan_s"), "within_1pct_s": stats.get("within_1pct_s"),
            "overhead": row.overhead, "peak_memory_bytes": stats.get("solver_peak_memory_bytes"),
        })  # fmt: skip
        overhead = "no plan" if row.overhead is None else f"overhead {100 * row.overhead:.2f} %"
        size = rows[-1]["peak_memory_bytes"]
        memory = "" if size is None else f", {size / 2**20:.0f} MiB"
        print(f"{graph.name}: {row.n_operations:,} operations, {row.n_edges:,} edges, first plan "
              f"{rows[-1]['first_plan_s']} s, {overhead} after {row.wall_s:.0f} s{memory}", flush=True)  # fmt: skip
    if not rows:
        raise InvalidInput("no graph; see --only")
    written = draw_growth(rows, Path(arguments.figure))
    print(f"drawn: {', '.join(str(path) for path in written)}")


def _folder(arguments: argparse.Namespace) -> Path | None:
    if arguments.generated:
        return None
    if folder := arguments.instances or os.environ.get("REMAT_INSTANCES"):
        return _existing(folder)
    print("no instances found (REMAT_INSTANCES); using the project's own graphs")
    return None


def _existing(folder: str | Path) -> Path:
    if not Path(folder).is_dir():
        raise InvalidInput(f"no folder '{folder}'; set REMAT_INSTANCES or use --generated")
    return Path(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, run, and print the table with the machine that it was measured on."""
    parser = Parser(prog="python -m experiments.bench_solvers", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--instances", type=argument(_existing), help="folder of instances; default REMAT_INSTANCES")
    parser.add_argument("--generated", action="store_true", help="use the project's own graphs")
    parser.add_argument("--only", type=pattern, default="", help="regular expression on 'instance budget scope'")
    parser.add_argument("--strategy", type=one_name("strategy", strategies), default="portfolio")
    parser.add_argument("--time-limit", type=seconds, default=TIME_LIMIT_S, help="seconds for each solve; default 60")
    parser.add_argument("--seeds", type=count, default=1, help="solve each case with the seeds 0, 1, ...")
    parser.add_argument("--certificates", type=Path, help="copy the certificates of the bounds to this folder")
    parser.add_argument("--target-gap", type=float, default=0.0, help="end at this gap, e.g. 0.01 for 1 %%")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--repeats", type=count, default=1, help="of each solve with --compare")
    parser.add_argument("--compare", action="store_true", help="the MILP's two formulations")
    parser.add_argument("--gaps", action="store_true", help="only cases with a goal for the gap, until each is reached")
    parser.add_argument("--growth", action="store_true", help="search against the size of the graph")
    parser.add_argument("--figure", default="runs/growth.png", help="of --growth")
    parser.add_argument("--out", default="runs/bench.jsonl", help="file of rows for people; they are also in the store")
    parser.add_argument("--markdown", help="also write the table to this file")
    _run(parser.parse_args(arguments))


def _run(arguments: argparse.Namespace) -> None:
    if arguments.compare:
        return compare(arguments)
    if arguments.growth:
        return growth(arguments)
    began = time.monotonic()
    results = bench(arguments)
    limit = " or ".join(f"{seconds:g} s" for seconds in sorted({r.row.time_limit_s for r in results}))
    text = (
        f"{table(results)}\n\n{time.strftime('%Y-%m-%d')}, {provenance().cpu}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {arguments.strategy}, {limit}, {arguments.threads} threads; "
        f"{time.monotonic() - began:.0f} s in all"
    )
    verdicts = [r.goal for r in results if r.goal]
    what = "Gaps" if arguments.gaps else "Costs against recorded or published ones"
    text += f"\n\n{what}: {verdicts.count('met')} of {len(verdicts)} goals met."
    asked = [r.gap_goal.startswith("met") for r in results if r.gap_goal]
    if asked:
        text += f" Bounds: {sum(asked)} of {len(asked)} goals met."
    print("\n" + text)
    if arguments.markdown:
        write_text(Path(arguments.markdown), text + "\n")


if __name__ == "__main__":
    run(main)
