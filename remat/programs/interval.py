"""The retention-interval program (Bartan et al., MOCCASIN, ICML 2023) for CP-SAT.

Time is the triangle of staged slots: stage t has slots 0 .. t, slot k of it is the event
t (t + 1) / 2 + k. Operation k runs first at slot k of stage k and may run again, up to C times in all,
at slot k of later stages. Each run of its producer gives a value one retention interval, from that event
to an end of its own; every run of a user must lie in one of them; a cumulative constraint keeps memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from remat.graph import Graph
from remat.programs.staged import last_stages

LARGEST_SUM = 1 << 60  # of costs times runs; CP-SAT refuses objectives that may overflow


def event(t: int, k: int) -> int:
    """Slot k of stage t, 0 <= k <= t."""
    return t * (t + 1) // 2 + k


@dataclass(frozen=True, slots=True, eq=False)
class IntervalModel:
    """A CP-SAT model and how to read it.

    Attributes:
        starts: [N] per operation its runs as (start variable or event, presence literal or True).
        limits: [N] largest number of runs, C.
        cost_unit: costs are divided by it, rounded down, so that a bound times it is a bound.
        base: cost of the first runs, exact.
    """

    model: Any
    starts: Sequence[Sequence[tuple[Any, Any]]]
    ends: dict[tuple[int, int], Any]
    limits: Sequence[int]
    cost_unit: int
    base: int

    def order(self, solver: Any) -> list[int]:
        """Computations of a solution, in order."""
        runs = []
        for k, mine in enumerate(self.starts):
            for start, present in mine:
                if present is True:
                    runs.append((start, k))
                elif solver.boolean_value(present):
                    runs.append((solver.value(start), k))
        return [k for _, k in sorted(runs)]


def run_stages(graph: Graph, order: Sequence[int]) -> list[list[int]]:
    """[N] the stages in which each operation runs in a staged order."""
    stages: list[list[int]] = [[] for _ in range(len(graph))]
    stage = 0
    for k in order:
        stages[k].append(stage)
        stage += k == stage
    return stages


def build_intervals(
    graph: Graph,
    budget_bytes: int,
    most_runs: int,
    hint: Sequence[Sequence[int]] | None = None,
    fixed: Collection[int] = (),
) -> IntervalModel | None:
    """The program with at most `most_runs` runs of each operation; None if a single operation exceeds the budget.

    Args:
        hint: [N] stages in which each operation runs in a known plan.
        fixed: operations whose runs stay as in the hint (neighbourhood search).
    """
    from ortools.sat.python import cp_model

    n = len(graph)
    model = cp_model.CpModel()
    last_run, last_held = last_stages(graph, [not op.run_once for op in graph.operations])
    unit = math.gcd(*(v.bytes for v in graph.values), *(op.workspace_bytes for op in graph.operations)) or 1
    capacity = (budget_bytes - graph.fixed_bytes) // unit
    if capacity < 0 or graph.largest_working_set()[0] > budget_bytes:
        return None
    total = graph.total_cost
    cost_unit = 1
    while total // cost_unit * max(most_runs, 1) > LARGEST_SUM:
        cost_unit *= 2
    end_of_time = event(n, 0)
    starts: list[list[tuple[Any, Any]]] = []
    limits: list[int] = []
    objective = []
    intervals: list[Any] = []
    demands: list[int] = []
    for k, op in enumerate(graph.operations):
        mine: list[tuple[Any, Any]] = [(event(k, k), True)]
        known = hint[k] if hint is not None else [k]
        limit = min(most_runs, last_run[k] - k + 1)
        if k in fixed:
            mine += [(event(t, k), True) for t in known[1:]]
            limits.append(len(mine))
        else:
            limit = max(limit, len(known))
            limits.append(limit)
            for c in range(1, limit):
                domain = cp_model.Domain.from_values([event(t, k) for t in range(k + c, last_run[k] + 1)])
                start = model.new_int_var_from_domain(domain, f"s{k}_{c}")
                present = model.new_bool_var(f"p{k}_{c}")
                mine.append((start, present))
                if op.cost:
                    objective.append((op.cost // cost_unit) * present)
                model.add_hint(present, c < len(known))
                if c < len(known):
                    model.add_hint(start, event(known[c], k))
                if c > 1:
                    model.add_implication(present, mine[c - 1][1])
                    model.add(mine[c - 1][0] < start).only_enforce_if(present)
        starts.append(mine)
        if op.workspace_bytes:
            for start, present in mine:
                demands.append(op.workspace_bytes // unit)
                intervals.append(_point(model, start, present))
    ends: dict[tuple[int, int], Any] = {}
    for v, value in enumerate(graph.values):
        p = graph.producer[v]
        # A run for the sake of another output gives v too, if only for that moment.
        last = max(event(min(last_held[v], n - 1), min(last_held[v], n - 1)), event(last_run[p], p))
        last = end_of_time if value.keep else last
        alone = len(graph.operations[p].outputs) == 1
        for c, (start, present) in enumerate(starts[p]):
            end = model.new_int_var(event(p, p), last, f"e{v}_{c}")
            ends[v, c] = end
            if c + 1 < len(starts[p]):
                after, there = starts[p][c + 1]
                later = model.add(end < after) if alone else model.add(end <= after)
                if there is not True:
                    later.only_enforce_if(there)
            if value.bytes:
                size = model.new_int_var(1, last - event(p, p) + 1, "")
                demands.append(value.bytes // unit)
                if present is True:
                    intervals.append(model.new_interval_var(start, size, end + 1, ""))
                else:
                    intervals.append(model.new_optional_interval_var(start, size, end + 1, present, ""))
            elif present is True:
                model.add(end >= start)
            else:
                model.add(end >= start).only_enforce_if(present)
        if value.keep:
            _covered(model, starts[p], [ends[v, c] for c in range(len(starts[p]))], end_of_time, True)
    for k, op in enumerate(graph.operations):
        for v in op.inputs:
            p = graph.producer[v]
            for start, present in starts[k]:
                _covered(model, starts[p], [ends[v, c] for c in range(len(starts[p]))], start, present)
    model.add_cumulative(intervals, demands, max(capacity, 0))
    model.minimize(sum(objective))
    base = total + sum(graph.operations[k].cost * (len(starts[k]) - 1) for k in fixed)
    return IntervalModel(model, starts, ends, limits, cost_unit, base)


def _point(model: Any, start: Any, present: Any) -> Any:
    if present is True:
        return model.new_fixed_size_interval_var(start, 1, "")
    return model.new_optional_fixed_size_interval_var(start, 1, present, "")


def _covered(model: Any, runs: Sequence[tuple[Any, Any]], ends: Sequence[Any], when: Any, needed: Any) -> None:
    """If `needed`, some run starts no later than `when` and its interval ends no earlier."""
    choices = []
    for (start, present), end in zip(runs, ends, strict=True):
        if isinstance(start, int) and isinstance(when, int) and start > when:
            continue
        chosen = model.new_bool_var("")
        if not (isinstance(start, int) and isinstance(when, int)):
            model.add(start <= when).only_enforce_if(chosen)
        model.add(end >= when).only_enforce_if(chosen)
        if present is not True:
            model.add_implication(chosen, present)
        choices.append(chosen)
    if needed is True:
        model.add_bool_or(choices)
    else:
        model.add_bool_or([*choices, needed.negated()])
