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
from remat import (
    BoundCertificate,
    Graph,
    InvalidInput,
    InvalidPlan,
    Link,
    Operation,
    Plan,
    Problem,
    Scope,
    Status,
    Value,
    simulate,
    verify_bound,
)
from remat.bounds.min_budget import min_budget
from remat.bounds.window_rows import LinkRows
from remat.bounds.windows import WindowBound, certify, solve_windows
from remat.certificate import KINDS, LINK_FORMAT
from remat.check import check_file
from remat.context import Context
from remat.frontends.synthetic import chain
from remat.implementation import Implementation
from remat.link import parse_link
from remat.plan import OFFLOAD
from remat.problem import SolveOptions
from remat.programs.link_windows import LinkModel
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


def test_times_and_bytes_of_three_streams_by_hand() -> None:
    trace = simulate(STEP, Plan.from_steps(STEP, AWAY, link=SLOW))
    # computed at 10, 30 and 40; copied out from 10 to 14, in from 40 to 48; the last one waits for that
    assert trace.end_cost.tolist() == [10, 30, 40, 58]
    assert trace.copies.tolist() == [[2, 0, 10, 14], [3, 0, 40, 48]]
    assert trace.running_bytes.tolist() == [4, 6, 4, 7]
    assert (trace.cost, trace.peak_bytes, trace.host_peak_bytes) == (58, 7, 4)
    early = [*AWAY[:4], ("prefetch", 0), *AWAY[4:6], ("compute", 3)]
    trace = simulate(STEP, Plan.from_steps(STEP, early, link=SLOW))
    assert (trace.cost, trace.peak_bytes) == (50, 8)  # in from 30 to 38, while operation 2 runs
    slower = Link(to_host=10**8, from_host=10**9, latency_s=0)  # 40 ns to the host, for which freeing waits
    trace = simulate(STEP, Plan.from_steps(STEP, AWAY, link=slower))
    assert trace.end_cost.tolist() == [10, 30, 60, 74]  # operation 2 begins at 50
    late = Link(to_host=10**9, from_host=10**9, latency_s=1e-9, duplex=0.5)
    assert (late.out_ns(4), late.in_ns(3)) == (9, 7)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([("compute", 0), ("prefetch", 0)], "still resident"),
        ([("compute", 0), ("free", 0), ("prefetch", 0)], "not on the host"),
        ([("offload", 0)], "not resident"),
        ([("compute", 0), ("offload", 0), ("offload", 0)], "already on the host"),
        ([("compute", 0), ("drop", 0)], "not on the host"),
        ([("compute", 0), ("offload", 0), ("drop", 0), ("free", 0), ("prefetch", 0)], "not on the host"),
    ],
)
def test_a_copy_from_where_the_value_is_not_is_refused(steps: list[tuple[str, int]], says: str) -> None:
    with pytest.raises(InvalidPlan, match=says):
        simulate(STEP, Plan.from_steps(STEP, steps, link=SLOW))


def test_copies_need_a_link_times_and_room_on_the_host() -> None:
    with pytest.raises(InvalidPlan, match="on the host then"):
        simulate(STEP, Plan.from_steps(STEP, AWAY, link=Link(10**9, 10**9, host_bytes=3)))
    with pytest.raises(InvalidInput, match="needs a link"):
        simulate(STEP, Plan.from_steps(STEP, AWAY))
    flops = replace(STEP, cost_unit="flop")
    with pytest.raises(InvalidInput, match="costs in ns"):
        simulate(flops, Plan.from_steps(flops, AWAY, link=SLOW))
    with pytest.raises(InvalidInput, match="costs in ns"):
        remat.solve(flops, 8, link="12GB/s")


@pytest.mark.parametrize(
    "wrong",
    ["12", "12GB", "GB/s", "-1GB/s", "1GB/s,2GB/s,3GB/s", "pcie9", 12, "", True, {"to_host": -1}, {"latency_s": -1},
     {"duplex": 0}, {"host_bytes": -4}],
)  # fmt: skip
def test_a_link_without_a_rate_or_of_wrong_numbers_is_refused_in_one_line(wrong: Any) -> None:
    with refused():
        Link(**{"to_host": 1, "from_host": 1, **wrong}) if isinstance(wrong, dict) else parse_link(wrong)


def test_a_link_without_bandwidth_is_none() -> None:
    assert [parse_link(link) for link in ("0GB/s", Link(0, 10**9), None)] == [None] * 3


def test_a_link_of_numpys_numbers_is_kept_in_a_file(tmp_path: Path) -> None:
    link = Link(np.int64(10**9), np.float64(5e8), np.float32(0), host_bytes=np.int64(9), duplex=np.float32(1))  # pyright: ignore[reportArgumentType]
    Plan.from_steps(STEP, AWAY, link=link).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", STEP).link == replace(SLOW, host_bytes=9)


def test_a_link_may_be_text_wherever_there_is_one() -> None:
    plan = Plan.from_steps(STEP, AWAY, link="1GB/s,0.5GB/s")
    assert plan.link == replace(SLOW, latency_s=plan.link.latency_s if plan.link else 0)
    assert simulate(STEP, plan, link="pcie5").cost < simulate(STEP, plan, link="1MB/s").cost
    with refused("needs a link"):
        simulate(STEP, Plan.from_steps(STEP, AWAY, link="0GB/s"))


@pytest.mark.parametrize(("strategy", "seconds"), [("portfolio", 1), ("search", 1), ("checkmate_milp", 60)])
def test_a_warm_start_that_the_host_has_no_room_for_is_left_out(strategy: str, seconds: float) -> None:
    plan = Plan.from_steps(STEP, AWAY, link=SLOW)
    solution = remat.solve(
        STEP, 7, strategy, link=replace(SLOW, host_bytes=3), warm_start=plan, time_limit_s=seconds, threads=1
    )
    assert solution.status is not remat.Status.FAILED
    assert solution.plan is not None
    assert not solution.plan.has_copies


@pytest.mark.parametrize(
    ("strategy", "status", "says"),
    [
        ("offload_all", "NO_PLAN", "does not fit the host: step"),
        ("offload_greedy", "NO_PLAN", "does not fit the host"),
        ("search", "FEASIBLE", ""),
        ("portfolio", "FEASIBLE OPTIMAL", ""),  # in a second it may end the proof
    ],
)
def test_rules_whose_copies_the_host_has_no_room_for_fail_no_solve(strategy: str, status: str, says: str) -> None:
    graph = replace(chain(n=12), cost_unit="ns")
    link = Link(10**9, 10**9, latency_s=0, host_bytes=2048)
    solution = remat.solve(graph, int(0.8 * plain_peak(graph)), strategy, link=link, time_limit_s=1, threads=1)
    assert solution.status in status.split()
    assert says in solution.message


def test_a_link_that_takes_years_is_refused_by_solves_and_judged_exactly() -> None:
    graph = replace(STEP, values=tuple(replace(value, bytes=value.bytes * 10**10) for value in STEP.values))
    for strategy in ("portfolio", "offload_all"):
        with refused("the link is too slow for 'step'"):
            remat.solve(graph, 7 * 10**10, strategy, link="1B/s", time_limit_s=5)
    trace = simulate(graph, Plan.from_steps(graph, AWAY, link=Link(1, 2, latency_s=0)))
    assert trace.copies[:, 3].tolist() == [10 + 4 * 10**19, 10 + 4 * 10**19 + 10 + 2 * 10**19]
    assert trace.cost == trace.copies[1, 3] + 10


def test_a_host_without_room_for_any_value_is_refused() -> None:
    with refused("host_bytes of 0 B hold no value of 'step', the smallest of which has 1 B"):
        remat.solve(STEP, 7, link=replace(SLOW, host_bytes=0))


def test_a_warm_start_that_cannot_be_executed_is_refused() -> None:
    with refused("warm_start: step 2: computes operation 1"):
        remat.solve(STEP, 7, warm_start=Plan.from_steps(STEP, [("compute", 0), ("free", 0), ("compute", 1)]))


def test_a_plan_with_copies_is_kept_in_a_file(tmp_path: Path) -> None:
    plan = Plan.from_steps(STEP, AWAY, 7, SLOW)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json", STEP)
    assert (again.steps, again.link, simulate(STEP, again).cost) == (AWAY, SLOW, 58)
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["format"] == "remat-plan/2"
    assert Plan.from_order(STEP, [0, 1, 2, 3]).document()["format"] == "remat-plan/1"
    (tmp_path / "old.json").write_text(json.dumps(document | {"format": "remat-plan/1"}))
    with pytest.raises(InvalidPlan, match="not a"):
        Plan.load(tmp_path / "old.json", STEP)


def test_matrices_show_what_is_on_the_device() -> None:
    _, S_TV = Plan.from_steps(STEP, AWAY, link=SLOW).matrices(STEP)
    assert S_TV[:, 0].tolist() == [False, True, False, True]


Problems = Callable[[range], list[tuple[Graph, int, Link]]]


def tiny_problems(seeds: range) -> list[tuple[Graph, int, Link]]:
    """Random problems in which something must be repeated or copied."""
    found = []
    for rng in map(np.random.default_rng, seeds):
        graph = tiny_graph(rng, int(rng.integers(4, 6)))
        least, most = graph.largest_working_set()[0], plain_peak(graph)
        if least < most:
            found.append((graph, int(rng.integers(least, most)), tiny_link(rng, host=rng.random() < 0.3)))
    return found


def other_problems(seeds: range) -> list[tuple[Graph, int, Link]]:
    """Such problems with several outputs or none of size or cost, workspaces, kept values, operations that run once."""
    found = []
    for rng in map(np.random.default_rng, seeds):
        make, positive = (random_step if rng.random() < 0.6 else random_graph), int(rng.random() < 0.6)
        graph = make(
            rng, int(rng.integers(3, 6)), multi_output=float(rng.choice([0, 0, 0.4])), workspace=int(rng.integers(3)),
            keep=float(rng.choice([0, 0.3, 0.6])), once=float(rng.choice([0, 0, 0.3])), min_bytes=positive,
            min_cost=positive, max_cost=5, max_bytes=5,
        )  # fmt: skip
        least, most = max(graph.largest_working_set()[0], graph.final_bytes), plain_peak(graph)
        link = replace(tiny_link(rng, host=rng.random() < 0.4), duplex=float(rng.choice([1, 1, 1, 1, 0.5])))
        found.append((replace(graph, cost_unit="ns"), int(rng.integers(least, max(most, least + 1))), link))
    return found


def check_tiny(seeds: range) -> tuple[int, int]:
    """(problems, those in which the search is at the optimum); everything else must hold in all."""
    equal, problems = 0, 0
    for graph, budget, link in tiny_problems(seeds):
        loose, (least, steps) = loose_optimum(graph, budget, link), strict_optimum(graph, budget, link)
        assert least == loose or None in (least, loose), (graph, budget, link)
        if None in (least, loose) or least == float("inf"):
            continue
        problems += 1
        trace = simulate(graph, plan_of(graph, steps, budget, link))
        assert (trace.cost, trace.peak_bytes <= budget) == (least, True)
        search = OffloadSearch(graph, budget, link, 0)
        for _ in range(3):
            search.run(0.5, 5e-3, 2000)
        if search.least < float("inf"):
            found = simulate(graph, search.best_plan())
            assert found.cost == search.least >= least
            assert found.peak_bytes <= budget
            assert link.host_bytes is None or found.host_peak_bytes <= link.host_bytes
            equal += found.cost == least
    return problems, equal


@pytest.mark.parametrize(
    ("seeds", "least"), [(range(24), 10), pytest.param(range(100, 3000), 1001, marks=pytest.mark.slow)]
)
def test_plans_lose_nothing_against_copies_at_any_moment_and_the_search_finds_most(seeds: range, least: int) -> None:
    problems, equal = check_tiny(seeds)
    assert problems >= least
    assert equal >= 0.7 * problems


@pytest.mark.parametrize("seed", range(120))
def test_the_search_counts_what_the_judge_counts(seed: int) -> None:
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
    assert trace.cost == found[MAKESPAN]
    host = 0 if link.host_bytes is None else trace.host_peak_bytes - link.host_bytes
    assert max(0, trace.peak_bytes - search.limits[1], host) == found[MOST_EXCESS]


def test_what_is_away_first_is_copied_first() -> None:
    """Operation 4 reads value 1 again. The copy of value 2, which is away after operation 3, thus goes ahead."""
    inputs = [[], [], [1], [2], [3, 1], [4], [5, 1], [6, 2], [7, 0]]
    graph = Graph.from_nodes("skip", inputs, [3, 4, 2, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 10, 5, 1, 1, 1], cost_unit="ns")
    search = OffloadSearch(graph, 100, SLOW, 0)
    search.begin_with([], [(6, 1), (7, 2), (8, 0)])
    trace = simulate(graph, search.plan())
    assert trace.copies_of(OFFLOAD).tolist() == [[0, 1, 4], [2, 4, 6], [1, 6, 10]]


def proven_with_copies(graph: Graph, budget: int, link: Link, boundaries: list[int]) -> BoundCertificate:
    """The certificate of the window relaxation with copies and these boundaries."""
    problem = Problem(graph, budget, Scope.STAGED, link=link)
    windows = WindowBound(problem)
    solved = solve_windows(windows.model(boundaries), time.monotonic() + 60, None)
    return certify(problem, solved[0], solved[2])


def proven_by_branching(
    graph: Graph, budget: int, link: Link, boundaries: list[int], rng: np.random.Generator
) -> BoundCertificate:  # fmt: skip
    """The certificate of a branch and bound of a few nodes, on columns that are drawn."""
    problem = Problem(graph, budget, Scope.STAGED, link=link)
    solved = solve_windows(WindowBound(problem).model(boundaries), time.monotonic() + 60, None)
    enough = graph.total_cost + float(solved[0].cost @ solved[1]) + float(rng.integers(0, 6))
    return branched(problem, *solved[::2], enough, rng)


def check_bounds(seeds: range, problems: Problems) -> tuple[int, int]:
    """(problems, those where the bound is above the cost of running everything once); no bound is above an optimum."""
    n = above = 0
    for seed, (graph, budget, link) in zip(seeds, problems(seeds), strict=False):
        rng = np.random.default_rng(seed)
        best = loose_optimum(graph, budget, link, 60_000)
        every = sorted([*range(len(graph) - 1), *range(1 - len(graph), 0)], key=place_of)
        some = rng.choice(len(every), int(rng.integers(1, len(every))), replace=False)
        boundaries = [every[i] for i in sorted(some.tolist())]
        if best is None:
            continue
        certificate = proven_with_copies(graph, budget, link, boundaries)
        assert verify_bound(graph, certificate) == certificate.bound <= best, (seed, boundaries)
        assert proven_with_copies(graph, budget, link, every).bound <= best, seed
        for some in (boundaries, every):
            by_tree = proven_by_branching(graph, budget, link, some, rng)
            assert verify_bound(graph, by_tree) == by_tree.bound <= best, (seed, some)
        assert invented_bound(graph, budget, link, boundaries, rng) <= best, (seed, boundaries)
        n, above = n + 1, above + (certificate.bound > graph.total_cost)
    return n, above


def invented_bound(graph: Graph, budget: int, link: Link, boundaries: list[int], rng: np.random.Generator) -> int:
    """The highest bound of random multipliers, over every row that the checker takes."""
    rows = LinkRows(graph, budget, boundaries, Scope.STAGED, link)
    most = max(len(graph), len(graph.values), len(boundaries) + 1)
    known = [
        (kind, *row)
        for kind, width in KINDS[LINK_FORMAT].items() if kind != "knapsack"
        for row in itertools.product(range(most), repeat=width) if rows.add(kind, row, 0)
    ]  # fmt: skip
    multipliers, best = np.zeros(len(known), dtype=int), graph.total_cost
    for _ in range(200):
        changed = multipliers.copy()
        for i in rng.integers(len(known), size=rng.integers(1, 5)):
            changed[i] = max(0, changed[i] + int(rng.choice([-2, -1, 1, 2, 4])))
        rows.clear()
        for i in np.nonzero(changed)[0].tolist():
            rows.add(known[i][0], known[i][1:], int(changed[i]))
        bound = min(rows.idle, graph.total_cost + -(-rows.value(2) // 2))
        if bound >= best:
            best, multipliers = bound, changed
    return best


@pytest.mark.parametrize(
    ("seeds", "least", "least_above"),
    [(range(40), 15, 5), pytest.param(range(5000, 9000), 2000, 5, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("problems", [tiny_problems, other_problems])
@pytest.mark.long
def test_no_bound_with_copies_is_above_an_optimum(
    problems: Problems, seeds: range, least: int, least_above: int
) -> None:
    number, above = check_bounds(seeds, problems)
    assert number >= least
    assert above >= least_above


@pytest.mark.parametrize(("seed", "by_ends", "by_both"), [(15, 22, 23), (24, 17, 18), (50, 19, 20)])
def test_starts_of_operations_prove_more_than_ends_alone(seed: int, by_ends: int, by_both: int) -> None:
    ((graph, budget, link),) = tiny_problems(range(seed, seed + 1))
    ends = list(range(len(graph) - 1))
    assert proven_with_copies(graph, budget, link, ends).bound == by_ends
    both = sorted([*ends, *range(1 - len(graph), 0)], key=place_of)
    certificate = proven_with_copies(graph, budget, link, both)
    assert verify_bound(graph, certificate) == certificate.bound == by_both
    assert (loose_optimum(graph, budget, link) or 0) >= by_both


def test_a_boundary_is_where_copies_come_too_late() -> None:
    """Operation 4 reads value 0. When operation 3 runs, memory is full, so that its copy comes while nothing runs."""
    graph = Graph.from_nodes(
        "late", [[], [0], [1], [2, 1], [3, 0]], [9, 7, 4, 2, 8], [12, 18, 18, 9, 11], cost_unit="ns"
    )
    link = Link(to_host=10**9, from_host=10**9 // 3, latency_s=0)
    windows = WindowBound(Problem(graph, 19, Scope.STAGED, link=link))
    windows.run(time.monotonic() + 60)
    assert windows.best is not None
    assert windows.best.boundaries == (-3, 3, -4)
    assert windows.best.bound == 77  # 74 without the last boundary
    assert (loose_optimum(graph, 19, link) or 0) >= 77


def test_a_boundary_at_a_start_needs_a_link_and_an_operation_before_it() -> None:
    graph, budget, link = tiny_problems(range(15, 16))[0]
    certificate = proven_with_copies(graph, budget, link, [-1, 1])
    for boundaries in ([1, -1], [-1, -1], [-len(graph)], [-1, len(graph) - 1]):
        with pytest.raises(InvalidInput, match="not ascending"):
            verify_bound(graph, replace(certificate, boundaries=boundaries))
    with pytest.raises(InvalidInput, match="need a link"):
        verify_bound(graph, replace(certificate, link=None, multipliers={}))


def test_a_bound_with_copies_is_kept_in_a_file(tmp_path: Path) -> None:
    graph, budget, link = tiny_problems(range(3, 30))[0]
    certificate = proven_with_copies(graph, budget, link, [len(graph) // 2])
    certificate.save(tmp_path / "bound.json")
    again = BoundCertificate.load(tmp_path / "bound.json")
    assert again.link == link
    assert json.loads((tmp_path / "bound.json").read_text())["format"] == "remat-bound/3"
    assert verify_bound(graph, again) == certificate.bound
    with pytest.raises(InvalidInput, match="proves only"):
        verify_bound(graph, replace(certificate, bound=certificate.bound + 1))
    with pytest.raises(InvalidInput):
        verify_bound(graph, replace(certificate, scope=Scope.FREE))


def test_a_bound_over_a_slower_link_or_none_is_refused(tmp_path: Path) -> None:
    graph, budget, link = tiny_problems(range(3, 30))[0]
    certificate = proven_with_copies(graph, budget, link, [len(graph) // 2])
    for other in (link, replace(link, to_host=link.to_host // 2), replace(link, latency_s=1e-3, host_bytes=1)):
        assert verify_bound(graph, certificate, link=other) == certificate.bound
    faster = (
        replace(link, to_host=link.to_host + 1), replace(link, from_host=link.from_host + 1),
        replace(link, to_host=2 * link.to_host, latency_s=1e-3),
    )  # fmt: skip
    for other in faster:
        with pytest.raises(InvalidInput, match=r"the bound holds over .*, not over"):
            verify_bound(graph, certificate, link=other)
    for slower in (replace(link, latency_s=1e-3), replace(link, duplex=0.5), replace(link, host_bytes=9)):
        with pytest.raises(InvalidInput, match="the bound holds over"):
            verify_bound(graph, proven_with_copies(graph, budget, slower, [1]), link=link)
    plain = BoundCertificate(graph.name, graph.sha256(), budget, Scope.STAGED, graph.total_cost, 1, {})
    assert verify_bound(graph, plain) == graph.total_cost
    with pytest.raises(InvalidInput, match="the bound holds without copies, not over"):
        verify_bound(graph, plain, link="12GB/s")
    slow = proven_with_copies(graph, budget, Link(10**6, 10**6, 1e-3, 9, 0.5), [1])
    slow.save(tmp_path / "slow.json")
    line, _ = check_file(tmp_path / "slow.json", None)
    assert "copies over 0.001 GB/s, 0.5 of it where both are busy, 0.001 s latency, 9 B on the host included" in line


def test_a_solve_with_a_link_copies_and_proves() -> None:
    graph = replace(chain(n=16), cost_unit="ns")
    least, most = graph.largest_working_set()[0], plain_peak(graph)
    budget = (2 * least + most) // 3
    plain = remat.solve(graph, budget, time_limit_s=10)
    fast = remat.solve(graph, budget, time_limit_s=10, link=Link(10**13, 10**13, latency_s=0))
    assert fast.cost <= plain.cost
    assert simulate(graph, fast.plan).cost == fast.cost
    assert fast.bound <= fast.cost
    if fast.certificate is not None:
        assert verify_bound(graph, fast.certificate) <= fast.bound


def test_strategies_without_copies_prove_nothing_about_a_link() -> None:
    graph = replace(chain(n=8), cost_unit="ns")
    budget = (graph.largest_working_set()[0] + plain_peak(graph)) // 2
    for strategy in ("checkmate_milp", "chen_sqrtn"):
        solution = remat.solve(graph, budget, strategy, link="12GB/s", time_limit_s=10)
        assert solution.bound in (None, graph.total_cost)
        assert solution.certificate is None
    assert remat.solve(graph, budget, "offload_all").status == "SKIPPED"
    assert remat.solve(graph, budget, "offload_greedy", link=Link(10**12, 10**12)).plan is not None


def test_a_warm_start_with_copies_needs_a_link() -> None:
    plan = Plan.from_steps(STEP, AWAY, 7, SLOW)
    with pytest.raises(InvalidInput, match="give the solve a link"):
        remat.solve(STEP, 7, warm_start=plan)
    for strategy in ("portfolio", "interval_cp"):
        solution = remat.solve(STEP, 7, strategy, warm_start=plan, link=SLOW, time_limit_s=20)
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


@pytest.mark.parametrize("seed", range(5))
def test_what_is_rebuilt_runs_where_the_matrix_of_residency_says(seed: int) -> None:
    graph, rng = replace(step_of(6), cost_unit="ns"), np.random.default_rng(seed)
    problem = Problem(graph, plain_peak(graph), Scope.STAGED, link=SLOW)
    of, search = Activations.of(problem), search_of(problem)
    rebuilt = {v for v in of.last if of.may_rebuild(v) and rng.random() < 0.5}
    held = {v: int(rng.integers(p, len(graph))) for v, p in enumerate(graph.producer) if rng.random() < 0.2}
    S_TV = base_residency(of.forward)
    for v, users in enumerate(graph.users):
        first, touched = graph.producer[v] + 1, max(users, default=graph.producer[v])
        S_TV[first : held.get(v, 0) + 1, v] = True
        if v in rebuilt:
            S_TV[first : of.last[v] + 1, v] = True
            S_TV[of.first[v] : touched + 1, v] = True
        else:
            S_TV[first : touched + 1, v] = True
    assert of.load(search, rebuilt, (), held)
    expected = plan_of_residency(of.forward, S_TV, "exact")
    assert search.plan().order.tolist() == expected.order.tolist()
    assert search.excess() == max(0, simulate(graph, expected).peak_bytes - problem.budget_bytes)


@pytest.mark.parametrize("name", ["capuchin", "torchtitan"])
def test_a_rule_that_tries_many_plans_ends_with_the_time(name: str) -> None:
    graph = replace(step_of(6), cost_unit="ns")
    problem = Problem(graph, plain_peak(graph), Scope.STAGED, link=SLOW)
    context = Context.of(problem, SolveOptions())
    assert [*get_strategy(name)(context, {})]
    assert not [*get_strategy(name)(context.until(time.monotonic()), {})]


def test_torchtitan_copies_over_a_fast_link_and_rebuilds_over_a_slow_one() -> None:
    small = step_of(6)
    values = tuple(replace(value, bytes=value.bytes << 20) for value in small.values)
    graph = replace(small, values=values, cost_unit="ns")
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


def test_a_link_without_bandwidth_changes_no_step() -> None:
    graph = random_chain(10, 3)
    budget = (graph.largest_working_set()[0] + plain_peak(graph)) // 2
    plain, none = (remat.solve(graph, budget, link=link, work_limit=500) for link in (None, "0GB/s"))
    assert plain.plan.document() == none.plan.document()


@pytest.mark.long
def test_starts_are_chains_of_blocks_with_copies() -> None:
    graph, link = replace(step_of(130), cost_unit="ns"), Link(3 * 10**9, 3 * 10**9, latency_s=0)
    least, most = graph.largest_working_set()[0], plain_peak(graph)
    budget = least + int(0.3 * (most - least))
    found = remat.solve(graph, budget, link=link, time_limit_s=60, threads=2, target_gap=0.005)
    assert found.overhead < 0.024  # about that of the best chain


@pytest.mark.long
def test_several_threads_anneal_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    times, run = list[float](), OffloadSearch.run

    def noted(search: OffloadSearch, *args: Any, **options: Any) -> None:
        times.append(time.monotonic())
        run(search, *args, **options)

    monkeypatch.setattr(OffloadSearch, "run", noted)
    graph, limit_s = random_chain(40, 3), 3.0
    least, most = graph.largest_working_set()[0], plain_peak(graph)
    began = time.monotonic()
    budget, link = least + int(0.3 * (most - least)), Link(2 * 10**8, 2 * 10**8)
    remat.solve(graph, budget, link=link, time_limit_s=limit_s, threads=3, target_gap=0.0)
    assert max(times) > began + 0.8 * limit_s


@pytest.mark.parametrize("rate", [10**8, 10**9, 10**11])
def test_one_thread_and_a_second_are_not_behind_the_rules(rate: int) -> None:
    graph, link = random_chain(14, rate % 97), Link(rate, rate)
    budget = (graph.largest_working_set()[0] + plain_peak(graph)) // 2
    remat.solve(graph, budget, link=link, time_limit_s=1, threads=1)  # the first one loads compiled code
    found = remat.solve(graph, budget, link=link, time_limit_s=1, threads=1)
    for strategy in ("offload_greedy", "offload_all", "offload_checkpoints"):
        rule = remat.solve(graph, budget, strategy, link=link, time_limit_s=1, threads=1)
        assert rule.cost is None or found.cost <= rule.cost
    plain = remat.solve(graph, budget, time_limit_s=1, threads=1)
    assert found.cost <= plain.cost


# Three forward operations and three backward ones; the only snapshot is after the first backward operation, when the
# values 0 and 1 may be missing. A value is held, on the host, or neither.
@pytest.mark.parametrize(
    ("held", "out", "repeats", "away"),
    [
        ([0, 1], [], [], []),
        ([1], [0], [], [(5, 0)]),
        ([0], [], [4 * 6 + 1], []),
        ([], [], [4 * 6 + 0, 4 * 6 + 1], []),
        ([], [0], [4 * 6 + 1], [(4, 0)]),
    ],
)
def test_a_point_of_the_relaxation_says_what_is_held_fetched_and_made_again(
    held: list[int], out: list[int], repeats: list[int], away: list[tuple[int, int]]
) -> None:
    graph = Graph.from_nodes("step", [[], [0], [1], [2], [1, 3], [0, 4]], [4] * 6, [10] * 6, cost_unit="ns")
    model = WindowBound(Problem(graph, plain_peak(graph), link=SLOW)).model([3])
    assert isinstance(model, LinkModel)
    point = np.zeros(len(model.cost))
    point[[model.S[0][v] for v in held]] = 1.0
    point[[model.copies.W[0][v] for v in out]] = 1.0
    shares = np.full(len(graph.values), 0.5)
    assert rounded(model, point, shares, shares) == (repeats, away)
    search = OffloadSearch(graph, plain_peak(graph), SLOW, 0)
    search.begin_with(repeats, away)
    plan = search.plan()
    assert len(plan.order) == 6 + len(repeats)
    assert len(simulate(graph, plan).copies) == 2 * len(away)


@pytest.mark.parametrize("seed", range(6))
def test_copies_and_implementations_go_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    full = replace(with_implementations(random_graph(rng, 10, **GRAPHS[seed % len(GRAPHS)]), rng), cost_unit="ns")  # pyright: ignore[reportArgumentType]
    choices = Choices(full)
    wanted = [int(rng.integers(len(each))) for each in choices.implementations]
    choice = choices.choose(wanted) or choices.choose([0] * len(full))
    if choice is None:
        pytest.skip("no choice makes all that is read")
    search = OffloadSearch(choice.graph, plain_peak(choice.graph), Link(10**9, 10**9, latency_s=0), seed)
    search.genes.away[:] = rng.random(search.genes.away.shape) < 0.6
    plan = search.plan()
    reduced, lifted = simulate(choice.graph, plan), simulate(full, choice.lift(plan))
    assert lifted.cost == reduced.cost
    assert lifted.peak_bytes <= reduced.peak_bytes
    assert len(lifted.copies) == len(reduced.copies)


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
        assert plain.cost is not None
        assert copying.cost is not None
        assert copying.cost <= plain.cost


@pytest.mark.parametrize("strategy", [name for name in remat.strategies() if get_strategy(name).copies == "own"])
def test_a_graph_without_values_has_nothing_to_copy(strategy: str) -> None:
    operations = tuple(Operation(name, "", (), (), 5, is_backward=name == "b") for name in "ab")
    graph = Graph("nothing", operations, (), cost_unit="ns", loss=0)
    solution = remat.solve(graph, 10, strategy, link="1GB/s", time_limit_s=20)
    assert solution.cost == 10 or solution.status is Status.SKIPPED
