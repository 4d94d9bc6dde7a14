"""Some of what `make fuzz` tries by the thousand, cases that it found, and errors that it must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import fuzz
import numpy as np
import pytest
import random_graphs
from brute_force import random_step, with_implementations

from remat import Graph
from remat.bounds import window_integers
from remat.bounds.window_rows import Row, WindowRows
from remat.simulator import plain_peak

LIMITS = {"most": 24, "seconds": 0.15}


@pytest.mark.parametrize("seed", range(9))
def test_no_bound_is_above_a_plan(seed: int) -> None:
    outcome = fuzz.outcome_of("bounds", seed, **LIMITS)
    assert outcome.startswith("ok"), f"seed {seed}: {outcome}"


def too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates prove 1 % more than they should."""
    value = WindowRows.value

    def more(self: WindowRows, denominator: int, fixed: Mapping[Any, int] | None = None) -> int:
        proven = value(self, denominator, fixed or {})
        return proven + abs(proven) // 100 + (proven > 0)

    monkeypatch.setattr(WindowRows, "value", more)


def a_byte_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates lose one byte of the budget."""
    begin = WindowRows.__init__

    def with_less(self: WindowRows, graph: Graph, budget_bytes: int, *rest: Any) -> None:
        begin(self, graph, budget_bytes - 1, *rest)

    monkeypatch.setattr(WindowRows, "__init__", with_less)


def never_held_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of continuity forgets that a value may have been held before: R[k,m,p] - S[m+1,v] >= 0."""
    continuity = WindowRows.continuity

    def without(self: WindowRows, k: int, m: int, v: int) -> Row | None:
        row = continuity(self, k, m, v)
        return row and ([term for term in row[0] if term[1] != ("S", k, k, v)], row[1])

    monkeypatch.setattr(WindowRows, "continuity", without)


def rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS's bounds of the window relaxation in integers are 1 % too high."""
    least = window_integers.least_whole
    monkeypatch.setattr(window_integers, "least_whole", lambda bound, scale: 1 + least(1.01 * bound, scale))


@pytest.mark.parametrize(
    ("plant", "seeds"),
    [
        (too_high, [0, 1, 4, 9]), (a_byte_less, [1, 23, 35]), (never_held_on, [85, 256]),
        (rounded_up, [1, 15, 22]),
    ],
)  # fmt: skip
def test_planted_errors_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds found them first; one of each is enough, because the limits are in seconds."""
    plant(monkeypatch)
    outcomes = (fuzz.outcome_of("bounds", seed, **LIMITS) for seed in seeds)
    assert any(outcome.startswith(("above a plan", "failed", "forged")) for outcome in outcomes)


def test_the_campaign_adds_up_what_was_checked() -> None:
    assert fuzz.checks_of("ok") == {}
    assert fuzz.checks_of("ok: 3 bounds of windows against plans, 12 certificates verified") == {
        "bounds of windows against plans": 3, "certificates verified": 12,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_against_brute_force(seed: int) -> None:
    assert random_graphs.check(seed) == "ok"


@pytest.mark.parametrize(
    ("strategy", "scope", "seed", "most", "joint"),
    [
        ("portfolio", "free", 22, 24, False),  # the bound of A* was that of the moment: 182 and 170
        ("portfolio", "fixed_order", 22, 24, False),
        ("portfolio", "staged", 12, 30, False),  # A* found a plan or not
        ("portfolio", "staged", 1, 12, True), ("interval_cp", "staged", 3, 16, False),
        ("lp_rounding", "staged", 3, 30, False),
    ],
)  # fmt: skip
def test_deterministic_runs_do_not_hear_the_clock(strategy: str, scope: str, seed: int, most: int, joint: bool) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(most // 2, most + 1))
    graph = random_step(rng, n, min_bytes=1, max_bytes=9, min_cost=1, max_cost=9, workspace=2)
    graph = with_implementations(graph, rng) if joint else graph
    low = graph.largest_working_set()[0]
    budget = low + int((plain_peak(graph) - low) * rng.choice([0.2, 0.4, 0.6]))
    assert len(random_graphs.repeated(graph, budget, strategy, scope, seed, time_limit_s=4.0)) <= 1
