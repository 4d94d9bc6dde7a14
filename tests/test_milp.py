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
from brute_force import KINDS, optimum, random_graph, training_chain
from helpers import DIAMOND, context_of, hide_package

from remat import Graph, Plan, Scope, Skip, Status, load_graph, min_budget, simulate, solve, solve_sweep
from remat.frontends.synthetic import skip
from remat.incumbent import is_closed
from remat.programs.backends import BACKENDS
from remat.programs.highs import Answer
from remat.programs.program import Limits
from remat.programs.published import build, estimate_nonzeros
from remat.programs.staged import build_staged_model
from remat.search.anneal import minimise_cost
from remat.search.greedy import greedy_eviction
from remat.simulator import plain_peak
from remat.solvers import _milp_restricted
from remat.solvers._milp_restricted import Refiner, repeats_of, repeats_worth_trying
from remat.solvers._milp_trimmed import solve_trimmed


def here(graph, budget, **options):
    """`solve` without a process of its own."""
    return solve_sweep(graph, [budget], "checkmate_milp", threads=1, isolate=False, **options)[0]


@pytest.mark.parametrize("formulation", ["trimmed", "published"])
@pytest.mark.parametrize("kind", KINDS)
def test_optimum_is_that_of_exhaustive_search(kind, formulation):
    rng, found = np.random.default_rng(3), Counter[str]()
    for _ in range(30):
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
    assert found["infeasible"]
    assert found["repeats"] >= 2


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


def test_a_model_beyond_a_restricted_licence_is_skipped():
    solution = here(training_chain(25), 10, solver="gurobi", time_limit_s=20)
    if "size" not in solution.message:
        pytest.skip(f"gurobi has no restricted licence here: {solution.status} {solution.message}")
    assert solution.status is Status.SKIPPED


def test_a_missing_package_is_skipped_with_the_command(monkeypatch):
    hide_package(monkeypatch, "pyscipopt")
    solution = here(DIAMOND, 7, solver="scip")
    assert solution.status is Status.SKIPPED
    assert re.search("scip.*pip install|pip install.*scip", solution.message)


def test_an_import_is_not_a_licence(monkeypatch):
    def refuse(limits):
        raise RuntimeError("no licence found\nat /opt")

    broken = dataclasses.replace(BACKENDS["highs"], options=refuse)
    with pytest.raises(Skip, match="does not run here: no licence found"):
        broken.probe()


def test_a_solver_that_had_no_time_is_not_called_broken():
    """On a busy machine cvxpy may take all of the time to compile a program of two columns."""
    late, wrong = (
        dataclasses.replace(BACKENDS["highs"], read=lambda _, answer=answer: (answer, False))
        for answer in (Answer(), Answer(infeasible=True))
    )
    with pytest.raises(Skip, match="is the machine busy"):
        late.probe()
    with pytest.raises(Skip, match="correctly; reinstall"):
        wrong.probe()


def test_a_model_that_is_too_large_is_skipped():
    solution = here(DIAMOND, 7, max_nonzeros=10)
    assert solution.status is Status.SKIPPED
    assert "max_nonzeros=10" in solution.message


def test_the_estimate_is_close_to_what_is_built():
    rng = np.random.default_rng(5)
    for kind in KINDS:
        graph = random_graph(rng, 40, min_bytes=1, **kind)
        made = build(graph).program(1).matrix.nnz
        assert 0.7 * made < estimate_nonzeros(graph) < 1.5 * made


def published(monkeypatch, graph, budget, *answers):
    """A solve with the published program by a back-end that gives these answers; it must ask for all of them."""
    left = list(answers)
    backend = SimpleNamespace(name="scripted", probe=lambda: None, solve=lambda *_, **__: left.pop(0))
    monkeypatch.setitem(BACKENDS, "highs", backend)
    solution = here(graph, budget, formulation="published")
    assert not left
    return solution


# Sizes that differ in the last of nine digits: half a unit is below any solver's tolerance.
GIGA = 10**9
FINE = Graph.from_nodes(
    "fine", [[], [0], [1], [1], [0, 2]], [2 * GIGA + 1, 2 * GIGA, 3 * GIGA, 2 * GIGA, GIGA], [1] * 5
)


def test_a_limit_without_incumbent_is_a_timeout(monkeypatch):
    solution = published(monkeypatch, DIAMOND, 7, Answer(bound=5.4))
    assert (solution.status, solution.plan, solution.cost) == (Status.TIMEOUT, None, None)
    assert solution.bound == 6  # costs are integers


def test_real_solver_at_its_time_limit_has_no_solution():
    graph = random_graph(np.random.default_rng(3), 60, min_bytes=1)
    budget = graph.largest_working_set()[0] + 2
    answer = BACKENDS["highs"].solve(build(graph).program(budget), Limits(time_s=0.01))
    assert (answer.x, answer.optimal, answer.infeasible) == (None, False, False)


@pytest.mark.parametrize(
    ("graph", "budget", "answers", "status"),
    [
        (FINE, 6 * GIGA + 1, [Answer(infeasible=True), Answer(bound=0)], Status.TIMEOUT),
        (FINE, 6 * GIGA + 1, [Answer(infeasible=True), Answer(bound=0, optimal=True)], Status.NO_PLAN),
        (FINE, 6 * GIGA + 1, [Answer(infeasible=True)] * 2, Status.INFEASIBLE),
        (DIAMOND, 6, [Answer(infeasible=True)], Status.INFEASIBLE),  # by whole units: no second solve
        (DIAMOND, 9, [], Status.OPTIMAL),  # running once needs no solver
    ],
)
def test_infeasible_within_tolerance_is_not_claimed(monkeypatch, graph, budget, answers, status):
    assert published(monkeypatch, graph, budget, *answers).status is status


def test_fine_sizes_give_no_false_claims():
    claims = set()
    for budget in (least + more for least in (6 * GIGA, 7 * GIGA) for more in range(-2, 4)):
        solution = here(FINE, budget)
        if is_closed(solution.gap) or solution.status is Status.INFEASIBLE:
            assert solution.cost == optimum(FINE, budget, "staged")
            claims.add(solution.status)
        assert solution.plan is None or simulate(FINE, solution.plan).peak_bytes <= budget
    assert claims == {Status.FEASIBLE, Status.INFEASIBLE}


def test_a_plan_is_a_point_of_the_equations():
    rng = np.random.default_rng(7)
    for _ in range(40):
        graph = random_graph(rng, 12, multi_output=0.3, workspace=2, keep=0.2, once=0.1)
        budget = min_budget(graph).bytes
        plan = greedy_eviction(graph, budget) or Plan.from_order(graph, range(len(graph)))
        R_TN, S_TV = plan.matrices(graph)
        equations, trace = build(graph), simulate(graph, plan)
        units = (trace.peak_bytes - graph.fixed_bytes) // equations.unit_bytes
        assert holds(equations, units, R_TN, S_TV)
        assert not holds(equations, units - 1, R_TN, S_TV)
        program = equations.program(units)
        cost = program.cost @ equations.point(units, R_TN, S_TV) / equations.cost_scale * equations.cost_unit
        assert cost == pytest.approx(trace.cost)


def holds(equations, units, R_TN, S_TV):
    """Whether the matrices are a point of the program at this budget."""
    program, x = equations.program(units), equations.point(units, R_TN, S_TV)
    rows, much = program.matrix @ x, 1e-9
    return (
        (rows >= program.row_lower - much).all() and (rows <= program.row_upper + much).all()
        and (x >= program.lower).all() and (x <= program.upper).all()
    )  # fmt: skip


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


@pytest.mark.parametrize("gib", [9, 10])
def test_recorded_optima_of_vgg16(instances, gib):
    """Of Checkmate's MILP with Gurobi (records.json): HiGHS proves the same."""
    records = json.loads((instances / "records.json").read_text())
    record = next(r for r in records if r["instance"] == "p100/vgg16_b176" and r["budget_gib"] == gib)
    graph = load_graph(instances / "p100" / "vgg16_b176.json")
    solution = solve(graph, record["budget_bytes"], "checkmate_milp", time_limit_s=120, threads=1)
    assert is_closed(solution.gap)
    assert solution.proven_by == "highs"
    assert solution.cost == pytest.approx(record["cost_ns"], rel=1e-4)
    assert solution.cost * (1 - 1e-4) <= solution.bound <= record["cost_ns"]


# ---- the trimmed program: every plan is a point of it


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[-1]])
def test_every_plan_is_a_point_of_the_relaxation(kind):
    rng = np.random.default_rng(1)
    repeats = 0
    for _ in range(40):
        graph = random_graph(rng, 8, min_cost=1, **kind)
        for budget in range(graph.largest_working_set()[0], plain_peak(graph) + 1):
            best = minimise_cost(graph, budget, work_limit=20_000, seed=budget)
            plan = Plan.from_order(graph, best.order.tolist())  # without needless repeats
            assert plan.scope is Scope.STAGED
            trace = simulate(graph, plan)
            model = build_staged_model(graph, trace.peak_bytes, memory="stage_end")
            assert not model.infeasible
            R_TN, S_TV = plan.matrices(graph)
            x = np.zeros(model.shape[1], dtype=np.int64)
            for (t, k), column in model.R_column.items():
                x[column] = R_TN[t, k]
            for (t, v), column in model.S_column.items():
                x[column] = S_TV[t, v]
            # Nothing of the plan is lost to the trimming ...
            assert x[list(model.R_column.values())].sum() == (trace.computations - 1).sum()
            assert model.cost_constant + model.cost @ x == trace.cost
            # ... and every row holds.
            short = model.matrix @ x < model.row_lower
            assert not short.any(), (model.row_kind[short], model.row_key[short])
            repeats += int(R_TN.sum()) - 8
    assert repeats > 50


# ---- restricted programs: exact where nothing is left out, never a claim, better plans where there are any


@pytest.mark.long
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]])
def test_with_all_repeats_it_is_the_whole_problem(kind):
    rng = np.random.default_rng(11)
    solved = 0
    for _ in range(40):
        graph = random_graph(rng, int(rng.integers(5, 9)), min_cost=1, **kind)
        budget = graph.largest_working_set()[0] + int(rng.integers(0, 3))
        problem = context_of(graph, budget, seconds=20)
        outcome = solve_trimmed(problem, 0.0, repeats={(t, k) for t in range(len(graph)) for k in range(t)})
        expected = optimum(graph, budget, "staged")
        assert (bool(outcome.candidates), outcome.bound, outcome.infeasible) == (expected is not None, None, False)
        assert (problem.incumbent.cost, problem.incumbent.bound) == (expected, graph.total_cost)
        solved += expected is not None
    assert solved >= 20


def test_what_is_worth_trying_follows_a_stretch_of_short_memory():
    assert repeats_of(None, np.array([0, 1, 0, 2, 0, 1, 3])) == {(2, 0), (3, 0), (3, 1)}
    # a -> b -> c -> d, and d reads a again: between them everything together exceeds the budget.
    graph = Graph.from_nodes("loop", [[], [0], [1], [2, 0]], [4] * 4, [1] * 4)
    assert repeats_worth_trying(graph, 100, 3) == set()
    assert repeats_worth_trying(graph, 11, 3) == {(3, 0)}
    # with an input of its own before a, that one too at depth 2
    longer = Graph.from_nodes("longer", [[], [0], [1], [2], [3, 1]], [4] * 5, [1] * 5)
    assert repeats_worth_trying(longer, 11, 1) == {(4, 1)}
    assert repeats_worth_trying(longer, 11, 2) == {(4, 1), (4, 0)}


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


@pytest.mark.parametrize("is_beside", [False, True])
def test_refining_waits_for_plans_only_where_a_search_runs_beside(monkeypatch: pytest.MonkeyPatch, is_beside) -> None:
    waits = list[float]()
    monkeypatch.setattr(_milp_restricted.time, "sleep", waits.append)
    monkeypatch.setattr(_milp_restricted, "MOST_REPEATS", -1)  # no model is small enough
    graph = skip(depth=2)
    context = context_of(graph, plain_peak(graph) - 1, seconds=3)
    Refiner(context).run(time.monotonic() + 0.5, 1, lambda: False, is_beside=is_beside)
    assert bool(waits) == is_beside
