"""The published MILP against exhaustive search, and what it claims when it cannot be sure."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from brute_force import KINDS, optimum, random_graph
from helpers import DIAMOND, context_of, hide_package

from remat import Graph, Plan, Scope, Skip, Status, load_graph, min_budget, simulate, solve, solve_sweep
from remat.frontends.synthetic import skip
from remat.incumbent import is_closed
from remat.programs.backends import BACKENDS
from remat.programs.highs import Answer
from remat.programs.program import Limits
from remat.programs.published import build, estimate_nonzeros
from remat.simulator import plain_peak
from remat.solvers._milp_restricted import Refiner
from remat.solvers._milp_trimmed import solve_trimmed


def here(graph, budget, **options):
    """`solve` without a process of its own."""
    return solve_sweep(graph, [budget], "checkmate_milp", threads=1, isolate=False, **options)[0]


@pytest.mark.parametrize("formulation", ["trimmed", "published"])
def test_optimum_is_that_of_exhaustive_search(formulation):
    rng, found = np.random.default_rng(3), Counter[str]()
    for kind in KINDS * 10:
        graph = random_graph(rng, int(rng.integers(5, 7)), min_bytes=1, min_cost=1, **kind)
        least = graph.largest_working_set()[0]
        for budget in range(least, min(least + 2, plain_peak(graph))):  # from there on no solver is asked
            expected = optimum(graph, budget, "staged")
            solution = here(graph, budget, formulation=formulation)
            if expected is None:
                assert solution.status is Status.INFEASIBLE
            else:
                assert (solution.status, solution.cost) == (Status.FEASIBLE, expected)  # no certificate
                assert (solution.bound, solution.gap, solution.proven_by) == (expected, 0, "highs")
                assert solution.peak_bytes <= budget
            found["infeasible" if expected is None else "repeats" if expected > graph.total_cost else "once"] += 1
    assert min(found["infeasible"], found["repeats"]) >= 6


@pytest.mark.parametrize("scope", ["fixed_order", "free"])
def test_nothing_is_claimed_for_a_wider_scope(scope):
    nothing = here(DIAMOND, 6, scope=scope)
    assert nothing.status is Status.NO_PLAN  # there is an unstaged plan of cost 7
    assert scope in nothing.message
    something = here(DIAMOND, 7, scope=scope)
    assert (something.status, something.cost) == (Status.FEASIBLE, 6)
    assert something.bound == DIAMOND.total_cost


@pytest.mark.parametrize("solver", BACKENDS)
def test_each_solver_is_right_or_skipped(solver):
    solution = here(DIAMOND, 7, solver=solver)
    if solution.status is Status.SKIPPED:
        assert f"'{solver}'" in solution.message
        if importlib.util.find_spec(BACKENDS[solver].package) is not None:
            assert solver in ("gurobi", "mosek")  # the others need no licence
            assert "icense" in solution.message
        return
    assert (solution.status, solution.cost, solution.bound) == (Status.FEASIBLE, 6, 6)
    assert (solution.gap, solution.proven_by) == (0, solver)
    assert solution.message == f"optimal within the tolerances of {solver}; no certificate"
    assert here(DIAMOND, 6, solver=solver).status is Status.INFEASIBLE


def test_a_solver_that_does_not_run_here_is_skipped_with_the_reason(monkeypatch):
    hide_package(monkeypatch, "pyscipopt")
    solution = here(DIAMOND, 7, solver="scip")
    assert solution.status is Status.SKIPPED
    assert re.search("scip.*pip install|pip install.*scip", solution.message)

    def refuse(limits):  # an import is not a licence
        raise RuntimeError("no licence found\nat /opt")

    def answering(answer):
        return dataclasses.replace(BACKENDS["highs"], read=lambda _: (answer, False))

    for broken, says in (
        (dataclasses.replace(BACKENDS["highs"], options=refuse), "does not run here: no licence found"),
        (answering(Answer()), "is the machine busy"),  # cvxpy may take all of the time to compile two columns
        (answering(Answer(infeasible=True)), "correctly; reinstall"),
    ):
        with pytest.raises(Skip, match=says):
            broken.probe()


def test_a_model_that_is_too_large_is_skipped_by_an_estimate_close_to_what_is_built():
    solution = here(DIAMOND, 7, max_nonzeros=10)
    assert solution.status is Status.SKIPPED
    assert "max_nonzeros=10" in solution.message
    rng = np.random.default_rng(5)
    for kind in KINDS:
        graph = random_graph(rng, 40, min_bytes=1, **kind)
        made = build(graph).program(1).matrix.nnz
        assert 0.7 * made < estimate_nonzeros(graph) < 1.5 * made


# Sizes that differ in the last of nine digits: half a unit is below any solver's tolerance.
GIGA = 10**9
FINE = Graph.from_nodes(
    "fine", [[], [0], [1], [1], [0, 2]], [2 * GIGA + 1, 2 * GIGA, 3 * GIGA, 2 * GIGA, GIGA], [1] * 5
)


def test_real_solver_at_its_time_limit_has_no_solution():
    graph = random_graph(np.random.default_rng(3), 60, min_bytes=1)
    budget = graph.largest_working_set()[0] + 2
    answer = BACKENDS["highs"].solve(build(graph).program(budget), Limits(time_s=0.01))
    assert (answer.x, answer.optimal, answer.infeasible) == (None, False, False)


@pytest.mark.parametrize(
    ("graph", "budget", "answers", "status", "bound"),
    [
        (FINE, 6 * GIGA + 1, [Answer(infeasible=True), Answer(bound=0)], Status.TIMEOUT, 5),
        (FINE, 6 * GIGA + 1, [Answer(infeasible=True), Answer(bound=0, optimal=True)], Status.NO_PLAN, 5),
        (FINE, 6 * GIGA + 1, [Answer(infeasible=True)] * 2, Status.INFEASIBLE, None),
        (DIAMOND, 6, [Answer(infeasible=True)], Status.INFEASIBLE, None),  # by whole units: no second solve
        (DIAMOND, 7, [Answer(bound=5.4)], Status.TIMEOUT, 6),  # without a plan; costs are integers
        (DIAMOND, 9, [], Status.OPTIMAL, 5),  # running once needs no solver
    ],
)
def test_only_what_a_solver_has_proven_is_claimed(monkeypatch, graph, budget, answers, status, bound):
    left = list(answers)
    backend = SimpleNamespace(name="scripted", probe=lambda: None, solve=lambda *_, **__: left.pop(0))
    monkeypatch.setitem(BACKENDS, "highs", backend)
    solution = here(graph, budget, formulation="published")
    assert not left
    assert (solution.status, solution.bound, solution.plan is None) == (status, bound, status is not Status.OPTIMAL)


def test_fine_sizes_give_no_false_claims():
    claims = set()
    for budget in (least + more for least in (6 * GIGA, 7 * GIGA) for more in range(-2, 4)):
        solution = here(FINE, budget)
        if is_closed(solution.gap) or solution.status is Status.INFEASIBLE:
            assert solution.cost == optimum(FINE, budget, "staged")
            claims.add(solution.status)
        assert solution.plan is None or simulate(FINE, solution.plan).peak_bytes <= budget
    assert claims == {Status.FEASIBLE, Status.INFEASIBLE}


@pytest.mark.parametrize("solver", ["highs", "gurobi"])
def test_a_warm_start_is_the_first_incumbent(solver):
    graph = random_graph(np.random.default_rng(3), 13, min_bytes=1, min_cost=1)
    least = min_budget(graph)
    budget, start = least.bytes, least.plan
    equations = build(graph)
    units = (budget - graph.fixed_bytes) // equations.unit_bytes
    program, point = equations.program(units), equations.point(units, *start.matrices(graph))
    pytest.importorskip(BACKENDS[solver].package)
    answer = BACKENDS[solver].solve(program, Limits(time_s=5.0, nodes=1), start=point)  # slow machines read it late
    cost = program.cost @ answer.x / equations.cost_scale * equations.cost_unit
    assert cost <= simulate(graph, start).cost + 1e-6


def test_the_recorded_optimum_of_vgg16(instances):
    """Of Checkmate's MILP with Gurobi (records.json): HiGHS proves the same."""
    records = json.loads((instances / "records.json").read_text())
    record = next(r for r in records if r["instance"] == "p100/vgg16_b176" and r["budget_gib"] == 9)
    graph = load_graph(instances / "p100" / "vgg16_b176.json")
    solution = solve(graph, record["budget_bytes"], "checkmate_milp", time_limit_s=120, threads=1)
    assert is_closed(solution.gap)
    assert solution.proven_by == "highs"
    assert solution.cost == pytest.approx(record["cost_ns"], rel=1e-4)
    assert solution.cost * (1 - 1e-4) <= solution.bound <= record["cost_ns"]


# ---- restricted programs: exact where nothing is left out, never a claim, better plans where there are any


@pytest.mark.long
def test_refining_ends_at_the_best_plan_of_its_models_and_claims_nothing():
    graph = skip(depth=3, varied=True, seed=4)
    budget = (graph.largest_working_set()[0] + plain_peak(graph)) // 2
    problem, exact = (context_of(graph, budget, seconds=20) for _ in range(2))
    solve_trimmed(exact, 0.0)
    refiner = Refiner(problem)
    refiner.run(time.monotonic() + 20, 1, lambda: False)
    assert refiner.solves >= 3
    assert problem.incumbent.bound == graph.total_cost
    assert exact.incumbent.cost <= problem.incumbent.cost <= 1.05 * exact.incumbent.cost


def test_refining_leaves_plans_of_other_scopes_alone():
    graph = skip(depth=2)
    problem = context_of(graph, 1 << 40, scope=Scope.FREE, seconds=3)
    order = [*range(len(graph))]
    problem.offer(Plan.from_order(graph, order, 1 << 40), "test")
    Refiner(problem).run(time.monotonic() + 1, 1, lambda: True)
    assert problem.incumbent.plan.order.tolist() == order
