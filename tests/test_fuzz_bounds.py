"""A few of the bounds that `make fuzz` compares with plans by the thousand, and errors that it must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import fuzz
import pytest

from remat import Graph
from remat.bounds import window_integers
from remat.bounds.window_rows import Row, WindowRows

LIMITS = {"most": 24, "seconds": 0.15}


@pytest.mark.parametrize("seed", range(16))
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
        (too_high, [1, 4, 8, 9]), (a_byte_less, [11, 17, 35]), (never_held_on, [84, 113, 138, 219]),
        (rounded_up, [8, 21, 27]),
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
