"""The only judge: replays a plan on its graph and measures its exact cost and memory.

It knows no solver. Time is linear in the number of steps and of inputs read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat.errors import InvalidPlan
from remat.graph import Graph, check_graph
from remat.implementation import Implementation
from remat.plan import FREE, Plan, check_plan, implementation_of
from remat.units import format_size


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trace:
    """Cost and memory of a plan, computation by computation (C computations).

    Attributes:
        cost: sum of the costs of all computations, in the graph's `cost_unit`.
        peak_bytes: most bytes held while any operation runs, or at the end; `fixed_bytes` included.
        peak_computation: index of the first computation that reaches the peak, -1 if there is no computation.
        order: [C] operation computed.
        running_bytes: [C] int64, held while it runs: residents, its outputs, its workspace, fixed bytes.
        resident_bytes: [C] int64, held after it ran, before the frees that follow it.
        end_cost: [C] int64, cumulative cost at its end; Python integers if 64 bits are too few.
        computations: [N] how often each operation is computed.
        final_bytes: held when the plan ends.
    """

    cost: int
    peak_bytes: int
    peak_computation: int
    order: np.ndarray
    running_bytes: np.ndarray
    resident_bytes: np.ndarray
    end_cost: np.ndarray
    computations: np.ndarray
    final_bytes: int

    def __repr__(self) -> str:
        return f"<Trace: {len(self.order)} computations, cost {self.cost}, peak {format_size(self.peak_bytes)}>"


# [N] for each operation, the (input, output) pairs in which the output may reuse the input's storage
Sharing = Sequence[Sequence[tuple[int, int]]]


def simulate(graph: Graph, plan: Plan, sharing: Sharing = ()) -> Trace:
    """Replay `plan` on `graph`.

    Args:
        sharing: pairs in which the output is written over an input that the plan frees right after the operation,
            as some frameworks do; the two count once while it runs. Each storage is reused at most once.

    Raises:
        InvalidPlan: with the step and the reason: an input is not resident, a single-output operation is
            recomputed while its output is resident, a freed value is not resident, an operation is never
            computed (or repeated though it must run once), a value with `keep` is missing at the end.
    """
    _check_both(graph, plan)
    n, n_values, size = len(graph), len(graph.values), [value.bytes for value in graph.values]
    chosen, call_of = _chosen_calls(graph, plan)
    calls = [*graph.operations, *chosen]
    output_bytes = [sum(size[v] for v in call.outputs) for call in calls]
    overwritten = {j: each.overwrites for j, each in enumerate(chosen, n) if each.overwrites is not None}
    resident, count, held, elapsed = bytearray(n_values), [0] * n, graph.fixed_bytes, 0
    running, after, elapsed_at = list[int](), list[int](), list[int]()
    saved = _reused_bytes(plan, sharing, size) if any(sharing) else {}
    for step, (kind, i, j) in enumerate(zip(plan.kinds.tolist(), plan.ids.tolist(), call_of, strict=True)):
        if kind == FREE:
            if not 0 <= i < n_values:
                raise InvalidPlan(f"frees value {i}, which does not exist", step)
            if not resident[i]:
                raise InvalidPlan(f"frees value {_named(graph, i)}, which is not resident", step)
            resident[i] = 0
            held -= size[i]
            continue
        if not 0 <= i < n:
            raise InvalidPlan(f"computes operation {i}, which does not exist", step)
        call = calls[j]
        for v in call.inputs:
            if not resident[v]:
                raise InvalidPlan(f"{_computes(graph, i)}, whose input {_named(graph, v)} is not resident", step)
        during = held + output_bytes[j]
        if j in overwritten:
            during -= size[overwritten[j]]  # the first output takes its storage
            resident[overwritten[j]] = 0
        held = during
        during -= saved.get(step, 0)
        for v in call.outputs:
            if resident[v]:
                if len(call.outputs) == 1:
                    raise InvalidPlan(f"{_computes(graph, i)}, whose output is still resident", step)
                held -= size[v]  # both copies count while it runs; the duplicate is freed now
            resident[v] = 1
        count[i] += 1
        elapsed += call.cost
        running.append(during + call.workspace_bytes)
        after.append(held - saved.get(step, 0))
        elapsed_at.append(elapsed)
    _check_end(graph, count, resident)
    at = max(range(len(running)), key=running.__getitem__, default=-1)
    return Trace(
        elapsed, running[at] if running else held, at, plan.order, np.array(running, dtype=np.int64),
        np.array(after, dtype=np.int64), np.array(elapsed_at, dtype=np.int64 if elapsed < 2**63 else object),
        np.array(count, dtype=np.int64), held,
    )  # fmt: skip


def _check_both(graph: Graph, plan: Plan) -> None:
    check_graph(graph)
    check_plan(plan)
    if plan.graph_sha256 != graph.sha256():
        raise InvalidPlan(f"the plan was made for another graph ('{plan.graph_name}'), not for this '{graph.name}'")


def plain_peak(graph: Graph) -> int:
    """Peak in bytes of running every operation once, in the graph's order."""
    return simulate(graph, Plan.from_order(graph, range(len(graph)))).peak_bytes


def load_and_simulate(path: str | os.PathLike[str], graph: Graph) -> tuple[Plan, Trace]:
    """The plan in a file and its trace on `graph`.

    Raises:
        InvalidPlan: names the file and the step: it cannot be read, is for another graph, or cannot be executed.
    """
    plan = Plan.load(path, graph)
    try:
        return plan, simulate(graph, plan)
    except InvalidPlan as error:
        raise error.of_file(os.fspath(path)) from None


def _chosen_calls(graph: Graph, plan: Plan) -> tuple[list[Implementation], list[int]]:
    """(implementations that the plan chooses instead of the default, [steps] call of each compute step).

    Call k < N is operation k by default; the chosen implementations follow. A free has its value in place of a call.
    """
    chosen: list[Implementation] = []
    call_of = plan.ids.tolist()
    number: dict[tuple[int, str], int] = {}
    for step, (kind, k, name) in enumerate(
        zip(plan.kinds.tolist(), plan.ids.tolist(), plan.implementations, strict=False)
    ):
        if kind == FREE or not name:
            continue
        if (k, name) not in number:
            number[k, name] = len(graph) + len(chosen)
            chosen.append(implementation_of(graph, k, name, step))
        call_of[step] = number[k, name]
    return chosen, call_of


def _check_end(graph: Graph, count: Sequence[int], resident: bytearray) -> None:
    """Raise `InvalidPlan` if an operation ran too rarely or too often, or a value with `keep` is missing."""
    for i, times in enumerate(count):
        if times == 0:
            raise InvalidPlan(f"never {_computes(graph, i)}")
        if times > 1 and graph.operations[i].run_once:
            raise InvalidPlan(f"{_computes(graph, i)} {times} times; it must run exactly once")
    for v, value in enumerate(graph.values):
        if value.keep and not resident[v]:
            raise InvalidPlan(f"ends without value {_named(graph, v)}, which must be kept")


def _computes(graph: Graph, i: int) -> str:
    return f"computes operation {i} ({graph.operations[i].name})"


def _named(graph: Graph, v: int) -> str:
    return f"{v} ({graph.values[v].name})"


def _reused_bytes(plan: Plan, sharing: Sharing, size: Sequence[int]) -> dict[int, int]:
    """Step of a computation -> bytes of its outputs that are written over inputs freed before the next computation."""
    saved: dict[int, int] = {}
    freed: set[int] = set()
    kinds, ids = plan.kinds.tolist(), plan.ids.tolist()
    for step in range(len(kinds) - 1, -1, -1):
        if kinds[step] == FREE:
            freed.add(ids[step])
            continue
        used: set[int] = set()
        for source, target in sharing[ids[step]]:
            if source in freed and source not in used and target not in used and target not in freed:
                used |= {source, target}
                saved[step] = saved.get(step, 0) + min(size[source], size[target])
        freed = set()
    return saved
