"""Griewank and Walther's binomial checkpointing (REVOLVE), computed from its recursion."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import comb

import numpy as np

from baselines._forward import Forward
from baselines._segments import base_residency, hold_forward, hold_latest, plan_of_residency
from remat import Candidate, Problem, Skip, strategy


@strategy("griewank", baseline=True, ignores_budget=True)
def griewank(problem: Problem) -> Iterator[Candidate]:
    """REVOLVE's schedule with the fewest forward steps for s slots, s swept; exact for chains.

    Slots count the start state, the snapshots and the value being computed, as the budgets in Jain et al., MLSys
    2020, do. The schedule takes all steps as equally long and all states as equally large. Generalisation, not in
    the paper: on a graph that is not a chain the states are the articulation points, a step is the part between
    two of them, and a step is rebuilt once for its backward (the parameter ``states`` says so).

    Under ``accounting=published`` a chain's states are its articulation points, and the first of them is the
    start state but is never held: the artifact counted like this to get its published numbers.

    @article{griewank2000algorithm, title={Algorithm 799: Revolve: An Implementation of Checkpointing for the
    Reverse or Adjoint Mode of Computational Differentiation}, author={Griewank, Andreas and Walther, Andrea},
    journal={ACM Transactions on Mathematical Software}, volume={26}, number={1}, pages={19--45}, year={2000}}
    """
    forward = Forward.of(problem.graph)
    as_published = problem.accounting == "published" and forward.is_chain
    last = len(forward.operations) - 1
    if as_published:
        states, label = forward.articulation_points(), "chain without its ends"
    elif forward.is_chain:
        states, label = list(range(last + 1)), "chain"
    else:
        states, label = forward.articulation_points(), "articulation points (generalised)"
        states += [last] if states[-1] < last else []
    start = 0 if as_published else -1
    residency = _as_published if as_published else _residency
    for slots in _sweep(len(states) - start):
        S_TV = residency(forward, states, list(schedule(start, len(states) - 1, slots - 1)))
        try:
            plan = plan_of_residency(forward, S_TV, problem.accounting)
        except Skip:  # the plan of few slots on a long chain is quadratic; more slots give shorter plans
            continue
        yield Candidate(plan, {"slots": slots, "snapshots": slots - 2, "states": label})


def _sweep(most: int) -> list[int]:
    """Slots from 2 (start state and value being computed) to `most` (everything stored): all, or about 60 of them."""
    few = set(range(2, min(most, 34) + 1))
    return sorted(few | set(np.rint(np.geomspace(34, most, 30)).astype(int).tolist()) if most > 34 else few)


def _residency(forward: Forward, states: list[int], snapshots: list[tuple[int, int]]) -> np.ndarray:
    """S_TV of a schedule: state i is the forward position ``states[i]``, and step i leads to it."""
    graph, anchor = forward.graph, forward.anchor
    S_TV = hold_forward(forward, base_residency(forward))
    end = forward.region[-1]
    for step, state in enumerate(states):  # the values of a step stay while it is being reversed
        low = states[step - 1] if step else 0
        # The last step's backward may also start from the loss itself.
        (window,) = np.nonzero((anchor >= low) & ((anchor < state) | (step == len(states) - 1)))
        if not len(window):
            continue
        for k in forward.operations[low : state + 1]:
            for v in graph.operations[k].outputs:
                read = max(graph.users[v], default=0)
                if read > end:
                    # The last step is reversed right after the sweep that ran it.
                    first = k + 1 if step == len(states) - 1 else max(window[0], k) + 1
                    S_TV[first : min(window[-1], read) + 1, v] = True
    for state, last in snapshots:
        k = forward.operations[states[state]]
        first = k
        if last < len(states) - 1:
            (later,) = np.nonzero((anchor >= 0) & (anchor < states[last]))
            if not len(later):
                continue
            first = max(k, int(later[0]))
        for v in graph.operations[k].outputs:
            S_TV[first + 1 : max(graph.users[v], default=0) + 1, v] = True
    return S_TV


def _as_published(forward: Forward, states: list[int], snapshots: list[tuple[int, int]]) -> np.ndarray:
    """S_TV of the artifact: it holds the latest value, and each snapshot until its own gradient, and nothing else."""
    anchor = forward.anchor
    S_TV = hold_latest(forward, base_residency(forward))
    for state, last in snapshots:
        k = forward.operations[states[state]]
        first = k + 1
        if last < len(states) - 1:
            first = int(np.nonzero((anchor >= 0) & (anchor <= states[last]))[0][0])
        final = int(np.nonzero(anchor >= states[state])[0][-1])
        S_TV[first : final + 1, list(forward.graph.operations[k].outputs)] = True
    return S_TV


def reachable(checkpoints: int, repeats: int) -> int:
    """beta(c, r): the most steps that c checkpoints can reverse when no step is advanced more than r times."""
    return comb(checkpoints + repeats, checkpoints) if repeats >= 0 else 0


def repetitions(steps: int, checkpoints: int) -> int:
    """The r with beta(c, r - 1) < steps <= beta(c, r)."""
    return next(r for r in count() if reachable(checkpoints, r) >= steps)


def split(steps: int, checkpoints: int) -> int:
    """Number of steps to the next checkpoint: the middle of the optimal range.

    The minimisers of ``t(l, c) = min over k of k + t(l - k, c - 1) + t(k, c)`` form an interval, for which Griewank
    and Walther give a closed form. The schedule is therefore not unique; the middle (the upper one of two)
    reproduces the cost published for VGG19.
    """
    r = repetitions(steps, checkpoints)
    low = max(1, reachable(checkpoints, r - 2), steps - reachable(checkpoints - 1, r))
    high = min(reachable(checkpoints, r - 1), steps - reachable(checkpoints - 1, r - 1))
    return low + (high - low + 1) // 2


def schedule(start: int, end: int, checkpoints: int) -> Iterator[tuple[int, int]]:
    """Checkpoints stored while steps ``start + 1 .. end`` are reversed from state `start`, which is held.

    Yields (state, last): `state` is stored on the sweep that first reverses step `last`.
    """
    todo = [(start, end, checkpoints)]
    while todo:
        low, high, c = todo.pop()
        if high - low > 1 and c > 1:
            middle = low + split(high - low, c)
            yield middle, high
            todo += [(low, middle, c), (middle, high, c - 1)]
