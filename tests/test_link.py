"""Plans that copy values to the host: the link, the judge, the files, and the search against exact optima."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brute_force import KINDS as GRAPHS
from brute_force import random_graph, random_step, with_implementations
from brute_force_link import loose_optimum, plan_of, strict_optimum, tiny_graph, tiny_link
from forged_certificates import branched
from helpers import refused, step_of

import remat
from baselines._offload import Activations, search_of
from baselines._segments import base_residency, plan_of_residency
from remat import BoundCertificate, Graph, Link, Operation, Plan, Problem, Scope, Status, Value, simulate, verify_bound
from remat.bounds.min_budget import min_budget
from remat.bounds.windows import WindowBound, certify, solve_windows
from remat.check import check_file
from remat.context import Context
from remat.frontends.synthetic import chain
from remat.implementation import Implementation
from remat.link import parse_link
from remat.problem import SolveOptions
from remat.programs.windows import place_of
from remat.registry import get_strategy
from remat.search.choices import Choices
from remat.search.offload import MAKESPAN, MOST_EXCESS, OffloadSearch, insert
from remat.simulator import plain_peak
from remat.solvers.link_rounding import rounded

# Two forward operations, and a backward pass that reads the first one's value last.
STEP = Graph.from_nodes("step", [[], [0], [1], [0, 2]], [4, 2, 2, 1], [10, 20, 10, 10], cost_unit="ns")
SLOW = Link(to_host=10**9, from_host=5 * 10**8, latency_s=0)  # 1 ns a byte to the host, 2 ns back
AWAY = [
    ("compute", 0), ("offload", 0), ("compute", 1), ("free", 0), ("compute", 2), ("free", 1), ("prefetch", 0),
    ("compute", 3),
]  # fmt: skip
STEPS = replace(step_of(6), cost_unit="ns")


def between(graph: Graph, share: float) -> int:
    """The budget so far on the way from the largest working set to the plain peak."""
    least = graph.largest_working_set()[0]
    return least + int(share * (plain_peak(graph) - least))


def test_times_and_bytes_of_three_streams_by_hand() -> None:
    plan = Plan.from_steps(STEP, AWAY, link=SLOW)
    trace = simulate(STEP, plan)
    # computed at 10, 30 and 40; copied out from 10 to 14, in from 40 to 48; the last one waits for that
    assert trace.end_cost.tolist() == [10, 30, 40, 58]
    assert trace.copies.tolist() == [[2, 0, 10, 14], [3, 0, 40, 48]]
    assert trace.running_bytes.tolist() == [4, 6, 4, 7]
    assert (trace.cost, trace.peak_bytes, trace.host_peak_bytes) == (58, 7, 4)
    assert plan.matrices(STEP)[1][:, 0].tolist() == [False, True, False, True]  # on the device
    early = [*AWAY[:4], ("prefetch", 0), *AWAY[4:6], ("compute", 3)]
    trace = simulate(STEP, Plan.from_steps(STEP, early, link=SLOW))
    assert (trace.cost, trace.peak_bytes) == (50, 8)  # in from 30 to 38, while operation 2 runs
    slower = Link(to_host=10**8, from_host=10**9, latency_s=0)  # 40 ns to the host, for which freeing waits
    trace = simulate(STEP, Plan.from_steps(STEP, AWAY, link=slower))
    assert trace.end_cost.tolist() == [10, 30, 60, 74]  # operation 2 begins at 50
    late = Link(to_host=10**9, from_host=10**9, latency_s=1e-9, duplex=0.5)
    assert (late.out_ns(4), late.in_ns(3)) == (9, 7)


def test_copies_that_cannot_be_are_refused() -> None:
    for steps, says in [
        ([("compute", 0), ("prefetch", 0)], "still resident"),
        ([("compute", 0), ("free", 0), ("prefetch", 0)], "not on the host"),
        ([("offload", 0)], "not resident"),
        ([("compute", 0), ("offload", 0), ("offload", 0)], "already on the host"),
        ([("compute", 0), ("drop", 0)], "not on the host"),
        ([("compute", 0), ("offload", 0), ("drop", 0), ("free", 0), ("prefetch", 0)], "not on the host"),
    ]:
        with refused(says):
            simulate(STEP, Plan.from_steps(STEP, steps, link=SLOW))
    with refused("on the host then"):
        simulate(STEP, Plan.from_steps(STEP, AWAY, link=Link(10**9, 10**9, host_bytes=3)))
    for none in (None, "0GB/s"):
        with refused("needs a link"):
            simulate(STEP, Plan.from_steps(STEP, AWAY, link=none))
    flops = replace(STEP, cost_unit="flop")
    with refused("costs in ns"):
        simulate(flops, Plan.from_steps(flops, AWAY, link=SLOW))
    with refused("costs in ns"):
        remat.solve(flops, 8, link="12GB/s")
    with refused("host_bytes of 0 B hold no value of 'step', the smallest of which has 1 B"):
        remat.solve(STEP, 7, link=replace(SLOW, host_bytes=0))
    with refused("warm_start: step 2: computes operation 1"):
        remat.solve(STEP, 7, warm_start=Plan.from_steps(STEP, [("compute", 0), ("free", 0), ("compute", 1)]))
    with refused("give the solve a link"):
        remat.solve(STEP, 7, warm_start=Plan.from_steps(STEP, AWAY, 7, SLOW))


@pytest.mark.parametrize(
    "wrong",
    ["12", "12GB", "-1GB/s", "1GB/s,2GB/s,3GB/s", "pcie9", 12, "", True, {"to_host": -1}, {"latency_s": -1},
     {"duplex": 0}, {"host_bytes": -4}],
)  # fmt: skip
def test_a_link_without_a_rate_or_of_wrong_numbers_is_refused_in_one_line(wrong: Any) -> None:
    with refused():
        Link(**{"to_host": 1, "from_host": 1, **wrong}) if isinstance(wrong, dict) else parse_link(wrong)


def test_a_link_may_be_text_and_is_none_without_bandwidth() -> None:
    assert [parse_link(link) for link in ("0GB/s", Link(0, 10**9), None)] == [None] * 3
    plan = Plan.from_steps(STEP, AWAY, link="1GB/s,0.5GB/s")
    assert replace(plan.link, latency_s=0) == SLOW
    assert simulate(STEP, plan, link="pcie5").cost < simulate(STEP, plan, link="1MB/s").cost
    graph = random_chain(10, 3)
    plain, none = (remat.solve(graph, between(graph, 0.5), link=link, work_limit=500) for link in (None, "0GB/s"))
    assert plain.plan.document() == none.plan.document()


def test_a_plan_with_copies_is_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    of_numpy = Link(np.int64(10**9), np.float64(5e8), np.float32(0), host_bytes=np.int64(9), duplex=np.float32(1))
    for link, same in ((SLOW, SLOW), (of_numpy, replace(SLOW, host_bytes=9))):
        Plan.from_steps(STEP, AWAY, 7, link).save(path)
        again = Plan.load(path, STEP)
        assert (again.steps, again.link, simulate(STEP, again).cost) == (AWAY, same, 58)
    document = json.loads(path.read_text())
    assert document["format"] == "remat-plan/2"
    assert Plan.from_order(STEP, [0, 1, 2, 3]).document()["format"] == "remat-plan/1"
    path.write_text(json.dumps(document | {"format": "remat-plan/1"}))
    with refused("not a"):
        Plan.load(path, STEP)


def test_what_the_host_has_no_room_for_fails_no_solve() -> None:
    graph, link = replace(chain(n=12), cost_unit="ns"), Link(10**9, 10**9, latency_s=0, host_bytes=2048)
    for strategy in ("offload_all", "offload_greedy", "portfolio"):
        solution = remat.solve(graph, int(0.8 * plain_peak(graph)), strategy, link=link, time_limit_s=1, threads=1)
        if strategy == "portfolio":
            assert solution.status in ("FEASIBLE", "OPTIMAL")  # in a second it may end the proof
        else:
            assert solution.status == "NO_PLAN"
            assert "does not fit the host" in solution.message
    warm_start, link = Plan.from_steps(STEP, AWAY, link=SLOW), replace(SLOW, host_bytes=3)
    for strategy, seconds in (("portfolio", 1), ("checkmate_milp", 60)):
        solution = remat.solve(STEP, 7, strategy, link=link, warm_start=warm_start, time_limit_s=seconds, threads=1)
        assert solution.status is not Status.FAILED
        assert not solution.plan.has_copies


def test_a_link_that_takes_years_is_refused_by_solves_and_judged_exactly() -> None:
    graph = replace(STEP, values=tuple(replace(value, bytes=value.bytes * 10**10) for value in STEP.values))
    for strategy in ("portfolio", "offload_all"):
        with refused("the link is too slow for 'step'"):
            remat.solve(graph, 7 * 10**10, strategy, link="1B/s", time_limit_s=5)
    trace = simulate(graph, Plan.from_steps(graph, AWAY, link=Link(1, 2, latency_s=0)))
    assert trace.copies[:, 3].tolist() == [10 + 4 * 10**19, 10 + 4 * 10**19 + 10 + 2 * 10**19]
    assert trace.cost == trace.copies[1, 3] + 10


def problems(seeds: range, make: Callable[[np.random.Generator], Graph] | None = None) -> list[tuple[Graph, int, Link]]:
    """Random tiny problems in which something must be repeated or copied, or others of graphs that are made."""
    found = []
    for rng in map(np.random.default_rng, seeds):
        graph = make(rng) if make else tiny_graph(rng, int(rng.integers(4, 6)))
        least, most = max(graph.largest_working_set()[0], graph.final_bytes), plain_peak(graph)
        if make or least < most:
            budget, link = int(rng.integers(least, max(most, least + 1))), tiny_link(rng, host=rng.random() < 0.3)
            link = replace(link, duplex=float(rng.choice([1, 1, 1, 1, 0.5]))) if make else link
            found.append((replace(graph, cost_unit="ns"), budget, link))
    return found


def test_plans_lose_nothing_against_copies_at_any_moment_and_the_search_finds_most() -> None:
    equal = n = 0
    for graph, budget, link in problems(range(24)):
        loose, (best, steps) = loose_optimum(graph, budget, link), strict_optimum(graph, budget, link)
        assert best == loose or None in (best, loose), (graph, budget, link)
        if None in (best, loose) or best == float("inf"):
            continue
        n += 1
        trace = simulate(graph, plan_of(graph, steps, budget, link))
        assert (trace.cost, trace.peak_bytes <= budget) == (best, True)
        search = OffloadSearch(graph, budget, link, 0)
        for _ in range(3):
            search.run(0.5, 5e-3, 2000)
        if search.least < float("inf"):
            found = simulate(graph, search.best_plan())
            assert found.cost == search.least >= best, (graph, budget, link)
            assert found.peak_bytes <= budget
            assert link.host_bytes is None or found.host_peak_bytes <= link.host_bytes
            equal += found.cost == best
    assert n >= 10
    assert equal >= 0.9 * n


def test_the_search_counts_what_the_judge_counts() -> None:
    for seed in range(120):
        rng = np.random.default_rng(seed)
        graph = tiny_graph(rng, int(rng.integers(8, 40)))
        if seed % 2:
            kinds = GRAPHS[seed // 2 % len(GRAPHS)]
            graph = replace(random_graph(rng, int(rng.integers(8, 40)), **kinds), cost_unit="ns")  # pyright: ignore[reportArgumentType]
        least, most = graph.largest_working_set()[0], plain_peak(graph)
        link = tiny_link(rng, host=seed % 3 == 0)
        search = OffloadSearch(graph, int(rng.integers(min(least, most), max(least, most) + 1)), link, seed)
        search.genes.away[:] = rng.random(search.genes.away.shape) < rng.random()
        search.genes.numbers[1] = rng.integers(0, 50)
        for _ in range(int(rng.integers(0, len(graph)))):
            t = int(rng.integers(1, len(graph)))
            i = int(rng.integers(0, t))
            if not graph.operations[i].run_once:
                insert(search.genes, t, i, len(graph))
        trace = simulate(graph, search.plan(), link=replace(link, host_bytes=None))
        found = search.works[0].found
        host = 0 if link.host_bytes is None else trace.host_peak_bytes - link.host_bytes
        excess = max(0, trace.peak_bytes - search.limits[1], host)
        assert (found[MAKESPAN], found[MOST_EXCESS]) == (trace.cost, excess), seed


def proven_with_copies(
    graph: Graph, budget: int, link: Link, boundaries: list[int], rng: np.random.Generator | None = None
) -> BoundCertificate:  # fmt: skip
    """Of the window relaxation with these boundaries, or with `rng` of a few nodes that branch on drawn columns."""
    problem = Problem(graph, budget, Scope.STAGED, link=link)
    model, x, y = solve_windows(WindowBound(problem).model(boundaries), time.monotonic() + 60, None)
    if rng is None:
        return certify(problem, model, y)
    return branched(problem, model, y, graph.total_cost + float(model.cost @ x) + float(rng.integers(0, 6)), rng)


def of_every_kind(rng: np.random.Generator) -> Graph:
    """With several outputs, workspaces, kept values and operations that run once."""
    return random_step(rng, int(rng.integers(4, 6)), **GRAPHS[-1], min_bytes=1, max_cost=5, max_bytes=5)


@pytest.mark.parametrize("make", [None, of_every_kind])
@pytest.mark.long
def test_no_bound_with_copies_is_above_an_optimum(make: Callable[[np.random.Generator], Graph] | None) -> None:
    n = above = 0
    for seed, (graph, budget, link) in enumerate(problems(range(12), make)):
        rng = np.random.default_rng(seed)
        best = loose_optimum(graph, budget, link, 30_000)
        every = sorted([*range(len(graph) - 1), *range(1 - len(graph), 0)], key=place_of)
        some = rng.choice(len(every), int(rng.integers(1, len(every))), replace=False)
        boundaries = [every[i] for i in sorted(some.tolist())]
        if best is None:
            continue
        for at, by_tree in itertools.product((boundaries, every), (None, rng)):
            proof = proven_with_copies(graph, budget, link, at, by_tree)
            assert verify_bound(graph, proof) == proof.bound <= best, (seed, at, by_tree)
            above += by_tree is None and at is every and proof.bound > graph.total_cost
        n += 1
    assert n >= 6
    assert above >= 4


def test_a_boundary_is_where_copies_come_too_late() -> None:
    """Operation 4 reads value 0. When operation 3 runs, memory is full, so that its copy comes while nothing runs."""
    graph = Graph.from_nodes(
        "late", [[], [0], [1], [2, 1], [3, 0]], [9, 7, 4, 2, 8], [12, 18, 18, 9, 11], cost_unit="ns"
    )
    link = Link(to_host=10**9, from_host=10**9 // 3, latency_s=0)
    windows = WindowBound(Problem(graph, 19, Scope.STAGED, link=link))
    windows.run(time.monotonic() + 60)
    assert windows.best.boundaries == (-3, 3, -4)
    assert windows.best.bound == 77  # 74 without the last boundary
    assert loose_optimum(graph, 19, link) >= 77


def test_a_bound_with_copies_is_kept_in_a_file_and_refused_for_what_it_is_not_about(tmp_path: Path) -> None:
    graph, budget, link = problems(range(3, 30))[0]
    proof = proven_with_copies(graph, budget, link, [len(graph) // 2])
    proof.save(tmp_path / "bound.json")
    assert BoundCertificate.load(tmp_path / "bound.json") == proof
    assert json.loads((tmp_path / "bound.json").read_text())["format"] == "remat-bound/3"
    for says, changes in [
        ("proves only", {"bound": proof.bound + 1}), (".", {"scope": Scope.FREE}),
        *(("not ascending", {"boundaries": at}) for at in ([1, -1], [-1, -1], [-len(graph)], [-1, len(graph) - 1])),
        ("need a link", {"boundaries": [-1, 1], "link": None, "multipliers": {}}),
    ]:  # fmt: skip
        with refused(says):
            verify_bound(graph, replace(proof, **changes))
    for other in (link, replace(link, to_host=link.to_host // 2), replace(link, latency_s=1e-3, host_bytes=1)):
        assert verify_bound(graph, proof, link=other) == proof.bound
    for other in (
        replace(link, to_host=link.to_host + 1), replace(link, from_host=link.from_host + 1),
        replace(link, to_host=2 * link.to_host, latency_s=1e-3),
    ):  # fmt: skip
        with refused("the bound holds over .*, not over"):
            verify_bound(graph, proof, link=other)
    for slower in (replace(link, latency_s=1e-3), replace(link, duplex=0.5), replace(link, host_bytes=9)):
        with refused("the bound holds over"):
            verify_bound(graph, proven_with_copies(graph, budget, slower, [1]), link=link)
    plain = BoundCertificate(graph.name, graph.sha256(), budget, Scope.STAGED, graph.total_cost, 1, {})
    with refused("the bound holds without copies, not over"):
        verify_bound(graph, plain, link="12GB/s")
    proven_with_copies(graph, budget, Link(10**6, 10**6, 1e-3, 9, 0.5), [1]).save(tmp_path / "slow.json")
    line, _ = check_file(tmp_path / "slow.json", None)
    assert "copies over 0.001 GB/s, 0.5 of it where both are busy, 0.001 s latency, 9 B on the host included" in line


def test_a_solve_with_a_link_copies_and_proves() -> None:
    graph = replace(chain(n=16), cost_unit="ns")
    budget = between(graph, 1 / 3)
    plain = remat.solve(graph, budget, time_limit_s=10)
    fast = remat.solve(graph, budget, time_limit_s=10, link=Link(10**13, 10**13, latency_s=0))
    assert fast.bound <= fast.cost == simulate(graph, fast.plan).cost <= plain.cost
    assert fast.certificate is None or verify_bound(graph, fast.certificate) <= fast.bound


def test_strategies_without_copies_prove_nothing_about_a_link() -> None:
    graph = replace(chain(n=8), cost_unit="ns")
    budget = between(graph, 0.5)
    for strategy in ("checkmate_milp", "chen_sqrtn"):
        solution = remat.solve(graph, budget, strategy, link="12GB/s", time_limit_s=10)
        assert solution.bound in (None, graph.total_cost)
        assert solution.certificate is None
    assert remat.solve(graph, budget, "offload_all").status == "SKIPPED"
    assert remat.solve(graph, budget, "offload_greedy", link=Link(10**12, 10**12)).plan is not None


def test_a_warm_start_with_copies_is_not_lost() -> None:
    plan = Plan.from_steps(STEP, AWAY, 7, SLOW)
    for strategy in ("portfolio", "interval_cp"):
        solution = remat.solve(STEP, 7, strategy, warm_start=plan, link=SLOW, time_limit_s=2)
        assert solution.cost <= 58


def test_capuchin_copies_the_longest_unused_value_and_else_drops_the_cheapest() -> None:
    deps = [[], [0], [1], [2], [3, 2], [4, 1], [5, 0]]
    graph = Graph.from_nodes(
        "chain", deps, [4, 4, 4, 1, 1, 1, 1], [10, 1, 5, 2, 2, 2, 2], backward=[False] * 4 + [True] * 3, loss=3,
        cost_unit="ns",
    )  # fmt: skip
    budget = plain_peak(graph) - 2
    fast, slow = Link(4 * 10**9, 4 * 10**9, latency_s=0), Link(10**8, 10**8, latency_s=0)
    copied = remat.solve(graph, budget, "capuchin", link=fast)
    assert (copied.parameters, copied.cost) == ({"copied": 1, "rebuilt": 0}, graph.total_cost)
    assert ("offload", 0) in copied.plan.steps
    dropped = remat.solve(graph, budget, "capuchin", link=slow)
    assert (dropped.parameters, dropped.cost) == ({"copied": 0, "rebuilt": 1}, graph.total_cost + 1)


def test_what_is_rebuilt_runs_where_the_matrix_of_residency_says() -> None:
    graph, rng = STEPS, np.random.default_rng(0)
    problem = Problem(graph, plain_peak(graph), Scope.STAGED, link=SLOW)
    of, search = Activations.of(problem), search_of(problem)
    for _ in range(5):
        rebuilt = {v for v in of.last if of.may_rebuild(v) and rng.random() < 0.5}
        held = {v: int(rng.integers(p, len(graph))) for v, p in enumerate(graph.producer) if rng.random() < 0.2}
        S_TV = base_residency(of.forward)
        for v, users in enumerate(graph.users):
            first, touched = graph.producer[v] + 1, max(users, default=graph.producer[v])
            S_TV[first : held.get(v, 0) + 1, v] = True
            S_TV[first : (of.last[v] if v in rebuilt else touched) + 1, v] = True
            S_TV[of.first.get(v, first) : touched + 1, v] = True
        assert of.load(search, rebuilt, (), held)
        expected = plan_of_residency(of.forward, S_TV, "exact")
        assert search.plan().order.tolist() == expected.order.tolist()
        assert search.excess() == max(0, simulate(graph, expected).peak_bytes - problem.budget_bytes)


@pytest.mark.parametrize("name", ["capuchin", "torchtitan"])
def test_a_rule_that_tries_many_plans_ends_with_the_time(name: str) -> None:
    context = Context.of(Problem(STEPS, plain_peak(STEPS), Scope.STAGED, link=SLOW), SolveOptions())
    assert next(iter(get_strategy(name)(context, {})))
    assert not [*get_strategy(name)(context.until(time.monotonic()), {})]


def test_torchtitan_copies_over_a_fast_link_and_rebuilds_over_a_slow_one() -> None:
    values = tuple(replace(value, bytes=value.bytes << 20) for value in STEPS.values)
    graph = replace(STEPS, values=values)
    budget = (min_budget(graph).bytes + 2 * plain_peak(graph)) // 3
    costs = []
    for link in (Link(10**18, 10**18, latency_s=0), Link(10**3, 10**3)):
        solution = remat.solve(graph, budget, "torchtitan", link=link)
        assert simulate(graph, solution.plan).peak_bytes <= budget
        costs.append(solution.cost)
        assert solution.plan.has_copies == (link.latency_s == 0)
    assert graph.total_cost <= costs[0] < costs[1]


def random_chain(n: int, seed: int) -> Graph:
    """A chain with a backward pass, with random costs and sizes."""
    rng = np.random.default_rng(seed)
    graph = chain(n=n)
    operations = tuple(replace(op, cost=int(rng.integers(10**5, 10**7))) for op in graph.operations)
    values = tuple(replace(value, bytes=int(rng.integers(10**5, 10**7))) for value in graph.values)
    return replace(graph, operations=operations, values=values, cost_unit="ns")


@pytest.mark.long
def test_starts_are_chains_of_blocks_with_copies() -> None:
    graph, link = replace(step_of(130), cost_unit="ns"), Link(3 * 10**9, 3 * 10**9, latency_s=0)
    found = remat.solve(graph, between(graph, 0.3), link=link, time_limit_s=60, threads=2, target_gap=0.005)
    assert found.overhead < 0.024  # about that of the best chain


@pytest.mark.long
def test_several_threads_anneal_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    times, run = list[float](), OffloadSearch.run

    def noted(search: OffloadSearch, *args: Any, **options: Any) -> None:
        times.append(time.monotonic())
        run(search, *args, **options)

    monkeypatch.setattr(OffloadSearch, "run", noted)
    graph, link, limit_s, began = random_chain(40, 3), Link(2 * 10**8, 2 * 10**8), 3.0, time.monotonic()
    remat.solve(graph, between(graph, 0.3), link=link, time_limit_s=limit_s, threads=3, target_gap=0.0)
    assert max(times) > began + 0.8 * limit_s


@pytest.mark.usefixtures("warm_search")
@pytest.mark.parametrize("rate", [10**8, 10**9])
def test_one_thread_and_a_second_are_not_behind_the_rules(rate: int) -> None:
    graph, link = random_chain(14, rate % 97), Link(rate, rate)
    budget, limits = between(graph, 0.5), {"time_limit_s": 1, "threads": 1}
    found = remat.solve(graph, budget, link=link, **limits)
    assert found.cost <= remat.solve(graph, budget, **limits).cost
    for strategy in ("offload_greedy", "offload_all", "offload_checkpoints"):
        rule = remat.solve(graph, budget, strategy, link=link, **limits)
        assert rule.cost is None or found.cost <= rule.cost


def test_a_point_of_the_relaxation_says_what_is_held_fetched_and_made_again() -> None:
    """The only snapshot is after the first backward operation: there value 0 is on the host, and value 1 is missing."""
    graph = Graph.from_nodes("step", [[], [0], [1], [2], [1, 3], [0, 4]], [4] * 6, [10] * 6, cost_unit="ns")
    model = WindowBound(Problem(graph, plain_peak(graph), link=SLOW)).model([3])
    point, shares = np.zeros(len(model.cost)), np.full(len(graph.values), 0.5)
    assert rounded(model, point, shares, shares) == ([4 * 6 + 0, 4 * 6 + 1], [])
    point[model.copies.W[0][0]] = 1.0
    assert rounded(model, point, shares, shares) == ([4 * 6 + 1], [(4, 0)])
    point[model.S[0][1]] = 1.0
    assert rounded(model, point, shares, shares) == ([], [(5, 0)])


def test_copies_and_implementations_go_together() -> None:
    together = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        full = replace(with_implementations(random_graph(rng, 10, **GRAPHS[seed % len(GRAPHS)]), rng), cost_unit="ns")  # pyright: ignore[reportArgumentType]
        choices = Choices(full)
        wanted = [int(rng.integers(len(each))) for each in choices.implementations]
        choice = choices.choose(wanted) or choices.choose([0] * len(full))
        if choice is None:  # no choice makes all that is read
            continue
        search = OffloadSearch(choice.graph, plain_peak(choice.graph), Link(10**9, 10**9, latency_s=0), seed)
        search.genes.away[:] = rng.random(search.genes.away.shape) < 0.6
        plan = search.plan()
        reduced, lifted = simulate(choice.graph, plan), simulate(full, choice.lift(plan))
        assert (lifted.cost, len(lifted.copies)) == (reduced.cost, len(reduced.copies))
        assert lifted.peak_bytes <= reduced.peak_bytes
        together += len(lifted.copies) > 0
    assert together >= 3


def test_a_plan_that_needs_another_implementation_is_found_with_a_link_too() -> None:
    """Without copies the portfolio has it; its first member has not."""
    slim = Implementation("slim", (1,), (3,), 4, 0, 1)
    operations = (
        Operation("a", "", (), (0,), 3), Operation("b", "", (0,), (1,), 1), Operation("c", "", (0,), (2,), 5),
        Operation("d", "", (1, 2), (3,), 1, implementations=(slim,)), Operation("e", "", (3,), (4,), 2),
    )  # fmt: skip
    values = tuple(Value(f"v{i}", size) for i, size in enumerate((2, 4, 5, 4, 2)))
    graph = Graph("slim", operations, values, fixed_bytes=3, cost_unit="ns")
    for budget, gap in (12, 0.26), (14, 0.21):  # only the plan to find has so small a gap
        plain = remat.solve(graph, budget, time_limit_s=30)
        copying = remat.solve(graph, budget, time_limit_s=30, link="1GB/s", target_gap=gap)
        assert copying.cost <= plain.cost


@pytest.mark.parametrize("strategy", [name for name in remat.strategies() if get_strategy(name).copies == "own"])
def test_a_graph_without_values_has_nothing_to_copy(strategy: str) -> None:
    operations = tuple(Operation(name, "", (), (), 5, is_backward=name == "b") for name in "ab")
    graph = Graph("nothing", operations, (), cost_unit="ns", loss=0)
    solution = remat.solve(graph, 10, strategy, link="1GB/s", time_limit_s=20)
    assert solution.cost == 10 or solution.status is Status.SKIPPED
