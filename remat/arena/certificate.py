"""remat-arena/1: a place for every byte of a plan, as a file that anyone can check without a solver."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from remat.arena.intervals import Intervals, events_of, intervals_of, load_of
from remat.arena.placing import place
from remat.errors import InvalidInput, InvalidPlan, shown
from remat.files import UnknownKeys, digest_of, read_json, write_text
from remat.graph import Graph, text_problem
from remat.plan import PLAN_FORMAT, PLAN_FORMAT_COPIES, Plan, plan_problems
from remat.simulator import Sharing, check_sharing
from remat.units import MAX_BYTES, format_size, parse_size

ARENA_FORMAT = "remat-arena/1"
PLAN_FORMATS = (PLAN_FORMAT, PLAN_FORMAT_COPIES)
_KEYS = ("format", "graph", "graph_sha256", "plan_sha256", "plan", "alignment", "sharing", "bytes", "load", "offsets")
MAX_ALIGNMENT = 1 << 30


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Arena:
    """A block with an offset for every output and workspace of a plan; `fixed_bytes` lie outside of it.

    Attributes:
        plan: the plan, with the budget that was given if there is one.
        bytes: of the block.
        load: the most bytes of the plan that are live at once, each size rounded up to the alignment: no block is
            smaller.
        offsets: for each step that takes memory (computations, copies from the host) the offset of each output, in the
            implementation's order, then of the workspace, if there is one; of a copy, the value's.
        bound: proven lower bound on the bytes of any block.
        fixed_bytes: of the graph.
        alignment: every offset is a multiple of it.
        sharing: see `remat.simulate`.
    """

    plan: Plan
    bytes: int
    load: int
    offsets: tuple[tuple[int, ...], ...]
    bound: int
    fixed_bytes: int
    alignment: int = 1
    sharing: Sharing = ()

    @property
    def budget_bytes(self) -> int | None:
        """The plan's."""
        return self.plan.budget_bytes

    @property
    def ratio(self) -> float:
        """Bytes of the block over the load."""
        return self.bytes / self.load if self.load else 1.0

    @property
    def is_optimal(self) -> bool:
        """Whether no block is smaller, by proof: it has the plan's load, or the search refuted a smaller one."""
        return self.bytes <= self.bound

    @property
    def total_bytes(self) -> int:
        """Bytes of the block and fixed bytes: what a budget limits."""
        return self.fixed_bytes + self.bytes

    @property
    def excess_bytes(self) -> int:
        """Bytes above the budget; 0 if it fits, or there is none."""
        return 0 if self.budget_bytes is None else max(0, self.total_bytes - self.budget_bytes)

    def __repr__(self) -> str:
        return f"<Arena of '{self.plan.graph_name}': {self.summary()}>"

    def summary(self) -> str:
        """Its size beside the load, and the budget if there is one."""
        optimal = ", the smallest" if self.is_optimal else ""
        text = f"{format_size(self.bytes)}, {self.ratio:.4f} of the load{optimal}"
        if self.budget_bytes is None:
            return text
        over = self.excess_bytes
        fits = f"{format_size(over)} above" if over else "within"
        return f"{text}, with fixed bytes {format_size(self.total_bytes)}, {fits} the budget"

    def document(self) -> dict[str, Any]:
        """The file that `save` writes. It has no claim that a reader could not check."""
        shared = {"sharing": [list(map(list, pairs)) for pairs in self.sharing]} if self.sharing else {}
        plan = self.plan.document()
        plan["steps"] = [list(step) for step in plan["steps"]]
        return {
            "format": ARENA_FORMAT, "graph": self.plan.graph_name, "graph_sha256": self.plan.graph_sha256,
            "plan_sha256": digest_of(plan["steps"]), "alignment": self.alignment, **shared, "bytes": self.bytes,
            "load": self.load, "offsets": [list(each) for each in self.offsets], "plan": plan,
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the certificate as JSON, atomically; compressed if the name ends with ``.gz``."""
        write_text(path, json.dumps(self.document(), separators=(",", ":")))

    @classmethod
    def read(cls, path: str | os.PathLike[str], graph: Graph) -> Arena:
        """The arena in a file, checked against `graph`.

        Raises:
            InvalidInput: names the file: it is no arena of this graph, or buffers that are live at once overlap.
        """
        return arena_of_document(read_json(path), graph, os.fspath(path))


def find_arena(
    graph: Graph, plan: Plan, budget: int | str | None = None, time_limit_s: float = 10.0, *,
    alignment: int = 1, sharing: Sharing = (), seed: int = 0,
) -> Arena:  # fmt: skip
    """An arena for `plan`, as small as is found in time.

    Args:
        budget: total bytes, fixed bytes included, at which the search stops; None for the smallest arena.
        time_limit_s: limits the call.
        alignment: of every offset, in bytes; sizes are rounded up to it (512 for PyTorch's allocator).
        sharing: see `remat.simulate`.

    Raises:
        InvalidPlan: the plan cannot be executed on the graph.
        InvalidInput: another argument cannot be used.
    """
    _check_alignment(alignment)
    intervals = intervals_of(graph, plan, sharing)
    size = aligned(intervals.size, alignment)
    limit = None if budget is None else parse_size(budget)
    capacity = None if limit is None else max(0, limit - graph.fixed_bytes)
    placed = place(intervals.lower, intervals.upper, size, capacity, time_limit_s, seed=seed)
    check_offsets(intervals, size, placed.offsets, placed.bytes)
    offsets = placed.offsets.tolist()
    return Arena(
        plan if limit is None else replace(plan, budget_bytes=limit), placed.bytes, placed.load,
        tuple(tuple(offsets[buffer] for buffer in call) for call in intervals.calls), placed.bound, graph.fixed_bytes,
        alignment, sharing,
    )  # fmt: skip


def aligned(size: np.ndarray, alignment: int) -> np.ndarray:
    """[n] int64, sizes rounded up."""
    return -(-size // alignment) * alignment


def check_offsets(intervals: Intervals, size: np.ndarray, offsets: np.ndarray, n_bytes: int) -> None:
    """Raise `InvalidInput` if two live buffers overlap or one ends beyond the block. O(n log n): a sweep over time.

    The live buffers are kept sorted by offset. They do not overlap, so that a new one needs to be compared with its two
    neighbours only.
    """
    beyond = np.nonzero((offsets < 0) | (offsets + size > n_bytes))[0]
    if len(beyond):
        i = int(beyond[0])
        raise InvalidInput(f"{intervals.names[i]} lies at {offsets[i]}, not within the {n_bytes} bytes of the arena")
    chosen = np.nonzero(size)[0]  # what has no bytes overlaps with nothing
    tops, live = (offsets + size).tolist(), list[tuple[int, int]]()
    starts = offsets.tolist()
    for event in events_of(intervals.lower[chosen], intervals.upper[chosen]).tolist():
        buffer = int(chosen[event % len(chosen)])
        at = bisect_left(live, (starts[buffer], buffer))
        if event < len(chosen):
            del live[at]
            continue
        for near in live[max(0, at - 1) : at + 1]:
            if starts[near[1]] < tops[buffer] and starts[buffer] < tops[near[1]]:
                both = f"{intervals.names[near[1]]} and {intervals.names[buffer]}"
                raise InvalidInput(f"{both} are live at once and overlap, at {near[0]} and {starts[buffer]}")
        live.insert(at, (starts[buffer], buffer))


def arena_of_document(document: Any, graph: Graph, where: str) -> Arena:
    """The arena in such a document; everything in it is checked.

    The intervals come from replaying the plan in the document.

    Raises:
        InvalidInput: names `where` and the place.
    """
    check_form(document, where)
    try:
        if document["graph_sha256"] != graph.sha256():
            raise InvalidInput(f"was made for graph {document['graph']!r:.80}, not for this '{graph.name}'")
        own = Plan.from_document(document["plan"], graph, "'plan'")
        if document["plan"].get("graph_sha256") not in (None, own.graph_sha256):
            raise InvalidInput("'plan' was made for another graph")
        if document["plan"].get("scope") not in (None, str(own.scope)):
            raise InvalidInput(f"'plan' says scope {document['plan']['scope']}, but its steps are {own.scope}")
        if digest_of(document["plan"]["steps"]) != document["plan_sha256"]:
            raise InvalidInput("'plan_sha256' is not the hash of the steps of its plan")
        return _checked(document, graph, own)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None


def _checked(document: Mapping[str, Any], graph: Graph, plan: Plan) -> Arena:
    alignment, sharing = document["alignment"], checked_sharing(document.get("sharing", []), graph)
    intervals = intervals_of(graph, plan, sharing)
    size = aligned(intervals.size, alignment)
    offsets = _offsets_of_buffers(intervals, document["offsets"])
    if (wrong := np.nonzero(offsets % alignment)[0]).size:
        raise InvalidInput(f"{intervals.names[wrong[0]]} lies at {offsets[wrong[0]]}, no multiple of {alignment}")
    check_offsets(intervals, size, offsets, document["bytes"])
    load = load_of(intervals.lower, intervals.upper, size)
    if load != document["load"]:
        raise InvalidInput(f"'load' is {document['load']}, but the plan's is {load}")
    return Arena(
        plan, document["bytes"], load, tuple(map(tuple, document["offsets"])), load, graph.fixed_bytes, alignment,
        sharing,
    )  # fmt: skip


def check_form(document: Any, where: str) -> None:
    """Raise `InvalidInput`, which names `where`, unless a document has the form of an arena's; no plan is replayed."""
    try:
        _check_form(document)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None
    unknown = UnknownKeys()
    unknown.look(document, _KEYS, "arena", "the arena")
    unknown.tell(where)


def _check_form(document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != ARENA_FORMAT:
        raise InvalidInput(f"'format' must be '{ARENA_FORMAT}'")
    for key in ("graph", "graph_sha256", "plan_sha256"):
        if not isinstance(document.get(key), str):
            raise InvalidInput(f"'{key}' must be a text")
    if problem := text_problem(document["graph"]):
        raise InvalidInput(f"'graph' {problem}")
    for key in ("bytes", "load", "alignment"):
        if type(document.get(key)) is not int or not 0 <= document[key] <= MAX_BYTES:
            raise InvalidInput(f"'{key}' must be a number of bytes, not {shown(document.get(key))}")
    _check_alignment(document["alignment"])
    if not isinstance(document.get("plan"), dict):
        raise InvalidInput("'plan' must be the plan's document")
    if document["plan"].get("format") not in PLAN_FORMATS:
        raise InvalidInput(f"'plan' must have 'format' {' or '.join(PLAN_FORMATS)}")
    if problems := plan_problems(document["plan"]):
        raise InvalidPlan(f"'plan': {problems[0]}")
    offsets = document.get("offsets")
    if not isinstance(offsets, list) or not all(isinstance(each, list) for each in offsets):
        raise InvalidInput("'offsets' must be a list with a list for each step that takes memory")
    for i, each in enumerate(offsets):
        if not all(type(offset) is int and 0 <= offset <= MAX_BYTES for offset in each):
            raise InvalidInput(f"entry {i} of 'offsets' must hold offsets of at least 0, not {shown(each)}")


def _check_alignment(alignment: Any) -> None:
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
        raise InvalidInput(f"alignment must be a number of bytes from 1 to {MAX_ALIGNMENT}, not {shown(alignment)}")


def checked_sharing(rows: Any, graph: Graph) -> Sharing:
    """The pairs (input, output) of each operation that may share a storage, from a file; () for none."""
    if rows == []:
        return ()
    if not isinstance(rows, list) or len(rows) != len(graph):
        raise InvalidInput(f"'sharing' must be a list for each of the {len(graph)} operations")
    for pair in (pair for pairs in rows for pair in (pairs if isinstance(pairs, list) else [pairs])):
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(v) is int for v in pair):
            raise InvalidInput(f"'sharing': {shown(pair)} is no pair of an input and an output")
    sharing = tuple(tuple((source, target) for source, target in pairs) for pairs in rows)
    check_sharing(graph, sharing)
    return sharing


def _offsets_of_buffers(intervals: Intervals, offsets: Sequence[Sequence[int]]) -> np.ndarray:
    """[n] int64; the offset of a buffer that several steps fill must be the same in each."""
    if len(offsets) != len(intervals.calls):
        raise InvalidInput(f"'offsets' has {len(offsets)} entries, but the plan has {len(intervals.calls)} such steps")
    found = np.full(len(intervals.size), -1, dtype=np.int64)
    for i, (call, given) in enumerate(zip(intervals.calls, offsets, strict=True)):
        if len(call) != len(given):
            raise InvalidInput(f"entry {i} of 'offsets' has {len(given)} offsets, but the step fills {len(call)}")
        for buffer, offset in zip(call, given, strict=True):
            if found[buffer] not in (-1, offset):
                raise InvalidInput(
                    f"entry {i} of 'offsets' places what {intervals.names[buffer]} becomes at {offset}, not in its "
                    f"storage at {found[buffer]}"
                )
            found[buffer] = offset
    return found
