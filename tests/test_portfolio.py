"""Search and portfolio: against exhaustive optima in every scope, at the edges of the interface."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from brute_force import SCOPES, optimum, random_graph, replay_plan
from helpers import context_of

import remat
from remat import Graph, Plan, Status, min_budget, simulate, solve
from remat.arrays import GraphArrays
from remat.errors import Skip
from remat.frontends import synthetic
from remat.problem import Problem, SolveOptions
from remat.registry import get_strategy
from remat.search import kernel
from remat.search.anneal import Annealer, Best, Calls, minimise_cost
from remat.simulator import plain_peak
from remat.solvers import portfolio, search
from remat.solving.dispatch import new_context
from remat.solving.patience import PATIENCE_S, enough_at, slower_by


def graphs(count: int):
    """Every other one with several outputs, workspace, kept values and operations that run once."""
    for seed in range(count):
        more = {"multi_output": 0.4, "workspace": 2, "keep": 0.1, "once": 0.1} if seed % 2 else {}
        yield random_graph(np.random.default_rng(seed), 7, **more)


def tight_budgets(graph: Graph) -> list[int]:
    peak = plain_peak(graph)
    least = graph.largest_working_set()[0]
    return sorted({least, (least + peak) // 2, peak - 1} - set(range(least)))


@pytest.mark.parametrize(
    ("scope", "exhaustive", "threads", "number"),
    [*((scope, True, 1, 30) for scope in SCOPES), ("staged", False, 1, 12), ("staged", False, 2, 12)],
)
def test_portfolio_proves_the_optimum_of_small_graphs(monkeypatch, scope, exhaustive, threads, number):
    if not exhaustive:
        monkeypatch.setattr(portfolio, "EXHAUSTIVE_OPERATIONS", 0)
    checked = 0
    for graph in graphs(number):
        for budget in tight_budgets(graph):
            solution = solve(graph, budget, scope=scope, threads=threads, time_limit_s=30)
            best = optimum(graph, budget, scope)
            if best is None:
                assert solution.status is Status.INFEASIBLE
            else:
                assert (solution.status, solution.cost) == (Status.OPTIMAL, best)
                assert replay_plan(graph, solution.plan).cost == best
            checked += 1
    assert checked > 1.2 * number


def test_a_plan_at_every_budget_a_little_above_the_smallest():
    for graph in (synthetic.chain(n=30, varied=True), synthetic.skip(depth=14), synthetic.layered(n=60)):
        least = int(1.05 * min_budget(graph).bytes) + 1  # without a time limit: the same on every machine
        for budget in (least, (least + plain_peak(graph)) // 2):
            solution = solve(graph, budget, "search", work_limit=200_000, time_limit_s=60)
            assert solution.plan is not None, (graph.name, budget)
            assert solution.peak_bytes <= budget


def test_costs_whose_sum_is_beyond_64_bits_are_exact():
    """A plan that costs more than 2**63: the same as with costs of 1, times 10**15."""
    mirrored = [[k - 1, 199 - k] if k > 100 else [k - 1] if k else [] for k in range(200)]
    graphs = [Graph.from_nodes("mirror", mirrored, [1] * 200, [cost] * 200) for cost in (1, 10**15)]
    cheap, costly = (solve(graph, 3, "search", work_limit=20_000, time_limit_s=120) for graph in graphs)
    assert cheap.status is costly.status is Status.FEASIBLE
    assert costly.cost > 2**63 // 2
    assert costly.cost % 10**15 == 0
    assert abs(costly.cost / cheap.cost / 10**15 - 1) < 0.05  # the same moves but for rounding


def test_search_keeps_its_books_exactly():
    """After thousands of moves, taken and taken back, memory and cost are those of the judge."""
    for seed, graph in enumerate(graphs(20)):
        for budget in tight_budgets(graph):
            annealer = Annealer(graph, budget, seed, GraphArrays.of(graph))
            assert annealer.load(np.arange(len(graph)))
            annealer.round(2000, 1.0, 0.5, Best(), lambda: False, lambda: None)
            plan = Plan.from_order(graph, annealer.order().tolist())
            trace = simulate(graph, plan)
            assert (str(plan.scope), trace.cost) == ("staged", annealer.cost)
            peak = graph.fixed_bytes + int(annealer.state.peak.max())
            # a plan frees what its producer makes again for the sake of another output
            assert trace.peak_bytes == peak or (trace.peak_bytes < peak and not graph.is_single_output)
            assert (annealer.excess == 0) == (peak <= budget)


@pytest.mark.parametrize(("plain", "share"), [(True, 1.0), (False, 0.85)])
def test_search_finds_the_staged_optimum_of_small_graphs(plain, share):
    """Always with one output per operation; with several its moves do not reach every plan."""
    found = total = 0
    for graph in graphs(80):
        for budget in tight_budgets(graph) if graph.is_single_output == plain else ():
            best = optimum(graph, budget, "staged")
            result = minimise_cost(graph, budget, work_limit=20_000)
            if best is None:
                assert result.excess > 0
                continue
            total += 1
            assert result.excess > 0 or result.cost >= best
            found += result.excess == 0 and result.cost == best
    assert total > 30
    assert found >= share * total


def test_a_plan_is_told_although_no_better_one_follows():
    """The first report is so long that the next one is due when the search has found its best plan."""
    graph, told = synthetic.layered(n=100), list[int]()
    budget_bytes = int(0.85 * plain_peak(graph))
    best = minimise_cost(graph, budget_bytes, work_limit=50_000).cost

    def on_order(_order: np.ndarray, cost: int) -> None:
        began = time.thread_time()
        while not told and time.thread_time() < began + 0.02:
            pass
        told.append(cost)

    calls = Calls(on_order, lambda: bool(told) and told[-1] <= best)
    minimise_cost(graph, budget_bytes, deadline=time.monotonic() + 10, calls=calls)
    assert len(told) > 1
    assert told[-1] <= best


@pytest.mark.parametrize("threads", [1, 3])
def test_progress_is_told_the_gap_stops_the_solve_and_no_thread_is_left(threads):
    graph, told, before = synthetic.chain(n=20), [], threading.active_count()
    budget = plain_peak(graph) * 7 // 10
    solution = solve(graph, budget, threads=threads, time_limit_s=20, target_gap=0.5, progress=told.append)
    assert solution.gap <= 0.5
    assert solution.cost in {p.cost for p in told}
    assert solution.wall_s < 20
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("costs", "bound", "now", "enough"),
    [
        ([], 0, 100.0, False),  # no plan
        ([(0.1, 1000)], 999, 0.1, True),  # the gap alone
        ([(0.1, 1000)], 998, 2.0, True),  # a narrow gap, and no gain for longer than the root of 2
        ([(0.1, 1000)], 900, 5.0, False),  # a wide gap takes more patience
        ([(0.1, 1000)], 900, 10.2, True),
        ([(0.1, 1000), (8.0, 990)], 900, 17.0, False),  # gains in the second half of the time
        ([(0.1, 1000), (1.0, 991), (9.0, 990)], 900, 12.0, True),  # the last one is not worth the wait
    ],
)
def test_when_more_time_is_not_worth_it(costs, bound, now, enough):
    """A function of times, costs and bound alone."""
    costs = [(seconds, 1000 * cost) for seconds, cost in costs]
    assert (enough_at(costs, 1000 * bound, now, 0.0011, PATIENCE_S) <= now) == enough


def test_patience_has_an_end_and_is_longer_on_a_busy_machine():
    costs = [(0.1, 1000), (3.0, 990)]
    ends = enough_at(costs, 950, 4.0, 0.001, 0.5)  # if nothing is found
    assert not enough_at(costs, 950, ends - 1e-6, 0.001, 0.5) <= ends - 1e-6
    assert enough_at(costs, 950, ends, 0.001, 0.5) <= ends
    assert ends == pytest.approx(6.18, abs=0.01)  # 3 s and 0.5 s times the root of 40.4
    assert enough_at([], 950, 4.0, 0.001, 0.5) == math.inf
    # wall time and processor time: at most twice as long
    assert [slower_by(2.0, used_s) for used_s in (1.6, 2.0, 3.9, 0.2)] == [1.25, 1.0, 1.0, 2.0]


def test_a_patient_solve_ends_in_time_and_no_worse() -> None:
    graph = synthetic.chain(n=60)
    budget = plain_peak(graph) * 6 // 10
    solution = solve(graph, budget, scope="free", threads=2, time_limit_s=40, target_gap=1e-3, least_gain=1e-3)
    assert solution.wall_s < 20
    staged = solve(graph, budget, threads=2, time_limit_s=2, target_gap=1e-3)
    assert solution.cost <= staged.cost * 1.001


EDGES = {
    "zero bytes": Graph.from_nodes("zero", [[], [0], [1], [0, 2]], [0, 0, 0, 0], [1, 2, 3, 4]),
    "zero cost": Graph.from_nodes("free", [[], [0], [1], [0, 2]], [2, 2, 2, 2], [0, 0, 0, 0]),
    "one node": Graph.from_nodes("one", [[]], [3], [5]),
    "two parts": Graph.from_nodes("parts", [[], [0], [], [2], [1, 3]], [4, 1, 4, 1, 1], [1, 1, 1, 1, 1]),
    "dear": Graph.from_nodes("dear", [[], [0], [1], [0, 2]], [2, 2, 3, 2], [10**15] * 4),
    "large": Graph.from_nodes("large", [[], [0], [1], [0, 2]], [2 * 10**15, 10**15, 3 * 10**15, 1], [1, 1, 1, 1]),
}


@pytest.mark.parametrize("strategy", ["search", "portfolio"])
@pytest.mark.parametrize("name", EDGES)
def test_edges(name, strategy):
    graph = EDGES[name]
    least = min_budget(graph).bytes
    assert optimum(graph, least, "staged") is not None
    for budget in range(max(least - 1, 0), least + 2):
        solution = solve(graph, budget, strategy, work_limit=2000, time_limit_s=20)
        assert solution.cost == optimum(graph, budget, "staged"), solution.message


def test_short_limits_are_kept():
    graph = synthetic.chain(n=50)
    for limit, strategy in itertools.product((0.1, 0.5), ("search", "portfolio")):
        solution = solve(graph, plain_peak(graph) // 2, strategy, time_limit_s=limit, threads=2)
        assert solution.status in (Status.FEASIBLE, Status.OPTIMAL, Status.TIMEOUT, Status.NO_PLAN)
        assert solution.wall_s <= limit * 1.05 + 2


INTERRUPTED = """
    import remat
    from remat.frontends import synthetic

    graph = synthetic.layered(n=120)
    peak = remat.simulate(graph, remat.Plan.from_order(graph, range(120))).peak_bytes
    say = lambda p: p.cost is not None and print("found", flush=True)
    solution = remat.solve(graph, int(0.9 * peak), time_limit_s=60, scope="SCOPE", progress=say)
    assert remat.simulate(graph, solution.plan).peak_bytes <= int(0.9 * peak)
    print(solution.status, solution.ended)
"""


def interrupted(scope: str) -> tuple[int, str, str]:
    """(exit code, output, errors) of a solve that gets Ctrl-C when it has a plan."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED).replace("SCOPE", scope)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    if process.stdout.readline() == "found\n":
        process.send_signal(signal.SIGINT)
    return process.wait(timeout=55), *process.communicate()


def test_ctrl_c_returns_the_incumbent_and_the_process_ends_well():
    with ThreadPoolExecutor(2) as pool:
        for code, out, errors in pool.map(interrupted, ("staged", "fixed_order")):
            assert code == 0, errors  # not aborted in the middle of a solver
            assert out.splitlines()[-1] == "FEASIBLE interrupted"


def test_ctrl_c_before_the_threads_run(monkeypatch):
    def stopped(thread):
        raise KeyboardInterrupt

    monkeypatch.setattr(portfolio._Thread, "start", stopped)
    graph = synthetic.layered(n=60)
    budget = int(0.8 * plain_peak(graph))
    solution = solve(graph, budget, time_limit_s=20, threads=2)
    assert solution.ended == "interrupted"
    assert solution.peak_bytes <= budget


def test_ctrl_c_in_a_member_ends_the_other_strategy_too(monkeypatch):
    """A member returns its plan after Ctrl-C; the strategy that asked for it must not go on to its time limit."""
    graph = synthetic.chain(n=20)

    def stopped(context, _threads, **_options):
        context.offer(Plan.from_order(graph, range(len(graph))), "search")
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "search_staged", stopped)
    context = new_context(Problem(graph, 1 << 40), SolveOptions())
    with pytest.raises(KeyboardInterrupt):
        context.run_strategy(context, "search", {}, isolate=False)
    assert context.incumbent.plan is not None
    assert solve(graph, 1 << 40, "search").ended == "interrupted"


def test_a_small_problem_that_highs_has_proven_is_certified_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portfolio, "WINDOW_INTEGER_SHARE_SMALL", 0.0)  # the MILP comes first
    monkeypatch.setattr(portfolio, "EXHAUSTIVE_OPERATIONS", 0)
    graph = synthetic.layered(n=40)
    budget = int(0.85 * plain_peak(graph))
    solution = solve(graph, budget, time_limit_s=60)
    assert (solution.status, solution.proven_by) == (Status.OPTIMAL, "certificate")
    assert solution.stats["milp_rounds"] > 0
    assert remat.verify_bound(graph, solution.certificate) == solution.bound


def test_where_the_greedy_fails_the_search_begins_with_the_cheapest_baseline_that_fits(monkeypatch):
    monkeypatch.setattr(search, "greedy_plans", lambda *_, **__: iter(()))
    graph = synthetic.skip(depth=5, varied=True, seed=1)
    members = []
    for name in remat.strategies():
        if get_strategy(name).ignores_budget:
            with contextlib.suppress(Skip):
                members += remat.family(graph, name)
    peaks = sorted(m.peak_bytes for m in members)
    budget = peaks[len(peaks) // 2]
    started = simulate(graph, Plan.from_order(graph, search.first_order(context_of(graph, budget)).tolist()))
    assert started.peak_bytes <= budget
    assert started.cost == min(m.cost for m in members if m.peak_bytes <= budget)
    assert search.first_order(context_of(graph, peaks[0] - 1)) is None


def test_a_plan_that_looks_for_memory_alone_where_greedy_and_search_find_none(monkeypatch) -> None:
    monkeypatch.setattr(search, "greedy_plans", lambda *_, **__: iter(()))
    monkeypatch.setattr(portfolio._Run, "search", lambda *_, **__: None)
    monkeypatch.setattr(portfolio, "SMALL_COLUMNS", 0)  # a small problem's MILP decides sooner
    graph = synthetic.layered(n=60)
    least = min_budget(graph, time_limit_s=3)
    solution = solve(graph, int(1.2 * least.bytes), time_limit_s=6, threads=2)
    assert solution.plan is not None
    assert solution.stats["trajectory"][0][2] == "min_budget"


def test_trees_of_deterministic_runs_repeat_with_their_certificate() -> None:
    graph = synthetic.layered(n=100)
    budget = int(0.9 * plain_peak(graph))
    runs = [solve(graph, budget, scope="fixed_order", deterministic=True, time_limit_s=30) for _ in range(2)]
    assert [run.cut_by_clock for run in runs] == [False, False]
    first, second = ((run.certificate, run.status, run.plan.order.tolist()) for run in runs)
    assert first == second
    assert first[1] is Status.OPTIMAL
    assert len(first[0].tree) > 1


def test_deterministic_runs_repeat_whatever_the_threads_do():
    compared = 0
    for graph in [synthetic.layered(n=40, seed=seed) for seed in range(3)]:
        budget = (graph.largest_working_set()[0] + plain_peak(graph)) // 2
        runs = [solve(graph, budget, "search", threads=2, deterministic=True, time_limit_s=4) for _ in range(2)]
        if any(run.cut_by_clock for run in runs):
            continue  # a busy machine; a run says so
        orders = [None if run.plan is None else run.plan.order.tolist() for run in runs]
        assert orders[0] == orders[1]
        compared += 1
    assert compared >= 1


def test_no_plan_is_not_a_proof():
    graph = synthetic.layered(n=40)
    least = remat.min_budget(graph).lower_bound_bytes
    solution = solve(graph, least, "search", work_limit=3000)
    assert solution.status is Status.NO_PLAN
    assert "nothing is proven" in solution.message


def test_the_price_rises_over_calls_that_are_shorter_than_its_window():
    """On graphs so large that the annealer is called for few moves at a time."""
    graph = synthetic.layered(n=1200)
    annealer = Annealer(graph, plain_peak(graph) // 20, seed=0)  # no plan fits
    annealer.load(np.arange(len(graph)))
    price = first = annealer.price
    for _ in range(400):
        *_, price = kernel.anneal(annealer.state, 40, 1.0, 1.0, price, 1 << 60, 1 << 60)
    assert price > 2 * first
