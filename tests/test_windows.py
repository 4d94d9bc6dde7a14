"""The window relaxation: every plan is a point of it, and its bound is never above the optimum."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from brute_force import SCOPES, optimum, random_graph, random_problem, random_step, training_chain
from helpers import context_of, refused, schema_of

import remat
from remat.bounds.certificate import verify_bound
from remat.bounds.window_integers import Listener, WindowIntegers
from remat.bounds.window_tree import Tree
from remat.bounds.windows import WindowBound, solve_windows
from remat.certificate import BoundCertificate, TreeNode
from remat.errors import InvalidInput
from remat.graph import Graph, Operation, Value
from remat.incumbent import Incumbent
from remat.plan import COMPUTE, Plan, Scope
from remat.programs.windows import Arrays, Kind, WindowModel, build_window_model
from remat.search.exhaustive import exhaustive
from remat.search.exhaustive_choices import exhaustive_choices


def some_model(graph: Graph, budget: int, rng: np.random.Generator, scope: str = "staged") -> WindowModel:
    """Random boundaries, and some of the windows between them; with slots in scope staged, a chain in scope free."""
    arrays = Arrays.of(graph, Scope(scope))
    most = 10 if scope == "free" else 5  # few of them are a chain
    n_boundaries = int(rng.integers(1, min(most, len(graph) - 1) + 1))
    drawn = set(rng.choice(len(graph) - 1, n_boundaries, replace=False).tolist())
    if scope == "staged" and rng.random() < 0.7:
        drawn |= {t + 1 for t in drawn if t + 2 < len(graph)}
    boundaries: list[int] = []
    for t in sorted(drawn):
        if not boundaries or arrays.sides(t).before[boundaries[-1]]:
            boundaries.append(t)
    windows = [pair for pair in itertools.combinations(range(len(boundaries)), 2) if rng.random() < 0.7]
    return build_window_model(arrays, budget, boundaries, windows, slots=scope == "staged")


def point_of(model: WindowModel, plan: Plan, full: Graph | None = None) -> np.ndarray:
    """[n] the columns that the docstring of `remat.programs.windows` gives a plan, from its steps alone.

    `full` is the graph if it has implementations.
    """
    graph, t = model.arrays.graph, model.boundaries
    steps = list(zip(plan.kinds.tolist(), plan.ids.tolist(), strict=True))
    named = plan.implementations or [""] * len(steps)
    ways = [(full or graph).implementation(i, name) if kind == COMPUTE else None
            for (kind, i), name in zip(steps, named, strict=True)]  # fmt: skip
    first: dict[int, int] = {}
    for at, (kind, i) in enumerate(steps):
        if kind == COMPUTE:
            first.setdefault(i, at)
    x = np.zeros(len(model.cost))
    for k, boundary in enumerate(t):
        at = first[boundary]
        made: set[int] = set()
        for way in ways[at + 1 :]:
            if way is None:
                continue
            for v in way.inputs:  # served by what was resident, or made again since
                if v not in made and model.S[k, v] >= 0:
                    x[model.S[k, v]] = 1
            made.update(way.outputs)
        for v, value in enumerate(graph.values):
            if value.keep and v not in made and model.S[k, v] >= 0:
                x[model.S[k, v]] = 1
    for (k, m), columns in model.R.items():
        end = first[t[m + 1]] if m + 1 < len(t) else len(steps)
        for at in range(first[t[k]] + 1, end):
            kind, i = steps[at]
            if kind == COMPUTE and at != first[i] and columns[i] >= 0:
                x[columns[i]] = 1
    for i, columns in model.X.items():
        x[columns[full.operations[i].all_implementations.index(ways[first[i]])]] = 1
    for (k, j, v), column in model.U.items():  # whether v serves at slot j or later in the stage, or beyond it
        runs = {i for i in (graph.producer[v], *graph.users[v]) if model.R[k, k][i] >= 0 and x[model.R[k, k][i]]}
        beyond = model.S[k + 1, v] >= 0 and x[model.S[k + 1, v]] == 1
        x[column] = beyond or any(j <= i < t[k + 1] for i in runs)
    return x


def in_integers(windows: WindowBound, known: int | None) -> tuple[list[BoundCertificate], list[int], list[Plan]]:
    """(the trees, all bounds, the plans) of `WindowIntegers` beside a plan of cost `known`."""
    proofs, bounds, plans = list[BoundCertificate](), list[int](), list[Plan]()
    listener = Listener(proofs.append, bounds.append, plans.append, lambda: False)
    WindowIntegers(windows, cast("Incumbent", SimpleNamespace(cost=known))).run(time.monotonic() + 60, listener)
    return proofs, bounds + [proof.bound for proof in proofs], plans


def bounds_of(
    graph: Graph, budget: int, scope: str = "staged", rounds: int | None = None, **more: int | None
) -> WindowBound:
    """The window bounds of a problem after so many rounds, or after all."""
    windows = WindowBound(context_of(graph, budget, scope=Scope(scope), **more).problem)
    windows.run(time.monotonic() + 60, rounds=rounds)
    return windows


def graphs(count: int, first: int = 0) -> list[tuple[Graph, np.random.Generator]]:
    """Random graphs with several outputs, workspaces, kept values and operations that run once."""
    found = []
    for seed in range(first, first + count):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(5, 9))
        kinds = {"multi_output": 0.2 * (seed % 2), "workspace": seed % 3, "keep": 0.15, "once": 0.15 * (seed % 2)}
        found.append((random_step(rng, n, **kinds) if seed % 3 else random_graph(rng, n, **kinds), rng))
    return found


def assert_fits(model: WindowModel, x: np.ndarray, extra_cost: int, case: object) -> None:
    """A plan's columns meet every row, and the model charges no more than the plan costs."""
    lacks = model.matrix @ x < model.row_lower
    assert not lacks.any(), (case, model.row_kind[lacks], model.row_key[lacks])
    assert model.cost @ x <= extra_cost


def test_every_optimal_choice_of_implementations_is_a_point_of_the_relaxation() -> None:
    mapped = costly = chosen = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        graph, budget, _, best = random_problem(rng, ["staged"])
        if best is None or not graph.has_implementations:
            continue
        plan, cost, _ = exhaustive_choices(graph, budget, 10**6, time.monotonic() + 60)
        if plan is None or cost is None:  # only a lossy implementation makes one
            continue
        assert cost >= best
        for scope in SCOPES:
            model = some_model(graph, budget, rng, scope)
            assert_fits(model, point_of(model, plan, graph), cost - graph.least_cost, (seed, scope))
            mapped += 1
            costly += best > graph.least_cost
            chosen += int(np.isin(model.row_kind, (Kind.CHOSEN, Kind.CHOICE)).sum())
    assert mapped > 24
    assert costly > 20
    assert chosen > 40


def test_every_optimal_plan_is_a_point_of_the_relaxation() -> None:
    repeats = slots = cuts = 0
    for graph, rng in graphs(30):
        least = remat.min_budget(graph, "staged").bytes
        for scope in SCOPES:
            budget = least + int(rng.integers(0, 2))
            plan = exhaustive(graph, budget, scope).plan
            cost = remat.simulate(graph, plan).cost
            for _ in range(3):
                solved = solve_windows(some_model(graph, budget, rng, scope), time.monotonic() + 60, lambda: False)
                model = solved[0]
                assert_fits(model, point_of(model, plan), cost - graph.total_cost, (graph, budget, scope))
                slots += bool(model.U)
                cuts += bool(model.cuts)
                repeats += cost > graph.total_cost
    assert min(slots, repeats) > 24
    assert cuts >= 4


def test_a_run_goes_on_where_it_stopped() -> None:
    graph = training_chain(12)
    problem, found = context_of(graph, remat.min_budget(graph, "staged").bytes).problem, list[int]()
    whole, parts = WindowBound(problem), WindowBound(problem)
    whole.run(time.monotonic() + 60, on_bound=lambda proof: found.append(proof.bound))
    while not parts.ended:
        parts.run(time.monotonic() + 60, rounds=1)
    assert parts.best == whole.best
    assert whole.best.bound == found[-1]
    assert found == sorted(set(found))
    assert parts.rounds == whole.rounds > 1
    for scope in (Scope.STAGED, Scope.FREE):  # without time: no round, no error
        windows = WindowBound(replace(problem, scope=scope))
        windows.run(time.monotonic() - 1)
        assert windows.boundaries == ()


def test_memory_between_boundaries_counts() -> None:
    """A value that does not fit beside an operation is not held there; and slots count what boundaries do not."""
    graph = Graph.from_nodes("v", [[], [0], [1], [0, 2]], [4, 3, 4, 1], [7, 1, 1, 1])
    assert bounds_of(graph, 9).best.bound == optimum(graph, 9, "staged") == 17
    rng = np.random.default_rng(44)
    graph = random_step(rng, int(rng.integers(6, 10)), workspace=2)
    budget, bounds = remat.min_budget(graph, "staged").bytes, []
    for slots in (False, True):
        model = build_window_model(Arrays.of(graph), budget, [4, 5], [(0, 1)], slots=slots)
        solved = solve_windows(model, time.monotonic() + 60, lambda: False)
        tree = Tree(solved[0], solved[2], 16.0)
        tree.run(time.monotonic() + 60, lambda: False)
        bounds.append(tree.certificate(context_of(graph, budget).problem).bound)
    assert bounds == [13, 15]
    assert optimum(graph, budget, "staged") == 15


def test_a_certificate_of_windows_is_a_file_like_any_other(tmp_path: Path) -> None:
    graph = training_chain(12)
    budget = remat.min_budget(graph, "staged").bytes
    proof = bounds_of(graph, budget).best
    proof.save(tmp_path / "bound.json")
    assert remat.verify_bound(graph, tmp_path / "bound.json", budget=budget, scope="staged") == proof.bound
    assert remat.BoundCertificate.load(tmp_path / "bound.json").to_dict() == proof.to_dict()
    schema_of("remat-bound/2").validate(json.loads((tmp_path / "bound.json").read_text()))
    for boundaries in ([], [3, 3], [5, 2], [-1, 4], [len(graph) - 1]):
        with refused("boundaries|unknown kind"):
            verify_bound(graph, replace(proof, boundaries=boundaries))


def test_boundaries_depend_on_each_other_in_scope_free() -> None:
    """Two branches of unit costs can run in either order: operation 2 need not run after operation 1."""
    graph = Graph.from_nodes("branches", [[], [0], [0], [1, 2]], [1, 1, 1, 1], [2, 2, 2, 1])
    proof = BoundCertificate(graph.name, graph.sha256(), 5, Scope.FREE, 4, 1, {}, (0, 2))
    assert verify_bound(graph, proof, scope="free") == 4
    assert verify_bound(graph, replace(proof, scope=Scope.STAGED, boundaries=(1, 2)), scope="staged") == 4
    with pytest.raises(InvalidInput, match="does not depend"):
        verify_bound(graph, replace(proof, boundaries=(1, 2)))


def test_trees_that_are_none_are_refused_at_once() -> None:
    """Nodes that share children would be walked once for each path: exponentially often."""
    graph, column = training_chain(6), ("R", 0, 0, 0)
    shared = [TreeNode(1, {}, column, i + 1, i + 2) for i in range(60)] + [TreeNode(1, {})] * 2
    several = [TreeNode(1, {}, column, 1, 1), TreeNode(1, {})]
    backwards = [TreeNode(1, {}, column, 0, 1), TreeNode(1, {})]
    unknown = [TreeNode(1, {}, ("R", 1 << 500, 1 << 500, 0), 1, 2), TreeNode(1, {}), TreeNode(1, {})]
    no_row = [TreeNode(1, {"edge": [[1 << 500] * 4 + [1]]})]
    trees = {"parent": shared, "than one": several, "children": backwards, "not a column": unknown, "not exist": no_row}
    for why, tree in trees.items():
        proof = BoundCertificate(
            graph.name, graph.sha256(), 8, Scope.STAGED, graph.total_cost, 1, {}, (3, 4), tuple(tree)
        )
        with pytest.raises(InvalidInput, match=why) as refusal:
            verify_bound(graph, proof)
        assert len(str(refusal.value)) < 300
    large = training_chain(500)
    every = tuple(range(len(large) - 1))
    proof = BoundCertificate("l", large.sha256(), 8, Scope.STAGED, 1, 1, {}, every, (TreeNode(1, {}),))
    for too_large in (proof, replace(proof, tree=(), multipliers={"memory": [[0, 1]]})):
        with pytest.raises(InvalidInput, match="too large to check"):
            verify_bound(large, too_large)


def test_a_round_that_runs_out_of_time_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time for an LP is no proof, and no reason to stop for good."""
    windows = bounds_of(training_chain(14), 9, rounds=2)
    known = SimpleNamespace(cost=96)  # twice the optimum: no bound meets it
    integers, proofs = WindowIntegers(windows, cast("Incumbent", known)), list[BoundCertificate]()
    listener = Listener(proofs.append, lambda _: None, lambda _: None, lambda: False)
    for owner, name, nothing in ((windows, "solve", lambda *_: None), (Tree, "begin", lambda *_: False)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, nothing)
            integers.run(time.monotonic() + 60, listener)
        assert not integers.ended
    known.cost = 48
    integers.run(time.monotonic() + 60, listener)
    assert integers.ended
    assert max(proof.bound for proof in proofs) == 48


def test_trees_and_programs_in_integers_never_prove_more_than_the_optimum() -> None:
    """Beside a plan that is known, optimal or not, or beside none; their points are plans."""
    count, trees, branched, proven, found = 50, 0, 0, 0, 0
    for graph, rng in graphs(count, first=600):
        for scope in SCOPES:
            budget = remat.min_budget(graph, scope).bytes + int(rng.integers(0, 2))
            best = optimum(graph, budget, scope)
            windows = bounds_of(graph, budget, scope, rounds=int(rng.integers(1, 4)))
            known = None if rng.random() < 0.25 else best + int(rng.choice([0, 1, 5]))
            proofs, bounds, plans = in_integers(windows, known)
            trees += len(proofs)
            for proof in proofs:
                assert verify_bound(graph, proof, budget=budget, scope=scope) == proof.bound
                branched += len(proof.tree) > 1
            assert max(bounds, default=0) <= best
            proven += max(bounds, default=0) == best > graph.total_cost
            for plan in plans:
                trace = remat.simulate(graph, plan)
                fits = trace.peak_bytes <= budget and Scope(scope).contains(plan.scope)
                assert trace.cost >= best or not fits
                found += fits and trace.cost == best
    assert trees > 1.3 * count
    assert min(branched, found, proven) > 0.3 * count


def test_trees_rule_out_a_cost_cap_only_where_no_plan_is_within_it() -> None:
    count, ruled_out, possible = 60, 0, 0
    for graph, rng in graphs(count, first=3000):
        for scope in SCOPES:
            budget = remat.min_budget(graph, scope).bytes + int(rng.integers(0, 2))
            best = optimum(graph, budget, scope)
            cap = best + int(rng.integers(-2, 1))
            if cap < graph.total_cost:
                continue
            windows = bounds_of(graph, budget, scope, rounds=2, cost_cap=cap)
            proofs, _, _ = in_integers(windows, None if rng.random() < 0.5 else best + 3)
            for proof in proofs:
                assert verify_bound(graph, proof, budget=budget, scope=scope) == proof.bound <= min(best, cap + 1)
            ruled_out += max((proof.bound for proof in proofs), default=0) > cap
            possible += best > cap
    assert possible > 0.25 * count
    assert ruled_out > 0.8 * possible


def a_budget_met_to_the_byte() -> tuple[Graph, int]:
    """A graph whose cheapest plan in fixed order, of cost 137, misses the budget by 2 of 42281995642 bytes."""
    operations = [
        ((), (0,), 10, False), ((0,), (1, 2), 1, False), ((0, 1), (3, 4), 1, True), ((4,), (5,), 1, False),
        ((5,), (), 1, False), ((5,), (), 10, False), ((4, 5), (6,), 30, False), ((4, 5), (7, 8), 10, False),
        ((1, 7), (9,), 10, False), ((0, 2, 9), (10,), 1, True), ((0, 8, 9), (11,), 20, False),
    ]  # fmt: skip
    sizes = (5729752, 251, 146, 1840075373, 2507, 3, 137548771, 42213299567, 68693310, 4, 311, 6166198169)
    kept = (2, 5, 6, 8, 10)
    return Graph(
        "tight", tuple(Operation(f"o{k}", "", *ends, cost, 0, run_once=once)
                       for k, (*ends, cost, once) in enumerate(operations)),
        tuple(Value(f"v{v}", size, v in kept) for v, size in enumerate(sizes)), fixed_bytes=1, cost_unit="u",
    ), 42281995642  # fmt: skip


def test_rows_that_are_met_to_the_byte_are_met_in_integers_too() -> None:
    """HiGHS proved 146 here: it took rows that are met exactly for rows that are missed."""
    graph, budget = a_budget_met_to_the_byte()
    plan = exhaustive(graph, budget, "fixed_order").plan
    assert remat.simulate(graph, plan).cost == 137
    for boundaries in ([7, 8], [6, 7, 8], [3, 7, 8]):
        windows = WindowBound(context_of(graph, budget, scope=Scope.FIXED_ORDER).problem)
        windows._boundaries = boundaries
        for known in (None, 137, 146, 160):
            assert max(in_integers(windows, known)[1], default=0) <= 137
    # but multiples of a large unit are solved: half a unit is far above a solver's tolerance
    graph = training_chain(8)
    large = replace(graph, values=tuple(replace(value, bytes=value.bytes << 30) for value in graph.values))
    budget = remat.min_budget(large, "staged").bytes
    assert in_integers(bounds_of(large, budget), None)[1]
