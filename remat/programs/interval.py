"""The retention-interval program (Bartan et al., MOCCASIN, ICML 2023) for CP-SAT.

Time is the triangle of staged slots: stage t has slots 0 .. t, and its slot k is the event t (t + 1) / 2 + k.
Operation k first runs at slot k of stage k and may run again at slot k of later stages, up to C times in all. Each run
of the producer gives a value one retention interval, from that event to an end of its own. Every run of a user must lie
in one of these intervals. A cumulative constraint keeps memory within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from remat.graph import Graph
from remat.programs.staged import last_stages, stages_of

LARGEST_SUM = 1 << 60  # of costs times runs, because CP-SAT refuses objectives that may overflow


def event(t: int, k: int) -> int:
    """Slot k of stage t, 0 <= k <= t."""
    return t * (t + 1) // 2 + k


@dataclass(frozen=True, slots=True, eq=False)
class IntervalModel:
    """A CP-SAT model and how to read it.

    Attributes:
        starts: [N] per operation its runs as (start variable or event, presence literal or True).
        limits: [N] largest number of runs, C.
        cost_unit: divides all costs, rounded down, so that a bound of the model times it is a bound.
        base: exact cost of the first runs.
        cost: of the repeats, in `cost_unit`, which the model minimises.
        room: memory that values and workspaces may take, in `memory_unit`; a variable if it may exceed the budget.
        memory_unit: bytes.
    """

    model: Any
    starts: Sequence[Sequence[tuple[Any, Any]]]
    limits: Sequence[int]
    cost_unit: int
    base: int
    cost: Any
    room: Any
    memory_unit: int

    def order(self, solver: Any) -> list[int]:
        """Computations of a solution, in order."""
        runs = []
        for k, own in enumerate(self.starts):
            for start, present in own:
                if present is True:
                    runs.append((start, k))
                elif solver.boolean_value(present):
                    runs.append((solver.value(start), k))
        return [k for _, k in sorted(runs)]


def run_stages(graph: Graph, order: Sequence[int]) -> list[list[int]]:
    """[N] stages in which each operation runs, for a staged order."""
    stages: list[list[int]] = [[] for _ in range(len(graph))]
    for k, stage in zip(order, stages_of(order), strict=True):
        stages[k].append(stage)
    return stages


def build_intervals(
    graph: Graph,
    budget_bytes: int,
    most_runs: int,
    hint: Sequence[Sequence[int]] | None = None,
    fixed: Collection[int] = (),
    most_bytes: int | None = None,
) -> IntervalModel | None:
    """The program with at most `most_runs` runs of each operation; None if one operation alone exceeds the budget.

    Args:
        hint: [N] stages in which each operation runs in a known plan.
        fixed: operations whose runs stay as in the hint, for neighbourhood search.
        most_bytes: lets the memory be a variable between the budget and this.
    """
    if graph.largest_working_set()[0] > budget_bytes:
        return None
    return _Builder(graph, budget_bytes, hint, fixed).build(most_runs, most_bytes)


class _Builder:
    """The program under construction; memory counts in units of the greatest common divisor of all sizes."""

    def __init__(
        self, graph: Graph, budget_bytes: int, hint: Sequence[Sequence[int]] | None, fixed: Collection[int]
    ) -> None:
        from ortools.sat.python import cp_model

        self.graph, self.hint, self.fixed = graph, hint, fixed
        self.domain_of = cp_model.Domain.from_values
        self.model: Any = cp_model.CpModel()
        self.last_run, self.last_held = last_stages(graph, [not op.run_once for op in graph.operations])
        self.unit = math.gcd(*(v.bytes for v in graph.values), *(op.workspace_bytes for op in graph.operations)) or 1
        self.room: Any = max(0, (budget_bytes - graph.fixed_bytes) // self.unit)
        self.starts: list[list[tuple[Any, Any]]] = []
        self.ends: dict[tuple[int, int], Any] = {}
        self.limits: list[int] = []
        self.intervals: list[Any] = []
        self.demands: list[int] = []

    def build(self, most_runs: int, most_bytes: int | None) -> IntervalModel:
        """Add the runs, the intervals of the values that they make, and the reads that need these intervals."""
        graph = self.graph
        if most_bytes is not None:
            self.room = self.model.new_int_var(self.room, -(-(most_bytes - graph.fixed_bytes) // self.unit), "room")
        cost_unit = 1
        while graph.total_cost // cost_unit * max(most_runs, 1) > LARGEST_SUM:
            cost_unit *= 2
        objective = []
        for k, op in enumerate(graph.operations):
            repeats = self._runs(k, most_runs)
            if op.cost:
                objective += [(op.cost // cost_unit) * present for present in repeats]
        for v in range(len(graph.values)):
            self._retain(v)
        for k, op in enumerate(graph.operations):
            for v in op.inputs:
                for start, present in self.starts[k]:
                    self._covered(v, start, present)
        self.model.add_cumulative(self.intervals, self.demands, self.room)
        self.model.minimize(sum(objective))
        base = graph.total_cost + sum(graph.operations[k].cost * (len(self.starts[k]) - 1) for k in self.fixed)
        return IntervalModel(
            self.model, self.starts, self.limits, cost_unit, base, sum(objective), self.room, self.unit
        )

    def _runs(self, k: int, most_runs: int) -> list[Any]:
        """Add the first run of operation `k` and its optional repeats; the presence literals of these repeats."""
        model, op = self.model, self.graph.operations[k]
        runs: list[tuple[Any, Any]] = [(event(k, k), True)]
        known = self.hint[k] if self.hint is not None else [k]
        repeats = []
        if k in self.fixed:
            runs += [(event(t, k), True) for t in known[1:]]
            self.limits.append(len(runs))
        else:
            limit = max(min(most_runs, self.last_run[k] - k + 1), len(known))
            self.limits.append(limit)
            for c in range(1, limit):
                domain = self.domain_of([event(t, k) for t in range(k + c, self.last_run[k] + 1)])
                start = model.new_int_var_from_domain(domain, f"s{k}_{c}")
                present = model.new_bool_var(f"p{k}_{c}")
                runs.append((start, present))
                repeats.append(present)
                model.add_hint(present, c < len(known))
                if c < len(known):
                    model.add_hint(start, event(known[c], k))
                if c > 1:  # repeats in order
                    model.add_implication(present, runs[c - 1][1])
                    model.add(runs[c - 1][0] < start).only_enforce_if(present)
        self.starts.append(runs)
        if op.workspace_bytes:
            for start, present in runs:
                self.demands.append(op.workspace_bytes // self.unit)
                self.intervals.append(_point(model, start, present))
        return repeats

    def _retain(self, v: int) -> None:
        """Add one interval for each run of the producer of `v`; it ends before the next one begins."""
        graph, model, value = self.graph, self.model, self.graph.values[v]
        p, n = graph.producer[v], len(graph)
        # A run that is needed for another output makes v too, if only for that moment.
        held = min(self.last_held[v], n - 1)
        last = event(n, 0) if value.keep else max(event(held, held), event(self.last_run[p], p))
        alone = len(graph.operations[p].outputs) == 1
        for c, (start, present) in enumerate(self.starts[p]):
            end = model.new_int_var(event(p, p), last, f"e{v}_{c}")
            self.ends[v, c] = end
            if c + 1 < len(self.starts[p]):
                next_start, next_present = self.starts[p][c + 1]
                _enforce(model.add(end < next_start) if alone else model.add(end <= next_start), next_present)
            if value.bytes:
                size = model.new_int_var(1, last - event(p, p) + 1, "")
                self.demands.append(value.bytes // self.unit)
                if present is True:
                    self.intervals.append(model.new_interval_var(start, size, end + 1, ""))
                else:
                    self.intervals.append(model.new_optional_interval_var(start, size, end + 1, present, ""))
            else:
                _enforce(model.add(end >= start), present)
        if value.keep:
            self._covered(v, event(n, 0), True)

    def _covered(self, v: int, when: Any, needed: Any) -> None:
        """Require, if `needed`, an interval of `v` that begins at `when` or earlier and does not end before it."""
        model, runs = self.model, self.starts[self.graph.producer[v]]
        choices = []
        for c, (start, present) in enumerate(runs):
            both_known = isinstance(start, int) and isinstance(when, int)
            if both_known and start > when:
                continue
            choice = model.new_bool_var("")
            if not both_known:
                model.add(start <= when).only_enforce_if(choice)
            model.add(self.ends[v, c] >= when).only_enforce_if(choice)
            if present is not True:
                model.add_implication(choice, present)
            choices.append(choice)
        model.add_bool_or(choices if needed is True else [*choices, needed.negated()])


def _enforce(constraint: Any, literal: Any) -> None:
    """Enforce a constraint of the model only if the literal holds; True is always."""
    if literal is not True:
        constraint.only_enforce_if(literal)


def _point(model: Any, start: Any, present: Any) -> Any:
    if present is True:
        return model.new_fixed_size_interval_var(start, 1, "")
    return model.new_optional_fixed_size_interval_var(start, 1, present, "")
