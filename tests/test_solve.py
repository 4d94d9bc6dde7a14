"""`solve`: statuses, what users get wrong, and processes that die."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from brute_force import training_chain
from helpers import ALL, DIAMOND, FEWER, context_of, install_package, refused, run_python

import remat
from remat import Candidate, Graph, InvalidInput, Outcome, Plan, Skip, Status, registry, simulate, solve
from remat.solving.api import solve_sweep
from remat.solving.worker import hard_limit_s, solve_isolated

INVALID = Plan.from_steps(DIAMOND, [(0, 1)])


def outcome(**fields):
    return lambda problem: Outcome(**fields)


def both(*plans):
    return tuple(map(Candidate, plans))


NO_WARM_START = r"proposed no plan; remat\.min_budget has a plan of 7 B; in Python, give it as warm_start"


@pytest.mark.parametrize(
    ("run", "budget", "scope", "status", "words"),
    [
        (lambda problem: ALL, 9, "staged", "OPTIMAL", ""),
        (lambda problem: ALL, 8, "staged", "NO_PLAN", "none of its 1 plans fits; the smallest needs 9 B"),
        (lambda problem: [ALL, FEWER], 8, "fixed_order", "FEASIBLE", ""),
        (lambda problem: FEWER, 8, "staged", "NO_PLAN", "its plan is fixed_order, but staged was asked for"),
        (lambda problem: None, 8, "staged", "NO_PLAN", NO_WARM_START),
        (lambda problem: [], 8, "staged", "NO_PLAN", "proposed no plan"),
        (lambda problem: 3, 8, "staged", "FAILED", "must return plans"),
        (lambda problem: INVALID, 8, "free", "FAILED", "step 0: .* not resident"),
        (lambda problem: 1 // 0, 8, "staged", "FAILED", r"ZeroDivisionError: .* \(test_solve.py:\d+\)"),
        (lambda problem: (_ for _ in ()).throw(MemoryError()), 8, "staged", "FAILED", "MemoryError"),
        (lambda problem: (_ for _ in ()).throw(Skip("needs\na chain")), 8, "staged", "SKIPPED", "needs a chain"),
        (outcome(candidates=both(FEWER), bound="x"), 8, "free", "FEASIBLE", "TypeError: .* is kept"),
        (outcome(infeasible=True), 8, "staged", "INFEASIBLE", "no staged plan fits 8 B; the smallest budget known"),
        (outcome(timed_out=True, bound=6), 8, "staged", "TIMEOUT", r"time limit; remat\.min_budget has a plan of 7 B"),
        (outcome(candidates=both(ALL), bound=6), 9, "staged", "FAILED", "claims the bound 6"),
        (outcome(candidates=both(ALL), infeasible=True), 9, "staged", "FAILED", "claims that no plan fits"),
        (outcome(candidates=both(FEWER), bound=7, proven_by="exhaustive"), 8, "free", "OPTIMAL", ""),
        (outcome(candidates=both(FEWER), bound=7), 8, "free", "FEASIBLE", "tolerances of scripted"),
        (lambda problem: ALL, 5, "staged", "INFEASIBLE", r"operation 4 \(4\) alone needs 6 B"),
    ],
)
def test_statuses(scripted, run, budget, scope, status, words):
    scripted(run)
    solution = solve(DIAMOND, budget, "scripted", scope=scope)
    assert solution.status == status
    assert re.search(words, solution.message), solution.message
    assert "\n" not in solution.message
    if status in ("OPTIMAL", "FEASIBLE"):
        trace = simulate(DIAMOND, solution.plan)
        assert (solution.cost, solution.peak_bytes) == (trace.cost, trace.peak_bytes)
        assert solution.overhead == pytest.approx(trace.cost / 5 - 1)
        assert solution.gap == pytest.approx((solution.cost - solution.bound) / solution.cost)
        assert solution.plan.budget_bytes == budget
    else:
        assert (solution.plan, solution.cost, solution.peak_bytes, solution.overhead) == (None,) * 4


def test_the_cheapest_that_fits_is_chosen_from_one_run_for_a_sweep(scripted):
    calls = []
    members = [Candidate(FEWER, {"k": 1}), Candidate(ALL, {"k": 2})]
    scripted(lambda problem: calls.append(problem) or members, ignores_budget=True)
    roomy, tight, _ = solve_sweep(DIAMOND, [9, 8, "1GB"], "scripted", scope="free")
    assert (roomy.cost, roomy.parameters) == (5, {"k": 2})
    assert (tight.cost, tight.parameters) == (7, {"k": 1})
    assert len(calls) == 1
    assert [member.peak_bytes for member in remat.family(DIAMOND, "scripted", scope="free")] == [6, 9]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": "lots"}, "cannot read 'lots' as a size"),
        ({"budget": -3}, "negative"),
        ({"strategy": "chekmate_milp"}, "did you mean checkmate_milp"),
        ({"scope": "stage"}, "did you mean staged"),
        ({"accounting": "exactly"}, "did you mean exact"),
        ({"time_limit_s": 0}, "time limit must be a positive"),
        ({"seed": "a"}, "seed must be an integer"),
        ({"deterministic": "maybe"}, "deterministic must be"),
        ({"warm_start": "plan.json"}, "warm_start must be a remat.Plan"),
        ({"threads": 0}, "threads"),
        ({"work_limit": 0}, "work_limit"),
        ({"target_gap": -1}, "target_gap"),
        ({"progress": 3}, "progress"),
        ({"slots": 4}, "takes no options, but got 'slots'"),
        ({"warm_start": Plan.from_order(training_chain(2), range(4))}, "made for another graph"),
    ],
)
def test_what_users_get_wrong(arguments, words):
    with refused(words):
        solve(**{"graph": DIAMOND, "budget": 9, "strategy": "checkpoint_all"} | arguments)


def test_a_graph_without_operations_is_refused():
    for call in (lambda graph: solve(graph, 9, "checkpoint_all"), remat.min_budget):
        with pytest.raises(InvalidInput, match="no operations"):
            call(Graph("empty", (), ()))


def test_names_of_strategies_are_identifiers_and_unique(scripted):
    for name in (5, "", "two words"):
        with refused("must be an identifier"):
            remat.strategy(name)(lambda problem: ALL)
    scripted(lambda problem: ALL)
    with pytest.raises(InvalidInput, match="two strategies are named 'scripted'"):
        registry.strategy("scripted")(solve)


def test_a_second_parameter_is_the_context_unless_it_has_a_default(scripted):
    def with_a_default(problem, k=3):
        return Plan.from_order(problem.graph, range(len(problem.graph))) if k == 3 else None

    def with_a_context(problem, context):
        return with_a_default(problem, 3 if context.deadline else 0)

    scripted(with_a_default)
    remat.strategy("with_a_context")(with_a_context)
    assert [solve(DIAMOND, 9, name).cost for name in ("scripted", "with_a_context")] == [5, 5]


def test_a_family_is_no_worse_than_the_plan_that_it_is_given(scripted):
    scripted(lambda problem: FEWER, ignores_budget=True)
    assert solve(DIAMOND, 9, "scripted", scope="free").cost == 7
    assert solve(DIAMOND, 9, "scripted", scope="free", warm_start=ALL).cost == 5


def test_an_endless_family_is_cut_at_the_time_limit(scripted):
    def endless(problem):
        while True:
            time.sleep(0.01)
            yield ALL

    scripted(endless)
    solution = solve(DIAMOND, 9, "scripted", time_limit_s=0.2)
    assert (solution.status, solution.cost) == (Status.OPTIMAL, 5)


def test_an_infinite_time_limit_kills_no_worker_and_the_hard_limit_is_inside_the_promise():
    assert solve(DIAMOND, 9, "checkmate_milp", time_limit_s=float("inf"), threads=1).cost == 5
    for limit_s in (0.1, 1, 60, 3600):
        assert hard_limit_s(limit_s) < limit_s * 1.05 + 2


CRASHERS = '''
    import os
    from remat import Plan, strategy

    @strategy("leaves", isolated=True)
    def leaves(problem):
        """Ends the process without a word."""
        os._exit(0)

    @strategy("raises", isolated=True)
    def raises(problem):
        """Has a bug."""
        raise KeyError("who")

    @strategy("prints", isolated=True)
    def prints(problem, *, order=None):
        """Prints a great deal; works."""
        print("x" * 10_000_000, flush=True)
        os.write(2, b"y" * 10_000_000)
        return Plan.from_order(problem.graph, range(len(problem.graph)))
'''
# No main guard, and a graph that only this script knows: spawned pools die here.
SCRIPT = """
    import json, sys
    import remat
    graph = remat.Graph.from_nodes("g", [[], [0], [1]], [1, 2, 3], [1, 1, 1])
    found = {name: remat.solve(graph, 100, name, time_limit_s=60, threads=1) for name in sys.argv[1:]}
    print(json.dumps({name: [one.status, one.message, one.cost] for name, one in found.items()}))
"""


def test_processes_that_misbehave_cost_one_row(tmp_path):
    """Those that are killed or hang are in `test_healing` and, with a plan, in `test_incumbent`."""
    install_package(tmp_path, CRASHERS)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    rows = {}
    for command in (["script.py", "leaves", "raises"], ["-", "prints"]):  # from standard input too
        done = subprocess.run(
            [sys.executable, *command], env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, text=True,
            input=script.read_text(), capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows |= json.loads(done.stdout)
    assert [row[0] for row in rows.values()] == ["FAILED", "FAILED", "OPTIMAL"]
    assert "KeyError: 'who' (heuristics.py:" in rows["raises"][1]
    assert rows["prints"] == ["OPTIMAL", "", 3]


def test_a_full_disk_is_a_failed_row(monkeypatch):
    def full(self, *rest, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    problem = context_of(DIAMOND, 9, seconds=9)
    solution = solve_isolated(problem, "checkpoint_all", {})
    assert solution.status is Status.FAILED
    assert "No space left on device" in solution.message


def test_a_worker_that_lies_is_a_failed_row(monkeypatch):
    def lie(*arguments, **more):
        row = remat.solving.worker.solution_to_row(solve(DIAMOND, 9, "checkpoint_all"))
        answer = {"solution": row | {"plan": ALL.document(), "cost": 4}, "began": time.time()}
        return json.loads(json.dumps(answer)), Status.FAILED, ""

    monkeypatch.setattr("remat.solving.worker._ask", lie)
    solution = solve_isolated(context_of(DIAMOND, 9, seconds=9), "checkpoint_all", {})
    assert solution.status is Status.FAILED
    assert "cost 4 was reported, but it costs 5" in solution.message


def test_options_that_cannot_travel_are_refused():
    with pytest.raises(InvalidInput, match="must be plain"):
        solve_isolated(context_of(DIAMOND, 9, seconds=9), "checkpoint_all", {"f": print})


FRAMEWORKS = ["torch", "tensorflow", "keras", "hydra", "matplotlib", "pandas", "pyarrow", "numba"]
SOLVERS = ["ortools", "highspy", "scipy"]


@pytest.mark.parametrize(
    ("module", "heavy"), [("remat", FRAMEWORKS + SOLVERS), ("remat.torch", ["tensorflow", *SOLVERS])]
)
def test_an_import_loads_no_other_framework_and_no_solver(module: str, heavy: list[str]) -> None:
    pytest.importorskip(module.replace("remat.", ""))
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    assert run_python(code).strip() == "[]"
