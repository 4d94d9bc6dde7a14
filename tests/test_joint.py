"""Graphs whose operations have several implementations: model, simulator, plans, solvers and the joint search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brute_force import optimum, random_budget, random_step, with_implementations
from helpers import conv_relu
from random_graphs import wrong_with

import remat
from remat import Graph, InvalidGraph, InvalidPlan, Operation, Plan, Scope, Value, simulate
from remat.bounds.relax import relaxed
from remat.frontends.monet import load_costs, training_graph
from remat.frontends.monet_networks import Network
from remat.implementation import Implementation
from remat.plan import COMPUTE, FREE
from remat.programs import monet as monet_program
from remat.programs.backends import Backend
from remat.programs.highs import Answer
from remat.search.choices import Choices
from remat.search.exhaustive_choices import exhaustive_choices
from remat.search.joint import EXACT_COST, EXACT_EXCESS, JointSearch, anneal_jointly, prepare, refresh
from remat.simulator import plain_peak

JOINT = conv_relu()
pytestmark = pytest.mark.usefixtures("warm_search")


def here(graph: Graph, budget: int, strategy: str, **options: Any) -> remat.Solution:
    """`solve` without a process of its own."""
    return remat.solve(graph, budget, strategy, time_limit_s=20, threads=1, isolate=False, **options)


def once_in_order(*names: str) -> Plan:
    """Each operation once, in these implementations."""
    return Plan.from_order(JOINT, range(6), implementations=names)


def test_the_default_graph_is_untouched() -> None:
    plain = JOINT.default()
    assert (plain.n_extra, plain.has_implementations, plain.values) == (0, False, JOINT.values[:6])
    assert plain.sha256() != JOINT.sha256()
    assert (JOINT.total_cost, JOINT.least_cost) == (26, 22)
    assert plain.default() is plain
    assert len(JOINT.every_implementation()) == 11
    weighed = JOINT.with_costs(range(11), "flop")
    assert [op.cost for op in weighed.operations] == [0, 1, 3, 6, 7, 10]
    assert [way.cost for way in weighed.operations[2].implementations] == [4, 5]


def test_hand_computed_memory_of_masks_and_writing_in_place() -> None:
    # x y; +z; y z loss (y is kept); y loss gy; ... each with 5 fixed bytes
    assert simulate(JOINT, once_in_order()).running_bytes.tolist() == [21, 53, 85, 117, 117, 69]
    mask = simulate(JOINT, once_in_order("", "", "mask", "", "mask", ""))
    assert (mask.running_bytes.tolist(), mask.cost) == ([21, 53, 86, 86, 86, 69], 27)
    in_place = once_in_order("", "fast", "in_place", "", "output", "")
    trace = simulate(JOINT, in_place)
    assert (trace.running_bytes.tolist(), trace.cost) == ([21, 83, 53, 85, 117, 69], 22)
    assert ("free", 1) not in in_place.steps
    assert in_place.choices == ("", "fast", "in_place", "", "output", "")


def test_reading_what_was_written_over_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="not resident"):
        simulate(JOINT, once_in_order("", "", "in_place", "", "", ""))
    with pytest.raises(InvalidPlan, match="whose input 6"):
        simulate(JOINT, once_in_order("", "", "", "", "mask", ""))
    with pytest.raises(InvalidPlan, match=r"no implementation 'nope' \(it has default, fast\)"):
        once_in_order("", "nope", "", "", "", "")
    with pytest.raises(InvalidPlan, match="a free has no implementation"):
        Plan.from_steps(JOINT, [(COMPUTE, 0), (FREE, 0, "fast")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Implementation("mask", (1,), (2,), 2), "name of its own"),
        (Implementation("w", (1,), (2,), -1), "negative"),
        (Implementation("w", (4,), (2,), 1), "before it is produced"),
        (Implementation("w", (1,), (0,), 1), "two producers"),
        (Implementation("w", (1,), (2,), 1, overwrites=0), "overwrite only an input"),
        (Implementation("w", (1,), (2,), 1 << 62), "beyond the limit|exceed"),
    ],
)
def test_bad_implementations_are_refused(change: Implementation, message: str) -> None:
    operations = list(JOINT.operations)
    operations[2] = replace(operations[2], implementations=(*operations[2].implementations, change))
    with pytest.raises(InvalidGraph, match=message):
        replace(JOINT, operations=tuple(operations))


def random_joint(rng: np.random.Generator, n: int, **kinds: float) -> Graph:
    """A step of which most operations have several implementations, none of them lossy: strategies leave those out."""
    joint = with_implementations(random_step(rng, n, **kinds), rng)
    ways = ([replace(way, is_lossy=False) for way in op.implementations] for op in joint.operations)
    operations = (replace(op, implementations=tuple(own)) for op, own in zip(joint.operations, ways, strict=True))
    return replace(joint, operations=tuple(operations))


def larger_joint(seed: int) -> Graph:
    rng = np.random.default_rng(seed)
    return random_joint(rng, int(rng.integers(4, 9)), min_bytes=1, max_bytes=9, max_cost=9)


@pytest.mark.parametrize("seed", [1, 2, 3, 5])
def test_plans_against_brute_force(seed: int, tmp_path) -> None:
    """As `test_fuzz_solvers`, with the exhaustive search, with `monet` and at more budgets."""
    joint = larger_joint(seed)
    for budget in sorted({int(plain_peak(joint) * share) for share in (0.6, 0.75, 0.9, 1.0)}):
        best = optimum(joint, budget, "staged")
        solution = here(joint, budget, "portfolio")
        assert (solution.status, solution.cost) == (("INFEASIBLE" if best is None else "OPTIMAL"), best)
        for each in (solution, here(joint, budget, "monet")):
            assert not wrong_with(joint, each, best, tmp_path)


@pytest.mark.parametrize(
    ("changed", "way"),
    [  # It writes over the kept value 1; does not make the kept value 3; does not make value 2, which b2 reads.
        (2, Implementation("over", (1, 2), (3, 4), 1, overwrites=1)),
        (2, Implementation("part", (1, 2), (4,), 1)),
        (1, Implementation("part", (0,), (1,), 1)),
    ],
)
def test_monet_makes_gradients_that_are_kept_or_read(changed: int, way: Implementation) -> None:
    operations = [
        Operation("x", "", (), (0,), 1), Operation("b1", "", (0,), (1, 2), 2, 0, True),
        Operation("b2", "", (1, 2), (3, 4), 4, 0, True),
    ]  # fmt: skip
    operations[changed] = replace(operations[changed], implementations=(way,))
    joint = Graph("kept", tuple(operations), tuple(Value(f"v{i}", 2, i in (1, 3)) for i in range(5)), loss=0)
    assert here(joint, 20, "monet").cost == optimum(joint, 20, "staged") == 7


@pytest.mark.parametrize("scope", Scope)
def test_very_small_graphs_with_implementations_are_solved_in_every_scope(scope: Scope) -> None:
    rng, decided = np.random.default_rng(5), 0
    for i in range(30):
        joint = random_joint(rng, 5, **({}, {"keep": 0.4, "multi_output": 0.3})[i % 2])
        budget = random_budget(rng, joint, str(scope))
        plan, bound, is_impossible = exhaustive_choices(joint, budget, 10**6, np.inf, scope)
        best = optimum(joint, budget, str(scope))
        assert (bound, is_impossible) == (best, best is None)
        if plan is not None:
            trace = simulate(joint, plan)
            assert (trace.cost, trace.peak_bytes <= budget, scope.contains(plan.scope)) == (best, True, True)
            decided += best is not None and best > joint.least_cost
    assert decided


def test_a_mask_is_made_only_by_the_run_before_its_reader() -> None:
    plan = Plan.from_order(JOINT, [0, 1, 2, 3, 2, 4, 5], implementations=["", "", "mask", "", "mask", "mask", ""])
    better, cost, peak_bytes = Choices(JOINT).with_fastest_that_fit(plan, 200)
    assert better.choices == ("", "fast", "", "", "mask", "mask", "")
    trace = simulate(JOINT, better)
    assert (trace.cost, trace.peak_bytes) == (cost, peak_bytes)
    assert cost == simulate(JOINT, plan).cost - 4 - 1  # the fast convolution, and one mask less


@pytest.mark.parametrize(
    ("reads", "order", "names"),
    [
        # Relu's backward reads the second y: only the first run, whose y nobody reads again, writes over it.
        ("", [0, 1, 2, 3, 1, 2, 4, 5], ("", "fast", "in_place", "", "fast", "", "", "")),
        # It reads z. The second relu reads the y that the forward pass saved; the third one's y is made beside it.
        ("output", [0, 1, 2, 3, 2, 4, 5], ("", "fast", "", "", "", "output", "")),
        ("output", [0, 1, 2, 3, 1, 2, 4, 5], ("", "fast", "in_place", "", "fast", "in_place", "output", "")),
    ],
)
def test_only_what_nobody_reads_again_is_written_over(reads: str, order: list[int], names: tuple[str, ...]) -> None:
    graph = conv_relu()
    relu = graph.operations[2]
    mask, in_place = relu.implementations
    relu = replace(relu, implementations=(mask, replace(in_place, cost=1)))
    joint = replace(graph, operations=(*graph.operations[:2], relu, *graph.operations[3:]))
    plan = Plan.from_order(joint, order, implementations=[reads if k == 4 else "" for k in order])
    better, cost, peak_bytes = Choices(joint).with_fastest_that_fit(plan, 200 if reads else 130)
    assert better.choices == names
    trace = simulate(joint, better)
    assert (trace.cost, trace.peak_bytes) == (cost, peak_bytes)


def test_lifted_plans_hold_no_more_and_the_fastest_that_fit_are_judged_as_they_say() -> None:
    rng, changed = np.random.default_rng(0), 0
    for seed in range(160):
        joint = larger_joint(seed // 8)
        choices = Choices(joint)
        chosen = choices.choose([rng.integers(len(op.all_implementations)) for op in joint.operations])
        if chosen is None:
            continue
        last = chosen.place[joint.loss]  # the forward pass runs twice
        plan = Plan.from_order(chosen.graph, [*range(last + 1), *range(len(chosen.graph))])
        trace, plan = simulate(chosen.graph, plan), chosen.lift(plan)
        lifted, easy = simulate(joint, plan), relaxed(joint)
        assert lifted.cost == trace.cost
        assert lifted.peak_bytes <= trace.peak_bytes
        relieved = simulate(easy, Plan.from_order(easy, [k for calls in chosen.calls for k, _ in calls]))
        assert relieved.cost <= trace.cost
        assert relieved.peak_bytes <= lifted.peak_bytes
        for budget in (lifted.peak_bytes, lifted.peak_bytes + int(rng.integers(10))):
            better, cost, peak_bytes = choices.with_fastest_that_fit(plan, budget)
            found = simulate(joint, better)
            assert found.cost == cost <= lifted.cost
            assert found.peak_bytes <= peak_bytes <= budget
            changed += better is not plan
    assert changed > 80


def test_a_group_that_may_run_once_runs_once() -> None:
    joint = replace(JOINT, operations=tuple(replace(op, run_once=op.name == "conv") for op in JOINT.operations))
    chosen = Choices(joint).choose([0, 0, 2, 0, 2, 0])  # ReLU writes over the convolution's output
    order = chosen.order_of([0, 1, 2, 3, 2, 4, 5])  # ReLU runs twice
    lifted = chosen.lift(Plan.from_order(chosen.graph, order.tolist()))
    assert lifted.order.tolist() == [0, 1, 2, 3, 4, 5]
    assert simulate(joint, lifted).cost == simulate(chosen.graph, Plan.from_order(chosen.graph, order.tolist())).cost


def test_strategies_without_a_choice_run_with_defaults_and_prove_nothing() -> None:
    solution = here(JOINT, 200, "checkmate_milp")
    assert (solution.status, solution.cost, solution.bound) == ("FEASIBLE", 26, 22)
    assert solution.stats["default_bound"] == simulate(JOINT, solution.plan).cost == 26
    tight = here(JOINT, 100, "checkmate_milp")
    assert tight.status == "NO_PLAN"
    assert "with default implementations" in tight.message
    assert remat.solve(JOINT, 200, "checkpoint_all").cost == 26


def test_monet_chooses_where_there_is_room() -> None:
    for budget, cost in ((200, 22), (117, 22), (90, 23), (86, 23)):
        solution = here(JOINT, budget, "monet")
        assert solution.cost == solution.stats["objective"] == cost
        assert cost - 1 <= solution.stats["monet_bound"] <= cost
    # a plan that is given is not lost, whatever the strategy knows of implementations
    given = once_in_order("", "", "mask", "", "mask", "")
    assert here(JOINT, 86, "checkmate_milp", warm_start=given).cost == 27
    backward_first = replace(JOINT, operations=tuple(replace(op, is_backward=True) for op in JOINT.operations))
    assert here(backward_first, 200, "monet").status == "SKIPPED"


def masks(n: int) -> Graph:
    """n convolutions, each with a ReLU, and their gradients; sizes and costs differ from layer to layer."""
    net, x = Network((2, 4, 16, 16)), 0
    for i in range(n):
        x = net.relu(net.conv(x, 8 + 4 * (i % 3), 3))
    net.linear(net.flatten(net.max_pool(x, 2, 2)), 8)
    return training_graph(net, "masks")


def test_a_plan_as_a_point_of_monets_program() -> None:
    joint = masks(3).default()
    solution = here(joint, (joint.largest_working_set()[0] + plain_peak(joint)) // 2, "monet")
    plan = solution.plan
    assert plan.n_computations > len(joint)
    calls = [*zip(plan.order.tolist(), plan.choices or [""] * plan.n_computations, strict=True)]
    model = monet_program.build_model(joint, solution.budget_bytes)
    x = model.point(calls)
    assert model.cost_unit * (model.cost @ x + model.cost_constant) == solution.cost
    assert model.calls(x) == calls
    # It has no point for a smaller budget, for a repeat in the forward pass, or for a repeated gradient.
    assert monet_program.build_model(joint, solution.peak_bytes - 1).point(calls) is None
    assert model.point([*calls[:2], calls[1], *calls[2:]]) is None
    assert model.point([*calls, calls[-1]]) is None


def test_monet_starts_from_a_plan_which_counts_if_the_solver_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = masks(3)
    budget = int(0.9 * plain_peak(joint))
    started = here(joint, budget, "monet")
    assert started.stats["started"]
    assert started.stats["start_cost"] >= started.cost
    again = here(joint, budget, "monet", deterministic=True)
    assert not again.stats["started"]  # the clock ends the searches for a start
    assert here(joint, budget, "monet", deterministic=True, warm_start=started.plan).stats["started"]
    monkeypatch.setattr(Backend, "probe", lambda _self: None)
    monkeypatch.setattr(Backend, "solve", lambda *_args, **_options: Answer())
    kept = here(joint, budget, "monet")
    assert simulate(joint, kept.plan).peak_bytes <= budget


GIB = 2**30


def plans_of(graph: Graph, budget: int, moves: int = 3_000) -> list[Plan]:
    """Each better plan; none where it cannot search."""
    prepared = prepare(graph)
    found: list[Plan] = []
    if prepared is not None:
        anneal_jointly(prepared, budget, 1, found.append, lambda: False, seconds=60.0, moves=moves)
    return found


def cases(n: int) -> list[Graph]:
    rng = np.random.default_rng(7)
    kinds = ({}, {"multi_output": 0.4}, {"workspace": 3})
    return [with_implementations(random_step(rng, int(rng.integers(4, 14)), **kinds[i % 3]), rng) for i in range(n)]


def test_each_plan_fits_costs_less_than_the_one_before_and_the_last_one_is_most_often_optimal() -> None:
    searched = equal = loaded = 0
    for graph in cases(120):
        least, most = graph.largest_working_set()[0], sum(value.bytes for value in graph.values) + graph.fixed_bytes
        for budget in ((least + most) // 2, least + 2, least + 4):
            plans = plans_of(graph, budget, 2_000)
            traces = [simulate(graph, plan) for plan in plans]
            costs = [trace.cost for trace in traces]
            assert costs == sorted(set(costs), reverse=True)
            assert all(trace.peak_bytes <= budget for trace in traces)
            searched += bool(traces)
            if plans and len(graph) <= 7:
                best = optimum(graph, budget, "staged")
                assert best <= costs[-1] or plans[-1].scope != "staged"
                equal += best == costs[-1]
            if plans:  # it goes on from its own plans at their cost
                search = JointSearch(prepare(graph), budget, 0)
                search.load(plans[-1])
                loaded += search.state.reals[EXACT_EXCESS] == 0
                assert search.state.reals[EXACT_COST] >= simulate(graph, search.plan()).cost - 0.5
                assert search.best == costs[-1] or search.state.reals[EXACT_EXCESS] > 0
    assert searched > 60
    assert equal > 20
    assert loaded > 30


def with_siblings(rng: np.random.Generator) -> Graph:
    """A step whose forward operations have up to two outputs, each read in the backward pass, at times by another."""
    graph = random_step(rng, 14, multi_output=0.8)
    forward = graph.operations[:7]
    backward = [
        replace(op, inputs=tuple(sorted({*op.inputs, *rng.choice([v for other in forward for v in other.outputs], 2)})))
        for op in graph.operations[7:]
    ]
    return with_implementations(replace(graph, operations=(*forward, *backward)), rng)


def test_what_it_counts_while_it_moves_is_what_a_count_from_the_genes_gives() -> None:
    counted, rng = 0, np.random.default_rng(3)
    for graph in (*cases(60), *(with_siblings(rng) for _ in range(120))):
        prepared, least = prepare(graph), graph.largest_working_set()[0]
        if prepared is None:
            continue
        for budget in (least, least + 4):
            search = JointSearch(prepared, budget, 0)
            search.run(0.3, 1_000)
            moved = [each.copy() for each in (search.state.exact_cost, search.state.exact_excess, search.state.total)]
            refresh(prepared.instance, search.state, search.budget)
            again = (search.state.exact_cost, search.state.exact_excess, search.state.total)
            assert all(np.array_equal(x, y) for x, y in zip(moved, again, strict=True))
            counted += bool(search.state.runs_at.any())
    assert counted > 50


def test_it_goes_on_from_any_other_plan() -> None:
    for graph in cases(30):
        prepared, budget = prepare(graph), graph.largest_working_set()[0] + 6
        other = remat.solve(graph, budget, strategy="chen_sqrtn", isolate=False).plan
        if prepared is not None and other is not None:
            search = JointSearch(prepared, budget, 0)
            search.load(other)
            assert search.plan() is not None


def test_graphs_that_it_cannot_express_are_left_to_others() -> None:
    chain = Graph.from_nodes("chain", [[], [0]], [1, 1], [1, 1], loss=0)
    assert prepare(chain) is None  # nothing to choose
    graph = with_implementations(random_step(np.random.default_rng(1), 8, once=1.0), np.random.default_rng(1))
    assert prepare(graph) is None


def test_vgg16_reaches_the_published_optimum_alone_and_in_the_portfolio(instances: Path) -> None:
    graph = load_costs(instances / "monet" / "costs_vgg16.json.gz")
    plan = plans_of(graph, int(5.5 * GIB), 600_000)[-1]
    assert simulate(graph, plan).cost == pytest.approx(1540.23e6, rel=5e-4)
    solution = remat.solve(graph, 10 * GIB, strategy="portfolio", time_limit_s=20, threads=2, isolate=False)
    assert solution.stats["joint_moves"] > 0
    assert solution.cost <= 1330e6
