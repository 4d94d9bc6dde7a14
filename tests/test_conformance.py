"""What every registered strategy must do; a new one is covered as soon as it is registered."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from brute_force import optimum, random_graph, scope_by_definition, training_chain

import remat
from remat import Graph, Operation, Scope, Status, Value, simulate
from remat.incumbent import is_closed
from remat.simulator import plain_peak
from remat.solvers import portfolio
from remat.solving.api import solve_sweep

# In a sweep of small graphs the portfolio's MILP would only repeat checkmate_milp; test_solve runs it.
# Without it they would use all of the time on what they cannot prove.
OPTIONS = {"portfolio": {"work_limit": 5000}, "search": {"work_limit": 5000}, "interval_cp": {"work_limit": 1}}
WITH_PLAN = (Status.OPTIMAL, Status.FEASIBLE)


def several_outputs() -> Graph:
    """Operations with two outputs, scratch memory, a kept value and an operation that must run once."""
    operations = (
        Operation("input", "", (), (0,), 1), Operation("norm", "", (0,), (1, 2), 3, 2),
        Operation("update", "", (2,), (3,), 1, run_once=True), Operation("relu", "", (1,), (4,), 1),
        Operation("loss", "", (4,), (5,), 1), Operation("grad", "", (1, 2, 5), (6,), 4, 1, is_backward=True),
    )  # fmt: skip
    values = tuple(Value(f"v{v}", size, v in (3, 6)) for v, size in enumerate((3, 3, 1, 1, 3, 1, 3)))
    return Graph("several", operations, values, fixed_bytes=2, loss=4)


def branching(n: int) -> Graph:
    """Like the published training graphs in miniature: blocks with a shortcut, mirrored backward."""
    deps = [[], *([i - 1, i - 2] if i % 3 == 0 else [i - 1] for i in range(1, n))]
    deps += [[n + j - 1, n - 1 - j] if j else [n - 1] for j in range(n)]
    size = [8 - (i % 5) for i in range(n)]
    return Graph.from_nodes(
        "branching", deps, size + size[::-1], [3 + i % 4 for i in range(2 * n)],
        backward=[False] * n + [True] * n, fixed_bytes=10, loss=n - 1, workspace_bytes=[i % 2 for i in range(2 * n)],
    )  # fmt: skip


SMALL = {
    "chain": training_chain(4), "several": several_outputs(), "branching": branching(4),
    "random": random_graph(np.random.default_rng(11), 8, min_bytes=1, min_cost=1),
}  # fmt: skip
# Too large for brute force; the first and the last for A* too.
LARGE = {
    "long chain": training_chain(14), "long branching": branching(11),
    "long random": random_graph(np.random.default_rng(12), 26, min_bytes=1, min_cost=1),
}  # fmt: skip
GRAPHS = SMALL | LARGE
# Budgets from just feasible to comfortable, and the least staged costs within them. Tests below find them again by
# other means.
RECORDED = {
    "long chain": {3: 120, 9: 48, 15: 42},
    "long branching": {37: 149, 62: 110, 85: 100},
    "long random": {13: 81, 20: 60, 27: 55},
}


@cache
def budgets(graph: str) -> tuple[int, ...]:
    """From just feasible to comfortable."""
    if graph in RECORDED:
        return tuple(RECORDED[graph])
    least, most = remat.min_budget(GRAPHS[graph]).bytes, plain_peak(GRAPHS[graph])
    return least, (least + most) // 2, most


@cache
def best(graph: str, budget: int) -> int | None:
    """The staged optimum: recorded, by exhaustive search, or None where that takes too long."""
    if graph in RECORDED:
        return RECORDED[graph][budget]
    return optimum(GRAPHS[graph], budget, "staged") if len(GRAPHS[graph]) <= 9 else None


def run(strategy: str, graph: str, wanted: tuple[int, ...], **more):
    options = {"time_limit_s": 20, "threads": 1, "isolate": False} | OPTIONS.get(strategy, {}) | more
    return solve_sweep(GRAPHS[graph], wanted, strategy, **options)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("strategy", remat.strategies())
def test_every_strategy_conforms(strategy, graph):
    solutions = run(strategy, graph, budgets(graph), time_limit_s=5 if graph in LARGE else 20)
    for tight, wide in pairwise(solutions):  # more memory never costs more
        assert tight.cost is None or (wide.cost is not None and wide.cost <= tight.cost)
    for budget, solution in zip(budgets(graph), solutions, strict=True):
        assert (solution.strategy, solution.budget_bytes) == (strategy, budget)
        assert solution.status in set(Status) - {Status.FAILED}, solution.message
        assert solution.status is not Status.INFEASIBLE, f"a plan exists within {budget}"
        if solution.status not in WITH_PLAN:
            assert (solution.plan, solution.cost, bool(solution.message)) == (None, None, True)
            continue
        trace = simulate(GRAPHS[graph], solution.plan)
        assert (solution.cost, solution.peak_bytes) == (trace.cost, trace.peak_bytes)
        assert trace.peak_bytes <= budget
        assert scope_by_definition(solution.plan.order.tolist(), len(GRAPHS[graph])) == "staged"
        assert solution.bound <= solution.cost
        optimal = best(graph, budget)
        if optimal is not None:
            assert solution.bound <= optimal <= solution.cost
            if solution.status is Status.OPTIMAL:
                assert solution.cost == optimal


@pytest.mark.parametrize("strategy", remat.strategies())
def test_the_same_seed_gives_the_same_plan(strategy):
    runs = [run(strategy, "branching", budgets("branching")[:2], seed=7) for _ in range(2)]
    first, second = ([(one.status, one.cost, one.plan and one.plan.steps) for one in solutions] for solutions in runs)
    assert first == second


@pytest.mark.parametrize("strategy", remat.strategies())
def test_a_budget_that_cannot_be_met_is_a_status(strategy):
    for graph, one in SMALL.items():
        for solution in run(strategy, graph, (one.largest_working_set()[0] - 1, 0)):
            assert solution.plan is None
            assert solution.status in (Status.INFEASIBLE, Status.SKIPPED), solution.message
            if solution.status is Status.INFEASIBLE:
                assert "smallest budget known feasible" in solution.message


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("strategy", remat.strategies())
def test_plans_stay_in_the_scope_asked_for(strategy, scope):
    for solution in run(strategy, "several", budgets("several"), scope=str(scope)):
        assert solution.status is not Status.FAILED, solution.message
        if solution.plan is not None:
            assert scope.contains(solution.plan.scope)
            assert solution.bound <= optimum(GRAPHS["several"], solution.budget_bytes, str(scope))


# --- graphs that no exhaustive solver decides: each proof against another one


@pytest.fixture
def nothing_exhaustive(monkeypatch):
    """The portfolio's A* fails the test: a graph is decided by search and proof."""

    def called(*_, **__):
        pytest.fail("A* was asked")

    monkeypatch.setattr(portfolio, "EXHAUSTIVE_OPERATIONS", 0)
    monkeypatch.setattr(portfolio, "exhaustive", called)


@pytest.mark.long
@pytest.mark.usefixtures("nothing_exhaustive")
@pytest.mark.parametrize("graph", LARGE)
def test_the_portfolio_proves_the_recorded_costs(graph):
    """Each budget by itself: no plan and no bound comes from another one."""
    for threads, (budget, cost) in zip((2, 1, 2), RECORDED[graph].items(), strict=True):
        (solution,) = run("portfolio", graph, (budget,), threads=threads, work_limit=None)
        assert (solution.status, solution.cost, solution.bound) == (Status.OPTIMAL, cost, cost)
        assert simulate(GRAPHS[graph], solution.plan).cost == cost
    (none,) = run("portfolio", graph, (min(RECORDED[graph]) - 1,), work_limit=None)
    assert none.status is Status.INFEASIBLE


@pytest.mark.parametrize("graph", LARGE)
def test_the_published_program_proves_the_recorded_costs(graph):
    """Another formulation, through another interface; at the smallest budget it needs minutes."""
    for budget in sorted(RECORDED[graph])[1:]:
        (solution,) = run("checkmate_milp", graph, (budget,), formulation="published")
        assert solution.cost == RECORDED[graph][budget]
        assert is_closed(solution.gap)  # by HiGHS; where nothing has to be repeated, OPTIMAL
    least = remat.min_budget(GRAPHS[graph])
    assert (least.bytes, least.is_exact) == (min(RECORDED[graph]), True)


def test_the_binomial_schedule_has_the_recorded_costs_of_a_chain():
    """Griewank and Walther prove it optimal on chains, without any program."""
    solutions = run("griewank", "long chain", budgets("long chain"))
    assert [solution.cost for solution in solutions] == list(RECORDED["long chain"].values())


@pytest.mark.long
@pytest.mark.usefixtures("nothing_exhaustive")
def test_the_certificate_of_a_large_problem_is_checked_without_a_solver(monkeypatch):
    """As for a problem of many columns: the LP bound comes before the MILP of the whole."""
    monkeypatch.setattr(portfolio, "SMALL_COLUMNS", 0)
    graph = "long random"
    one, (budget, cost) = GRAPHS[graph], min(RECORDED[graph].items())
    (solution,) = run("portfolio", graph, (budget,), work_limit=None, time_limit_s=40)
    assert (solution.status, solution.cost) == (Status.OPTIMAL, cost)
    proven = remat.verify_bound(one, solution.certificate, budget=budget, scope="staged")
    assert one.total_cost < proven <= cost
    with pytest.raises(remat.InvalidInput, match=f"up to {budget} B, not for {budget + 1}"):
        remat.verify_bound(one, solution.certificate, budget=budget + 1)
