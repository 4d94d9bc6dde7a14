"""``make bench``: cost, bound, gap, times and memory of the solvers, beside the recorded results.

Instances are the files of REMAT_INSTANCES (or ``--instances``); without them, the project generates graphs of the
same kinds. Budgets come from records.json; without it, they are shares of the peak of running every operation once.
Each row goes into the common store as it finishes, and the next run finds it there. Each solve has its own process;
"start s" is the time until the strategy begins in it, and is included in the other times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.growth import draw_growth
from experiments.arguments import Parser, argument, count, one_name, run, seconds
from experiments.budget_sweep import run_single
from experiments.build import Subject, plain_peak
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
from remat import Graph, load_graph, strategies
from remat.errors import InvalidInput
from remat.files import read_json, write_text
from remat.frontends import synthetic
from remat.incumbent import GAP_TOLERANCE, relative_gap

GROWTH_LAYERED, GROWTH_CHAINS = (250, 1000, 4000, 16_000), (100, 1000, 10_000)
TIME_LIMIT_S = 60.0
NEAR = 1e-4  # relative distance to a proven record that counts as equal
SHARES = {"v100": (0.9, 0.75, 0.6), "layered": (0.9, 0.8), "generated": (0.9, 0.75, 0.6)}
# Published overheads in percent on the layered graphs: MOCCASIN (fixed order), FastSA (free).
PUBLISHED = {
    ("layered_n100", 0.9): (0.8, 0.0), ("layered_n100", 0.8): (2.3, 0.3),
    ("layered_n250", 0.9): (0.9, 0.0), ("layered_n250", 0.8): (4.9, 0.0),
}  # fmt: skip

# Goals of `--gaps`: (gap, seconds without the start of the process).
GAP_GOALS = {
    ("p100/resnet50_b184", "5 GiB"): (0.05, 600.0), ("p100/resnet50_b184", "6 GiB"): (0.027, 600.0),
    ("p100/resnet50_b184", "7 GiB"): (0.02, 600.0), ("p100/resnet50_b184", "8 GiB"): (0.013, 600.0),
    ("p100/resnet50_b184", "9 GiB"): (0.01, 600.0), ("p100/resnet50_b184", "10 GiB"): (0.01, 600.0),
    ("p100/unet_b11", "6 GiB"): (0.02, 600.0),
    **{("p100/unet_b11", f"{size} GiB"): (0.01, 600.0) for size in (7, 8, 9, 10)},
    **{("p100/vgg16_b176", f"{size} GiB"): (GAP_TOLERANCE, 2.0) for size in (8, 9, 10)},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One solve: an instance, a budget (`budget` is its text) and a scope, with recorded results to compare with."""

    instance: str
    graph: Graph
    budget_bytes: int
    budget: str
    scope: str = "staged"
    record_cost: int | None = None
    record_proven: bool = False
    record_s: float | None = None
    published_overhead: float | None = None
    goal_gap: float | None = None
    goal_s: float | None = None


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
        return "met" if met else "MISSED"

    def line(self) -> str:
        """Case and row as one JSON object."""
        known = {name: getattr(self.case, name) for name in Case.__dataclass_fields__ if name != "graph"}
        return json.dumps({**known, **asdict(self.row)})


def cases(folder: Path | None) -> Iterator[Case]:
    """Every case of a folder of instances, or of the generated graphs if it is None."""
    if folder is None:
        for graph in generated():
            for share in SHARES["generated"]:
                yield Case(f"generated/{graph.name}", graph, _share(graph, share), f"{share:.0%}")
        return
    file = folder / "records.json"
    records = read_json(file) if file.exists() else []
    for path in sorted(folder.glob("*/*.json")):
        graph, kind = load_graph(path), path.parent.name
        name = f"{kind}/{path.stem}"
        mine = sorted((r for r in records if r["instance"] == name and r["cost_ns"]), key=lambda r: r["budget_bytes"])
        for r in mine:
            yield Case(
                name, graph, r["budget_bytes"], f"{r['budget_gib']:g} GiB", record_cost=r["cost_ns"],
                record_proven=r["status"].startswith("optimal"), record_s=r["solve_s"],
            )  # fmt: skip
        for share in () if mine else SHARES.get(kind, SHARES["generated"]):
            scopes = ("fixed_order", "free") if kind == "layered" else ("staged",)
            for scope, published in zip(scopes, PUBLISHED.get((path.stem, share), (None, None)), strict=False):
                yield Case(name, graph, _share(graph, share), f"{share:.0%}", scope, published_overhead=published)


def generated() -> Iterator[Graph]:
    """Generated graphs of the same kinds as the published instances."""
    yield synthetic.chain(n=48, varied=True, name="chain_n48")
    yield synthetic.chain(n=160, varied=True, name="chain_n160")
    yield synthetic.skip(depth=32, name="skip_d32")
    yield synthetic.layered(n=100, name="layered_n100")
    yield synthetic.layered(n=250, name="layered_n250")


def _share(graph: Graph, share: float) -> int:
    return int(share * plain_peak(graph))


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


HEADER = (
    "instance", "budget", "status", "cost", "overhead %", "bound", "gap %", "certified gap %", "start s",
    "first s", "1 % s", "wall s", "MiB", "record", "vs record %", "record s", "goal",
)  # fmt: skip


def table(results: Sequence[Comparison]) -> str:
    """The results as Markdown tables, one for each scope, because costs of different scopes do not compare."""
    parts = []
    for scope in dict.fromkeys(r.case.scope for r in results):
        rows = [table_row(r) for r in results if r.case.scope == scope]
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
        number(row.overhead, 3, 100), "" if row.bound is None else f"{row.bound:,}", number(row.gap, 3, 100),
        number(certified_gap(row.cost, row.certified_bound), 3, 100),
        number(stats.get("start_s"), 2), number(stats.get("first_plan_s"), 2), number(stats.get("within_1pct_s"), 1),
        number(row.wall_s, 1), number(stats.get("solver_peak_memory_bytes"), 0, 2**-20), record,
        number(compared.against_record, 4, 100), number(case.record_s, 0), goal,
    )  # fmt: skip


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases that ``--only`` selects; with ``--gaps`` only those that have a goal, with that goal.

    Raises:
        InvalidInput: there is none.
    """
    found = [case for case in cases(_folder(arguments)) if _is_wanted(arguments, case)]
    if arguments.gaps:
        goals = ((case, GAP_GOALS.get((case.instance, case.budget))) for case in found)
        found = [replace(case, goal_gap=goal[0], goal_s=goal[1]) for case, goal in goals if goal is not None]
    if not found:
        raise InvalidInput("no case; see --only, --instances and --generated")
    return found


def _is_wanted(arguments: argparse.Namespace, case: Case) -> bool:
    return bool(re.search(arguments.only, f"{case.instance} {case.budget} {case.scope}"))


def bench(arguments: argparse.Namespace) -> list[Comparison]:
    """Solve every case that is not in the store, and write the file of rows."""
    store, out, results = Store(STORE_FOLDER), Path(arguments.out), []
    lines = out.read_text().splitlines() if out.exists() else []
    settings = settings_of(arguments.strategy, arguments.time_limit or TIME_LIMIT_S, arguments.threads)
    for case in chosen_cases(arguments):
        limit_s = arguments.time_limit or max(case.goal_s or 0.0, TIME_LIMIT_S)
        target_gap = arguments.target_gap or case.goal_gap or GAP_TOLERANCE
        results.append(solve(case, replace(settings, time_limit_s=limit_s, target_gap=target_gap), store))
        print(f"| {' | '.join(table_row(results[-1]))} |", flush=True)
        lines = list(dict.fromkeys([*lines, results[-1].line()]))
        write_text(out, "\n".join(lines) + "\n")
    return results


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
                seconds += [compared.solve_s] if compared.row.status == "OPTIMAL" else []
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
        case = Case(graph.name, graph, _share(graph, 0.9), "90%")
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
    beside = Path("../shared/instances")
    if beside.is_dir():
        return beside
    print("no instances found (REMAT_INSTANCES); using the project's own graphs")
    return None


def _existing(folder: str | Path) -> Path:
    if not Path(folder).is_dir():
        raise InvalidInput(f"no folder '{folder}'; set REMAT_INSTANCES or use --generated")
    return Path(folder)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidInput(f"'{text}' is no regular expression: {error}") from None
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, run, and print the table with the machine that it was measured on."""
    parser = Parser(prog="python -m experiments.bench_solvers", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--instances", type=argument(_existing), help="folder of instances; default REMAT_INSTANCES")
    parser.add_argument("--generated", action="store_true", help="use the project's own graphs")
    parser.add_argument(
        "--only", type=argument(_pattern), default="", help="regular expression on 'instance budget scope'"
    )
    parser.add_argument("--strategy", type=one_name("strategy", strategies), default="portfolio")
    parser.add_argument("--time-limit", type=seconds, help="seconds for each solve; default 60, with --gaps 600")
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
    if not arguments.gaps:
        arguments.time_limit = arguments.time_limit or TIME_LIMIT_S
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
    goals = [r.goal for r in results if r.goal]
    what = "Gaps" if arguments.gaps else "Costs against recorded or published ones"
    text += f"\n\n{what}: {goals.count('met')} of {len(goals)} goals met."
    print("\n" + text)
    if arguments.markdown:
        write_text(Path(arguments.markdown), text + "\n")


if __name__ == "__main__":
    run(main)
