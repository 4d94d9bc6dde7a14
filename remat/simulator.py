"""The only judge: replays a plan on its graph and measures its exact cost and memory.

It knows no solver. Time is linear in the number of steps and of inputs read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from remat.errors import HostFull, InvalidInput, InvalidPlan
from remat.graph import Graph, Operation, check_graph, is_held_outside
from remat.implementation import DEFAULT, Implementation
from remat.link import Link, parse_link
from remat.plan import COMPUTE, DROP, FREE, OFFLOAD, PREFETCH, Plan, check_plan, implementation_of
from remat.units import format_size

NO_COPIES = np.empty((0, 4), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trace:
    """Cost and memory of a plan, computation by computation (C computations).

    Attributes:
        cost: sum of the costs of all computations, in the graph's `cost_unit`; with copies the makespan, in ns.
        peak_bytes: most bytes held on the device while any operation runs, where a copy from the host takes its place,
            or at the end; `fixed_bytes` included. Counted on the order of the steps: it does not depend on any time.
        peak_computation: index of the first computation that reaches the peak, or that a copy which does follows; -1
            if there is no computation.
        order: [C] operation computed.
        running_bytes: [C] int64, held while it runs: residents, its outputs, its workspace, fixed bytes.
        resident_bytes: [C] int64, held after it ran, before the frees that follow it.
        end_cost: [C] int64, cumulative cost at its end, with copies the time; Python integers if 64 bits are too few.
        computations: [N] how often each operation is computed.
        final_bytes: held when the plan ends.
        host_peak_bytes: most bytes of copies on the host.
        copies: [copies, 4] int64, (`OFFLOAD` or `PREFETCH`, value, start, end) in ns; Python integers if need be.
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
    host_peak_bytes: int = 0
    copies: np.ndarray = field(default_factory=lambda: NO_COPIES)

    def copies_of(self, kind: int) -> np.ndarray:
        """[copies, 3] int64, (value, start, end) in ns of the copies of a direction: `OFFLOAD` or `PREFETCH`."""
        return self.copies[self.copies[:, 0] == kind, 1:]

    def __repr__(self) -> str:
        return f"<Trace: {len(self.order)} computations, cost {self.cost}, peak {format_size(self.peak_bytes)}>"


# [N] for each operation, the (input, output) pairs in which the output may reuse the input's storage
Sharing = Sequence[Sequence[tuple[int, int]]]


def simulate(graph: Graph, plan: Plan, sharing: Sharing = (), *, link: Link | str | None = None) -> Trace:
    """Replay `plan` on `graph`.

    Args:
        sharing: pairs in which the output is written over an input that the plan frees right after the operation,
            as some frameworks do; the two count once while it runs. Each storage is reused at most once.
        link: that copies go over; by default the one that the plan was made for.

    Raises:
        InvalidPlan: with the step and the reason: an input is not resident, a single-output operation is recomputed
            while its output is resident, a freed value is not resident, an operation is never computed (or repeated
            though it must run once), a value with `keep` is missing at the end; a value is copied from where it is not,
            or the host has no room for it.
        InvalidInput: the plan copies, but there is no link, or costs are not in ns; `sharing` does not fit the graph.
    """
    _check_both(graph, plan)
    check_sharing(graph, sharing)
    n, size = len(graph), [value.bytes for value in graph.values]
    chosen, call_of = _chosen_calls(graph, plan)
    calls = [*graph.operations, *chosen]
    output_bytes = [sum(size[v] for v in call.outputs) for call in calls]
    overwritten = {j: each.overwrites for j, each in enumerate(chosen, n) if each.overwrites is not None}
    resident, count, held, elapsed = bytearray(len(size)), [0] * n, graph.fixed_bytes, 0
    running, after, elapsed_at = list[int](), list[int](), list[int]()
    reused = reused_storages(plan, sharing) if any(sharing) else {}
    saved = {step: sum(min(size[v], size[w]) for v, w in pairs) for step, pairs in reused.items()}
    streams = Streams(graph, parse_link(link) or plan.link) if plan.has_copies else None
    for step, (kind, i, j) in enumerate(zip(plan.kinds.tolist(), plan.ids.tolist(), call_of, strict=True)):
        if kind != COMPUTE:
            _check_movable(graph, resident, kind, i, step)
            if streams is not None:
                streams.move(kind, i, step, held, len(running))
            if kind in (FREE, PREFETCH):
                resident[i] = kind == PREFETCH
                held += size[i] if resident[i] else -size[i]
            continue
        if not 0 <= i < n:
            raise InvalidPlan(f"computes operation {i}, which does not exist", step)
        call = calls[j]
        if not all(map(resident.__getitem__, call.inputs)):
            raise _without_input(graph, i, call.inputs, resident, step)
        elapsed = elapsed + call.cost if streams is None else streams.compute(call, resident, reused.get(step, ()))
        held += output_bytes[j]
        if j in overwritten:
            held -= size[overwritten[j]]  # the first output takes its storage
            resident[overwritten[j]] = 0
        during = held - saved.get(step, 0)
        for v in call.outputs:
            if resident[v]:
                if len(call.outputs) == 1:
                    raise InvalidPlan(f"{_computes(graph, i)}, whose output is still resident", step)
                held -= size[v]  # both copies count while it runs; the duplicate is freed now
            resident[v] = 1
        count[i] += 1
        running.append(during + call.workspace_bytes)
        after.append(held - saved.get(step, 0))
        elapsed_at.append(elapsed)
    _check_end(graph, count, resident)
    trace = _trace(plan, running, after, elapsed_at, count, held)
    return trace if streams is None else streams.completed(trace)


def _trace(
    plan: Plan, running: list[int], after: list[int], elapsed_at: list[int], count: list[int], held: int
) -> Trace:
    """What was noted for each computation, and for each operation, as arrays."""
    cost, at = elapsed_at[-1] if elapsed_at else 0, max(range(len(running)), key=running.__getitem__, default=-1)
    return Trace(
        cost, running[at] if running else held, at, plan.order, np.array(running, dtype=np.int64),
        np.array(after, dtype=np.int64), np.array(elapsed_at, dtype=np.int64 if cost < 2**63 else object),
        np.array(count, dtype=np.int64), held,
    )  # fmt: skip


class Streams:
    """The time of a plan with copies, and its memory on the host, in exact integers.

    Computations, copies to the host and copies from it are three streams, each in the order of the plan. A computation
    waits for the copies of its inputs. A copy waits for all that the computations before it in the plan waited for, and
    for the copy that made what it copies. The stream of computations waits for a copy before memory that it reads or
    writes is given back, on either side.
    """

    def __init__(self, graph: Graph, link: Link | None):
        if link is None:
            raise InvalidInput("the plan copies values to the host: its cost needs a link, e.g. link=Link('12GB/s')")
        if graph.cost_unit != "ns":
            raise InvalidInput(f"a link needs costs in ns; those of '{graph.name}' are in {graph.cost_unit}")
        self.graph, self.link = graph, link
        self.time = self.out_time = self.in_time = 0  # when each stream has ended what it was given so far
        self.out_end: dict[int, int] = {}  # [value on the host]
        self.in_end: dict[int, int] = {}  # [value on the device that came from the host]
        self.host_bytes = self.host_peak_bytes = 0
        self.peak = (0, -1)  # most bytes held on the device when a copy took its place, after which computation
        self.copies: list[tuple[int, int, int, int]] = []

    def compute(self, call: Operation | Implementation, resident: bytearray, reused: Sequence[tuple[int, int]]) -> int:
        """Run an operation, when it ends; `reused` are pairs (input, output), the output written over the input."""
        waits = [self.in_end.get(v, 0) for v in call.inputs]
        written = [*(v for v in call.outputs if resident[v]), *(source for source, _ in reused)]
        if isinstance(call, Implementation) and call.overwrites is not None:
            written.append(call.overwrites)
        waits += [end.get(v, 0) for v in written for end in (self.in_end, self.out_end)]
        self.time = max([self.time, *waits]) + call.cost
        for v in call.outputs:
            self.in_end.pop(v, None)
        return self.time

    def move(self, kind: int, v: int, step: int, held: int, n_computed: int) -> None:
        """Copy or free a value; `held` bytes are on the device before."""
        size, ends = self.graph.values[v].bytes, (self.out_end.get(v, 0), self.in_end.get(v, 0))
        is_on_host = v in self.out_end
        if is_on_host != (kind in (PREFETCH, DROP)) and kind != FREE:
            what = f"{'copies' if kind != DROP else 'drops'} value {_named(self.graph, v)}"
            raise InvalidPlan(f"{what}, which is {'already' if is_on_host else 'not'} on the host", step)
        if kind == FREE and is_held_outside(self.graph, v):
            raise InvalidPlan(f"frees value {_named(self.graph, v)}, which is kept and made only once", step)
        if kind in (FREE, DROP):
            self.time = max(self.time, *ends)
            self.in_end.pop(v, None) if kind == FREE else self.out_end.pop(v)
            self.host_bytes -= size if kind == DROP else 0
            return
        if kind == OFFLOAD:
            start = max(self.out_time, self.time, ends[1])
            end = self.out_time = self.out_end[v] = start + self.link.out_ns(size)
            self.host_bytes += size
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
            most = self.link.host_bytes
            if most is not None and self.host_bytes > most:
                needed = f"{format_size(self.host_bytes)} are on the host then, which has {format_size(most)}"
                raise HostFull(f"copies value {_named(self.graph, v)}: {needed}", step)
        else:
            start = max(self.in_time, self.time, ends[0])
            end = self.in_time = self.in_end[v] = start + self.link.in_ns(size)
            self.peak = max(self.peak, (held + size, n_computed - 1), key=lambda peak: peak[0])
        self.copies.append((kind, v, start, end))

    def completed(self, trace: Trace) -> Trace:
        """The trace with what the copies add: the plan ends when kept values have arrived."""
        kept = [self.in_end.get(v, 0) for v, value in enumerate(self.graph.values) if value.keep]
        peak, after = max((trace.peak_bytes, trace.peak_computation), self.peak, key=lambda peak: peak[0])
        is_long = max(self.out_time, self.in_time) >= 2**63
        copies = np.array(self.copies, dtype=object if is_long else np.int64).reshape(-1, 4)
        return replace(
            trace, cost=max([self.time, *kept]), peak_bytes=peak, peak_computation=after,
            host_peak_bytes=self.host_peak_bytes, copies=copies,
        )  # fmt: skip


def _check_both(graph: Graph, plan: Plan) -> None:
    check_graph(graph)
    check_plan(plan)
    if plan.graph_sha256 != graph.sha256():
        raise InvalidPlan(f"the plan was made for another graph ('{plan.graph_name}'), not for this '{graph.name}'")


def _check_movable(graph: Graph, resident: bytearray, kind: int, v: int, step: int) -> None:
    """Raise `InvalidPlan` unless a value is on the device, or for a copy from the host is not."""
    does = {FREE: "frees", OFFLOAD: "copies", PREFETCH: "fetches", DROP: "drops"}[kind]
    if not 0 <= v < len(resident):
        raise InvalidPlan(f"{does} value {v}, which does not exist", step)
    if kind in (FREE, OFFLOAD) and not resident[v]:
        raise InvalidPlan(f"{does} value {_named(graph, v)}, which is not resident", step)
    if kind == PREFETCH and resident[v]:
        raise InvalidPlan(f"{does} value {_named(graph, v)}, which is still resident", step)


def check_sharing(graph: Graph, sharing: Sharing) -> None:
    """Raise `InvalidInput` unless each operation has its list of pairs of an input and an output of its own."""
    if not any(sharing):
        return
    if len(sharing) != len(graph):
        raise InvalidInput(f"'sharing' must be a list for each of the {len(graph)} operations, not {len(sharing)}")
    for op, pairs in zip(graph.operations, sharing, strict=True):
        for source, target in pairs:
            if source not in op.inputs or target not in op.outputs:
                raise InvalidInput(f"'sharing': ({source}, {target}) is no input and output of '{op.name}'")


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

    Call k < N is operation k by default; the chosen implementations follow. Other steps have their value there.
    """
    chosen: list[Implementation] = []
    call_of = plan.ids.tolist()
    number: dict[tuple[int, str], int] = {}
    for step, (kind, k, name) in enumerate(
        zip(plan.kinds.tolist(), plan.ids.tolist(), plan.implementations, strict=False)
    ):
        if kind != COMPUTE or not name:
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


def _without_input(graph: Graph, i: int, inputs: Sequence[int], resident: bytearray, step: int) -> InvalidPlan:
    v = next(v for v in inputs if not resident[v])
    return InvalidPlan(f"{_computes(graph, i)}, whose input {_named(graph, v)} is not resident", step)


def _computes(graph: Graph, i: int) -> str:
    return f"computes operation {i} ({graph.operations[i].name})"


def _named(graph: Graph, v: int) -> str:
    return f"{v} ({graph.values[v].name})"


def reused_storages(plan: Plan, sharing: Sharing) -> dict[int, list[tuple[int, int]]]:
    """Step of a computation -> (input, output) pairs, the output written over an input freed before the next one.

    An input that is copied to the host after the computation is not written over. Other implementations than the
    default one write over what they say themselves.
    """
    reused: dict[int, list[tuple[int, int]]] = {}
    freed: set[int] = set()
    kinds, ids, names = plan.kinds.tolist(), plan.ids.tolist(), plan.implementations
    for step in range(len(kinds) - 1, -1, -1):
        if kinds[step] != COMPUTE:
            freed |= {ids[step]} if kinds[step] == FREE else set()
            freed -= {ids[step]} if kinds[step] == OFFLOAD else set()
            continue
        used: set[int] = set()
        for source, target in sharing[ids[step]] if not names or names[step] in ("", DEFAULT) else ():
            if source in freed and source not in used and target not in used and target not in freed:
                used |= {source, target}
                reused.setdefault(step, []).append((source, target))
        freed = set()
    return reused
