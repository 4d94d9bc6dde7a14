"""Search and portfolio: against exhaustive optima in every scope, at the edges of the interface."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from brute_force import SCOPES, optimum, random_graph, replay_plan
from helpers import context_of

import remat
from remat import Graph, Plan, Status, min_budget, simulate, solve, solve_sweep
from remat.arrays import GraphArrays
from remat.errors import Skip
from remat.frontends import synthetic
from remat.problem import Problem, SolveOptions
from remat.registry import get_strategy
from remat.search import kernel
from remat.search.anneal import Annealer, Best, Calls, minimise_cost
from remat.search.greedy import greedy_plans
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
    [
        *((scope, True, 1, 80) for scope in SCOPES),
        *(("staged", False, threads, 12) for threads in (1, 2)),
        pytest.param("staged", False, 2, 40, marks=pytest.mark.slow),
    ],
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
    for graph in (synthetic.chain(n=40, varied=True), synthetic.skip(depth=20), synthetic.layered(n=80)):
        least = int(1.05 * remat.min_budget(graph).bytes) + 1  # without a time limit: the same on every machine
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
        arrays = GraphArrays.of(graph)
        for budget in tight_budgets(graph):
            annealer = Annealer(graph, budget, seed, arrays)
            assert annealer.load(np.arange(len(graph)))
            annealer.round(2000, 1.0, 0.5, Best(), lambda: False, lambda: None)
            plan = Plan.from_order(graph, annealer.order().tolist())
            trace = simulate(graph, plan)
            assert str(plan.scope) == "staged"
            assert trace.cost == annealer.cost
            peak = graph.fixed_bytes + int(annealer.state.peak.max())
            if graph.is_single_output:
                assert trace.peak_bytes == peak
            else:  # a plan frees what its producer makes again for the sake of another output
                assert trace.peak_bytes <= peak
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
    graph, told, ended = synthetic.layered(n=100), list[int](), list[bool]()
    budget_bytes = int(0.85 * plain_peak(graph))
    cost = minimise_cost(graph, budget_bytes, work_limit=50_000).cost

    def on_order(_order: np.ndarray, cost: int) -> None:
        began = time.thread_time()
        while not told and time.thread_time() < began + 0.02:
            pass
        told.append(cost)

    def should_stop() -> bool:
        if told and told[-1] <= cost:
            ended.append(True)
        return bool(ended)

    minimise_cost(graph, budget_bytes, deadline=time.monotonic() + 10, calls=Calls(on_order, should_stop))
    assert ended
    assert len(told) > 1


@pytest.mark.parametrize(("lp_gap", "begins"), [(0.0, True), (1.0, False)])
def test_the_staged_lp_begins_where_windows_leave_a_larger_gap(monkeypatch, lp_gap: float, begins: bool) -> None:
    """On U-Net at 5 GiB it took a quarter of a minute, and proved less than windows had in a second."""
    graph, asked = synthetic.layered(n=60), list[int]()

    def lower_bound(*_: object, **__: object) -> SimpleNamespace:
        asked.append(1)
        return SimpleNamespace(stats={})

    def nothing(*_: object, **__: object) -> None:
        """No trees and no MILPs."""

    monkeypatch.setattr(portfolio, "LP_GAP", lp_gap)
    monkeypatch.setattr(portfolio, "SMALL_COLUMNS", 0)
    monkeypatch.setattr(portfolio, "lower_bound", lower_bound)
    monkeypatch.setattr(portfolio.WindowIntegers, "run", nothing)
    monkeypatch.setattr(portfolio.Refiner, "run", nothing)
    monkeypatch.setattr(portfolio._Run, "_whole_milp", nothing)
    monkeypatch.setattr(portfolio._Run, "_has_time_for_lp", lambda *_: True)
    solution = solve_sweep(graph, [int(0.8 * plain_peak(graph))], isolate=False, threads=1, time_limit_s=3)[0]
    assert solution.gap > 1e-4
    assert bool(asked) == begins


def test_no_plan_is_not_a_proof():
    graph = synthetic.layered(n=40)
    least = remat.min_budget(graph).lower_bound_bytes
    solution = solve(graph, least, "search", work_limit=3000)
    assert solution.status is Status.NO_PLAN
    assert "nothing is proven" in solution.message


@pytest.mark.parametrize("threads", [1, 2])
def test_progress_is_told_and_the_gap_stops_the_solve(threads):
    graph, told = synthetic.chain(n=20), []
    budget = plain_peak(graph) * 7 // 10
    solution = solve(graph, budget, threads=threads, time_limit_s=20, target_gap=0.5, progress=told.append)
    assert solution.gap <= 0.5
    assert solution.cost in {p.cost for p in told}
    assert solution.wall_s < 20


@pytest.mark.parametrize(
    ("costs", "bound", "now", "enough"),
    [
        ([], 0, 100.0, False),  # no plan
        ([(0.1, 1000)], 999, 0.1, True),  # the gap alone
        ([(0.1, 1000)], 998, 1.0, False),  # a narrow gap, and too soon
        ([(0.1, 1000)], 998, 2.0, True),  # a narrow gap, and no gain for longer than the root of 2
        ([(0.1, 1000)], 900, 5.0, False),  # a wide gap takes more patience
        ([(0.1, 1000)], 900, 10.2, True),
        ([(0.1, 1000), (8.0, 990)], 900, 17.0, False),  # gains in the second half of the time
        ([(0.1, 1000), (8.0, 990)], 900, 17.6, True),
        ([(0.1, 1000), (1.0, 991), (9.0, 990)], 900, 12.0, True),  # the last one is not worth the wait
    ],
)
def test_when_more_time_is_not_worth_it(costs, bound, now, enough):
    """A function of times, costs and bound alone."""
    costs = [(seconds, 1000 * cost) for seconds, cost in costs]
    assert (enough_at(costs, 1000 * bound, now, 0.0011, PATIENCE_S) <= now) == enough


def test_when_patience_ends_if_nothing_is_found():
    """A run need not be longer."""
    costs = [(0.1, 1000), (3.0, 990)]
    ends = enough_at(costs, 950, 4.0, 0.001, 0.5)
    assert not enough_at(costs, 950, ends - 1e-6, 0.001, 0.5) <= ends - 1e-6
    assert enough_at(costs, 950, ends, 0.001, 0.5) <= ends
    assert ends == pytest.approx(6.18, abs=0.01)  # 3 s and 0.5 s times the root of 40.4
    assert enough_at([], 950, 4.0, 0.001, 0.5) == math.inf


@pytest.mark.parametrize(
    ("wall_s", "used_s", "factor"), [(3.0, 2.0, 1.5), (2.0, 2.0, 1.0), (2.0, 3.9, 1.0), (2.0, 0.2, 2.0)]
)
def test_a_busy_machine_makes_a_search_patient(wall_s, used_s, factor):
    """A process that gets two thirds of the time waits 1.5 times as long, but at most twice as long."""
    assert slower_by(wall_s, used_s) == factor


def test_a_patient_solve_ends_in_time_and_no_worse() -> None:
    graph = synthetic.chain(n=60)
    budget = plain_peak(graph) * 6 // 10
    solution = solve(graph, budget, scope="free", threads=2, time_limit_s=40, target_gap=1e-3, least_gain=1e-3)
    assert solution.wall_s < 20
    staged = solve(graph, budget, threads=2, time_limit_s=5, target_gap=1e-3)
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
    least = min(b for b in _budgets_to_try(graph) if optimum(graph, b, "staged") is not None)
    for budget in (least, least - 1, least + 1):
        if budget < 0:
            continue
        solution = solve(graph, budget, strategy, work_limit=2000, time_limit_s=20)
        best = optimum(graph, budget, "staged")
        assert (solution.cost is None) == (best is None), solution.message
        assert best is None or solution.cost == best


def _budgets_to_try(graph: Graph) -> range | list[int]:
    sizes = [value.bytes for value in graph.values]
    sums = {0}
    for size in sizes:
        sums |= {s + size for s in sums}
    return sorted(sums)


@pytest.mark.parametrize("limit", [0.1, 1.0])
def test_short_limits_are_kept(limit):
    graph = synthetic.chain(n=50)
    budget = plain_peak(graph) // 2
    for strategy in ("search", "portfolio"):
        solution = solve(graph, budget, strategy, time_limit_s=limit, threads=2)
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


@pytest.mark.parametrize("scope", ["staged", "fixed_order"])
def test_ctrl_c_returns_the_incumbent_and_the_process_ends_well(scope):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED).replace("SCOPE", scope)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    said = process.stdout.readline()
    assert said == "found\n", process.communicate(timeout=55)[1]
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=55)
    assert process.returncode == 0, errors  # not aborted in the middle of a solver
    assert out.splitlines()[-1] == "FEASIBLE interrupted"


def test_ctrl_c_before_the_threads_run(monkeypatch):
    def interrupted(thread):
        raise KeyboardInterrupt

    monkeypatch.setattr(portfolio._Thread, "start", interrupted)
    solution = solve(LAYERED, TIGHT, time_limit_s=20, threads=2)
    assert solution.ended == "interrupted"
    assert solution.peak_bytes <= TIGHT


def test_ctrl_c_in_a_member_ends_the_other_strategy_too(monkeypatch):
    """A member returns its plan after Ctrl-C; the strategy that asked for it must not go on to its time limit."""
    graph = synthetic.chain(n=20)

    def interrupted(context, _threads, **_options):
        context.offer(Plan.from_order(graph, range(len(graph))), "search")
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "search_staged", interrupted)
    context = new_context(Problem(graph, 1 << 40), SolveOptions())
    with pytest.raises(KeyboardInterrupt):
        context.run_strategy(context, "search", {}, isolate=False)
    assert context.incumbent.plan is not None
    assert solve(graph, 1 << 40, "search").ended == "interrupted"


LAYERED = synthetic.layered(n=60)
TIGHT = int(0.8 * plain_peak(LAYERED))


def test_a_solve_leaves_no_thread_behind():
    before = threading.active_count()
    solve(synthetic.chain(n=12), 20 * 1024, threads=3, time_limit_s=5, target_gap=0.9)
    assert threading.active_count() <= before


@pytest.mark.parametrize("strategy", ["search", "portfolio"])
def test_deterministic_runs_repeat_whatever_the_threads_do(strategy):
    compared, rng = 0, np.random.default_rng(8)
    graphs = [synthetic.layered(n=40, seed=seed) for seed in range(3)]
    graphs += [random_graph(rng, 30, min_cost=1) for _ in range(5)]
    for graph in graphs:
        budget = (graph.largest_working_set()[0] + plain_peak(graph)) // 2
        runs = [solve(graph, budget, strategy, threads=2, deterministic=True, time_limit_s=4) for _ in range(2)]
        if any(run.cut_by_clock for run in runs):
            continue  # a busy machine; a run says so
        orders = [None if run.plan is None else run.plan.order.tolist() for run in runs]
        assert orders[0] == orders[1]
        compared += 1
    assert compared >= 3


def test_trees_of_deterministic_runs_repeat_with_their_certificate() -> None:
    graph = synthetic.layered(n=100)
    budget = int(0.9 * plain_peak(graph))
    runs = [solve(graph, budget, scope="fixed_order", deterministic=True, time_limit_s=30) for _ in range(2)]
    assert [run.cut_by_clock for run in runs] == [False, False]
    first, second = ((run.certificate, run.status, run.plan.order.tolist()) for run in runs)
    assert first == second
    assert first[1] is Status.OPTIMAL
    assert len(first[0].tree) > 1


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


def test_a_poor_plan_to_start_from_does_not_replace_the_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portfolio._Run, "one_after_the_other", lambda self: None)
    graph = synthetic.skip(depth=8, varied=True, seed=1)
    poor = remat.family(graph, "checkpoint_last")[0]
    budget = (poor.peak_bytes + 3 * plain_peak(graph)) // 4
    greedy = min(simulate(graph, plan).cost for plan in greedy_plans(graph, budget))
    (found,) = solve_sweep(graph, [budget], "portfolio", threads=1, warm_start=poor.plan, isolate=False)
    assert found.cost == greedy < poor.cost


def test_a_plan_that_looks_for_memory_alone_where_greedy_and_search_find_none(monkeypatch) -> None:
    monkeypatch.setattr(search, "greedy_plans", lambda *_, **__: iter(()))
    monkeypatch.setattr(portfolio._Run, "search", lambda *_, **__: None)
    monkeypatch.setattr(portfolio, "SMALL_COLUMNS", 0)  # a small problem's MILP decides sooner
    graph = synthetic.layered(n=60)
    least = min_budget(graph, time_limit_s=5)
    solution = solve(graph, int(1.2 * least.bytes), time_limit_s=8, threads=2)
    assert solution.plan is not None
    assert solution.stats["trajectory"][0][2] == "min_budget"


def test_plans_of_strategies_that_give_starts_count_on_a_graph_of_middle_size(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = synthetic.chain(n=40, varied=True)
    peak = plain_peak(graph)
    best = min(
        (rival for rival in map(get_strategy, remat.strategies()) if rival.gives_starts),
        key=lambda rival: solve(graph, peak // 2, rival.name).cost or float("inf"),
    )
    monkeypatch.setattr(portfolio, "SMALL_COLUMNS", 0)  # a small problem's MILP decides it
    monkeypatch.setattr(search, "greedy_plans", lambda *_, **__: iter(()))
    monkeypatch.setattr(search, "online_plan", lambda *_: None)
    monkeypatch.setattr(portfolio._Run, "search", lambda *_, **__: None)
    monkeypatch.setattr(portfolio._Run, "prove", lambda *_: None)
    for threads in (1, 2):
        found = solve(graph, peak // 2, time_limit_s=10, threads=threads)
        assert found.stats["trajectory"][-1][2] == best.name
        assert found.cost == solve(graph, peak // 2, best.name).cost


@pytest.mark.parametrize("gains", [{"proof": 3, "search": 1}, {"proof": 1, "search": 3}])
def test_the_last_of_the_time_goes_to_what_has_closed_more_of_the_gap(
    monkeypatch: pytest.MonkeyPatch, gains: dict[str, int]
) -> None:
    """Each has one turn first, the proof before the search, and both go on from the best plan."""
    graph = synthetic.chain(n=40, varied=True)
    run, turns = portfolio._Run(context_of(graph, plain_peak(graph), seconds=2.0)), list[str]()
    known = SimpleNamespace(gap=0.5, plan=None)
    monkeypatch.setattr(portfolio._Run, "_done", lambda self: len(turns) == 5)
    object.__setattr__(run.context, "incumbent", known)

    def turn(name: str) -> None:
        turns.append(name)
        time.sleep(0.02)
        known.gap -= 0.01 * gains[name]

    monkeypatch.setattr(portfolio._Run, "prove", lambda self, context: turn("proof"))
    heats = list[float]()
    monkeypatch.setattr(portfolio._Run, "search", lambda self, *_, hot: (turn("search"), heats.append(hot)))
    run._last_turns()
    more = max(gains, key=lambda name: gains[name])
    assert turns == ["proof", "search", more, more, more]
    assert set(heats) == {search.WARM}


@pytest.mark.parametrize(("cost", "heat"), [(None, search.HOT), (200, search.HOT), (120, search.MEDIUM)])
def test_sequences_begin_from_the_best_plan_unless_eviction_finds_a_poor_one(cost: int | None, heat: float) -> None:
    assert search.first_heat(Graph.from_nodes("one", [[]], [1], [100]), cost) == heat


def test_the_price_rises_over_calls_that_are_shorter_than_its_window():
    """On graphs so large that the annealer is called for few moves at a time."""
    graph = synthetic.layered(n=1200)
    annealer = Annealer(graph, plain_peak(graph) // 20, seed=0)  # no plan fits
    annealer.load(np.arange(len(graph)))
    price = first = annealer.price
    for _ in range(400):
        *_, price = kernel.anneal(annealer.state, 40, 1.0, 1.0, price, 1 << 60, 1 << 60)
    assert price > 2 * first


def test_a_search_that_goes_on_begins_neither_from_blocks_nor_from_every_operation_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, begun = synthetic.chain(n=350), list[tuple[bool, float]]()
    start = next(greedy_plans(graph, plain_peak(graph) * 3 // 4))
    monkeypatch.setattr(search, "_cheaper_by_blocks", lambda *_: begun.append((True, -1.0)))
    monkeypatch.setattr(search, "SHORT_SEARCH_S", 0.0)
    monkeypatch.setattr(
        search._Cycles, "sequences", lambda self, order, hot, *_: begun.append((order is not None, hot))
    )
    for heat in (search.HOT, search.WARM):
        context = context_of(graph, plain_peak(graph) * 3 // 4, seconds=0.5, warm_start=start)
        begun.clear()
        search.search_staged(context, 1, hot=heat)
        again = [(True, -1.0), (False, search.HOT)] if heat == search.HOT else [(True, search.WARM)]
        assert begun[: len(again) + 1] == [*again, (True, search.WARM)]
