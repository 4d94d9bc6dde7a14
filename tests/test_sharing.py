"""Budgets of a sweep share plans and bounds, in the library and in the harness."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from brute_force import optimum, training_chain
from helpers import DIAMOND, context_of
from sweep_helpers import MIRROR, at, graph_run_of

import remat
from experiments.budget_sweep import run_sweep
from experiments.engine import LocalEngine
from experiments.solving import GraphRun, contradictions, is_final, reuse_plans
from experiments.store import Row, Store
from remat import Outcome, Plan, Problem, Solution, Status, registry, simulate
from remat.context import Context
from remat.simulator import plain_peak
from remat.solution import Candidate, Ending
from remat.solving.api import solve_sweep
from remat.solving.budgets import share
from remat.solving.dispatch import new_context
from remat.solving.here import solve_here
from remat.solving.worker import Known

CHAIN = training_chain(4)
LEAST = remat.min_budget(CHAIN).bytes
MOST = plain_peak(CHAIN)


def test_budgets_are_solved_ascending_each_from_the_best_plan_before(scripted) -> None:
    asked: list[tuple[int, int | None]] = []
    cheapest = solve_sweep(CHAIN, [LEAST], "checkmate_milp", isolate=False)[0].plan

    def run(problem: Problem, context: Context) -> Plan | None:
        start = context.options.warm_start
        asked.append((problem.budget_bytes, start and simulate(CHAIN, start).cost))
        return cheapest if problem.budget_bytes == LEAST else None

    scripted(run)
    wide, tight, _ = found = solve_sweep(CHAIN, [MOST, LEAST, LEAST + 1], "scripted")
    cost = optimum(CHAIN, LEAST, "staged")
    assert asked == [(LEAST, None), (LEAST + 1, cost), (MOST, cost)]
    assert [(s.budget_bytes, s.cost) for s in found] == [(MOST, cost), (LEAST, cost), (LEAST + 1, cost)]
    assert (wide.parameters["plan_from_bytes"], wide.plan.budget_bytes) == (LEAST, MOST)
    assert wide.status is Status.FEASIBLE
    assert "plan found at" in wide.message
    assert "plan_from_bytes" not in tight.parameters


def test_a_baseline_says_only_what_it_finds_itself() -> None:
    solutions = solve_sweep(CHAIN, [LEAST, MOST], "checkpoint_all")
    assert [s.status for s in solutions] == [Status.NO_PLAN, Status.OPTIMAL]


def solved(budget: int, cost: int | None, bound: int | None, status: Status = Status.FEASIBLE) -> Solution:
    plan = None if cost is None else Plan.from_order(CHAIN, range(len(CHAIN)), budget)
    gap = None if cost is None or bound is None else (cost - bound) / cost
    return Solution(status, "s", "g", budget, remat.Scope.STAGED, "exact", plan, cost, cost, 0.0, bound, gap)


def test_a_larger_budget_never_costs_more_and_a_smaller_never_proves_less() -> None:
    given = [solved(40, 130, 100), solved(10, 150, 90), solved(20, 120, 105), solved(30, None, 110, Status.TIMEOUT)]
    shared = share(given)
    assert [(s.cost, s.bound, s.status) for s in shared] == [
        (120, 100, Status.FEASIBLE), (150, 110, Status.FEASIBLE), (120, 110, Status.FEASIBLE),
        (120, 110, Status.FEASIBLE),
    ]  # fmt: skip
    assert [s.gap for s in shared] == pytest.approx([20 / 120, 40 / 150, 10 / 120, 10 / 120])
    assert [s.parameters.get("plan_from_bytes") for s in shared] == [20, None, None, 20]
    tight, _ = share([solved(10, 120, 100), solved(20, 120, 120, Status.OPTIMAL)])
    assert (tight.status, tight.bound, tight.gap) == (Status.OPTIMAL, 120, 0.0)
    given = [solved(10, 120, 100), solved(20, None, None, Status.FAILED), solved(30, None, None, Status.SKIPPED)]
    assert [s.status for s in share(given)] == [Status.FEASIBLE, Status.FAILED, Status.SKIPPED]


@pytest.mark.parametrize(
    "wrong", [solved(20, None, None, Status.INFEASIBLE), solved(20, 130, 125), solved(20, None, 121, Status.TIMEOUT)]
)
def test_claims_that_contradict_each_other_are_failed(wrong) -> None:
    (failed,) = (s for s in share([solved(10, 120, 100), wrong]) if s.status is Status.FAILED)
    assert failed.contradicted
    assert "claims" in failed.message


def test_rows_that_contradict_each_other_are_named_and_not_papered_over() -> None:
    proven = replace(at(20, 120, 120, "OPTIMAL"), strategy="milp")
    cheaper = replace(at(10, 110, 100), strategy="search", peak_bytes=9)
    assert contradictions([proven, replace(cheaper, cost=120)]) == []
    (line,) = contradictions([proven, cheaper])
    assert "milp claims the bound 120 at 20 B" in line
    assert "a plan of search fits and costs 110" in line
    (line,) = contradictions([cheaper, replace(at(15, None, None, "INFEASIBLE"), strategy="milp")])
    assert "that no plan fits" in line
    marked = replace(at(20, None, None, "FAILED"), contradicted=True, message="it lied")
    assert contradictions([marked]) == [f"{marked.strategy} at 20 B: it lied"]
    rows = reuse_plans([at(10, 120, 100), at(20, None, None, "INFEASIBLE"), at(30, None, None, "FAILED")], 1e-4)
    assert [row.status for row in rows] == ["FEASIBLE", "INFEASIBLE", "FAILED"]


class Here(LocalEngine):
    """Runs jobs in this process, one after the other; Ctrl-C comes before job number `stop_before`."""

    def __init__(self, stop_before: int | None = None):
        super().__init__(1)
        self.jobs, self.stop_before, self.starts = [], stop_before, []

    def submit(self, job) -> None:
        self.jobs.append(job)

    def results(self):
        while self.jobs:
            if self.stop_before == len(self.starts):
                raise KeyboardInterrupt
            job = self.jobs.pop(0)
            start = job.warm_start() if job.warm_start is not None else None
            self.starts.append((job.problem.budget_bytes, start and simulate(MIRROR, start).cost))
            context = new_context(job.problem, replace(job.how, warm_start=start))
            yield job, solve_here(context, job.strategy, job.options)

    def running(self):
        return []

    def interrupt(self):
        job = self.jobs[0]
        plan = Plan.from_order(MIRROR, range(len(MIRROR)))
        solution = solve_sweep(MIRROR, [5], job.strategy, isolate=False)[0]
        return [(job, replace(solution, plan=plan, budget_bytes=5, status=Status.FEASIBLE, ended=Ending.INTERRUPTED))]


def sweep(folder: Path, engine: Here, **changes: object) -> tuple[list[Row], GraphRun]:
    changes |= {"strategies": ("scripted",), "options": {"scripted": {}}}
    with graph_run_of(folder, engine, **changes) as graph_run:
        return run_sweep(graph_run)[0], graph_run


def only_tight(problem: Problem) -> Outcome:
    if problem.budget_bytes > 3:
        return Outcome(timed_out=True)
    return Outcome((Candidate(solve_sweep(MIRROR, [3], "checkmate_milp", isolate=False)[0].plan),))


@pytest.mark.parametrize("deterministic", [False, True])
def test_finished_budgets_feed_the_queued_ones_unless_runs_must_repeat(scripted, tmp_path, deterministic) -> None:
    scripted(only_tight)
    engine = Here()
    rows, graph_run = sweep(tmp_path, engine, deterministic=deterministic)
    cost = optimum(MIRROR, 3, "staged")
    later = None if deterministic else cost
    assert engine.starts == [(3, None), (4, later), (5, later)]
    assert [row.cost for row in rows] == [cost] * 3
    assert [row.plan_from for row in rows] == [None, 3, 3]
    again, repeated = sweep(tmp_path, Here(), deterministic=deterministic)
    assert (repeated.solved, again) == (0, rows)
    assert graph_run.solved == 3


def test_an_interrupted_row_is_kept_but_not_taken_for_a_finished_one(scripted, tmp_path) -> None:
    scripted(only_tight)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, Here(stop_before=2))  # budgets 3 and 4 are done, 5 runs
    stored = [Store(tmp_path).read_row(path.stem) for path in (tmp_path / "rows").iterdir()]
    cut = [row for row in stored if row is not None and not is_final(row)]
    assert [(row.budget_bytes, row.status, row.ended) for row in cut] == [(5, "FEASIBLE", "interrupted")]
    assert len(stored) == 3
    engine = Here()
    rows, graph_run = sweep(tmp_path, engine)
    assert (graph_run.solved, graph_run.reused) == (1, 2)
    assert [row.budget_bytes for row in rows] == [3, 4, 5]
    assert all(is_final(row) for row in rows)
    assert engine.starts[0][1] is not None  # begins from a plan


def test_a_plan_damaged_on_the_disk_is_no_start_and_is_solved_again(scripted, tmp_path) -> None:
    scripted(only_tight)
    rows, _ = sweep(tmp_path, Here())
    (tmp_path / str(rows[0].plan_file)).write_text('{"format": "remat-pl')
    for path in (tmp_path / "rows").iterdir():
        row = Store(tmp_path).read_row(path.stem)
        if row is not None and row.budget_bytes == 4:
            path.unlink()
    engine = Here()
    with pytest.warns(UserWarning, match="cannot be read as JSON: .*; computing it again"):
        again, _ = sweep(tmp_path, engine)
    assert engine.starts == [(3, None), (4, rows[0].cost)]
    assert [row.cost for row in again] == [row.cost for row in rows]


def sweep_of(folder: Path, *names: str, engine: LocalEngine, graph=MIRROR, budget: int = 3) -> dict[str, Row]:
    """[strategy] its row of `GraphRun.run_budgets` at one budget."""
    options = {name: {} for name in names}
    with graph_run_of(folder, engine, graph, strategies=names, options=options) as graph_run:
        return {name: rows[0] for name, rows in graph_run.run_budgets(names, [budget]).items()}


def test_a_strategy_has_the_cheaper_plan_of_its_member_and_says_so(scripted, tmp_path) -> None:
    scripted(only_tight)
    registry.strategy("whole", members=("scripted",))(lambda problem: Outcome(bound=problem.graph.total_cost))
    rows = sweep_of(tmp_path / "to the whole", "scripted", "whole", engine=Here())
    member, whole = rows["scripted"], rows["whole"]
    assert member.cost == whole.cost == optimum(MIRROR, 3, "staged")
    assert (whole.plan_file, whole.plan_from, whole.status) == (member.plan_file, 3, "FEASIBLE")
    assert "plan found by scripted" in whole.message
    assert Store(tmp_path / "to the whole").read_row(whole.key) == whole
    # but a member does not get the plan of the whole
    registry.strategy("group", members=("idle",))(only_tight)
    registry.strategy("idle")(lambda problem: Outcome())
    rows = sweep_of(tmp_path / "to a member", "group", "idle", engine=Here())
    assert (rows["group"].cost, rows["idle"].cost) == (optimum(MIRROR, 3, "staged"), None)


@pytest.mark.usefixtures("warm_search")
def test_a_proven_optimum_ends_a_search_that_has_it_and_an_infeasible_budget_is_not_searched(tmp_path) -> None:
    rows = sweep_of(tmp_path, "search", "portfolio", engine=LocalEngine(1))
    search, portfolio = rows["search"], rows["portfolio"]
    assert portfolio.status == search.status == "OPTIMAL"
    assert search.bound == portfolio.bound == optimum(MIRROR, 3, "staged")
    assert (search.message, search.proof_from) == ("its plan meets the bound proven by portfolio", "portfolio")
    assert search.wall_s < 30  # of the 60 that it would search
    assert is_final(search)
    assert DIAMOND.largest_working_set()[0] == 6, "a smaller budget is refused before any strategy runs"
    rows = sweep_of(tmp_path, "search", "portfolio", engine=LocalEngine(1), graph=DIAMOND, budget=6)
    assert (rows["search"].status, rows["search"].bound) == ("INFEASIBLE", None)
    assert rows["search"].message.startswith("proven by portfolio: ")
    assert rows["search"].wall_s < 30


def test_a_bound_above_a_plan_is_a_contradiction_and_ends_nothing() -> None:
    problem = context_of(MIRROR, 5)
    problem.offer(Plan.from_order(MIRROR, range(len(MIRROR))), "test")
    assert Known("liar", problem.incumbent.cost + 1).decides(problem) is False
    assert Known("liar", None).decides(problem) is False


def test_a_certified_bound_is_handed_on_beside_a_higher_one_that_is_not_exact(tmp_path) -> None:
    of_portfolio = {"strategies": ("portfolio",), "options": {"portfolio": {}}}
    for target_gap, expected in ((1e-4, (7, "certificate")), (0.01, (8, "highs"))):
        with graph_run_of(tmp_path, LocalEngine(1), **of_portfolio, target_gap=target_gap) as graph_run:
            row = graph_run.keep("key", remat.solve(MIRROR, 3))
            found = {"key": replace(row, bound=8, proven_by="highs", certified_bound=7)}
            known = graph_run._known(found, "search", 3)
        assert (known.bound, known.by) == expected
