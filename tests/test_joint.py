"""Graphs whose operations have several implementations: model, simulator, plans, and solvers against brute force."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from brute_force import optimum, random_budget, random_step, with_implementations
from helpers import conv_relu
from random_graphs import wrong_with

import remat
from remat import Graph, InvalidGraph, InvalidPlan, Operation, Plan, Scope, Value, simulate
from remat.bounds.relax import relaxed
from remat.implementation import Implementation
from remat.plan import COMPUTE, FREE
from remat.programs import monet as monet_program
from remat.programs.backends import Backend
from remat.programs.highs import Answer
from remat.search.choices import Choices
from remat.search.exhaustive_choices import exhaustive_choices
from remat.simulator import plain_peak
from remat.solvers import choose as joint_search

JOINT = conv_relu()


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


def test_files_keep_implementations(tmp_path) -> None:
    remat.save_graph(JOINT, tmp_path / "g.json")
    again = remat.load_graph(tmp_path / "g.json")
    assert (again.operations, again.sha256()) == (JOINT.operations, JOINT.sha256())
    plan = once_in_order("", "", "mask", "", "mask", "")
    plan.save(tmp_path / "p.json")
    steps = json.loads((tmp_path / "p.json").read_text())["steps"]
    assert [step for step in steps if step in (["compute", 2, "mask"], ["compute", 0])] == [steps[0], steps[2]]
    read = Plan.load(tmp_path / "p.json", again)
    assert (read.steps, simulate(again, read).cost) == (plan.steps, 27)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Implementation("mask", (1,), (2,), 2), "name of its own"),
        (Implementation("default", (1,), (2,), 2), "name of its own"),
        (Implementation("w", (1,), (2,), -1), "negative"),
        (Implementation("w", (4,), (2,), 1), "before it is produced"),
        (Implementation("w", (1,), (0,), 1), "two producers"),
        (Implementation("w", (1,), (2,), 1, overwrites=0), "overwrite only an input"),
        (Implementation("w", (1,), (2,), 1, overwrites=99), "overwrite only an input"),
        (Implementation("w", (1,), (2,), 1 << 62), "beyond the limit|exceed"),
    ],
)
def test_bad_implementations_are_refused(change: Implementation, message: str) -> None:
    operations = list(JOINT.operations)
    operations[2] = replace(operations[2], implementations=(*operations[2].implementations, change))
    with pytest.raises(InvalidGraph, match=message):
        replace(JOINT, operations=tuple(operations))


def random_joint(seed: int) -> Graph:
    """A forward and backward pass of which most operations have several implementations."""
    rng = np.random.default_rng(seed)
    joint = with_implementations(random_step(rng, int(rng.integers(4, 9)), min_bytes=1, max_bytes=9, max_cost=9), rng)
    operations = (
        replace(op, implementations=tuple(replace(each, is_lossy=False) for each in op.implementations))
        for op in joint.operations
    )  # the strategies leave lossy ones out
    return replace(joint, operations=tuple(operations))


@pytest.mark.parametrize("seed", range(8))
def test_plans_against_brute_force(seed: int, tmp_path) -> None:
    """The strategies of `test_fuzz_solvers`, with the exhaustive search and at more budgets."""
    joint = random_joint(seed)
    for budget in sorted({int(plain_peak(joint) * share) for share in (0.6, 0.75, 0.9, 1.0)}):
        best = optimum(joint, budget, "staged")
        for strategy, work in (("portfolio", None), ("search", 2000), ("monet", None)):  # the search goes on until then
            solution = here(joint, budget, strategy, work_limit=work)
            assert not wrong_with(joint, solution, best, tmp_path)
            if strategy == "portfolio":
                assert (solution.status, solution.cost) == (("INFEASIBLE" if best is None else "OPTIMAL"), best)


def kept(*operations: Operation, sizes: dict[str, int], keep: set[str]) -> Graph:
    return Graph("kept", operations, tuple(Value(name, size, name in keep) for name, size in sizes.items()))


KEPT = {
    "dropped and made again": kept(
        Operation("a", "", (), (0,), 1), Operation("g", "", (0,), (1,), 1),
        Operation("b", "", (0,), (2,), 1, implementations=(Implementation("other", (0,), (2,), 5),)),
        Operation("c", "", (2,), (3,), 1, 8), Operation("d", "", (3,), (4,), 1),
        sizes={"a": 2, "g": 8, "b": 2, "c": 2, "d": 1}, keep={"g"},
    ),
    "written over": kept(
        Operation("a", "", (), (0,), 1),
        Operation("b", "", (0,), (1,), 5, implementations=(Implementation("in_place", (0,), (1,), 1, overwrites=0),)),
        sizes={"a": 4, "b": 4}, keep={"a"},
    ),
    "not made": kept(
        Operation("a", "", (), (0, 1), 5, implementations=(Implementation("part", (), (0,), 1),)),
        Operation("b", "", (0,), (2,), 5), sizes={"a": 4, "a1": 4, "b": 4}, keep={"a1"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_kept_values_against_brute_force(name: str) -> None:
    joint = KEPT[name]
    for budget in range(6, 24):
        best = optimum(joint, budget, "staged")
        solution = here(joint, budget, "portfolio")
        assert (solution.status, solution.cost) == (("INFEASIBLE", None) if best is None else ("OPTIMAL", best))


def with_extra(cost: int, *more: Implementation) -> Graph:
    """Operation a costs 5; its other implementation costs `cost` and makes the extra value 2, which nobody reads."""
    extra = Implementation("extra", (), (0, 2), cost)
    a = Operation("a", "", (), (0,), 5, implementations=(extra, *more))
    return Graph("extra", (a, Operation("b", "", (0,), (1,), 5)), (Value("x", 2), Value("y", 2, True), Value("e", 1)))


NO_SWITCH = {
    "an extra output each": with_extra(6),
    "an extra output, cheaper": with_extra(1),
    "lossy": with_extra(6, Implementation("lossy", (), (0,), 5, is_lossy=True)),
    "fewer outputs": Graph(
        "fewer",
        (Operation("a", "", (), (0, 1), 5, implementations=(Implementation("part", (), (0,), 1),)),
         Operation("b", "", (0, 1), (2,), 5)),
        (Value("x", 2), Value("y", 2), Value("z", 2, True)),
    ),
    "free of charge": Graph(
        "free",
        (Operation("a", "", (), (0,), 0, implementations=(Implementation("extra", (), (0, 1), 0),)),),
        (Value("x", 2), Value("e", 0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["portfolio", "search", "interval_cp"])
@pytest.mark.parametrize("name", NO_SWITCH)
def test_nothing_to_switch_is_no_failure(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_search, "EXHAUSTIVE_OPERATIONS", 0)
    joint = NO_SWITCH[name]
    for scope, budget in (("staged", 4), ("staged", 5), ("staged", 8), ("fixed_order", 5), ("free", 5)):
        solution = here(joint, budget, strategy, scope=scope, work_limit=3)
        assert solution.status not in ("FAILED", "SKIPPED")
        assert not solution.ended, solution.message
        assert solution.cost == optimum(joint, budget, scope)


@pytest.mark.parametrize(
    "way", [Implementation("over", (1,), (2, 3), 1, overwrites=1), Implementation("part", (1,), (2,), 1)]
)
def test_monet_leaves_kept_gradients_alone(way: Implementation) -> None:
    """The other implementation of b2 writes over the kept value 1, or does not make the kept value 3."""
    b2 = Operation("b2", "", (1,), (2, 3), 4, 0, True, implementations=(way,))
    operations = (Operation("x", "", (), (0,), 1), Operation("b1", "", (0,), (1,), 1, 0, True), b2)
    joint = Graph("kept", operations, tuple(Value(f"v{i}", 2, i in (1, 3)) for i in range(4)), loss=0)
    solution = here(joint, 20, "monet")
    assert solution.cost == 6, solution.message


def test_monet_makes_what_later_gradients_read() -> None:
    joint = Graph(
        "several",
        (
            Operation("x", "", (), (0,), 1),
            Operation("b1", "", (0,), (1, 2), 4, 0, True, implementations=(Implementation("part", (0,), (1,), 1),)),
            Operation("b2", "", (1, 2), (3,), 2, 0, True),
        ),
        tuple(Value(f"v{i}", 2, i == 3) for i in range(4)), loss=0,
    )  # fmt: skip
    solution = here(joint, 20, "monet")
    assert solution.cost == optimum(joint, 20, "staged") == 7


@pytest.mark.parametrize("seed", range(40))
def test_lifted_plans_cost_the_same_and_hold_no_more(seed: int) -> None:
    joint = random_joint(seed)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        wanted = [rng.integers(len(op.all_implementations)) for op in joint.operations]
        chosen = Choices(joint).choose(wanted)
        if chosen is None:
            continue
        plan = Plan.from_order(chosen.graph, range(len(chosen.graph)))
        trace, lifted = simulate(chosen.graph, plan), simulate(joint, chosen.lift(plan))
        assert lifted.cost == trace.cost
        assert lifted.peak_bytes <= trace.peak_bytes
        easy = relaxed(joint)
        order = [k for calls in chosen.calls for k, _ in calls]
        assert simulate(easy, Plan.from_order(easy, order)).cost <= trace.cost
        assert simulate(easy, Plan.from_order(easy, order)).peak_bytes <= lifted.peak_bytes


@pytest.mark.parametrize("scope", Scope)
def test_very_small_graphs_with_implementations_are_solved_in_every_scope(scope: Scope) -> None:
    rng, decided = np.random.default_rng(5), 0
    for _ in range(40):
        joint = with_implementations(random_step(rng, 5), rng)
        if any(each.is_lossy for op in joint.operations for each in op.implementations):
            continue
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


def test_the_fastest_that_fit_are_judged_as_they_say() -> None:
    rng, changed = np.random.default_rng(0), 0
    for seed in range(400):
        joint = random_joint(seed // 20)
        choices = Choices(joint)
        chosen = choices.choose([rng.integers(len(op.all_implementations)) for op in joint.operations])
        if chosen is None:
            continue
        last = chosen.place[joint.loss]  # the forward pass runs twice
        plan = chosen.lift(Plan.from_order(chosen.graph, [*range(last + 1), *range(len(chosen.graph))]))
        before = simulate(joint, plan)
        for budget in (before.peak_bytes, before.peak_bytes + int(rng.integers(10))):
            better, cost, peak_bytes = choices.with_fastest_that_fit(plan, budget)
            trace = simulate(joint, better)
            assert trace.cost == cost <= before.cost
            assert trace.peak_bytes <= peak_bytes <= budget
            changed += better is not plan
    assert changed > 200


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


def test_a_plan_as_a_point_of_monets_program() -> None:
    joint = chain_with_masks(4).default()
    least, peak = joint.largest_working_set()[0], plain_peak(joint)
    found = (here(joint, budget, "monet") for budget in range(least, peak))
    solution = next(one for one in found if one.plan is not None)
    plan = solution.plan
    assert plan.n_computations > len(joint)
    names = plan.choices or [""] * plan.n_computations
    calls = [*zip(plan.order.tolist(), names, strict=True)]
    model = monet_program.build_model(joint, solution.budget_bytes)
    x = model.point(calls)
    assert model.cost_unit * (model.cost @ x + model.cost_constant) == solution.cost
    assert model.calls(x) == calls
    # It has no point for a smaller budget, for a repeat in the forward pass, or for a repeated gradient.
    assert monet_program.build_model(joint, solution.peak_bytes - 1).point(calls) is None
    assert model.point([*calls[:2], calls[1], *calls[2:]]) is None
    assert model.point([*calls, calls[-1]]) is None


def test_monet_starts_from_a_plan() -> None:
    joint = chain_with_masks(5)
    budget = int(0.8 * plain_peak(joint))
    started = here(joint, budget, "monet")
    assert started.stats["started"]
    assert started.stats["start_cost"] >= started.cost
    again = here(joint, budget, "monet", deterministic=True)
    assert not again.stats["started"]  # the clock ends the searches for a start
    assert here(joint, budget, "monet", deterministic=True, warm_start=started.plan).stats["started"]


def test_the_start_counts_if_the_solver_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = chain_with_masks(5)
    budget = int(0.8 * plain_peak(joint))
    monkeypatch.setattr(Backend, "probe", lambda _self: None)
    monkeypatch.setattr(Backend, "solve", lambda *_args, **_options: Answer())
    kept = here(joint, budget, "monet")
    assert remat.simulate(joint, kept.plan).peak_bytes <= budget


def chain_with_masks(n: int) -> Graph:
    """n convolutions, each with a ReLU, and their gradients; sizes and costs differ from layer to layer."""
    operations, sizes = [Operation("x", "input", (), (0,), 1)], [8]
    for i in range(n):
        size = 8 + 4 * (i % 3)
        x = len(sizes) - 1
        operations.append(Operation(f"conv{i}", "conv", (x,), (x + 1,), 10 + i))
        operations.append(Operation(f"relu{i}", "relu", (x + 1,), (x + 2,), 2))
        sizes += [size, size]
    first = len(operations)
    operations.append(Operation("loss", "loss", (first - 1,), (first,), 1))
    sizes.append(8)
    gradient = first
    for i in reversed(range(n)):
        x = 2 * i
        operations.append(Operation(f"relu{i}_back", "relu_back", (x + 1, gradient), (len(sizes),), 2, 0, True))
        sizes.append(sizes[x + 1])
        operations.append(Operation(f"conv{i}_back", "conv_back", (x, len(sizes) - 1), (len(sizes),), 20, 0, True))
        gradient = len(sizes)
        sizes.append(sizes[x])
    total = len(sizes)
    for i in range(n):
        relu, back = 2 * i + 2, first + 1 + 2 * (n - 1 - i)
        extra, grad = total + i, operations[back].inputs[1]
        ways = (Implementation("mask", (relu - 1,), (relu, extra), 2),
                Implementation("in_place", (relu - 1,), (relu,), 2, overwrites=relu - 1),
                Implementation("in_place_mask", (relu - 1,), (relu, extra), 2, overwrites=relu - 1))  # fmt: skip
        operations[relu] = replace(operations[relu], implementations=ways)
        reads = (Implementation("mask", (grad, extra), operations[back].outputs, 2),
                 Implementation("output", (relu, grad), operations[back].outputs, 2))  # fmt: skip
        operations[back] = replace(operations[back], implementations=reads)
        conv = operations[relu - 1]
        fast = Implementation("fast", conv.inputs, conv.outputs, conv.cost - 3, 9)
        operations[relu - 1] = replace(conv, implementations=(fast,))
    values = [Value(f"v{i}", size, i == total - 1) for i, size in enumerate(sizes)]
    values += [Value(f"m{i}", 1) for i in range(n)]
    return Graph("masks", tuple(operations), tuple(values), loss=first)


@pytest.mark.slow
def test_portfolio_is_at_least_as_good_as_monet() -> None:
    joint = chain_with_masks(7)
    peak = plain_peak(joint)
    for share in (0.5, 0.6, 0.8):
        budget = int(share * peak)
        of_monet = remat.solve(joint, budget, "monet", time_limit_s=10)
        of_portfolio = remat.solve(joint, budget, "portfolio", time_limit_s=10)
        assert of_portfolio.cost <= of_monet.cost
        assert not of_portfolio.ended, of_portfolio.message
        assert of_portfolio.bound <= of_portfolio.cost
        plain = remat.solve(joint.default(), budget, "portfolio", time_limit_s=5)
        assert plain.cost is not None or share < 0.8
        assert plain.cost is None or plain.cost >= of_portfolio.cost
