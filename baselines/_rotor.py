"""The dynamic program of Rotor: the cheapest persistent schedule of a chain of stages (Beaumont et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

F_ALL, F_CK = 0, -1  # what the program chose; a number above 0 is the stage at which a checkpoint follows


@dataclass(frozen=True, slots=True)
class Stages:
    """A chain of L stages; sizes in slots of memory, costs in the graph's unit.

    Attributes:
        forward, backward: [L] costs.
        inputs: [L + 1] slots of a stage's input; the last one is the chain's output.
        saved: [L] slots of all that a stage saves for its backward pass, its output included.
        gradients: [L + 1] slots of the gradient of a stage's input; the last one is the output's.
        forward_over, backward_over: [L] slots that a pass needs while it runs beyond what it reads and leaves.
    """

    forward: np.ndarray
    backward: np.ndarray
    inputs: np.ndarray
    saved: np.ndarray
    gradients: np.ndarray
    forward_over: np.ndarray
    backward_over: np.ndarray


@numba.njit(cache=True)
def _table(forward, backward, inputs, saved, gradients, forward_over, backward_over, slots):
    """(cost[s, t, m], choice[s, t, m]): stages s .. t reversed within m slots beside the input of s."""
    n = len(forward)
    cost = np.full((n, n, slots + 1), np.inf)
    choice = np.full((n, n, slots + 1), -2, dtype=np.int32)
    for length in range(n):
        for s in range(n - length):
            t = s + length
            # Both passes of stage s with all that it saves, and all after it in between.
            least = max(gradients[t + 1] + saved[s] + forward_over[s],
                        gradients[s] + gradients[s + 1] + saved[s] + backward_over[s])
            for m in range(least, slots + 1):
                if s == t:
                    cost[s, t, m] = forward[s] + backward[s]
                    choice[s, t, m] = 0
                elif m >= saved[s]:
                    after = cost[s + 1, t, m - saved[s]] + forward[s] + backward[s]
                    if after < cost[s, t, m]:
                        cost[s, t, m] = after
                        choice[s, t, m] = 0
            # Forward to stage k without saving, a checkpoint of its input, all from k on, then s .. k - 1.
            run, most = 0.0, gradients[t + 1] + inputs[s + 1] + forward_over[s]
            for k in range(s + 1, t + 1):
                run += forward[k - 1]
                if k > s + 1:
                    most = max(most, gradients[t + 1] + inputs[k - 1] + inputs[k] + forward_over[k - 1])
                for m in range(max(most, inputs[k]), slots + 1):
                    total = run + cost[k, t, m - inputs[k]] + cost[s, k - 1, m]
                    if total < cost[s, t, m]:
                        cost[s, t, m] = total
                        choice[s, t, m] = k
    return cost, choice
