"""The cheapest persistent schedule of a chain of stages, by the dynamic program of Beaumont et al. (2019)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numba
import numpy as np

NONE = -(1 << 15)  # choice: no schedule fits. Above 0: the stage before which to checkpoint; else minus an option


class Stages(NamedTuple):
    """A chain of L stages. Costs are in the graph's unit, all else in bytes or in slots of memory.

    A stage may have several options of what to save for its backward pass. Then the attributes marked with (K) have a
    second axis of K options; those that do not exist have the backward cost infinity.

    Attributes:
        forward, backward (K): [L] costs of a pass.
        inputs: [L] of a stage's input; 0 for the first one, which is always there.
        saved (K): [L] of all that a stage saves for its backward pass, its output included.
        gradients: [L + 1] of the gradients that a backward pass hands to the one before it; [L] is what the last gets.
        kept: [L + 1] of what the backward passes from a stage on leave to the end.
        saving (K), running, returning (K): [L] most in a forward pass that saves all, in one that saves its output
            only, and in a backward pass with what it reads; beyond the stage's input.
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
        return self._replace(**{name: -(-getattr(self, name) // unit) for name in sizes})


class Schedules:
    """The cheapest schedules of a chain within each number of slots up to a largest one."""

    def __init__(self, stages: Stages, slots: int) -> None:
        self.stages, self.slots, n = stages, slots, len(stages.forward)
        names = ("backward", "saved", "saving", "returning")
        by_option = {name: getattr(stages, name).reshape(n, -1) for name in names}
        costs = {"forward": stages.forward.astype(np.float64), "backward": by_option["backward"].astype(np.float64)}
        self.saved = by_option["saved"]
        self.choice = schedule_table(stages._replace(**by_option | costs), slots)

    def within(self, slots: int) -> list[tuple[str, int, int]] | None:
        """Passes (kind, stage, option) in the cheapest order within so many slots; None if none fits.

        Kinds, with the paper's names: ``check`` (F_ck) runs forward and keeps the stage's input, ``run`` (F_empty)
        drops it afterwards, ``save`` (F_all) saves all, ``return`` (B) is the backward pass.

        Persistent: a checkpoint stays until the backward pass of its stage has used it. Among such schedules the
        program is exact (their theorem 1): it tries every stage before which the first checkpoint may lie.
        """
        if self.choice[0, -1, slots] == NONE:
            return None
        return [*self._passes(slots)]

    def _passes(self, slots: int) -> Iterator[tuple[str, int, int]]:
        todo: list[tuple[int, int, int]] = [(0, len(self.stages.forward) - 1, slots)]
        while todo:
            s, t, m = todo.pop()
            if t < 0:  # a backward pass
                yield "return", s, m
                continue
            k = int(self.choice[s, t, m])
            if k <= 0:
                yield "save", s, -k
                todo.append((s, -1, -k))
                if s < t:
                    todo.append((s + 1, t, m - int(self.saved[s, -k])))
                continue
            yield "check", s, 0
            for j in range(s + 1, k):
                yield "run", j, 0
            todo += [(s, k - 1, m), (k, t, m - int(self.stages.inputs[k]))]


@numba.njit(cache=True)
def schedule_table(stages, slots):
    """choice[s, t, m] for stages s .. t within m slots beside the input of s."""
    forward, backward, inputs, saved, gradients, kept, saving, running, returning = stages
    n = len(forward)
    cost = np.full((n, n, slots + 1), np.inf, dtype=np.float64)
    choice = np.full((n, n, slots + 1), NONE, dtype=np.int16)
    nothing = np.zeros(slots + 1, dtype=np.float64)
    for length in range(n):
        for s in range(n - length):
            t = s + length
            own, chosen = cost[s, t], choice[s, t]
            after = gradients[t + 1] + kept[t + 1]
            for option in range(saved.shape[1]):
                both, size = forward[s] + backward[s, option], saved[s, option] if s < t else 0
                if both == np.inf:
                    continue
                rest = cost[s + 1, t] if s < t else nothing
                least = max(after + saving[s, option], kept[s + 1] + returning[s, option], size)
                for m in range(least, slots + 1):
                    total = rest[m - size] + both
                    if total < own[m]:
                        own[m] = total
                        chosen[m] = -option
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
    return choice
