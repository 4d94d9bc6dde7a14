"""Largest batches: the published numbers, the bisection, the direct formulation, the price of memory."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from brute_force import optimum, random_graph
from helpers import context_of
from rich.console import Console

import experiments.largest_model as largest_module
import experiments.throughput as throughput_module
import remat
from experiments import cli
from experiments.batch_search import RULES, Bisection, PerSample, of_batch, pair, per_sample
from experiments.config import register
from experiments.engine import make_engine
from experiments.max_batch_size import DIRECT, _BatchSearch
from experiments.progress import SolveProgress
from experiments.solving import Solves
from experiments.store import Store, Table
from remat import BoundCertificate, Graph
from remat.bounds.price import price_of, shadow_price
from remat.bounds.windows import WindowBound
from remat.cost import apply_cost
from remat.errors import RematError
from remat.extraction import extract_in_child
from remat.frontends.spec import ModelSpec
from remat.graph import Work
from remat.largest import SizeSearch
from remat.plan import Scope
from remat.problem import Problem
from remat.search.exhaustive import exhaustive
from remat.simulator import plain_peak
from remat.solution import Status
from remat.solving.here import solve_here

VGG19 = ModelSpec("vgg19", "keras", "keras.applications:VGG19", 256, (224, 224, 3), "layer")
GPU_BYTES = 16 * 10**9
PEAK = {"formulation": "peak"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module")
def vgg19(cache: Path) -> PerSample:
    return per_sample(VGG19, cache)


def training_graph(n: int, seed: int = 0) -> Graph:
    """A chain of n layers with skips, its loss and its gradients, sizes and costs at random."""
    draw = random.Random(seed)
    sizes, costs = [draw.randint(2, 9) for _ in range(n)], [draw.randint(1, 9) for _ in range(n)]
    deps = [sorted({k - 1, max(0, k - 3)}) if k > 3 else [k - 1] if k else [] for k in range(n)]
    deps += [sorted({k, max(0, k - 1), *([2 * n - 2 - k] if k < n - 1 else [])}) for k in reversed(range(n))]
    return Graph.from_nodes(
        "training", deps, [1000 * size for size in (*sizes, *reversed(sizes))],
        [*costs, *(2 * cost for cost in reversed(costs))], backward=[k >= n for k in range(2 * n)],
    )  # fmt: skip


def test_vgg19_has_the_artifacts_batches_and_those_of_the_stated_rule(vgg19: PerSample) -> None:
    """The artifact's printed numbers and the rule that the paper states, from the same plans."""
    expected = {"published": (167, 197, 266), "published_stated": (181, 213, 289), "exact": (220, 269, 285)}
    for rule in RULES:
        batches = []
        for strategy in ("checkpoint_all", "chen_sqrtn", "chen_greedy"):
            members = remat.family(vgg19.graph, strategy, accounting=rule.accounting)
            peak = min(m.peak_bytes for m in members if m.cost <= vgg19.cost_cap)
            batches.append(rule.batch(peak, vgg19, GPU_BYTES))
        assert tuple(batches) == expected[rule.name], rule.name
    # 289 is the working set of one operation: no plan has more.
    assert RULES[2].batch(vgg19.graph.largest_working_set()[0], vgg19, GPU_BYTES) == 289


def test_graphs_of_a_batch_lie_on_the_line_through_one_and_two_samples(cache: Path, vgg19: PerSample) -> None:
    one, two = pair(VGG19, cache)
    derived, extracted = of_batch(one, two, 37), extract_in_child(replace(VGG19, batch_size=37), None)
    assert [v.bytes for v in derived.values] == [v.bytes for v in extracted.values]
    assert derived.fixed_bytes == extracted.fixed_bytes
    works = ([(op.name, op.work.flops, op.work.bytes_moved) for op in each.operations] for each in (derived, extracted))
    assert next(works) == next(works)
    assert vgg19.parameter_bytes == 2 * 4 * 143_667_240  # with gradients; as published graphs count
    assert vgg19.parameter_bytes + 37 * vgg19.input_bytes == extracted.fixed_bytes


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rules_budget_admits_its_batch_and_no_byte_more(rule) -> None:
    network, admitted = PerSample("any", training_graph(3), 12_345, 678), 0
    for memory in (100_000, 999_999, 12_345_678):
        for batch in (1, 2, 7, 50):
            budget = rule.sample_bytes(batch, network, memory)
            if budget:
                assert rule.batch(budget, network, memory) >= batch
                assert rule.batch(budget + 1, network, memory) < batch
                admitted += 1
    assert admitted >= 6


def answer(budget: int, status: str, cost: int | None, bound: int | None, total_cost: int) -> SimpleNamespace:
    """What the bisection reads of a row."""
    return SimpleNamespace(
        budget_bytes=budget, status=status, cost=cost, peak_bytes=None if cost is None else budget, bound=bound,
        total_cost=total_cost, plan_file=None, wall_s=0.0, message="",
    )  # fmt: skip


def least_peak(graph: Graph, cap: int) -> int:
    """The smallest budget, tried byte by byte upwards from the working set, at which a plan within the cap exists."""
    budget = graph.largest_working_set()[0]
    while True:
        found = exhaustive(graph, budget)
        assert found.is_decided
        if found.plan is not None and remat.simulate(graph, found.plan).cost <= cap:
            return budget
        budget += 1000  # sizes of `training_graph` are whole thousands


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("knows_bounds", [True, False])
def test_bisection_finds_what_stepping_through_every_batch_finds(seed: int, knows_bounds: bool) -> None:
    graph = training_graph(5, seed)
    network = PerSample("small", graph, 50_000, 400)
    memory, rule = 4_000_000, RULES[0]
    least = least_peak(graph, network.cost_cap)
    # Every batch, by definition: the batch fits if a plan of its budget is within the cap.
    stepped = max(batch for batch in range(1, 1000) if rule.sample_bytes(batch, network, memory) >= least)
    known = Bisection(network, memory, [rule], plain_peak(graph), graph.largest_working_set()[0])
    asked, none = [], Status.INFEASIBLE if knows_bounds else Status.TIMEOUT
    while (budget := known.next_budget()) is not None:
        assert budget not in asked
        asked.append(budget)
        plan = exhaustive(graph, budget).plan
        status, cost = (none, None) if plan is None else (Status.FEASIBLE, remat.simulate(graph, plan).cost)
        known.learn(answer(budget, status, cost, cost if knows_bounds else graph.total_cost, graph.total_cost))
    assert rule.batch(known.found_bytes, network, memory) == stepped
    most = rule.batch(known.proven_bytes, network, memory)
    assert most == stepped if knows_bounds else most >= stepped
    limit = rule.batch(graph.largest_working_set()[0], network, memory)
    assert len(asked) <= limit.bit_length() + 2


def test_direct_formulation_is_the_least_peak_of_brute_force() -> None:
    binding = 0
    for seed in range(16):
        rng = np.random.default_rng(seed)
        graph = random_graph(rng, int(rng.integers(4, 8)), workspace=2)
        cap = graph.total_cost + int(rng.integers(graph.total_cost // 2 + 2))
        plain = plain_peak(graph)
        costs = ((budget, optimum(graph, budget, "staged")) for budget in range(plain + 1))
        least = next(budget for budget, cost in costs if cost is not None and cost <= cap)
        binding += least < plain
        solution = solve_here(context_of(graph, plain, cost_cap=cap, seconds=30), "checkmate_milp", PEAK)
        trace = remat.simulate(graph, solution.plan)
        assert trace.cost <= cap, seed
        assert (trace.peak_bytes, solution.peak_bound_bytes) == (least, least), seed
    assert binding >= 3  # in the others plain training is the least already
    uncapped = solve_here(context_of(graph, plain), "checkmate_milp", PEAK)
    assert uncapped.status is Status.SKIPPED
    assert "cost cap" in uncapped.message


@pytest.mark.parametrize("strategy", ["portfolio", "checkmate_milp", "search"])
def test_a_solve_with_a_cost_cap_ends_when_it_is_decided(strategy: str, warm_search: None) -> None:
    graph = training_graph(14)
    cap = graph.total_cost + sum(op.cost for op in graph.operations if not op.is_backward)
    loose = (graph.largest_working_set()[0] + 3 * plain_peak(graph)) // 4
    problem = context_of(graph, loose, cost_cap=cap)
    assert not problem.is_solved()
    solution = solve_here(problem, strategy, {})
    assert solution.cost <= cap
    assert problem.is_solved()
    assert problem.remaining_s() > 10  # not the time limit


def test_a_cost_cap_is_refuted_by_a_bound_above_it() -> None:
    graph = training_graph(6)
    tight = least_peak(graph, 1 << 60)
    cost = remat.simulate(graph, exhaustive(graph, tight).plan).cost
    assert cost > graph.total_cost
    problem = context_of(graph, tight, cost_cap=cost - 1)
    assert not problem.is_solved()
    solution = solve_here(problem, "portfolio", {})
    assert solution.bound == cost
    assert problem.is_solved()


def test_the_price_of_memory_is_the_slope_of_the_bound(vgg19: PerSample) -> None:
    graph, low, high = vgg19.graph, vgg19.graph.largest_working_set()[0], plain_peak(vgg19.graph)
    step = (high - low) // 500
    for share in (0.1, 0.3, 0.5):
        budget = low + int(share * (high - low))
        price = shadow_price(graph, budget)
        fall = bound_at(graph, budget - step, price.certificate) - bound_at(graph, budget + step, price.certificate)
        assert 0 < price.cost_per_byte == pytest.approx(fall / (2 * step), rel=0.01)
        assert remat.verify_bound(graph, price.certificate) == price.bound
    free = shadow_price(graph, high)
    assert free.cost_per_byte == 0  # nothing is short
    with pytest.raises(RematError, match="knapsack"):
        price_of(replace(free.certificate, multipliers={"knapsack": [[3, 1, 0, 1, 5]]}))


def bound_at(graph: Graph, budget: int, certificate: BoundCertificate) -> float:
    """The LP's value at another budget, with the same boundaries."""
    windows = WindowBound(Problem(graph, budget, Scope.STAGED), with_cuts=False)
    solved = windows.solve(windows.model(certificate.boundaries), time.monotonic() + 60, lambda: False)
    model, x, _ = solved
    return graph.total_cost + float(model.cost @ x)


@pytest.mark.parametrize(("largest", "provable"), [(1, True), (9, True), (14, False), (40, True)])
@pytest.mark.parametrize("growth", [2, 4])
def test_sizes_grow_then_are_halved(largest: int, provable: bool, growth: int) -> None:
    known, asked = SizeSearch(7, 7 * (growth - 1), growth), []
    while (size := known.next_size()) is not None:
        assert size not in asked
        asked.append(size)
        known.learn(size, fits=size <= largest, impossible=provable and size > largest)
    assert known.found == largest
    assert known.ruled_out == (largest + 1 if provable else None)


@pytest.mark.slow
def test_the_command_keeps_what_it_solved_and_redraws_without_solving(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["experiment=max_batch_size", "model=chain", "model.options.n=6", "scale=quick",
             "budget=200000", "strategies=[checkpoint_all,checkmate_milp]"]  # fmt: skip
    assert cli.main(asked) == 0
    (row,) = Table("max_batch_size").rows()
    found = {record["strategy"]: record["found"]["exact"] for record in row["records"]}
    assert found[DIRECT] == found["checkmate_milp"] == row["proven"]["exact"]  # small enough to be proven
    assert found["checkpoint_all"] < found["checkmate_milp"]
    assert not row["contradicted"]
    folder = here / "runs" / "max_batch_size"
    assert "published_stated" in (folder / "max_batch_size.csv").read_text()
    assert (folder / "figures" / "max_batch_size.png").stat().st_size > 5000
    assert cli.main(asked) == 0
    assert "0 cases measured now, 1 taken" in capsys.readouterr().out
    assert cli.main([asked[0], "draw=true"]) == 0
    assert "| checkmate_milp |" in capsys.readouterr().out


def no_engine() -> Any:
    """Nothing may be solved again."""
    return SimpleNamespace(submit=lambda job: pytest.fail(f"{job.label} is solved again"), results=list)


def worked(graph: Graph, batch: int) -> Graph:
    """`graph` for a batch, with parameters and work that the roofline can time."""
    operations = tuple(
        replace(op, work=Work(batch * op.cost * 10**9, bytes_moved=1000 + batch * 1000)) for op in graph.operations
    )
    values = tuple(replace(value, bytes=batch * value.bytes) for value in graph.values)
    return replace(graph, name=f"small_b{batch}", operations=operations, values=values, fixed_bytes=5000 + 10 * batch)


@pytest.fixture
def surroundings(here: Path):
    """The solves of a Keras model of a few operations, extracted by nobody."""
    register()
    (settings,) = cli.check(["time_limit=5"], multirun=False)
    settings = replace(settings, gpu=replace(settings.gpu, memory_bytes=400_000))
    console = Console(quiet=True)
    with SolveProgress(console) as progress, make_engine("local", 2) as engine:
        yield Solves(settings, Store(here / "store"), engine, progress, console)


def test_throughput_finds_the_best_batch_of_those_it_solved(
    surroundings: Solves, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, store = surroundings.settings, surroundings.store
    graph = training_graph(6)
    monkeypatch.setattr(throughput_module, "pair", lambda spec: (worked(graph, 1), worked(graph, 2)))
    monkeypatch.setattr(throughput_module, "per_sample", lambda spec: PerSample("small", graph, 5000, 10))
    document = throughput_module.best_batch(surroundings, settings, coarse=2, rounds=1)
    points = {point["batch"]: point for point in document["points"]}
    planned = {batch: point for batch, point in points.items() if point["samples_per_s"] is not None}
    assert document["best"] == max(planned, key=lambda batch: planned[batch]["samples_per_s"])
    assert points[document["plain_batch"]]["overhead"] == 0
    assert max(planned) > document["plain_batch"]  # more fits with recomputation, and costs more
    assert planned[max(planned)]["overhead"] > 0
    for batch, point in planned.items():
        assert point["samples_per_s"] <= point["most_per_s"]
        row = store.read_row(point["key"])
        assert row.peak_bytes <= 400_000
        assert point["samples_per_s"] == pytest.approx(batch * 1e9 / (row.cost or 0))
    assert [price["batch"] for price in document["prices"]] == list(dict.fromkeys((document["best"], max(planned))))
    nothing_left = replace(surroundings, engine=no_engine())
    assert throughput_module.best_batch(nothing_left, settings, coarse=2, rounds=1) == document


@pytest.mark.slow
def test_largest_models_stop_at_sizes_that_do_not_fit(surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = surroundings.settings

    def extracted(spec: ModelSpec) -> Graph:
        if "blocks" in spec.options:
            return worked(training_graph(3 + spec.options["blocks"][2]), 4)
        return worked(training_graph(5), (spec.input_size[0] // 32) ** 2)

    monkeypatch.setattr(largest_module, "extracted", extracted)
    settings = replace(settings, spec=replace(settings.spec, input_size=(64, 96, 3)), time_limit_s=4.0)
    document = largest_module.largest_models(surroundings, settings, max_trials=5)
    resolution, depth = document["searches"]
    assert resolution["ruled_out"] == resolution["found"] + 1  # bisected to the end
    side = 32 * resolution["found"]
    assert resolution["found_label"] == f"{side} x {round(side * 1.5 / 32) * 32}"
    assert depth["found"] >= 6
    assert all(trial["fits"] == (trial["cost"] is not None and trial["cost"] <= trial["cost_cap"])
               for trial in (*resolution["trials"], *depth["trials"]))  # fmt: skip
    kinds = {trial["size"]: trial["kind"] for trial in resolution["trials"]}
    assert (kinds[resolution["found"]], kinds[resolution["ruled_out"]]) == ("fits", "ruled out")


@pytest.mark.slow
def test_resnet50_of_the_depth_search_is_keras_own() -> None:
    """Same operations, shapes, parameters and FLOPs; (3, 4, 6, 3) is the 50 of the name."""
    own = ModelSpec("resnet", "keras", "remat.tf.networks.resnet:resnet", 2, (224, 224, 3), "layer",
                    options={"blocks": [3, 4, 6, 3]})  # fmt: skip
    theirs = replace(own, target="keras.applications:ResNet50", options={})
    a, b = (apply_cost(extract_in_child(spec, None), "flops", None) for spec in (own, theirs))
    assert a.fixed_bytes == b.fixed_bytes
    assert a.total_cost == b.total_cost
    assert sorted(v.bytes for v in a.values) == sorted(v.bytes for v in b.values)


def test_the_portfolio_has_what_its_members_find_and_nobody_asks_what_is_ruled_out(vgg19: PerSample) -> None:
    """ResNet50: `search` found a batch of 904 where the portfolio, whose member it is, stopped at 874."""
    least, plain = vgg19.graph.largest_working_set()[0], plain_peak(vgg19.graph)
    portfolio, member, stranger = searches = [
        _BatchSearch(name, "solver", None, Bisection(vgg19, GPU_BYTES, RULES[:1], plain, least), limit_s=100.0)  # type: ignore[arg-type]
        for name in ("portfolio", "search", "interval_cp")
    ]
    for one in searches:
        one.others = [other for other in searches if other is not one]
    member.known.found_bytes = (least + plain) // 2
    stranger.known.found_bytes, stranger.known.proven_bytes = least + 2, least + 1
    assert portfolio.next_budget() >= least + 1  # what the stranger has ruled out is not asked
    # Of its member it has the plans, and of others the proofs alone.
    assert portfolio.known.found_bytes == member.known.found_bytes == (least + plain) // 2
    assert (portfolio.known.proven_bytes, portfolio.known.excluded_bytes) == (least, least + 1)
