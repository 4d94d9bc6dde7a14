"""``experiment=benchmark``: every strategy on every graph of a benchmark, each solve by itself, and their ranking.

No solve starts from the plan of another, or ends by its proof. A case is a strategy on a graph at all budgets, with one
seed. Cases run in one shuffled order, so that what else the machine does falls on all strategies alike. A case that is
finished in any checkout is not measured again until a version is raised by hand (`experiments.store.code_of`).
"""

import base64
import itertools
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from analysis.leaderboard import draw, leaderboard
from analysis.leaderboard import page as page_of
from analysis.memory import timeline
from experiments.arguments import names_of, one_of
from experiments.config import group_options
from experiments.documents import Drawing
from experiments.engine import Job
from experiments.leaderboard_table import PAGE, drawn
from experiments.measure_solve import graph_of, row_of, spec_of
from experiments.provenance import solver_build
from experiments.registry import Case, Row, experiment
from experiments.settings import RUNS_FOLDER, Settings
from experiments.solving import ANY_BUDGET, compile_first, finished
from experiments.store import code_of
from remat.cost.gpu import gpu_names
from remat.errors import InvalidInput, RematError
from remat.files import write_text
from remat.graph import Graph
from remat.plan import Plan, parse_scope
from remat.problem import Problem, SolveOptions
from remat.registry import get_strategy
from remat.simulator import plain_peak, simulate
from remat.solution import Family, Status
from remat.solving.here import solve_family

POINTS = 128  # of the line of memory over time


@experiment(page=PAGE, has_graphs=True)
def benchmark(
    settings: Settings, benchmark: Mapping[str, Any] = {}, networks: list[str] | None = None, time_limit: float = 10.0,
    seeds: int = 3,
) -> Iterator[Case]:  # fmt: skip
    """Every strategy on every graph of a benchmark (benchmark=field) at five budgets, and their ranking."""
    _check(benchmark)
    cases = list[Case]()
    if settings.instances is not None:
        os.environ["REMAT_INSTANCES"] = settings.instances  # for the processes of the cases
    for name in names_of("instance", networks or benchmark["instances"], benchmark["instances"]):
        instance = benchmark["instances"][name]
        source = _source(instance, settings)
        try:
            sha256 = graph_of(source).sha256()
        except InvalidInput as error:
            warnings.warn(f"left out: {name}: {error}", stacklevel=1)
            continue
        of = {"benchmark": benchmark["name"], "instance": name, "family": instance["family"], "graph": source,
              "graph_sha256": sha256, "shares": sorted(instance["shares"] or benchmark["shares"])}  # fmt: skip
        of |= {"held_out": True} if instance["held_out"] else {}
        cases += _cases(of, settings, benchmark["long_time_limit"] if instance["is_long"] else None, seeds)
    Random(settings.seed).shuffle(cases)
    yield from cases


def _cases(of: Mapping[str, Any], settings: Settings, long_limit_s: float | None, seeds: int) -> Iterator[Case]:
    """Every strategy on a graph. What ignores the budget has no use for the longer limit or for other seeds."""
    s = settings
    for strategy in s.strategies:
        once = get_strategy(strategy).ignores_budget
        limits_s = dict.fromkeys([s.time_limit_s] if once else [s.time_limit_s, long_limit_s or s.time_limit_s])
        for limit_s, seed in itertools.product(limits_s, range(s.seed, s.seed + (1 if once else seeds))):
            what = dict(of) | {
                "strategy": strategy, "options": s.options.get(strategy, {}), "time_limit_s": limit_s, "seed": seed,
                "threads": s.threads, "scope": s.scope, "accounting": s.accounting, "target_gap": s.target_gap,
                "work_limit": s.work_limit, "deterministic": s.deterministic,
            }  # fmt: skip
            name = f"{of['instance']}, {strategy}, {limit_s:g} s, seed {seed}"
            yield Case(measure, what, code_of(strategy), name=name)


def measure(
    graph: str | Mapping[str, Any], shares: Sequence[float], strategy: str, options: Mapping[str, Any],
    time_limit_s: float, scope: str, accounting: str, **how: Any,
) -> Iterator[Row]:  # fmt: skip
    """A row for each budget: a share of the way from what one operation needs to the plain peak.

    Raises:
        RematError: a solve failed; after the rows of the others.
    """
    compile_first([strategy])
    loaded, chosen = graph_of(graph), get_strategy(strategy)
    least, most = max(loaded.largest_working_set()[0], loaded.final_bytes), plain_peak(loaded)

    def job(budget: int, limit_s: float) -> Job:
        names = ("seed", "threads", "work_limit", "deterministic", "target_gap")
        options_of_all = SolveOptions(limit_s, **{name: how[name] for name in names})
        spec = spec_of(graph) if chosen.prepare is not None else None
        problem = Problem(loaded, budget, parse_scope(scope), accounting)
        return Job(strategy, strategy, problem, strategy, options_of_all, options, spec=spec)

    jobs = [job(least + int(share * (most - least)), time_limit_s) for share in shares]
    if chosen.ignores_budget:  # if it asks a framework, it has the time limit for each budget
        family = job(ANY_BUDGET, time_limit_s * (1 if chosen.prepare is None else len(jobs))).run()
        assert isinstance(family, Family)
        solutions = solve_family(family, [each.problem for each in jobs])
        walls = [family.wall_s] * len(jobs)
    else:
        solutions = [each.run() for each in jobs]
        walls = [solution.wall_s for solution in solutions]
    failed = list[str]()
    for share, solution, wall_s in zip(shares, solutions, walls, strict=True):
        assert not isinstance(solution, Family)
        try:
            if solution.status != Status.SKIPPED:
                finished(solution)
        except RematError as error:
            failed.append(f"share {share:g}: {error}")
            continue
        yield dict(row_of(solution, loaded)) | {
            "budget_bytes": solution.budget_bytes, "share": share, "wall_s": wall_s,
            "message": solution.message[:200], "cost_unit": loaded.cost_unit,
            "solver": solver_build(solution.stats.get("solver")),
            "trajectory": [list(step[:2]) for step in solution.stats.get("trajectory", [])],
            "memory": None if solution.plan is None else memory_line(loaded, solution.plan),
        }  # fmt: skip
    if failed:
        raise RematError("; ".join(failed))


def _check(given: Mapping[str, Any]) -> None:
    """Refuse a benchmark that would fail after the first solve.

    Raises:
        InvalidInput: names the instance and the value.
    """

    def check_shares(where: str, shares: Sequence[float]) -> None:
        if not shares or not all(0 < share <= 1 for share in shares):
            raise InvalidInput(f"{where}.shares must be numbers above 0 and at most 1, not {list(shares)}")

    if not re.fullmatch(r"[\w-]+", given["name"]):
        raise InvalidInput("benchmark.name must be a word; the rows have it")
    if not given["long_time_limit"] > 0:
        raise InvalidInput(f"benchmark.long_time_limit must be positive, not {given['long_time_limit']:g}")
    check_shares("benchmark", given["shares"])
    for name, instance in given["instances"].items():
        where = f"benchmark.instances.{name}"
        if instance["family"] == "???":
            raise InvalidInput(f"{where}.family is missing")
        if (instance["graph"] is None) == (instance["model"] is None):
            raise InvalidInput(f"{where} needs a graph or a model, and not both")
        if instance["model"] is not None:
            one_of("model", instance["model"], group_options("model"))
        one_of("gpu", instance["gpu"], gpu_names())
        if instance["shares"] is not None:
            check_shares(where, instance["shares"])


def _source(instance: Mapping[str, Any], settings: Settings) -> str | dict[str, Any]:
    """Where the graph of an instance comes from, for `graph_of`."""
    if instance["graph"] is not None:
        return instance["graph"]
    names = ("model", "gpu", "batch_size", "input_size", "options")
    return {name: instance[name] for name in names if instance[name]} | {"cost": settings.cost}


def memory_line(graph: Graph, plan: Plan) -> str:
    """Base64 of [POINTS] bytes: the most memory in each part of a plan's time, in 255ths of the plain peak."""
    line = timeline(graph, simulate(graph, plan))
    levels = bytes(round(255 * held / max(1, plain_peak(graph))) for held in line.highest(POINTS))
    return base64.b64encode(levels).decode()


@benchmark.draws
def page(rows: Sequence[Row]) -> Drawing:
    """The ranking of the benchmark that was run last: tables, figures, and the page that filters."""
    name = rows[-1]["benchmark"]
    shown = leaderboard([row for row in rows if row["benchmark"] == name])
    figures = {"leaderboard": draw(shown.boards[0])} if shown.boards and shown.boards[0].ranked else {}
    write_text(file := RUNS_FOLDER / "benchmark" / "page.html", page_of(shown, f"Leaderboard: {name}"))
    return Drawing(*drawn(shown), figures, [file])
