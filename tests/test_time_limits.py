"""What could hold a solve beyond its time limit: compiling, processes that start late, plans made without a clock."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from brute_force import random_graph, training_chain
from helpers import context_of, conv_relu, install_package, run_python, step_of

import remat
from baselines import _hierarchy
from remat import Plan, Status, registry, simulate
from remat.context import Context
from remat.frontends.synthetic import layered
from remat.registry import LARGEST_WITHOUT_CLOCK, get_strategy
from remat.search import kernel, online, ready
from remat.search.anneal import NOTHING
from remat.simulator import plain_peak
from remat.solvers import choose, portfolio, search
from remat.solvers.search import COLD, search_staged
from remat.solving import judgement, worker
from remat.solving.api import solve_sweep
from remat.solving.here import solve_here

BLOCKS = step_of(8)


def halfway(graph: remat.Graph) -> int:
    return (graph.largest_working_set()[0] + plain_peak(graph)) // 2


TIGHT = halfway(BLOCKS)

# Prints the functions that a process has compiled itself.
COLD_SOLVES = """
    import json, sys
    sys.path.insert(0, sys.argv[1])
    from helpers import step_of
    import remat.frontends.monet
    from remat.registry import get_strategy
    from remat.search import kernel, sequence
    from remat.search.ordering import kernel as orders
    from remat.simulator import plain_peak
    from remat.solving.api import solve_sweep

    graph, joint = step_of(8), remat.frontends.monet.monet_graph("vgg16", 4)
    found = {}
    for name, scope, one in (
        ("portfolio", "staged", graph), ("portfolio", "staged", joint), ("search", "staged", joint),
        ("search", "free", graph), ("dtr", "staged", graph), ("rotor", "staged", graph),
    ):
        budget = (one.default().largest_working_set()[0] + plain_peak(one.default())) // 2
        found[f"{name} {scope} {one.name}"] = solve_sweep(
            one, [budget], name, scope, time_limit_s=0.3, threads=2, isolate=False
        )[0].status
    compiled = [get_strategy(name).compiles for name in ("hierarchical", "xla_greedy", "fastsa", "dtr")]
    compiled += [kernel.anneal, kernel.load_order, orders.anneal, orders.measure, sequence.anneal]
    print(json.dumps([found, [f.__name__ for f in compiled if f.signatures]]))
"""


def test_no_solve_compiles_in_its_own_process(tmp_path: Path) -> None:
    """Numba cannot be interrupted: with an empty cache these solves leave the compiling to other processes."""
    printed = run_python(COLD_SOLVES, str(Path(__file__).parent), NUMBA_CACHE_DIR=str(tmp_path))
    found, compiled = json.loads(printed)
    assert compiled == []
    in_time = {status for name, status in found.items() if not name.startswith(("dtr", "rotor"))}
    assert in_time <= {"FEASIBLE", "OPTIMAL"}, found  # greedy eviction and windows need nothing compiled


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A search that is not compiled until `done` is set, beside a child that pretends to compile it."""
    state = SimpleNamespace(done=False, begun=0, polls=0, after=3)

    def poll() -> int | None:
        state.polls += 1
        state.done = state.done or state.polls > state.after
        return 0 if state.done else None

    def popen(*_: Any, **__: Any) -> SimpleNamespace:
        state.begun += 1
        return SimpleNamespace(poll=poll)

    monkeypatch.setattr(ready, "_was_ready", False)
    monkeypatch.setattr(ready, "_running", None)
    monkeypatch.setattr(ready, "is_compiled", lambda _: state.done)
    monkeypatch.setattr(ready.subprocess, "Popen", popen)
    return state


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cold_solve_searches_once_a_child_has_compiled(cold: SimpleNamespace, threads: int) -> None:
    graph = step_of(4)
    solution = remat.solve(graph, halfway(graph), time_limit_s=60, threads=threads)
    assert (solution.status, cold.begun) == (Status.OPTIMAL, 1)
    assert COLD not in solution.message
    assert ready.is_ready()


def test_a_cold_solve_without_the_child_ends_with_what_needs_no_search(
    cold: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "anneal", lambda *_: pytest.fail("a solve has called what is not compiled"))
    monkeypatch.setattr(kernel, "load_order", kernel.anneal)
    monkeypatch.setattr(ready, "COLD_START_S", 0.0)
    cold.after = 1 << 60
    graph = layered(n=150)
    for name in ("portfolio", "search"):
        for repeats in (False, True):
            budgets = [halfway(graph)]
            solution = solve_sweep(graph, budgets, name, time_limit_s=0.4, threads=1, deterministic=repeats)[0]
            assert solution.plan is not None
            assert COLD in solution.message
            assert bool(solution.cut_by_clock) is repeats
    assert cold.begun == 1  # it goes on for the next solve
    assert solve_sweep(conv_relu(), [101], "search", time_limit_s=0.4)[0].plan is not None


def test_with_little_time_nothing_is_compiled(cold: SimpleNamespace) -> None:
    assert (ready.ready_by(time.monotonic() + 1), ready.begin_compiling(1)(), cold.begun) == (False, False, 0)
    assert (ready.ready_by(time.monotonic() + 50), cold.begun) == (True, 1)


def test_only_what_sees_no_clock_and_another_process_finds_runs_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    griewank, large = get_strategy("griewank"), LARGEST_WITHOUT_CLOCK + 1
    of_a_script = replace(griewank, run=conv_relu)
    aside = [one.in_own_process(False, large) for one in (griewank, get_strategy("portfolio"), of_a_script)]
    assert aside == [True, False, False]
    monkeypatch.setattr(registry, "LARGEST_WITHOUT_CLOCK", 10)
    monkeypatch.setattr("remat.solving.api.run_family", lambda *_: pytest.fail("it ran in this process"))
    roomy, tight = solve_sweep(BLOCKS, [plain_peak(BLOCKS), TIGHT], "checkpoint_all", time_limit_s=60)
    assert (roomy.status, roomy.cost, tight.status) == (Status.OPTIMAL, BLOCKS.total_cost, Status.NO_PLAN)


# ---- processes that start late ----------------------------------------------------------------------


@pytest.fixture
def slow_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that need 2.5 s more to start; the parent of a child's first process is then the shell's."""
    usual = worker.child.command

    def late(module: str, *arguments: str) -> list[str]:
        return ["sh", "-c", 'sleep 2.5; exec "$@"', "sh", *usual(module, *arguments)]

    monkeypatch.setattr(worker.child, "command", late)
    # The parent of the child's first process is the shell's, so that it does not end for want of its parent.


def test_the_start_of_a_process_is_not_time_of_a_family(slow_start: None) -> None:
    family = worker.run_family_isolated(context_of(BLOCKS, 1 << 60, seconds=0.2), "chen_sqrtn", {})
    assert (family.status, family.message) == (None, "")
    assert [m.cost for m in family.members] == [m.cost for m in remat.family(BLOCKS, "chen_sqrtn")]


def test_greedy_plans_do_not_wait_for_a_process(slow_start: None) -> None:
    late = solve_sweep(BLOCKS, [TIGHT], "interval_cp", time_limit_s=0.2, isolate=True)[0]
    assert late.status is Status.FEASIBLE
    assert simulate(BLOCKS, late.plan).peak_bytes <= TIGHT
    assert "its process was still starting" in late.message
    published = solve_sweep(BLOCKS, [TIGHT], "moccasin", time_limit_s=0.2)[0]  # it has no plans of ours
    assert (published.status, published.plan) == (Status.TIMEOUT, None)
    assert "its process was still starting" in published.message


def test_a_worker_does_not_get_the_time_that_came_before_it(slow_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """E.g. imports of all strategies that take longer than the time limit."""

    def late(name: str) -> registry.Strategy:
        time.sleep(1.0)
        return get_strategy(name)

    monkeypatch.setattr("remat.solving.api.get_strategy", late)
    began = time.monotonic()
    assert solve_sweep(BLOCKS, [TIGHT], "interval_cp", time_limit_s=0.2, isolate=True)[0].plan is not None
    assert time.monotonic() - began <= 1.05 * 0.2 + 2


def test_a_family_that_is_killed_keeps_its_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = '''
        import time
        from remat import Plan, strategy

        @strategy("stalls", ignores_budget=True)
        def stalls(problem):
            """Two plans, then nothing for ever."""
            yield from 2 * [Plan.from_order(problem.graph, range(len(problem.graph)))]
            time.sleep(1000)
    '''
    install_package(tmp_path, code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry._REGISTRY, "stalls", replace(get_strategy("checkpoint_all"), name="stalls"))
    family = worker.run_family_isolated(context_of(BLOCKS, 1 << 60, seconds=0.2), "stalls", {})
    assert (family.status, family.rejected) == (None, "stopped at the time limit after 2 plans")
    assert [member.cost for member in family.members] == [BLOCKS.total_cost] * 2


def test_a_plan_of_a_family_that_would_end_late_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100, 4))
    monkeypatch.setattr(judgement, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    plans = repeat(remat.Candidate(Plan.from_order(BLOCKS, range(len(BLOCKS)))))
    members, rejected = judgement.judge(context_of(BLOCKS, 1 << 60).until(10), plans)
    assert (len(members), rejected) == (2, "stopped at the time limit after 2 plans")  # a third would end at 12 s


def test_the_first_call_counts_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    left = []

    def run(problem: remat.Problem, context: Context) -> Plan:
        left.append(context.remaining_s())
        return Plan.from_order(problem.graph, range(len(problem.graph)))

    def late(name: str) -> registry.Strategy:
        time.sleep(0.5)  # as the import of all strategies
        return replace(get_strategy("portfolio"), run=run, members=())

    monkeypatch.setattr("remat.solving.api.get_strategy", late)
    monkeypatch.setattr("remat.solving.dispatch.get_strategy", lambda _: replace(get_strategy("portfolio"), run=run))
    monkeypatch.setattr("remat.solving.here.get_strategy", lambda _: replace(get_strategy("portfolio"), run=run))
    solve_sweep(BLOCKS, [plain_peak(BLOCKS), 2 * plain_peak(BLOCKS)], "portfolio", time_limit_s=10)
    assert left[0] <= 9.5 < left[1]  # each budget has its own limit


# ---- the deadline ---------------------------------------------------------------------------------


def test_nothing_begins_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    over = context_of(BLOCKS, TIGHT).until(time.monotonic() - 100)
    assert search_staged(over, 1).cost == NOTHING
    assert solve_here(over, "search", {}).status is Status.TIMEOUT
    assert solve_here(over, "dtr", {}).status is Status.TIMEOUT
    monkeypatch.setattr(_hierarchy.Solver, "_evaluated", lambda *_: pytest.fail("an option was evaluated"))
    solve_here(over, "hierarchical", {})
    monkeypatch.setattr(search, "online_plan", lambda *_: None)
    assert solve_here(over, "portfolio", {}).plan is not None  # greedy eviction


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize("repeats", [False, True])
def test_a_proof_that_nothing_interrupts_is_left_at_the_deadline(
    is_joint: bool, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = conv_relu() if is_joint else BLOCKS
    for owner, name in ((choose._Prover, "_run"), (portfolio._Run, "prove"), (portfolio._Run, "_prove_aside")):
        monkeypatch.setattr(owner, name, lambda *_: time.sleep(4))
    monkeypatch.setattr(choose, "EXHAUSTIVE_OPERATIONS", 0)
    began = time.monotonic()
    solution = solve_sweep(graph, [75 if is_joint else TIGHT], time_limit_s=1.0, threads=1, deterministic=repeats)[0]
    assert time.monotonic() - began <= 1.05 + 2
    assert solution.plan is not None
    assert bool(solution.cut_by_clock) is repeats


@pytest.mark.parametrize("heuristic", ["exact", "random"])
def test_an_online_run_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch, heuristic: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        graph = random_graph(rng, 14, min_cost=1, multi_output=0.4, workspace=2, keep=0.15)
        runs = []
        for chunk in (1, 3, 1 << 20):
            monkeypatch.setattr(online, "CHUNK", chunk)
            run = online.run_online(graph, halfway(graph), heuristic, 7, 200)
            runs.append((run.order.tolist(), run.failed_at, run.is_stopped))
        assert runs[0] == runs[1] == runs[2]
    stopped = online.run_online(BLOCKS, TIGHT, heuristic, 7, 200, lambda: True)
    assert (stopped.is_stopped, stopped.failed_at >= 0) == (True, True)


@pytest.mark.parametrize("name", ["checkpoint_last", "griewank", "portfolio"])
def test_quadratic_plans_do_not_break_the_time_limit(name: str) -> None:
    limit_s, started = 5.0, time.monotonic()
    solution = remat.solve(training_chain(2000), 600, name, time_limit_s=limit_s, threads=1)
    assert time.monotonic() - started <= 1.05 * limit_s + 2
    if name == "checkpoint_last":  # 2000 + 2000 * 1999 / 2 forward computations and more
        assert solution.status is Status.SKIPPED
        assert "computations; the limit is" in solution.message
    else:
        assert solution.status in (Status.FEASIBLE, Status.OPTIMAL), solution.message


# ---- what is said of the cache of compiled code ------------------------------------------------------

SOURCE = "from numba import njit\n\n@njit(cache=True)\ndef triple(x):\n    return 3 * x\n"
ASK = """
from small import triple
from remat.compiled import is_compiled

said = is_compiled(triple)
triple(2)
print(said, sum(triple.stats.cache_hits.values()) > 0, is_compiled(triple))
"""


def test_said_is_what_numba_does(tmp_path: Path) -> None:
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def ask(**more: str) -> list[str]:
        return run_python(ASK, PYTHONPATH=path, NUMBA_CACHE_DIR=str(tmp_path / "cache"), **more).split()

    file = tmp_path / "small.py"
    file.write_text(SOURCE)
    assert ask() == ["False", "False", "True"]
    assert ask() == ["True", "True", "True"]
    assert ask(NUMBA_CPU_NAME="generic") == ["False", "False", "True"]  # the cache is of another processor
    later = file.stat().st_mtime + 1000
    os.utime(file, (later, later))  # as after a checkout: which Numba compiles again depends on its version
    said, loaded, _ = ask()
    assert said == loaded


def test_a_short_limit_does_not_end_what_ends_at_once() -> None:
    context = context_of(BLOCKS, TIGHT, seconds=1.0)
    assert not context.is_late()
    assert context.until(time.monotonic() + 0.4).is_late()
    assert context_of(BLOCKS, TIGHT, seconds=60.0).until(time.monotonic() + 0.9).is_late()
