"""Solves through the store and the engine: a problem with a final row in the store is not solved again."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console

import remat
from experiments.build import Subject
from experiments.engine import Engine, Job
from experiments.progress import SolveProgress
from experiments.provenance import provenance, solver_build
from experiments.settings import Settings
from experiments.store import Row, Store, code_of, row_key
from remat.compiled import is_compiled
from remat.errors import InvalidPlan, RematError
from remat.frontends import synthetic
from remat.incumbent import EXACT, GAP_TOLERANCE, Progress, is_proven, relative_gap
from remat.plan import Plan, parse_scope
from remat.problem import Problem, SolveOptions
from remat.registry import get_strategy
from remat.simulator import plain_peak
from remat.solution import Ending, Family, Solution, Status
from remat.solving.here import solve_family
from remat.solving.worker import Known
from remat.units import format_size

ANY_BUDGET = 2**60
COMPILE_S = 60.0  # for a strategy that compiles when it first runs
# Another attempt with the same key would not change these. SKIPPED is not one: a missing solver may be installed.
_FINAL = (Status.OPTIMAL, Status.FEASIBLE, Status.INFEASIBLE, Status.NO_PLAN, Status.TIMEOUT)


@dataclass(frozen=True, slots=True)
class Solves:
    """What the solves of a case are made with, and where they run and are kept."""

    settings: Settings
    store: Store
    engine: Engine
    progress: SolveProgress
    console: Console

    def graph_run(
        self, subject: Subject, experiment: str, settings: Settings | None = None, cost_cap: int | None = None
    ) -> "GraphRun":
        """The solves of one graph, by default with the settings of the case; stores the graph."""
        chosen, graph = settings or self.settings, subject.graph
        self.store.write_graph(graph)
        plain = remat.family(graph.default(), "checkpoint_all", accounting=chosen.accounting)[0]
        where = self.store, self.engine, self.progress
        return GraphRun(subject, chosen, experiment, *where, plain.peak_bytes, cost_cap)


@dataclass(slots=True)
class GraphRun:
    """The solves of one graph: runs strategies on it and keeps rows as they finish.

    Attributes:
        experiment: name in new rows.
        store_all_peak_bytes: checkpoint-all's peak under the run's accounting.
        cost_cap: of every problem, see `Problem`.
        serves: budgets that the run of a family is for. If it asks a framework, it has the time limit for each.
        starts: [strategy] families; its solves may also start from their cheapest plan that fits, as in Checkmate's
            artifact.
        live: [key] the last improvement of a running solve.
        families: [strategy] those of this run so far.
        kept: [key] every row of this run so far.
        solved, reused: number of solves done now, and number found in the store.
    """

    subject: Subject
    settings: Settings
    experiment: str
    store: Store
    engine: Engine
    progress: SolveProgress
    store_all_peak_bytes: int
    cost_cap: int | None = None
    serves: int = 1
    starts: dict[str, tuple[Family, ...]] = field(default_factory=dict)
    families: dict[str, Family] = field(default_factory=dict)
    kept: dict[str, Row] = field(default_factory=dict)
    live: dict[str, Progress] = field(default_factory=dict)
    solved: int = 0
    reused: int = 0

    def problem(self, budget_bytes: int) -> Problem:
        """The problem at one budget."""
        s = self.settings
        return Problem(self.subject.graph, budget_bytes, parse_scope(s.scope), s.accounting, self.cost_cap, s.link)

    def how(self, strategy: str) -> SolveOptions:
        """The limits and options of every solve of a strategy."""
        s, limit_s = self.settings, self.settings.limit_of(strategy)
        return SolveOptions(limit_s, s.seed, s.threads, s.work_limit, s.deterministic, target_gap=s.target_gap)

    def key(self, strategy: str, budget_bytes: int | None) -> str:
        """The key of the row at that budget; for None, of the strategy's family."""
        s, subject = self.settings, self.subject
        return row_key(
            {
                "graph": subject.graph.sha256(),
                "of": [subject.graph.name, subject.model, subject.framework, subject.granularity, subject.batch_size,
                       subject.dtype, subject.cost_model, s.gpu.name],
                "strategy": strategy,
                "options": s.options.get(strategy, {}),
                "budget": budget_bytes,
                "time_limit": s.limit_of(strategy),
                "work_limit": s.work_limit,
                "target_gap": s.target_gap,
                "seed": s.seed,
                "threads": s.threads,
                "deterministic": s.deterministic,
                "scope": s.scope,
                "accounting": s.accounting,
                **({} if s.link is None else {"link": s.link.document()}),
                **({} if self.cost_cap is None or budget_bytes is None else {"cost_cap": self.cost_cap}),
                **({} if budget_bytes is not None or self._turns(strategy) == 1 else {"serves": self._turns(strategy)}),
                **({"starts": "families"} if budget_bytes is not None and strategy in self.starts else {}),
                **({"without": "network"} if s.spec is None and get_strategy(strategy).prepare is not None else {}),
                "code": code_of(strategy, has_link=s.link is not None),
            }
        )  # fmt: skip

    def run_families(self, names: Sequence[str]) -> dict[str, Family]:
        """[strategy] the family of each of `names` that ignores the budget, from the store or run now."""
        names = [name for name in names if get_strategy(name).ignores_budget]
        jobs = []
        for name in names:
            if name in self.families:
                continue
            key = self.key(name, None)
            found = self.store.read_family(key, name, self.subject.graph)
            if found is not None:
                self.families[name] = found
                self.reused += 1
            else:
                options = self.settings.options.get(name, {})
                spec = self.settings.spec if get_strategy(name).prepare is not None else None
                how = self.how(name)
                how = replace(how, time_limit_s=self._turns(name) * how.time_limit_s)
                jobs.append(Job(key, name, self.problem(ANY_BUDGET), name, how, options, spec=spec))
        for job, family in run_jobs(jobs, self.engine, self.progress):
            self.solved += 1
            assert isinstance(family, Family)
            self.families[job.strategy] = family
            if family.status is not Status.FAILED:
                self.store.write_family(job.key, family, self.subject.graph, self.settings.accounting)
            self.progress.finished(_family_line(family))
        return {name: self.families[name] for name in names}

    def _turns(self, strategy: str) -> int:
        """Time limits of a family's run."""
        return 1 if get_strategy(strategy).prepare is None else self.serves

    def family_rows(self, family: Family, budgets: Sequence[int]) -> list[Row]:
        """A row for each budget: the cheapest member that fits. Solves nothing."""
        name = family.strategy
        rows = []
        for solution in solve_family(family, [self.problem(budget) for budget in budgets]):
            key = self.key(name, solution.budget_bytes)
            row = self.store.read_row(key, self.subject.graph)
            outcome = (str(solution.status), solution.cost, solution.peak_bytes)
            if row is None or (row.status, row.cost, row.peak_bytes) != outcome:  # e.g. FAILED: its worker was killed
                row = self.keep(key, solution)
            rows.append(row)
            self.kept[key] = row
        return rows

    def run_budgets(self, names: Sequence[str], budgets: Sequence[int]) -> dict[str, list[Row]]:
        """[strategy] a row for each budget, in the order of `budgets`, for strategies that depend on it.

        A solve starts from the cheapest plan that its strategy or a member of it has found so far for a smaller
        budget. It ends when a proof of another strategy decides it. Neither holds for a baseline, nor with
        `deterministic`, where a row must not depend on the order of the solves. A strategy with members also gets
        their plans where these are cheaper. Ctrl-C stores the plans of the running solves; the next run solves these
        rows again.
        """
        found: dict[str, Row] = {}
        asked = [
            Asked(self, name, budget, partial(self.cheapest_below, found, name, budget),
                  partial(self._known, found, name, budget))
            for budget in budgets  # the tightest are the hardest: first, so that no long one is left to the end
            # Strategies with members prove bounds: first, so that the others end sooner.
            for name in sorted(names, key=lambda name: not get_strategy(name).members)
        ]  # fmt: skip
        solve_each(asked, found)
        rows = {name: [found[self.key(name, budget)] for budget in budgets] for name in names}
        return {name: self._with_members(name, rows) for name in names}

    def _with_members(self, name: str, rows: Mapping[str, list[Row]]) -> list[Row]:
        """A strategy's rows, each with the cheapest plan of the strategy and its members; stores changed rows."""
        members = [rows[member] for member in get_strategy(name).members if member in rows]
        improved = []
        for row, *others in zip(rows[name], *members, strict=True):
            best = min(others, key=_cost_or_last, default=row)
            if _may_take(row, best) and _cost_or_last(best) < _cost_or_last(row):
                row = _derived(row, plan=best)
                self.store.write_row(row)
            improved.append(row)
        return improved

    def _known(self, found: Mapping[str, Row], name: str, budget: int) -> Known | None:
        """The best proof by other strategies so far for this budget or a larger one, whose proofs hold here too."""
        proofs = [
            row for row in list(found.values())
            if row.strategy != name and row.budget_bytes >= budget and row.status not in (Status.FAILED, Status.SKIPPED)
        ]  # fmt: skip
        infeasible = next((row for row in proofs if row.status == Status.INFEASIBLE), None)
        if infeasible is not None:
            return Known(infeasible.strategy, None, infeasible.message)
        bounds = [
            Known(row.strategy, bound, by=by or "")
            for row in proofs
            for bound, by in ((row.bound, row.proven_by), (row.certified_bound, "certificate"))
            if bound and (self.settings.target_gap > GAP_TOLERANCE or (by or "") in EXACT)  # else it decides nothing
        ]
        return max(bounds, key=lambda known: known.bound or 0, default=None)

    def job(
        self, name: str, budget: int, start: Callable[[], Plan | None], known: Callable[[], Known | None] | None = None
    ) -> Job:
        """One solve. `start` gives a plan to start from, `known` gives proofs while it runs.

        A baseline and a run that must repeat exactly use neither.
        """
        key = self.key(name, budget)
        how = replace(self.how(name), progress=lambda progress: self.live.__setitem__(key, progress))
        shares = not how.repeats and not get_strategy(name).is_baseline
        options = self.settings.options.get(name, {})
        return Job(key, f"{name} at {format_size(budget, digits=3)}", self.problem(budget), name, how, options,
                   start if shares else None, known if shares else None)  # fmt: skip

    def cheapest_below(self, found: Mapping[str, Row], name: str, budget: int) -> Plan | None:
        """The cheapest plan of a strategy, its members or its `starts` for this budget or a smaller one."""
        names = (name, *get_strategy(name).members)
        rows = [row for row in list(found.values()) if row.strategy in names and row.budget_bytes <= budget]
        row = min(rows, key=_cost_or_last, default=None)
        fitting = [m for family in self.starts.get(name, ()) for m in family.members if m.peak_bytes <= budget]
        member = min(fitting, key=lambda member: member.cost, default=None)
        if member is not None and (row is None or member.cost < _cost_or_last(row)):
            return member.plan
        return self.plan_of(row)

    def plan_of(self, row: Row | None) -> Plan | None:
        """A row's plan; None without one, or with a warning if its file is damaged."""
        if row is None or row.plan_file is None:
            return None
        try:
            return self.store.read_plan(row, self.subject.graph)
        except InvalidPlan as error:
            warnings.warn(str(error), stacklevel=2)
            return None

    def label(self, job: Job) -> str:
        """The label of a running solve, with its results so far."""
        known = self.live.get(job.key)
        return job.label if known is None else f"{job.label} ({progress_line(known, self.subject.graph.total_cost)})"

    def keep(self, key: str, solution: Solution) -> Row:
        """Store a solution with its plan, the certificate of its bound and its provenance."""
        plan_file = self.store.write_plan(key, solution.plan) if solution.plan is not None else None
        if solution.certificate is not None:
            solution.certificate.save(self.store.certificate_file(key))
        row = self._row(key, solution, plan_file)
        self.store.write_row(row)
        self.kept[key] = row
        return row

    def _row(self, key: str, solution: Solution, plan_file: str | None) -> Row:
        s, subject, graph, where = self.settings, self.subject, self.subject.graph, provenance()
        stats, options, proof = solution.stats, s.options.get(solution.strategy, {}), solution.certificate
        return Row(
            key=key, experiment=self.experiment, model=subject.model, framework=subject.framework,
            granularity=subject.granularity, batch_size=subject.batch_size, dtype=subject.dtype, graph_name=graph.name,
            graph_sha256=graph.sha256(), gpu=s.gpu.name, gpu_memory_bytes=int(s.gpu.memory_bytes),
            cost_model=subject.cost_model, cost_source=subject.cost_source, cost_unit=graph.cost_unit,
            strategy=solution.strategy,
            parameters=json.dumps({**options, **solution.parameters}, sort_keys=True, default=str),
            options=json.dumps(dict(options), sort_keys=True, default=str),
            budget_bytes=solution.budget_bytes, status=str(solution.status), cost=solution.cost, bound=solution.bound,
            gap=solution.gap, overhead=solution.overhead, peak_bytes=solution.peak_bytes, plan_file=plan_file,
            plan_from=None, message=solution.message, ended=str(solution.ended), cut_by_clock=solution.cut_by_clock,
            contradicted=solution.contradicted, proof_from=solution.proof_from or None,
            proven_by=solution.proven_by or None, certified_bound=None if proof is None else proof.bound,
            peak_bound_bytes=solution.peak_bound_bytes, wall_s=solution.wall_s,
            time_limit_s=s.limit_of(solution.strategy), seed=s.seed, threads=s.threads, scope=s.scope,
            accounting=s.accounting, cost_cap=self.cost_cap,
            stats=json.dumps(dict(stats), sort_keys=True, default=str), total_cost=graph.total_cost,
            store_all_peak_bytes=self.store_all_peak_bytes, fixed_bytes=graph.fixed_bytes, n_operations=len(graph),
            n_edges=graph.n_edges, git_commit=where.git_commit, git_dirty=where.git_dirty, versions=where.versions,
            cpu=stats.get("cpu", where.cpu),  # on a cluster the node's
            solver_build=solver_build(stats.get("solver")),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip


def finished_jobs(
    engine: Engine, progress: SolveProgress, label: Callable[[Any], str] = lambda job: job.label
) -> Iterator[tuple[Any, Any]]:
    """Jobs as they finish, until none is left; meanwhile shows the running jobs."""
    for finished in engine.results():
        if finished is not None:
            yield finished
        progress.tick([label(job) for job in engine.running()])


def run_jobs(
    jobs: Sequence[Job], engine: Engine, progress: SolveProgress, label: Callable[[Job], str] = lambda job: job.label
) -> Iterator[tuple[Job, Family | Solution]]:
    """Submit the jobs; yield them as they finish."""
    progress.expect(len(jobs))
    if jobs:
        compile_first((job.strategy for job in jobs), progress.note)
    for job in jobs:
        engine.submit(job)
    yield from finished_jobs(engine, progress, label)


def compile_first(names: Iterable[str], say: Callable[[str], None] = lambda line: None) -> None:
    """Compile the search, and what these strategies compile, before the first solve: its time limit may be shorter."""
    from remat.search.ready import is_ready  # imports Numba, which a run that only redraws does not need

    if not is_ready():
        say("compiling the search, once on this machine (1 to 4 minutes)")
        subprocess.run([sys.executable, "-m", "remat.search"], stdout=subprocess.DEVNULL, check=False)
    for name in dict.fromkeys(names):
        function = get_strategy(name).compiles
        if function is not None and not is_compiled(function):
            say(f"compiling {name}, once on this machine (at most {COMPILE_S:.0f} s)")
            graph = synthetic.chain(n=6)
            remat.solve_sweep(graph, [plain_peak(graph) - 1], name, time_limit_s=COMPILE_S, isolate=True)


def _cost_or_last(row: Row) -> float:
    return float("inf") if row.cost is None or row.plan_file is None else row.cost


def is_final(result: Row | Solution) -> bool:
    """Whether another attempt would only repeat the result: false for a failure and for a solve that was cut short."""
    return result.status in _FINAL and result.ended not in (Ending.INTERRUPTED, Ending.CRASHED)


def finished(solution: Solution) -> Solution:
    """The solution.

    Raises:
        KeyboardInterrupt: Ctrl-C ended it.
        RematError: the solver failed, so that this is no result to keep.
    """
    if solution.ended is Ending.INTERRUPTED:
        raise KeyboardInterrupt
    if not is_final(solution):
        raise RematError(
            f"{solution.strategy}, {solution.status}: {solution.message}; to try again, repeat the command"
        )
    return solution


def contradictions(rows: Sequence[Row]) -> list[str]:
    """Claims that the simulator or another row's plan refutes, one line each."""
    from analysis import claims  # imported late: it imports pandas, which would delay the first line of a run

    failed = [row for row in rows if row.contradicted]
    lines = [f"{row.strategy} at {format_size(row.budget_bytes)}: {row.message}" for row in failed]
    return list(dict.fromkeys(lines)) + claims.contradictions(rows)


def progress_line(known: Progress, total_cost: int) -> str:
    """Incumbent, bound, gap, and the strategy that found the last improvement."""
    parts = ["no plan yet"] if known.cost is None else [f"overhead {_percent(known.cost, total_cost)}"]
    if known.bound is not None:
        parts.append(f"bound {_percent(known.bound, total_cost)}")
    if known.gap is not None:
        parts.append(f"gap {100 * known.gap:.2f} %")
    return ", ".join(parts) + f", {known.who}"


def _percent(cost: int, total_cost: int) -> str:
    return f"{100 * (cost / total_cost - 1) if total_cost else 0.0:.2f} %"


def row_line(row: Row) -> str:
    """A row in one line."""
    parts = [row.status]
    if row.overhead is not None:
        parts.append(f"overhead {100 * row.overhead:.2f} %")
    if row.gap and row.bound is not None:
        parts.append(f"bound {_percent(row.bound, row.total_cost)}, gap {100 * row.gap:.2f} %")
    finder = json.loads(row.parameters).get("from")
    if finder and row.cost is not None:
        parts.append(f"found by {finder}")
    parts.append(f"{row.wall_s:.1f} s")
    return ", ".join(parts) + (f" ({row.message})" if row.cost is None and row.message else "")


def _family_line(family: Family) -> str:
    if family.status is not None:
        return f"{family.strategy}: {family.status} ({family.message})"
    if not family.members:
        return f"{family.strategy}: NO_PLAN ({family.rejected or 'it proposed no plan'})"
    n = len(family.members)
    least = format_size(min(member.peak_bytes for member in family.members))
    return f"{family.strategy}: {n} plan{'s' * (n > 1)}, peak from {least}, {family.wall_s:.1f} s"


def reuse_plans(rows: Sequence[Row], tolerance: float) -> list[Row]:
    """One strategy's rows of a sweep, each with the best plan and bound that all of them together give.

    A plan for a smaller budget is also a plan for a larger one: where it is cheaper (or the row has none), the row
    gets it, and `plan_from` names its budget. A lower bound for a larger budget holds for a smaller one. A changed
    row gets its own key, so that the solved row stays as it was. OPTIMAL only where the bound at this budget meets
    the cost.
    """
    rows = sorted(rows, key=lambda row: row.budget_bytes)
    improved: list[Row] = []
    best: Row | None = None
    for i, row in enumerate(rows):
        if row.status in (Status.FAILED, Status.SKIPPED) or (best is not None and not _may_take(row, best)):
            improved.append(row)  # a contradicted claim must stay visible; `contradictions` names it
            continue
        plan = best if best is not None and _cost_or_last(best) < _cost_or_last(row) else None
        bound = None
        if plan is not None or row.cost is not None:
            bound = max((r for r in rows[i + 1 :] if r.bound is not None), key=lambda r: r.bound or 0, default=None)
            if bound is not None and not _is_better(bound, row):
                bound = None
        new = row if plan is bound is None else _derived(row, plan=plan, bound=bound, tolerance=tolerance)
        if new.cost is not None and (best is None or new.cost < _cost_or_last(best)):
            best = new
        improved.append(new)
    return improved


def _may_take(row: Row, plan: Row) -> bool:
    """Whether a row can get the plan of another: its status and its bound do not contradict that plan."""
    closed = row.status in (Status.FAILED, Status.SKIPPED, Status.INFEASIBLE)
    return not closed and (row.bound or 0) <= _cost_or_last(plan)


def _is_better(bound: Row, row: Row) -> bool:
    """Whether a row can use another's bound: it is higher, and a row that is OPTIMAL stays so."""
    is_enough = row.status != Status.OPTIMAL or is_proven(row.cost or 0, bound.bound or 0, bound.proven_by)
    return is_enough and (bound.bound or 0) > (row.bound or row.total_cost)


def _derived(row: Row, *, plan: Row | None = None, bound: Row | None = None, tolerance: float = GAP_TOLERANCE) -> Row:
    """A row with the plan of another, the bound of another, or both; it has its own key."""
    new = row
    if plan is not None:
        origin = plan.budget_bytes if plan.plan_from is None else plan.plan_from
        finder = f" by {plan.strategy}" if plan.strategy != row.strategy else ""
        new = replace(new, cost=plan.cost, overhead=plan.overhead, peak_bytes=plan.peak_bytes,
                      plan_file=plan.plan_file, plan_from=origin,
                      message=f"plan found{finder} at {format_size(origin)}; here: {row_line(row)}")  # fmt: skip
    if bound is not None:
        note = f"bound proven at {format_size(bound.budget_bytes)}"
        certified = max((b for b in (row.certified_bound, bound.certified_bound) if b is not None), default=None)
        proof = {"proven_by": bound.proven_by, "certified_bound": certified}
        new = replace(new, bound=bound.bound, message=f"{new.message}; {note}" if new.message else note, **proof)
    assert new.cost is not None
    cost, certified = new.cost, new.certified_bound or 0
    proven = new.bound if new.bound is not None else new.total_cost
    if is_proven(cost, certified, "certificate") and not is_proven(cost, proven, new.proven_by):
        proven, new = certified, replace(new, proven_by="certificate")  # the solver's bound alone is not exact
    gap = relative_gap(cost, proven)
    status = Status.OPTIMAL if is_proven(cost, proven, new.proven_by, tolerance) else Status.FEASIBLE
    used = [row.key, "" if plan is None else plan.key, proven]
    return replace(new, bound=proven, gap=gap, status=str(status), key=row_key({"reused": used}))


class Asked(NamedTuple):
    """A row that is asked for; for `start` and `known` see `GraphRun.job`."""

    graph_run: GraphRun
    strategy: str
    budget: int
    start: Callable[[], Plan | None] = lambda: None
    known: Callable[[], Known | None] | None = None


def solve_each(asked: Sequence[tuple[Any, ...]], rows: dict[str, Row] | None = None) -> list[Row]:
    """A row for each, from the store or solved side by side; all share one engine.

    Ctrl-C as in `GraphRun.run_budgets`.

    Args:
        asked: (graph run, strategy, budget), or more as in `Asked`.
        rows: [key] is filled as solves finish.
    """
    rows = {} if rows is None else rows
    wanted = [Asked(*each) for each in asked]
    keys = [each.graph_run.key(each.strategy, each.budget) for each in wanted]
    by_key = dict(zip(keys, wanted, strict=True))
    jobs = []
    for key, each in by_key.items():
        row = each.graph_run.store.read_row(key, each.graph_run.subject.graph)
        if row is not None and is_final(row):
            rows[key] = each.graph_run.kept[key] = row
            each.graph_run.reused += 1
            continue
        if row is not None and row.cost is not None:
            rows[key] = row  # of an interrupted run: solves can start from its plan
        jobs.append(each.graph_run.job(each.strategy, each.budget, each.start, each.known))
    if jobs:
        engine, progress = wanted[0].graph_run.engine, wanted[0].graph_run.progress
        has_several = len({id(each.graph_run) for each in wanted}) > 1
        try:
            for job, solution in run_jobs(jobs, engine, progress, lambda job: by_key[job.key].graph_run.label(job)):
                assert isinstance(solution, Solution)
                graph_run = by_key[job.key].graph_run
                graph_run.solved += 1
                rows[job.key] = graph_run.keep(job.key, solution)
                of = f"{graph_run.subject.graph.name}, " if has_several else ""
                progress.finished(f"{of}{job.label}: {row_line(rows[job.key])}")
        except KeyboardInterrupt:
            for job, solution in engine.interrupt():
                if isinstance(solution, Solution) and solution.plan is not None:
                    by_key[job.key].graph_run.keep(job.key, solution)
            raise
    return [rows[key] for key in keys]
