"""``make bench``: cost, bound, gap, times and memory of the solvers, beside the recorded results.

Instances are the files of REMAT_INSTANCES (or ``--instances``); without them, graphs of the same kinds
that the project generates. Budgets: those of records.json; else shares of the peak of running every
operation once. Rows are written as they finish and found again by the next run. Each solve has a process of
its own; "start s" is the time until the strategy begins in it, and part of the times that follow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from analysis.growth import draw_growth
from experiments.provenance import provenance
from experiments.store import code_version
from remat import Ending, Graph, Plan, Solution, load_graph, simulate, solve_sweep
from remat.errors import RematError
from remat.files import read_json
from remat.frontends import synthetic
from remat.incumbent import GAP_TOLERANCE

GROWTH_LAYERED, GROWTH_CHAINS = (250, 1000, 4000, 16_000), (100, 1000, 10_000)
TIME_LIMIT_S = 60.0
NEAR = 1e-4  # of a proven record
SHARES = {"v100": (0.9, 0.75, 0.6), "layered": (0.9, 0.8), "generated": (0.9, 0.75, 0.6)}
# Overheads in percent that others published on the layered graphs: MOCCASIN (fixed order), FastSA (free).
PUBLISHED = {
    ("layered_n100", 0.9): (0.8, 0.0), ("layered_n100", 0.8): (2.3, 0.3),
    ("layered_n250", 0.9): (0.9, 0.0), ("layered_n250", 0.8): (4.9, 0.0),
}  # fmt: skip

# (gap, seconds without the start of the process) that `--gaps` measures against.
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
    """One solve: an instance, a budget and a scope, with what is recorded about it."""

    instance: str
    graph: Graph
    budget_bytes: int
    label: str
    scope: str = "staged"
    record_cost: int | None = None
    record_proven: bool = False
    record_s: float | None = None
    published_overhead: float | None = None
    goal_gap: float | None = None
    goal_s: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What one solve gave; costs in the graph's unit, times in seconds."""

    instance: str
    budget: str
    budget_bytes: int
    scope: str
    strategy: str
    time_limit_s: float
    threads: int
    code: str
    status: str
    cost: int | None
    overhead: float | None
    bound: int | None
    gap: float | None
    first_plan_s: float | None
    within_1pct_s: float | None
    wall_s: float
    peak_memory_bytes: int | None
    record_cost: int | None
    record_proven: bool
    record_s: float | None
    published_overhead: float | None
    found_by: str
    message: str
    target_gap: float = 0.0
    graph_sha256: str = ""
    machine: str = ""
    date: str = ""
    start_s: float | None = None
    goal_gap: float | None = None
    goal_s: float | None = None

    @property
    def solve_s(self) -> float:
        """Wall time without the start of the solver's process."""
        return self.wall_s - (self.start_s or 0.0)

    @property
    def against_record(self) -> float | None:
        """cost / recorded cost - 1."""
        return None if self.cost is None or not self.record_cost else self.cost / self.record_cost - 1

    @property
    def goal(self) -> str:
        """Whether the result is as good as what it is compared with; '' if with nothing."""
        if self.goal_gap is not None and self.goal_s is not None:
            met = self.gap is not None and self.gap <= self.goal_gap and self.solve_s <= self.goal_s
        elif self.record_cost:
            difference = self.against_record
            met = difference is not None and (difference <= NEAR if self.record_proven else difference < 0)
        elif self.published_overhead is not None:
            met = self.overhead is not None and round(100 * self.overhead, 2) <= self.published_overhead + 0.005
        else:
            return ""
        return "met" if met else "MISSED"


def cases(folder: Path | None) -> Iterator[Case]:
    """Every case of the instances folder, or of the generated graphs."""
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
    """Graphs of the kinds of the published instances, from the project's own generators."""
    yield synthetic.chain(n=48, varied=True, name="chain_n48")
    yield synthetic.chain(n=160, varied=True, name="chain_n160")
    yield synthetic.skip(depth=32, name="skip_d32")
    yield synthetic.layered(n=100, name="layered_n100")
    yield synthetic.layered(n=250, name="layered_n250")


def _share(graph: Graph, share: float) -> int:
    return int(share * simulate(graph, Plan.from_order(graph, range(len(graph)))).peak_bytes)


def run_case(
    case: Case, strategy: str, time_limit_s: float, threads: int, options: dict[str, Any], target_gap: float = 0.0
) -> Result:
    """Solve one case in a process of its own, so that its memory is measured alone.

    Raises:
        KeyboardInterrupt: it was interrupted; what it had found is no result.
        SystemExit: the judge contradicts what the solver claims.
    """
    solution = solve_sweep(
        case.graph, [case.budget_bytes], strategy, scope=case.scope, time_limit_s=time_limit_s, threads=threads,
        isolate=True, target_gap=target_gap or GAP_TOLERANCE, **options,
    )[0]  # fmt: skip
    if solution.contradicted:
        raise SystemExit(f"bench: {case.instance} at {case.label}: {solution.message}")
    if solution.ended is Ending.INTERRUPTED:
        raise KeyboardInterrupt
    return _result(case, strategy, time_limit_s, threads, target_gap, solution)


def _result(case: Case, strategy: str, time_limit_s: float, threads: int, target_gap: float, s: Solution) -> Result:
    return Result(
        case.instance, case.label, case.budget_bytes, case.scope, strategy, time_limit_s, threads, code_version(),
        str(s.status), s.cost, s.overhead, s.bound, s.gap, s.stats.get("first_plan_s"), s.stats.get("within_1pct_s"),
        s.wall_s, s.stats.get("solver_peak_memory_bytes"), case.record_cost, case.record_proven, case.record_s,
        case.published_overhead, str(s.parameters.get("from", "")), s.message, target_gap,
        case.graph.sha256(), provenance().cpu, time.strftime("%Y-%m-%d"),
        s.stats.get("start_s"), case.goal_gap, case.goal_s,
    )  # fmt: skip


HEADER = (
    "instance", "budget", "status", "cost", "overhead %", "bound", "gap %", "start s", "first s", "1 % s",
    "wall s", "MiB", "record", "vs record %", "record s", "goal",
)  # fmt: skip


def table(results: Sequence[Result]) -> str:
    """The results as Markdown tables, one for each scope: their costs and bounds do not compare."""
    parts = []
    for scope in dict.fromkeys(r.scope for r in results):
        rows = [table_row(r) for r in results if r.scope == scope]
        head = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
        parts.append("\n".join([f"Scope {scope}:", "", *head, *rows]))
    return "\n\n".join(parts)


def table_row(r: Result) -> str:
    """One line of the table."""

    def number(value: float | None, digits: int, factor: float = 1.0) -> str:
        return "" if value is None else f"{factor * value:.{digits}f}"

    record = "" if r.record_cost is None else f"{r.record_cost:,}" + ("" if r.record_proven else " (24 h)")
    if r.published_overhead is not None:
        record = f"{r.published_overhead} % (published)"
    goal = r.goal
    if r.goal_gap is not None:
        goal = f"{goal}: {100 * r.goal_gap:g} % in {r.goal_s:g} s"
    cells = (
        r.instance, r.budget, r.status, "" if r.cost is None else f"{r.cost:,}",
        number(r.overhead, 3, 100), "" if r.bound is None else f"{r.bound:,}", number(r.gap, 3, 100),
        number(r.start_s, 2), number(r.first_plan_s, 2), number(r.within_1pct_s, 1), number(r.wall_s, 1),
        number(r.peak_memory_bytes, 0, 2**-20), record, number(r.against_record, 4, 100), number(r.record_s, 0), goal,
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


class Rows:
    """The file of rows: what was solved before by this code on this machine is not solved again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.known = {_key(r): r for r in self._read() if r.status != "FAILED"}

    def solve(self, case: Case, strategy: str, time_limit_s: float, threads: int, target_gap: float = 0.0) -> Result:
        """The stored result of the case, or that of `run_case`, stored as soon as it is there."""
        key = (case.instance, case.budget_bytes, case.scope, strategy, time_limit_s, threads, target_gap,
               code_version(), case.graph.sha256(), provenance().cpu)  # fmt: skip
        result = self.known.get(key)
        if result is None:
            result = run_case(case, strategy, time_limit_s, threads, {}, target_gap)
            with self.path.open("a") as file:  # one line, one write: an interrupted run loses nothing
                file.write(json.dumps(asdict(result)) + "\n")
        return result

    def _read(self) -> Iterator[Result]:
        """The rows of the file; a line that an interrupted run wrote in part is none."""
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                yield Result(**json.loads(line))


def _key(r: Result) -> tuple[Any, ...]:
    return (r.instance, r.budget_bytes, r.scope, r.strategy, r.time_limit_s, r.threads, r.target_gap, r.code,
            r.graph_sha256, r.machine)  # fmt: skip


def bench(arguments: argparse.Namespace) -> list[Result]:
    """Run every case that the store of rows does not have yet."""
    kept = Rows(Path(arguments.out))
    results = []
    for case in cases(_folder(arguments)):
        if arguments.only and not re.search(arguments.only, f"{case.instance} {case.label} {case.scope}"):
            continue
        time_limit_s, target_gap = arguments.time_limit, arguments.target_gap
        if arguments.gaps:
            if (case.instance, case.label) not in GAP_GOALS:
                continue
            goal_gap, goal_s = GAP_GOALS[case.instance, case.label]
            case = replace(case, goal_gap=goal_gap, goal_s=goal_s)
            time_limit_s, target_gap = arguments.time_limit or max(goal_s, TIME_LIMIT_S), target_gap or goal_gap
        result = kept.solve(case, arguments.strategy, time_limit_s, arguments.threads, target_gap)
        results.append(replace(result, goal_gap=case.goal_gap, goal_s=case.goal_s))
        print(table_row(results[-1]), flush=True)
    return results


def compare(arguments: argparse.Namespace) -> None:
    """Seconds to a proven optimum of checkmate_milp's two formulations (without the process's start), their ratio."""
    for case in cases(_folder(arguments)):
        if case.scope != "staged" or (
            arguments.only and not re.search(arguments.only, f"{case.instance} {case.label}")
        ):
            continue
        seconds: dict[str, list[float]] = {}
        for form in ("trimmed", "published"):
            for _ in range(arguments.repeats):
                r = run_case(case, "checkmate_milp", arguments.time_limit, arguments.threads, {"formulation": form})
                if r.status == "OPTIMAL":
                    seconds.setdefault(form, []).append(r.solve_s)
        proven = {form: len(times) for form, times in seconds.items()}
        seconds = {form: times for form, times in seconds.items() if len(times) == arguments.repeats}
        shown = {form: f"proven in {count} of {arguments.repeats} runs" for form, count in proven.items()}
        shown |= {form: f"{statistics.median(times):.1f} s" for form, times in seconds.items()}
        ratio = ""
        if len(seconds) == 2:
            ratio = (
                f"{statistics.median(seconds['published']) / statistics.median(seconds['trimmed']):.0f} times faster"
            )
        print(f"{case.instance} {case.label}: trimmed {shown.get('trimmed', 'not proven')}, "
              f"published {shown.get('published', 'not proven')} {ratio}", flush=True)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Growth:
    """What a strategy gave on a graph of some size; times in seconds, overhead as a fraction."""

    kind: str
    operations: int
    edges: int
    time_limit_s: float
    first_plan_s: float | None
    within_1pct_s: float | None
    overhead: float | None
    peak_memory_bytes: int | None


def growth(arguments: argparse.Namespace) -> list[Growth]:
    """First plan, plan quality and memory of `search` against the size of the graph."""
    Path(arguments.figure).parent.mkdir(parents=True, exist_ok=True)
    kept = Rows(Path(arguments.out))
    graphs = [("layered", synthetic.layered(n=n, name=f"layered_n{n}")) for n in GROWTH_LAYERED]
    graphs += [("chain", synthetic.chain(n=n // 2, name=f"chain_n{n}")) for n in GROWTH_CHAINS]
    rows = []
    for kind, graph in graphs:
        if arguments.only and not re.search(arguments.only, graph.name):
            continue
        case = Case(graph.name, graph, _share(graph, 0.9), "90%")
        r = kept.solve(case, "search", arguments.time_limit, arguments.threads)
        row = Growth(
            kind, len(graph), graph.n_edges, arguments.time_limit, r.first_plan_s, r.within_1pct_s, r.overhead,
            r.peak_memory_bytes,
        )  # fmt: skip
        rows.append(row)
        overhead = "no plan" if row.overhead is None else f"overhead {100 * row.overhead:.2f} %"
        memory = "" if row.peak_memory_bytes is None else f", {row.peak_memory_bytes / 2**20:.0f} MiB"
        print(f"{graph.name}: {row.operations:,} operations, {row.edges:,} edges, first plan {row.first_plan_s} s, "
              f"{overhead} after {r.wall_s:.0f} s{memory}", flush=True)  # fmt: skip
    if rows:
        written = draw_growth([asdict(row) for row in rows], Path(arguments.figure))
        print(f"drawn: {', '.join(str(path) for path in written)}")
    return rows


def _folder(arguments: argparse.Namespace) -> Path | None:
    if arguments.generated:
        return None
    given = arguments.instances or os.environ.get("REMAT_INSTANCES")
    folder = Path(given) if given else Path("../shared/instances")
    if folder.is_dir():
        return folder
    if given:
        raise SystemExit(f"bench: no folder '{folder}'; set REMAT_INSTANCES or use --generated")
    print("bench: no instances at hand (REMAT_INSTANCES); the project's own graphs are used")
    return None


def main() -> None:
    """Read the arguments, run, print the table and what it was measured on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", help="folder of instances; default REMAT_INSTANCES")
    parser.add_argument("--generated", action="store_true", help="use the project's own graphs")
    parser.add_argument("--only", help="regular expression on 'instance budget scope'")
    parser.add_argument("--strategy", default="portfolio")
    parser.add_argument("--time-limit", type=float, help="seconds for each solve; default 60, with --gaps 600")
    parser.add_argument("--target-gap", type=float, default=0.0, help="end at this gap, e.g. 0.01 for 1 %%")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1, help="of each solve with --compare")
    parser.add_argument("--compare", action="store_true", help="the MILP's two formulations")
    parser.add_argument("--gaps", action="store_true", help="the proven gaps that are aimed at, until each is reached")
    parser.add_argument("--growth", action="store_true", help="search against the size of the graph")
    parser.add_argument("--figure", default="runs/growth.png", help="of --growth")
    parser.add_argument("--out", default="runs/bench.jsonl", help="rows, found again by the next run")
    parser.add_argument("--markdown", help="write the table there too")
    arguments = parser.parse_args()
    try:
        re.compile(arguments.only or "")
    except re.error as error:
        parser.error(f"--only is no regular expression: {error}")
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    try:
        _run(arguments)
    except RematError as error:
        raise SystemExit(f"bench: {error}") from None


def _run(arguments: argparse.Namespace) -> None:
    if not arguments.gaps:
        arguments.time_limit = arguments.time_limit or TIME_LIMIT_S
    if arguments.compare:
        compare(arguments)
        return
    if arguments.growth:
        growth(arguments)
        return
    began = time.monotonic()
    results = bench(arguments)
    if not results:
        raise SystemExit("bench: no case; see --only, --instances and --generated")
    where = provenance()
    limits = sorted({r.time_limit_s for r in results})
    limit = " or ".join(f"{seconds:g} s" for seconds in limits)
    text = (
        f"{table(results)}\n\n{time.strftime('%Y-%m-%d')}, {where.cpu}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {arguments.strategy}, {limit}, {arguments.threads} threads; "
        f"{time.monotonic() - began:.0f} s in all"
    )
    goals = [r.goal for r in results if r.goal]
    what = "Gaps" if arguments.gaps else "Costs against what is recorded or published"
    text += f"\n\n{what}: {goals.count('met')} of {len(goals)} goals met."
    print("\n" + text)
    if arguments.markdown:
        Path(arguments.markdown).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.markdown).write_text(text + "\n")


if __name__ == "__main__":
    main()
