"""Graph files: remat-graph/1 (one value per node) and remat-graph/2 (operations and values).

remat-graph/2 is the project's own format for graphs that /1 cannot hold: multi-output operations, kept
values, run-once operations, work, implementations. `load_graph` reads both, `save_graph` writes the simpler
one that can hold the graph.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from remat.errors import InvalidGraph, nearest, plain
from remat.files import MOST_PROBLEMS, NO_MORE, UnknownKeys, read_json, write_text
from remat.frontends.dtr_log import is_dtr_log, load_dtr_log
from remat.graph import Graph, Operation, Value, Work, check_graph, text_problem
from remat.implementation import Implementation
from remat.units import MAX_BYTES

GRAPH_FORMAT_NODES = "remat-graph/1"
GRAPH_FORMAT_VALUES = "remat-graph/2"
MAX_OPERATIONS = 1_000_000


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """Read a graph file, or a log of DTR's simulator (`.log`), compressed with gzip or not; warn once of unknown keys.

    Raises:
        InvalidGraph: naming the file and the place: unreadable, schema, order, dangling edge, sizes.
    """
    if is_dtr_log(path):
        return load_dtr_log(path).graph
    return graph_of_file(read_json(path, InvalidGraph), path)


def graph_of_file(document: Any, path: str | os.PathLike[str]) -> Graph:
    """The graph in the document of a file; warns and raises as `load_graph`."""
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
    try:
        parts = reader.nodes(document) if kind == GRAPH_FORMAT_NODES else reader.operations_and_values(document)
    except _TooManyProblems:
        parts = {}
    if reader.problems:
        raise InvalidGraph(reader.problems[0], reader.problems)
    return Graph.from_nodes(**parts) if kind == GRAPH_FORMAT_NODES else Graph(**parts)


def save_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write `graph` as JSON, atomically; compressed if the name ends with ``.gz``."""
    check_graph(graph)
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


# Fields of the records, each with its type and its default; `...` is for a field that must be there.
_COUNT, _IDS = "a non-negative integer", "a list of value ids"  # beside Python's types
_NULL = type(None)
_Fields = dict[str, tuple[Any, Any]]
_HEAD: _Fields = {
    "name": (str, ...), "fixed_bytes": (_COUNT, 0), "cost_unit": (str, ...), "loss": ((int, _NULL), None),
    "source": (str, ""),
}  # fmt: skip
_NODE: _Fields = {
    "bytes": (_COUNT, ...), "cost": (_COUNT, ...), "name": (str, ...), "op": (str, ""), "backward": (bool, False),
    "workspace_bytes": (_COUNT, 0),
}  # fmt: skip
_RUN: _Fields = {
    "name": (str, ...), "inputs": (_IDS, ...), "outputs": (_IDS, ...), "cost": (_COUNT, ...),
    "workspace_bytes": (_COUNT, 0), "work": ((dict, _NULL), None),
}  # fmt: skip
_OPERATION: _Fields = _RUN | {
    "op": (str, ""), "backward": (bool, False), "run_once": (bool, False), "implementations": (list, ()),
}  # fmt: skip
_IMPLEMENTATION: _Fields = _RUN | {"overwrites": ((int, _NULL), None), "is_lossy": (bool, False)}
_WORK: _Fields = {
    "flops": ((int, _NULL), None), "bytes_moved": (_COUNT, 0), "dtype": (str, "float32"), "signature": (str, ""),
    "published_flops": ((int, _NULL), None), "is_free": (bool, False),
}  # fmt: skip
_VALUE: _Fields = {"name": (str, ...), "bytes": (_COUNT, ...), "keep": (bool, False)}
_LISTS = ("nodes", "edges", "operations", "values")
_KNOWN = {"format", *_HEAD, *_NODE, *_OPERATION, *_IMPLEMENTATION, *_WORK, *_VALUE, *_LISTS}
_EMPTY: dict[type, Any] = {int: 0, str: "", list: (), bool: False, dict: {}}  # in place of a wrong field
_NAMES: dict[type, str] = {
    int: "an integer", str: "text", list: "a list", bool: "true or false", dict: "an object", _NULL: "null",
}  # fmt: skip


class _TooManyProblems(Exception):
    """The rest of a file is not read."""


class _Reader:
    """Reads documents and notes every problem with its place; a wrong field is read as zero or empty."""

    def __init__(self, unknown: UnknownKeys):
        self.problems: list[str] = []
        self.unknown = unknown

    def note(self, problem: str) -> None:
        self.problems.append(problem)
        if len(self.problems) >= MOST_PROBLEMS:
            self.problems.append(f"the graph {NO_MORE}")
            raise _TooManyProblems

    def nodes(self, document: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `Graph.from_nodes` for a remat-graph/1 document."""
        head = self._head(document, "nodes", "edges")
        rows = self._rows(document, "nodes", "node", _NODE)
        deps = self._deps(self._field(document, "edges", list, "the graph"), len(rows))
        nodes = [self._fields(row, _NODE, at) for row, at in rows]
        columns = {"name": "names", "op": "kinds", "cost": "costs"}  # the others are called as their key
        return head | {"deps": deps} | {columns.get(key, key): [node[key] for node in nodes] for key in _NODE}

    def operations_and_values(self, document: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `Graph` for a remat-graph/2 document."""
        head = self._head(document, "operations", "values")
        rows = self._rows(document, "operations", "operation", _OPERATION)
        values = self._rows(document, "values", "value", _VALUE, may_be_empty=True)
        return head | {
            "operations": tuple(self._operation(row, at) for row, at in rows),
            "values": tuple(Value(**self._fields(row, _VALUE, at)) for row, at in values),
        }

    def _head(self, document: dict[str, Any], *lists: str) -> dict[str, Any]:
        self.unknown.look(document, ("format", *_HEAD, *lists), "graph", "the graph")
        return self._fields(document, _HEAD, "the graph")

    def _rows(
        self, document: dict[str, Any], key: str, what: str, known: _Fields, *, may_be_empty: bool = False
    ) -> list[tuple[Any, str]]:
        """(record, place) of every record of a list."""
        rows = self._field(document, key, list, "the graph")
        if not rows and not may_be_empty and isinstance(document.get(key), list):
            self.note(f"the graph has no {key}")
        if len(rows) > MAX_OPERATIONS:
            self.note(f"the graph has more than {MAX_OPERATIONS} {key}")
            return []
        return [(self._record(row, f"{what} {i}", what, known), f"{what} {i}") for i, row in enumerate(rows)]

    def _record(self, record: Any, where: str, what: str, known: _Fields) -> dict[str, Any] | None:
        """Note the record's unknown keys and return it; note a problem and return None if it is no object."""
        if not isinstance(record, dict):
            self.note(f"{where} must be an object, not {record!r:.60}")
            return None
        self.unknown.look(record, tuple(known), what, where)
        return record

    def _deps(self, edges: Sequence[Any], n_nodes: int) -> list[set[int]]:
        """[N] the nodes that each node reads."""
        deps: list[set[int]] = [set() for _ in range(n_nodes)]
        for e, edge in enumerate(edges):
            problem = _edge_problem(edge, deps)
            if problem:
                self.note(f"edge {e} {problem}")
            else:
                deps[edge[1]].add(edge[0])
        return deps

    def _operation(self, row: Any, at: str) -> Operation:
        found = self._fields(row, _OPERATION, at)
        implementations = tuple(
            self._implementation(given, f"{at}, implementation {i}")
            for i, given in enumerate(found.pop("implementations"))
        )
        kind, is_backward, work = found.pop("op"), found.pop("backward"), self._work(found.pop("work"), at)
        return Operation(**found, kind=kind, is_backward=is_backward, work=work, implementations=implementations)

    def _implementation(self, given: Any, at: str) -> Implementation:
        found = self._fields(self._record(given, at, "implementation", _IMPLEMENTATION), _IMPLEMENTATION, at)
        return Implementation(work=self._work(found.pop("work"), at), **found)

    def _work(self, work: dict[str, Any] | None, at: str) -> Work | None:
        if work is None:
            return None
        at = f"{at}.work"
        self.unknown.look(work, tuple(_WORK), "work", at)
        return Work(**self._fields(work, _WORK, at))

    def _fields(self, record: Any, known: _Fields, at: str) -> dict[str, Any]:
        return {key: self._field(record, key, kind, at, default) for key, (kind, default) in known.items()}

    def _field(self, record: Any, key: str, kind: Any, at: str, default: Any = ...) -> Any:
        wanted = {_COUNT: (int,), _IDS: (list,)}.get(kind) or (kind if isinstance(kind, tuple) else (kind,))
        if not isinstance(record, dict):  # noted already
            return _EMPTY[wanted[0]]
        if key in record:
            value = record[key]
            problem = _type_problem(value, wanted) or _range_problem(value, kind)
            if not problem:
                return tuple(value) if kind == _IDS else value
            self.note(f"{at}: '{key}' {problem}")
        elif default is not ...:
            return default
        else:
            slip = nearest(key, record.keys() - _KNOWN, 1, alike=0.7)
            hint = f"; did you mean '{key}' by '{plain(slip[0])}'?" if slip else ""
            self.note(f"{at} lacks '{key}'{hint}")
        return _EMPTY[wanted[0]]


def _type_problem(value: Any, wanted: tuple[type, ...]) -> str:
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        return f"must be {' or '.join(_NAMES[kind] for kind in wanted)}, not {value!r:.60}"
    return text_problem(value) if isinstance(value, str) else ""


def _range_problem(value: Any, kind: Any) -> str:
    if kind == _COUNT and not 0 <= value <= MAX_BYTES:
        limit = "must not be negative" if value < 0 else f"must be at most {MAX_BYTES}"
        return f"{limit}, but is {value if abs(value) < 10**30 else 'far beyond'}"
    if kind == _IDS and not all(type(i) is int for i in value):
        return "must be a list of value indices"
    return ""


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
