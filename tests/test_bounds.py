"""Lower bounds on cost: never above the exhaustive optimum, and proven by certificates that cannot be forged."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import forged_certificates
import numpy as np
import pytest
from brute_force import least_budget, optimum, random_graph, training_chain
from helpers import context_of, refused

import remat
from remat.bounds.certificate import proven_bound, verify_bound
from remat.bounds.cuts import is_valid, knapsack_cuts
from remat.bounds.lp import lower_bound
from remat.certificate import BoundCertificate
from remat.errors import InvalidInput
from remat.graph import Graph, Operation, Value
from remat.implementation import Implementation
from remat.plan import Scope


@pytest.mark.parametrize("scope", ["staged", "fixed_order"])
def test_bound_never_exceeds_the_optimum_and_its_certificate_proves_it(scope: str) -> None:
    above = costly = exact = certified = 0
    for seed in range(60):
        rng, positive = np.random.default_rng(seed), int(seed % 4 < 2)  # half without zero bytes and zero costs
        graph = random_graph(
            rng, int(rng.integers(3, 8)), multi_output=0.2 * (seed % 2), workspace=seed % 3, keep=0.15,
            once=0.15 * (seed % 2), max_bytes=5, min_bytes=positive, min_cost=positive,
        )  # fmt: skip
        least = least_budget(graph, scope)
        for budget in (least, least + int(rng.integers(1, 4))):
            best = optimum(graph, budget, scope)
            result = lower_bound(context_of(graph, budget, scope=Scope(scope)))
            assert graph.total_cost <= result.bound <= best, (seed, budget)
            if result.certificate is not None:
                assert verify_bound(graph, result.certificate) == result.bound
                assert result.certificate.scope is Scope(scope)
                certified += 1
            costly += best > graph.total_cost
            above += result.bound > graph.total_cost
            exact += result.bound == best
    assert costly > 8
    assert above > costly / 2
    assert certified >= above
    assert exact > 56


def test_kept_value_may_be_computed_after_the_last_operation_in_fixed_order() -> None:
    """Value 0 (3 bytes) need not be held while the last operation (5 bytes) runs; budget 5."""
    graph = Graph.from_nodes("late", [[], []], [3, 5], [1, 1], keep=[0])
    assert optimum(graph, 5, "fixed_order") == 3
    assert optimum(graph, 5, "staged") is None
    for multiplier in (1, 10, 1000):
        rows = {"memory": [[1, multiplier]]}
        assert proven_bound(graph, 5, Scope.FIXED_ORDER, rows, 1) <= 3
        assert proven_bound(graph, 5, Scope.STAGED, rows, 1) > 3  # infeasible: no bound is too high
    assert lower_bound(context_of(graph, 5, scope=Scope.FIXED_ORDER)).bound <= 3


def test_knapsack_check_is_exact_against_all_subsets() -> None:
    rng = np.random.default_rng(0)
    seen = {True: 0, False: 0}
    for _ in range(400):
        count = int(rng.integers(1, 8))
        sizes, weights = rng.integers(0, 9, count).tolist(), rng.integers(1, 4, count).tolist()
        room, right = int(rng.integers(-1, 25)), int(rng.integers(0, 10))
        subsets = [s for size in range(count + 1) for s in itertools.combinations(range(count), size)]
        holds = all(sum(weights[i] for i in s) <= right for s in subsets if sum(sizes[i] for i in s) <= room)
        assert is_valid(sizes, weights, room, right) == holds
        seen[holds] += 1
    assert min(seen.values()) > 50


def test_cuts_found_are_violated_and_valid() -> None:
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(100):
        sizes = rng.integers(1, 30, 8)
        room = int(sizes.sum()) // 2
        x = np.minimum(1.0, rng.random(8) * 1.6)
        for weights, right in knapsack_cuts(x, sizes, room):
            found += 1
            assert weights @ x > right
            for s in itertools.product((0, 1), repeat=8):
                assert np.dot(s, sizes) > room or np.dot(s, weights) <= right
    assert found > 20


def certified() -> tuple[Graph, BoundCertificate]:
    graph = training_chain(6)
    budget = least_budget(graph, "staged")
    result = lower_bound(context_of(graph, budget))
    assert result.bound > graph.total_cost
    return graph, result.certificate


def test_tampered_certificates_are_refused(tmp_path: Path) -> None:
    graph, proof = certified()
    file = tmp_path / "bound.json"
    proof.save(file)
    assert remat.verify_bound(graph, file) == remat.BoundCertificate.load(file).bound == proof.bound
    assert verify_bound(graph, replace(proof, bound=proof.bound - 1)) == proof.bound - 1  # weaker is still true
    with refused("another graph"):
        verify_bound(training_chain(5), proof)
    *memory, last = proof.multipliers["memory"][0]
    no_row, not_held = "does not exist|must be 5 integers", [[3, 0, 0, 1, 1]]  # nothing says that value 0 is not held
    for says, changes in [
        ("proves only", {"bound": proof.bound + 1}), ("proves only", {"budget_bytes": proof.budget_bytes + 100}),
        ("scope free", {"scope": Scope.FREE}), ("denominator", {"denominator": 0}),
        ("staged only", {"scope": Scope.FIXED_ORDER, "multipliers": {"once": [[2, 1, 1]]}}),
        ("proves only", {"multipliers": {}}),
        ("negative", {"multipliers": {**proof.multipliers, "memory": [[*memory, -last]]}}),
        ("does not follow", {"budget_bytes": 100, "multipliers": {"knapsack": not_held}}),
        *((no_row, {"multipliers": {"knapsack": [row]}})
          for row in ([3, 0, 0, 1, 0, 1, 1], [3, 0, 0, 0, 1], [3, 0, 99, 1, 1], [3, 0, 1])),
        (no_row, {"multipliers": {"memory": [[len(graph), 1]]}}),
    ]:  # fmt: skip
        with refused(says):
            verify_bound(graph, replace(proof, **changes))


def test_a_bound_is_refused_for_more_than_it_is_about() -> None:
    graph, proof = certified()
    assert verify_bound(graph, proof, budget=proof.budget_bytes - 1, scope="staged") == proof.bound
    with refused(rf"holds up to {proof.budget_bytes} B, not for 1kB"):
        verify_bound(graph, proof, budget="1kB")
    for scope in ("fixed_order", "free"):
        with refused(f"holds for scope staged, not for {scope}"):
            verify_bound(graph, proof, scope=scope)
    wide = lower_bound(context_of(graph, proof.budget_bytes, scope=Scope.FIXED_ORDER)).certificate
    assert verify_bound(graph, wide, scope="staged") == wide.bound
    free = lower_bound(context_of(graph, proof.budget_bytes, scope=Scope.FREE))
    assert (free.bound, free.certificate) == (graph.total_cost, None)


def test_several_outputs_may_be_there_when_they_are_made_again() -> None:
    """Value 0 is held while operation 0 makes value 1 again, so no row says that either is absent."""
    deps = {"a": ((), (0, 1)), "b": ((1,), (2,)), "c": ((2,), (3,)), "d": ((0, 1, 3), (4,))}
    operations = tuple(Operation(name, "", inputs, outputs, 1) for name, (inputs, outputs) in deps.items())
    graph = Graph("two", operations, tuple(Value(str(v), size) for v, size in enumerate((3, 1, 2, 2, 1))))
    with refused(r"uses the once row \[3, 0\], which does not exist"):
        proven_bound(graph, 8, Scope.STAGED, {"once": [[3, 0, 1]]}, 1)


def test_a_certificate_holds_for_every_implementation() -> None:
    """The operation costs 5, or 1 in its other implementation."""
    cheap = Implementation("cheap", (), (0,), 1)
    graph = Graph("choice", (Operation("a", "", (), (0,), 5, implementations=(cheap,)),), (Value("x", 2),))
    default = BoundCertificate("choice", graph.sha256(), 100, Scope.STAGED, 5, 1, {})
    with refused("claims a bound of 5, but proves only 1"):
        verify_bound(graph, default)
    assert verify_bound(graph.default(), replace(default, graph_sha256=graph.default().sha256())) == 5
    assert verify_bound(graph, replace(default, bound=1)) == 1


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 20))])
def test_no_forged_certificate_is_believed(seed: int) -> None:
    assert forged_certificates.check(seed) == "ok"


def test_a_certificate_made_by_hand_is_checked_as_a_file_is() -> None:
    graph, proof = certified()
    for change in (
        {"bound": float("nan")}, {"denominator": float("nan")}, {"budget_bytes": "6GB"}, {"scope": "best"},
        {"multipliers": {"memory": [[1, float("inf")]]}}, {"multipliers": {"memory": [[1, np.uint64(2**62)]]}},
        {"multipliers": {"memory": [[]]}}, {"multipliers": {"magic": [[1, 1]]}}, {"multipliers": None},
        {"bound": 10**5000}, {"bound": -(10**5000)}, {"denominator": 10**200}, {"budget_bytes": 10**5000},
        {"multipliers": {"memory": [[1, 10**5000]]}}, {"multipliers": {"memory": [[True, 1]]}}, {"graph_sha256": None},
        {"graph_name": None},
    ):  # fmt: skip
        with pytest.raises(InvalidInput) as caught:
            verify_bound(graph, replace(proof, **change))
        assert len(str(caught.value)) < 200


def test_bound_of_a_published_network_beats_its_record_within_the_recorded_optimum(instances: Path) -> None:
    graph = remat.load_graph(instances / "p100" / "vgg16_b176.json")
    result = lower_bound(context_of(graph, 8 << 30, seconds=600))
    assert 2_530_000_000 < result.bound <= 2_558_280_000  # records.json: proven optimal to 1e-4
