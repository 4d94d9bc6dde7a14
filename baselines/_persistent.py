"""The cheapest persistent schedule of a chain of stages, by the dynamic program of Beaumont et al. (2019)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numba
import numpy as np

SAVE = 0  # choice: run the stage with all that its backward pass reads; above 0: the stage before which to checkpoint


@dataclass(frozen=True, slots=True)
class Stages:
    """A chain of L stages. Costs are in the graph's unit, all else in bytes or in slots of memory.

    Attributes:
        forward, backward: [L] costs of a pass.
        inputs: [L] of a stage's input; 0 for the first one, which is always there.
        saved: [L] of all that a stage saves for its backward pass, its output included.
        gradients: [L + 1] of the gradients that a backward pass hands to the one before it; [L] is what the last gets.
        kept: [L + 1] of what the backward passes from a stage on leave to the end.
        saving, running, returning: [L] most in a forward pass that saves all, in one that saves its output only, and
            in a backward pass with what it reads; beyond the stage's input.
    """

    forward: np.ndarray
    backward: np.ndarray
    inputs: np.ndarray
    saved: np.ndarray
    gradients: np.ndarray
    kept: np.ndarray
    saving: np.ndarray
    running: np.ndarray
    returning: np.ndarray

    def in_slots(self, unit: int) -> Stages:
        """The stages with sizes in slots of so many bytes, rounded up."""
        sizes = ("inputs", "saved", "gradients", "kept", "saving", "running", "returning")
        return replace(self, **{name: -(-getattr(self, name) // unit) for name in sizes})


def cheapest_schedule(stages: Stages, slots: int) -> list[tuple[str, int]] | None:
    """Passes (kind, stage) in the cheapest order within so many slots; None if none fits.

    Kinds, with the paper's names: ``check`` (F_ck) runs forward and keeps the stage's input, ``run`` (F_empty) drops it
    afterwards, ``save`` (F_all) saves all, ``return`` (B) is the backward pass.

    Persistent: a checkpoint stays until the backward pass of its stage has used it. Among such schedules the program is
    exact (their theorem 1): it tries every stage before which the first checkpoint may lie.
    """
    choice, feasible = _table(
        stages.forward.astype(np.float64), stages.backward.astype(np.float64), stages.inputs, stages.saved,
        stages.gradients, stages.kept, stages.saving, stages.running, stages.returning, slots,
    )  # fmt: skip
    return [*_passes(stages, choice, slots)] if feasible else None


def _passes(stages: Stages, choice: np.ndarray, slots: int) -> Iterator[tuple[str, int]]:
    todo: list[tuple[int, int, int] | int] = [(0, len(stages.forward) - 1, slots)]
    while todo:
        part = todo.pop()
        if isinstance(part, int):
            yield "return", part
            continue
        s, t, m = part
        k = int(choice[s, t, m])
        if k == SAVE:
            yield "save", s
            todo.append(s)
            if s < t:
                todo.append((s + 1, t, m - int(stages.saved[s])))
            continue
        yield "check", s
        for j in range(s + 1, k):
            yield "run", j
        todo += [(s, k - 1, m), (k, t, m - int(stages.inputs[k]))]


@numba.njit(cache=True)
def _table(forward, backward, inputs, saved, gradients, kept, saving, running, returning, slots):
    """(choice[s, t, m] for stages s .. t within m slots beside the input of s; whether all fit within `slots`)."""
    n = len(forward)
    cost = np.full((n, n, slots + 1), np.inf, dtype=np.float64)
    choice = np.full((n, n, slots + 1), -1, dtype=np.int16)
    for length in range(n):
        for s in range(n - length):
            t = s + length
            own, chosen = cost[s, t], choice[s, t]
            after = gradients[t + 1] + kept[t + 1]
            least = max(after + saving[s], kept[s + 1] + returning[s])
            both = forward[s] + backward[s]
            if s == t:
                for m in range(least, slots + 1):
                    own[m] = both
                    chosen[m] = SAVE
                continue
            rest = cost[s + 1, t]
            for m in range(max(least, saved[s]), slots + 1):
                own[m] = rest[m - saved[s]] + both
                chosen[m] = SAVE
            run, most = 0.0, 0
            for k in range(s + 1, t + 1):
                run += forward[k - 1]
                most = max(most, after + running[k - 1] + (inputs[k - 1] if k - 1 > s else 0))
                right, left, size = cost[k, t], cost[s, k - 1], inputs[k]
                for m in range(max(most, size), slots + 1):
                    total = run + right[m - size] + left[m]
                    if total < own[m]:
                        own[m] = total
                        chosen[m] = k
    return choice, np.isfinite(cost[0, n - 1, slots])
