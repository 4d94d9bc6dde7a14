"""Graph files: remat-graph/1 (one value per node) and remat-graph/2 (operations and values).

remat-graph/2 is the project's own format for graphs that /1 cannot hold: multi-output operations, kept
values, run-once operations, work, implementations. `load_graph` reads both, `save_graph` writes the simpler
one that can hold the graph.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from remat.errors import InvalidGraph, nearest
from remat.files import UnknownKeys, read_json, write_text
from remat.graph import Graph, Operation, Value, Work, holds_control_character
from remat.implementation import Implementation
from remat.units import MAX_BYTES

GRAPH_FORMAT_NODES = "remat-graph/1"
GRAPH_FORMAT_VALUES = "remat-graph/2"
MAX_OPERATIONS = 1_000_000


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """Read a graph file, compressed with gzip or not; warn once of unknown keys.

    Raises:
        InvalidGraph: naming the file and the place: unreadable, schema, order, dangling edge, sizes.
    """
    document = read_json(path, InvalidGraph)
    unknown = UnknownKeys()
    try:
        graph = graph_from_dict(document, unknown)
    except InvalidGraph as error:
        problems = [f"{path}: {problem}" for problem in error.problems]
        more = f" (and {len(problems) - 1} more; see remat check)" if len(problems) > 1 else ""
        raise InvalidGraph(problems[0] + more, problems) from None
    unknown.tell(path)
    return graph


def graph_from_dict(document: Any, unknown: UnknownKeys | None = None) -> Graph:
    """A graph from a parsed remat-graph document.

    Args:
        unknown: collects the keys that are not in the format.

    Raises:
        InvalidGraph: naming the place of the first problem, and all of them in `problems`.
    """
    if not isinstance(document, dict):
        raise InvalidGraph("must be a JSON object")
    kind = document.get("format")
    if kind not in (GRAPH_FORMAT_NODES, GRAPH_FORMAT_VALUES):
        raise InvalidGraph(f"'format' must be '{GRAPH_FORMAT_NODES}' or '{GRAPH_FORMAT_VALUES}', not {kind!r:.60}")
    reader = _Reader(UnknownKeys() if unknown is None else unknown)
    parts = reader.nodes(document) if kind == GRAPH_FORMAT_NODES else reader.operations_and_values(document)
    if reader.problems:
        raise InvalidGraph(reader.problems[0], reader.problems)
    return Graph.from_nodes(**parts) if kind == GRAPH_FORMAT_NODES else Graph(**parts)


def save_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write `graph` as JSON, atomically."""
    write_text(path, json.dumps(graph_to_dict(graph), separators=(",", ":")))


def graph_to_dict(graph: Graph) -> dict[str, Any]:
    """The document of `graph`: remat-graph/1 if that loses nothing, remat-graph/2 otherwise."""
    head = {
        "name": graph.name,
        "source": graph.source,
        "cost_unit": graph.cost_unit,
        "fixed_bytes": graph.fixed_bytes,
        "loss": graph.loss,
    }
    plain = (
        graph.is_single_output
        and all(
            o.work is None and not o.run_once and not o.implementations and o.name == graph.values[i].name
            for i, o in enumerate(graph.operations)
        )
        and not any(v.keep for v in graph.values)
    )
    if plain:
        nodes = [
            {"name": o.name, "op": o.kind, "bytes": v.bytes, "cost": o.cost, "backward": o.is_backward}
            | ({"workspace_bytes": o.workspace_bytes} if o.workspace_bytes else {})
            for o, v in zip(graph.operations, graph.values, strict=True)
        ]
        edges = [[u, k] for k, o in enumerate(graph.operations) for u in o.inputs]
        return {"format": GRAPH_FORMAT_NODES, **head, "nodes": nodes, "edges": edges}
    operations = []
    for o in graph.operations:
        row = {
            "name": o.name, "op": o.kind, "inputs": list(o.inputs), "outputs": list(o.outputs),
            "cost": o.cost, "workspace_bytes": o.workspace_bytes, "backward": o.is_backward, "run_once": o.run_once,
        }  # fmt: skip
        row |= {"work": asdict(o.work)} if o.work else {}
        operations.append(row | ({"implementations": [*map(asdict, o.implementations)]} if o.implementations else {}))
    values = [{"name": v.name, "bytes": v.bytes, "keep": v.keep} for v in graph.values]
    return {"format": GRAPH_FORMAT_VALUES, **head, "operations": operations, "values": values}


_HEAD = ("format", "name", "source", "cost_unit", "fixed_bytes", "loss")
_NODE = ("name", "op", "bytes", "cost", "backward", "workspace_bytes")
_OPERATION = ("name", "op", "inputs", "outputs", "cost", "workspace_bytes", "backward", "run_once", "work",
              "implementations")  # fmt: skip
_IMPLEMENTATION = tuple(field.name for field in fields(Implementation))
_WORK = tuple(field.name for field in fields(Work))
_VALUE = ("name", "bytes", "keep")
_KNOWN = {*_HEAD, *_NODE, *_OPERATION, *_IMPLEMENTATION, *_WORK, *_VALUE, "nodes", "edges", "operations", "values"}
_EMPTY: dict[type, Any] = {int: 0, str: "", list: (), bool: False, dict: {}}  # in place of a wrong field


class _Reader:
    """Reads documents and notes every problem with its place; a wrong field is read as zero or empty."""

    def __init__(self, unknown: UnknownKeys):
        self.problems: list[str] = []
        self.unknown = unknown

    def nodes(self, document: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `Graph.from_nodes` for a remat-graph/1 document."""
        head = self._head(document, "nodes", "edges")
        rows = self._rows(document, "nodes", "node", _NODE)
        return head | {
            "deps": self._deps(self._field(document, "edges", list, "the graph"), len(rows)),
            "bytes": [self._count(row, "bytes", at) for row, at in rows],
            "costs": [self._count(row, "cost", at) for row, at in rows],
            "names": [self._field(row, "name", str, at) for row, at in rows],
            "kinds": [self._field(row, "op", str, at, "") for row, at in rows],
            "backward": [self._field(row, "backward", bool, at, False) for row, at in rows],
            "workspace_bytes": [self._count(row, "workspace_bytes", at, 0) for row, at in rows],
        }

    def operations_and_values(self, document: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `Graph` for a remat-graph/2 document."""
        head = self._head(document, "operations", "values")
        rows = self._rows(document, "operations", "operation", _OPERATION)
        values = self._rows(document, "values", "value", _VALUE, may_be_empty=True)
        return head | {
            "operations": tuple(self._operation(row, at) for row, at in rows),
            "values": tuple(
                Value(self._field(row, "name", str, at), self._count(row, "bytes", at),
                      self._field(row, "keep", bool, at, False))
                for row, at in values
            ),
        }  # fmt: skip

    def _head(self, document: dict[str, Any], *lists: str) -> dict[str, Any]:
        self.unknown.look(document, (*_HEAD, *lists), "graph", "the graph")
        return {
            "name": self._field(document, "name", str, "the graph"),
            "fixed_bytes": self._count(document, "fixed_bytes", "the graph", 0),
            "cost_unit": self._field(document, "cost_unit", str, "the graph"),
            "loss": self._field(document, "loss", (int, type(None)), "the graph", None),
            "source": self._field(document, "source", str, "the graph", ""),
        }

    def _rows(
        self, document: dict[str, Any], key: str, what: str, known: tuple[str, ...], *, may_be_empty: bool = False
    ) -> list[tuple[Any, str]]:
        """(record, place) of every record of a list."""
        rows = self._field(document, key, list, "the graph")
        if not rows and not may_be_empty and isinstance(document.get(key), list):
            self.problems.append(f"the graph has no {key}")
        if len(rows) > MAX_OPERATIONS:
            self.problems.append(f"the graph has more than {MAX_OPERATIONS} {key}")
            return []
        return [(self._record(row, f"{what} {i}", what, known), f"{what} {i}") for i, row in enumerate(rows)]

    def _record(self, record: Any, where: str, what: str, known: tuple[str, ...]) -> dict[str, Any] | None:
        """Note the record's unknown keys and return it; note a problem and return None if it is no object."""
        if not isinstance(record, dict):
            self.problems.append(f"{where} must be an object, not {record!r:.60}")
            return None
        self.unknown.look(record, known, what, where)
        return record

    def _deps(self, edges: Sequence[Any], n_nodes: int) -> list[set[int]]:
        """[N] the nodes that each node reads."""
        deps: list[set[int]] = [set() for _ in range(n_nodes)]
        for e, edge in enumerate(edges):
            problem = _edge_problem(edge, deps)
            if problem:
                self.problems.append(f"edge {e} {problem}")
            else:
                deps[edge[1]].add(edge[0])
        return deps

    def _operation(self, row: Any, at: str) -> Operation:
        return Operation(
            name=self._field(row, "name", str, at),
            kind=self._field(row, "op", str, at, ""),
            inputs=self._ids(row, "inputs", at),
            outputs=self._ids(row, "outputs", at),
            cost=self._count(row, "cost", at),
            workspace_bytes=self._count(row, "workspace_bytes", at, 0),
            is_backward=self._field(row, "backward", bool, at, False),
            run_once=self._field(row, "run_once", bool, at, False),
            work=self._work(row, at),
            implementations=tuple(
                self._implementation(implementation, f"{at}, implementation {i}")
                for i, implementation in enumerate(self._field(row, "implementations", list, at, ()))
            ),
        )

    def _implementation(self, given: Any, at: str) -> Implementation:
        row = self._record(given, at, "implementation", _IMPLEMENTATION)
        return Implementation(
            name=self._field(row, "name", str, at),
            inputs=self._ids(row, "inputs", at),
            outputs=self._ids(row, "outputs", at),
            cost=self._count(row, "cost", at),
            workspace_bytes=self._count(row, "workspace_bytes", at, 0),
            overwrites=self._field(row, "overwrites", (int, type(None)), at, None),
            is_lossy=self._field(row, "is_lossy", bool, at, False),
            work=self._work(row, at),
        )

    def _work(self, row: Any, at: str) -> Work | None:
        work = self._field(row, "work", (dict, type(None)), at, None)
        if work is None:
            return None
        at = f"{at}.work"
        self.unknown.look(work, _WORK, "work", at)
        return Work(
            flops=self._field(work, "flops", (int, type(None)), at, None),
            bytes_moved=self._count(work, "bytes_moved", at, 0),
            dtype=self._field(work, "dtype", str, at, "float32"),
            signature=self._field(work, "signature", str, at, ""),
            published_flops=self._field(work, "published_flops", (int, type(None)), at, None),
            is_free=self._field(work, "is_free", bool, at, False),
        )

    def _ids(self, row: Any, key: str, at: str) -> tuple[int, ...]:
        ids = self._field(row, key, list, at)
        if all(type(i) is int for i in ids):
            return tuple(ids)
        self.problems.append(f"{at}: '{key}' must be a list of value indices")
        return ()

    def _count(self, record: Any, key: str, at: str, default: Any = ...) -> int:
        """A non-negative integer."""
        number = self._field(record, key, int, at, default)
        if 0 <= number <= MAX_BYTES:
            return number
        what = "must not be negative, but is" if number < 0 else f"must be at most {MAX_BYTES}, but is"
        self.problems.append(f"{at}: '{key}' {what} {number if abs(number) < 10**30 else 'far beyond'}")
        return 0

    def _field(self, record: Any, key: str, types: type | tuple[type, ...], at: str, default: Any = ...) -> Any:
        wanted = types if isinstance(types, tuple) else (types,)
        if not isinstance(record, dict):  # noted already
            return _EMPTY[wanted[0]]
        if key not in record and default is not ...:
            return default
        value = record.get(key)
        if key not in record:
            slip = nearest(key, record.keys() - _KNOWN, 1, alike=0.7)
            hint = f"; did you mean '{key}' by '{slip[0]:.60}'?" if slip else ""
            self.problems.append(f"{at} lacks '{key}'{hint}")
        elif not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            names = " or ".join(_NAMES[kind] for kind in wanted)
            self.problems.append(f"{at}: '{key}' must be {names}, not {value!r:.60}")
        elif isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            self.problems.append(f"{at}: '{key}' holds half a character (a lone surrogate): {value!r:.60}")
        elif isinstance(value, str) and holds_control_character(value):
            self.problems.append(f"{at}: '{key}' holds a control character: {value!r:.60}")
        else:
            return value
        return _EMPTY[wanted[0]]


_NAMES: dict[type, str] = {
    int: "an integer", str: "text", list: "a list", bool: "true or false", dict: "an object", type(None): "null",
}  # fmt: skip


def _edge_problem(edge: Any, deps: Sequence[set[int]]) -> str:
    """The reason that `edge` cannot be added to the edges `deps`; '' if it can."""
    if not (isinstance(edge, list) and len(edge) == 2 and all(type(u) is int for u in edge)):
        return f"must be a pair of node indices, not {edge!r:.60}"
    u, v = edge
    if not (0 <= u < len(deps) and 0 <= v < len(deps)):
        return f"is [{u}, {v}], but there are {len(deps)} nodes"
    if u >= v:
        return f"goes from node {u} to node {v}: nodes must be in execution order, no cycles"
    return f"is [{u}, {v}] a second time" if u in deps[v] else ""
