"""From the records of MONeT's ``SolverInfo`` to a graph; `monet_schedules` explains the fields."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from remat.errors import InvalidInput
from remat.frontends import _monet_pickle as stored
from remat.frontends._monet_pickle import Record
from remat.graph import Graph, Operation, Value
from remat.implementation import Implementation

KIB, MIB = 1024, 1024 * 1024
TICK_NS = 10_000  # a hundredth of a millisecond: the solvers' unit of time
MAX_NODES = 100_000
MAX_READS = 1_000_000
MODELS = {"un": "unet"}  # MONeT cuts the last two letters off every name; in all others these are brackets


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the solver.

    Attributes:
        reads: for each implementation, the nodes that it reads.
        ms, mib: time and workspace of each implementation or algorithm; `in_place_ms` and `in_place_mib` in place.
        forward: of a backward node, the node whose gradient it computes; -1 otherwise.
        parent, implementation: of an intermediate, the node and the implementation that produce it; -1 otherwise.
    """

    kind: str
    reads: list[list[int]]
    bytes: int
    ms: list[float]
    mib: list[float]
    in_place_ms: list[float]
    in_place_mib: list[float]
    forward: int = -1
    parent: int = -1
    implementation: int = -1


class SolverGraph:
    """The graph of a SolverInfo.

    Attributes:
        made_by: intermediates by the (node, implementation) that produces them.
        required: intermediates that a node's first implementation reads, where every implementation reads some:
            these are ordinary outputs.
        value: {node: id of its value}, in order of ids; extra ones are last.
        n_ordinary: number of values that are not extra.
    """

    def __init__(self, info: Record):
        self.info = info
        records = _field(info, "nodes", dict)
        if not 0 < len(records) <= MAX_NODES or any(i not in records for i in range(len(records))):
            raise InvalidInput(f"its nodes are not numbered from 0 on, or more than {MAX_NODES}")
        self.nodes = [_node(records[i], i, len(records)) for i in range(len(records))]
        if sum(len(implementation) for node in self.nodes for implementation in node.reads) > MAX_READS:
            raise InvalidInput(f"its nodes read more than {MAX_READS} times")
        self.loss = _field(info, "loss", int)
        if not 0 <= self.loss < len(records) or self.nodes[self.loss].parent >= 0:
            raise InvalidInput(f"its loss is node {self.loss}, which is none of its operations")
        self.fixed_bytes = _kib(number(records[len(records) - 1].fields.get("fixed_mem"), "the last node's fixed_mem"))
        self.algorithms = _field(info, "conv_list", dict) if info.fields.get("select_conv_algo") else {}
        self.overwrites = _field(info, "inplace_list", dict) if info.fields.get("do_inplace") else {}
        self.made_by: dict[tuple[int, int], list[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.parent >= 0:
                self.made_by.setdefault((node.parent, node.implementation), []).append(i)
        reads = [
            [[u for u in implementation if self.nodes[u].parent >= 0] for implementation in node.reads]
            for node in self.nodes
        ]
        self.required = {u for implementations in reads if all(implementations) for u in implementations[0]}
        is_extra = [node.parent >= 0 and i not in self.required for i, node in enumerate(self.nodes)]
        self.value = {i: v for v, i in enumerate(sorted(range(len(self.nodes)), key=lambda i: (is_extra[i], i)))}
        self.n_ordinary = is_extra.count(False)

    def graph(self, source: str) -> Graph:
        model, batch, mode = _field(self.info, "model_name", str), _field(self.info, "bs", int), _mode(self.info)
        name = f"{MODELS.get(model, model)}_b{batch}" + f"_{mode}" * (mode != "normal")
        at = [i for i, node in enumerate(self.nodes) if node.parent < 0]
        values = tuple(Value(str(i), self.nodes[i].bytes) for i in self.value)
        operations = tuple(map(self._operation, at))
        return Graph(name, operations, values, self.fixed_bytes, "ns", at.index(self.loss), source)

    def _operation(self, i: int) -> Operation:
        node = self.nodes[i]
        if i in self.algorithms:
            implementations = [*self._algorithms(i)]
        else:
            implementations = [*(self._backward(i) if node.forward >= 0 else self._forward(i))]
        # The default one touches no extra value. It exists, because required intermediates are not extra.
        own = next(i for i in implementations if all(v < self.n_ordinary for v in (*i.inputs, *i.outputs)))
        others = tuple(other for other in implementations if other is not own)
        return Operation(
            str(i), node.kind, own.inputs, own.outputs, own.cost, own.workspace_bytes, node.forward >= 0,
            implementations=others,
        )  # fmt: skip

    def _algorithms(self, i: int) -> Iterator[Implementation]:
        worked = [c for c, ms in enumerate(self.nodes[i].ms) if ms >= 0]
        if not worked:
            raise InvalidInput(f"node {i} is a convolution, and every algorithm of it failed")
        for c in worked:
            yield self._implementation(f"algorithm_{c}", i, c, self._inputs(i, 0))

    def _forward(self, i: int) -> Iterator[Implementation]:
        """Plain, and with each kind of intermediate; the same in place."""
        node, inputs = self.nodes[i], self._inputs(i, 0)
        kinds: list[tuple[str, int, tuple[int, ...]]] = [("", 0, ())]
        for (parent, p), made in self.made_by.items():
            extra = tuple(self.value[j] for j in made if j not in self.required)
            if parent == i and extra:
                kinds.append((self.nodes[made[0]].kind.removeprefix("int::"), p, extra))
        for label, p, extra in kinds:
            yield self._implementation(label or "plain", i, p, inputs, extra)
        x = self.overwrites.get(i)
        if type(x) is int and x in node.reads[0] and self.nodes[x].bytes == node.bytes:
            for label, p, extra in kinds:
                yield self._implementation("in_place" + f"_{label}" * bool(label), i, p, inputs, extra, self.value[x])

    def _backward(self, i: int) -> Iterator[Implementation]:
        node, used = self.nodes[i], set()
        for p, reads in enumerate(node.reads):
            extra = [self.nodes[u].kind.removeprefix("int::") for u in reads if self.nodes[u].parent >= 0]
            of_forward = (
                "output" if node.forward in reads else "input" if any(u < self.loss for u in reads) else "plain"
            )
            label = extra[0] if extra else of_forward
            name = f"{label}_{p}" if label in used else label
            used.add(label)
            yield self._implementation(name, i, p, self._inputs(i, p))

    def _inputs(self, i: int, p: int) -> tuple[int, ...]:
        return tuple(sorted({self.value[u] for u in self.nodes[i].reads[p]}))

    def _outputs(self, i: int) -> tuple[int, ...]:
        required = (j for (parent, _), made in self.made_by.items() if parent == i for j in made if j in self.required)
        return (self.value[i], *(self.value[j] for j in required))

    def _implementation(
        self, name: str, i: int, p: int, inputs: tuple[int, ...], extra: tuple[int, ...] = (),
        overwrites: int | None = None,
    ) -> Implementation:  # fmt: skip
        """Implementation p of node i, which makes the values `extra` too."""
        node = self.nodes[i]
        ms, mib, shared = node.ms, node.mib, 0
        if overwrites is not None:
            ms, mib, shared = node.in_place_ms, node.in_place_mib, node.bytes
        if p >= min(len(ms), len(mib)):
            raise InvalidInput(f"node {i} ({node.kind}) has no measurement of its implementation {p}")
        cost = ticks(ms[p], f"the time of node {i}")
        return Implementation(name, inputs, self._outputs(i) + extra, cost, scratch(mib[p], shared), overwrites)


def ticks(ms: float, what: str) -> int:
    """`ms` in nanoseconds, rounded to hundredths of a millisecond; `what` is for the error if it is negative."""
    if ms < 0:
        raise InvalidInput(f"{what} is {ms:g} ms")
    return round(ms * 100) * TICK_NS


def scratch(mib: float, shared_bytes: int = 0) -> int:
    """Bytes beside inputs and outputs, in whole KiB; 0 where an output took an input's storage, a fact not stored."""
    return max(0, _kib(mib * MIB + shared_bytes))


def _kib(size: float) -> int:
    return round(size / KIB) * KIB


def _mode(info: Record) -> str:
    """The mode as in file names; MONeT removes ``inplace_`` from the attribute."""
    return "inplace_" * bool(info.fields.get("do_inplace")) + _field(info, "mode", str).replace("inplace_", "")


def _node(record: Any, i: int, n: int) -> Node:
    """The node of one record, with numbers and ids checked."""
    if not isinstance(record, (stored.FwdNode, stored.BwdNode, stored.IntNode)):
        raise InvalidInput(f"node {i} is a {type(record).__name__:.40}, not one of its nodes")
    where = f"node {i}"
    reads = _field(record, "args", list, where)
    if not reads or not all(
        isinstance(implementation, list) and all(_is_id(u, n) for u in implementation) for implementation in reads
    ):
        raise InvalidInput(f"{where}: 'args' must be lists of nodes")
    ms, mib, in_place_ms, in_place_mib = (_numbers(record, key, where) for key in (
        "workspace_compute", "workspace_mem", "inplace_workspace_compute", "inplace_workspace_mem"))  # fmt: skip
    of_op = record if "op" in record.fields else _field(record, "gnode", Record, where)
    kind = of_op.fields.get("op", of_op.fields.get("_op"))
    if not isinstance(kind, str):
        raise InvalidInput(f"{where} has no kind")
    size = _kib(number(_field(record, "mem", (int, float), where), f"{where}'s mem"))
    forward = parent = implementation = -1
    if isinstance(record, stored.BwdNode):
        forward = _field(record, "fwd_id", int, where)
    elif isinstance(record, stored.IntNode):
        parent, implementation = _field(record, "solver_parent_id", int, where), _field(record, "op_idx", int, where)
        if not 0 <= parent < i or implementation < 0:
            raise InvalidInput(f"{where} is an intermediate of node {parent}")
    return Node(kind, reads, size, ms, mib, in_place_ms, in_place_mib, forward, parent, implementation)


def _is_id(u: Any, n: int) -> bool:
    return type(u) is int and 0 <= u < n


def _field(record: Record, key: str, kinds: Any, where: str = "SolverInfo") -> Any:
    value = record.fields.get(key)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise InvalidInput(f"{where} lacks '{key}', or it is no {getattr(kinds, '__name__', 'number')}")
    return value


def number(x: Any, what: str) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x) or abs(x) > 1e15:
        raise InvalidInput(f"{what} is no number")
    return x


def _numbers(record: Record, key: str, where: str) -> list[float]:
    return [number(x, f"{where}: '{key}'") for x in _field(record, key, list, where)]
