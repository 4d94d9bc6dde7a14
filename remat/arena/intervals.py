"""When each byte of a plan is live: derived by replaying the plan, never read from a file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat.graph import Graph
from remat.implementation import Implementation
from remat.plan import COMPUTE, FREE, PREFETCH, Plan, implementation_of
from remat.simulator import Sharing, reused_storages, simulate


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """The buffers of a plan, and which of them each computation fills.

    Time counts the steps that take memory: computations, and copies from the host. At the end comes one more, in which
    what outlives the step is live. A buffer is live in [lower, upper): while the call that makes it runs, and up to the
    last call before it is freed. What a call frees may lie where the next call's outputs do, never where its own do.

    Attributes:
        lower, upper, size: [n] int64.
        calls: [steps that take memory] the buffer of each output, in the implementation's order, and of the workspace,
            if there is one; of a copy from the host, the value's.
        names: [n] what is in each buffer first, for messages.
    """

    lower: np.ndarray
    upper: np.ndarray
    size: np.ndarray
    calls: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    @property
    def load(self) -> int:
        """The largest sum of bytes that are live at once: no arena is smaller."""
        return load_of(self.lower, self.upper, self.size)


def load_of(lower: np.ndarray, upper: np.ndarray, size: np.ndarray) -> int:
    """The largest sum of sizes of intervals [lower, upper) that have a time in common."""
    return int(np.cumsum(np.concatenate([-size, size])[events_of(lower, upper)]).max(initial=0))


def events_of(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """[2n] the ends (i) and beginnings (n + i) of intervals, by time; what ends at a time goes before what begins."""
    return np.argsort(np.concatenate([upper, lower]), kind="stable")


def sections_of(lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), each buffer's sections [low, high): the times at which a largest set of buffers is live at once."""
    starts, ends = np.unique(lower), np.unique(upper)
    after = np.append(starts[1:], ends[-1])
    # The buffers live at a start are a largest set if one of them ends before others begin.
    is_largest = np.searchsorted(ends, after, "right") > np.searchsorted(ends, starts, "right")
    times = starts[is_largest]
    return np.searchsorted(times, lower), np.searchsorted(times, upper)


def members_of(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first, members, spot) of buffers in sections [low, high).

    Section s has the buffers ``members[first[s] : first[s + 1]]``. The places of each buffer in `members` follow each
    other in `spot`, by section.
    """
    length = high - low
    buffers = np.repeat(np.arange(len(low)), length)
    sections = np.arange(len(buffers)) - np.repeat(np.cumsum(length) - length - low, length)
    by_section = np.argsort(sections, kind="stable")
    spot = np.empty(len(buffers), dtype=np.int64)
    spot[by_section] = np.arange(len(buffers))
    first = np.concatenate([[0], np.cumsum(np.bincount(sections, minlength=int(high.max(initial=0))))])
    return first, buffers[by_section], spot


def intervals_of(graph: Graph, plan: Plan, sharing: Sharing = ()) -> Intervals:
    """The buffers of `plan`, which is simulated first.

    One buffer holds several values after each other where an implementation overwrites its input, and where an output
    is written over an input of the same size (`sharing`, see `simulate`). A value that is computed again while it is
    resident has a second buffer; the first one ends with that call.

    Raises:
        InvalidPlan: the plan cannot be executed.
    """
    simulate(graph, plan, sharing)
    return _Replay(graph, plan, sharing).result()


class _Replay:
    def __init__(self, graph: Graph, plan: Plan, sharing: Sharing):
        self.graph, self.plan = graph, plan
        self.lower, self.upper, self.size = list[int](), list[int](), list[int]()
        self.names = list[str]()
        self.calls = list[tuple[int, ...]]()
        self.buffer_of: dict[int, int] = {}  # [resident value]
        self.reused = reused_storages(plan, sharing) if any(sharing) else {}

    def result(self) -> Intervals:
        plan = self.plan
        names = plan.implementations or [""] * len(plan.kinds)
        for step, (kind, i, name) in enumerate(zip(plan.kinds.tolist(), plan.ids.tolist(), names, strict=True)):
            if kind == COMPUTE:
                self.compute(step, i, implementation_of(self.graph, i, name, step))
            elif kind == PREFETCH:
                self.buffer_of[i] = self.new(self.graph.values[i].bytes, f"value {i} ({self.graph.values[i].name})")
                self.calls.append((self.buffer_of[i],))
            elif kind == FREE:
                self.upper[self.buffer_of.pop(i)] = len(self.calls)
        for buffer in self.buffer_of.values():
            self.upper[buffer] = len(self.calls) + 1  # it outlives the step
        lower, upper, size = (np.array(each, dtype=np.int64) for each in (self.lower, self.upper, self.size))
        return Intervals(lower, upper, size, tuple(self.calls), tuple(self.names))

    def compute(self, step: int, k: int, call: Implementation) -> None:
        time, values = len(self.calls), self.graph.values
        taken: dict[int, int] = {}  # [output] buffer of the input that it takes
        if call.overwrites is not None:
            taken[call.outputs[0]] = self.buffer_of.pop(call.overwrites)
        for source, target in self.reused.get(step, ()):
            if values[source].bytes == values[target].bytes and source in self.buffer_of:
                taken[target] = self.buffer_of[source]
        made = [
            taken[v] if v in taken else self.new(values[v].bytes, f"value {v} ({values[v].name})") for v in call.outputs
        ]
        for v, buffer in zip(call.outputs, made, strict=True):
            if v in self.buffer_of:  # computed again while it is resident: the first one is given back
                self.upper[self.buffer_of[v]] = time + 1
            self.buffer_of[v] = buffer
        if call.workspace_bytes:
            made.append(
                self.new(call.workspace_bytes, f"the workspace of operation {k} ({self.graph.operations[k].name})")
            )
            self.upper[made[-1]] = time + 1
        self.calls.append(tuple(made))

    def new(self, size: int, name: str) -> int:
        self.lower.append(len(self.calls))
        self.upper.append(0)
        self.size.append(size)
        self.names.append(name)
        return len(self.size) - 1
