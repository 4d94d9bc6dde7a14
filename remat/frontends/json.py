"""Graph files: remat-graph/1 (one value per node) and remat-graph/2 (operations and values).

remat-graph/2 is the project's own format for what /1 cannot say: multi-output operations, kept
values, run-once operations, work. `load_graph` reads both, `save_graph` writes the simpler one
that holds the graph.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from remat.errors import InvalidGraph
from remat.files import replacing
from remat.graph import Graph, Operation, Value, Work
from remat.implementation import Implementation

GRAPH_FORMAT_NODES = "remat-graph/1"
GRAPH_FORMAT_VALUES = "remat-graph/2"
MAX_FILE_BYTES = 512 * 1024**2
MAX_OPERATIONS = 1_000_000


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """Read a graph file.

    Raises:
        InvalidGraph: naming the file and the place: unreadable, schema, order, dangling edge, sizes.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidGraph(f"the path of a graph file is wanted, not {path!r:.60}")
    path = Path(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InvalidGraph(f"{path}: not a regular file")  # a device or a pipe may never end
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidGraph(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
    except InvalidGraph:
        raise
    except FileNotFoundError:
        raise InvalidGraph(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, absurd integers
        raise InvalidGraph(f"{path}: cannot be read as JSON: {error}") from None
    try:
        return graph_from_dict(document)
    except InvalidGraph as error:
        raise InvalidGraph(f"{path}: {' '.join(str(error).split())}") from None  # a name may hold line ends


def graph_from_dict(document: Any) -> Graph:
    """A graph from a parsed remat-graph document; raises `InvalidGraph` naming the place."""
    if not isinstance(document, dict):
        raise InvalidGraph("must be a JSON object")
    kind = document.get("format")
    if kind == GRAPH_FORMAT_NODES:
        return _from_nodes(document)
    if kind == GRAPH_FORMAT_VALUES:
        return _from_values(document)
    raise InvalidGraph(f"'format' must be '{GRAPH_FORMAT_NODES}' or '{GRAPH_FORMAT_VALUES}', not {kind!r}")


def save_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write `graph` as JSON, atomically."""
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(graph_to_dict(graph), separators=(",", ":")), encoding="utf-8")


def graph_to_dict(graph: Graph) -> dict[str, Any]:
    """The document of `graph`: remat-graph/1 if that loses nothing, remat-graph/2 otherwise."""
    head = {
        "name": graph.name,
        "source": graph.source,
        "cost_unit": graph.cost_unit,
        "fixed_bytes": int(graph.fixed_bytes),
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
            {"name": o.name, "op": o.kind, "bytes": int(v.bytes), "cost": int(o.cost), "backward": o.is_backward}
            | ({"workspace_bytes": int(o.workspace_bytes)} if o.workspace_bytes else {})
            for o, v in zip(graph.operations, graph.values, strict=True)
        ]
        edges = [[u, k] for k, o in enumerate(graph.operations) for u in o.inputs]
        return {"format": GRAPH_FORMAT_NODES, **head, "nodes": nodes, "edges": edges}
    operations = []
    for o in graph.operations:
        row = {
            "name": o.name, "op": o.kind, "inputs": list(o.inputs), "outputs": list(o.outputs),
            "cost": int(o.cost), "workspace_bytes": int(o.workspace_bytes), "backward": o.is_backward,
            "run_once": o.run_once,
        }  # fmt: skip
        row |= {"work": asdict(o.work)} if o.work else {}
        operations.append(row | ({"implementations": [*map(asdict, o.implementations)]} if o.implementations else {}))
    values = [{"name": v.name, "bytes": int(v.bytes), "keep": v.keep} for v in graph.values]
    return {"format": GRAPH_FORMAT_VALUES, **head, "operations": operations, "values": values}


def _field(record: Any, key: str, types: type | tuple[type, ...], where: str, default: Any = ...) -> Any:
    if not isinstance(record, dict):
        raise InvalidGraph(f"{where} must be an object")
    if key not in record:
        if default is ...:
            raise InvalidGraph(f"{where} lacks '{key}'")
        return default
    value = record[key]
    wanted = types if isinstance(types, tuple) else (types,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise InvalidGraph(f"{where}: '{key}' must be {'/'.join(t.__name__ for t in wanted)}, not {value!r:.60}")
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise InvalidGraph(f"{where}: '{key}' holds half a character (a lone surrogate): {value!r:.60}")
    return value


def _head(document: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": _field(document, "name", str, "the graph"),
        "fixed_bytes": _field(document, "fixed_bytes", int, "the graph", 0),
        "cost_unit": _field(document, "cost_unit", str, "the graph"),
        "loss": _field(document, "loss", (int, type(None)), "the graph", None),
        "source": _field(document, "source", str, "the graph", ""),
    }


def _from_nodes(document: dict[str, Any]) -> Graph:
    nodes = _field(document, "nodes", list, "the graph")
    edges = _field(document, "edges", list, "the graph")
    if not nodes:
        raise InvalidGraph("the graph has no nodes")
    if len(nodes) > MAX_OPERATIONS:
        raise InvalidGraph(f"more than {MAX_OPERATIONS} nodes")
    deps: list[set[int]] = [set() for _ in nodes]
    for e, edge in enumerate(edges):
        if not (isinstance(edge, list) and len(edge) == 2 and all(type(u) is int for u in edge)):
            raise InvalidGraph(f"edge {e} must be a pair of node indices, not {edge!r:.60}")
        u, v = edge
        if not (0 <= u < len(nodes) and 0 <= v < len(nodes)):
            raise InvalidGraph(f"edge {e} is [{u}, {v}], but there are {len(nodes)} nodes")
        if u >= v:
            raise InvalidGraph(f"edge {e} goes from node {u} to node {v}: nodes must be in execution order, no cycles")
        deps[v].add(u)
    where = [f"node {i}" for i in range(len(nodes))]
    return Graph.from_nodes(
        deps=deps,
        bytes=[_field(r, "bytes", int, w) for r, w in zip(nodes, where, strict=True)],
        costs=[_field(r, "cost", int, w) for r, w in zip(nodes, where, strict=True)],
        names=[_field(r, "name", str, w) for r, w in zip(nodes, where, strict=True)],
        kinds=[_field(r, "op", str, w, "") for r, w in zip(nodes, where, strict=True)],
        backward=[_field(r, "backward", bool, w, False) for r, w in zip(nodes, where, strict=True)],
        workspace_bytes=[_field(r, "workspace_bytes", int, w, 0) for r, w in zip(nodes, where, strict=True)],
        **_head(document),
    )


def _ids(record: Any, key: str, where: str) -> tuple[int, ...]:
    ids = _field(record, key, list, where)
    if not all(type(i) is int for i in ids):
        raise InvalidGraph(f"{where}: '{key}' must be a list of value indices")
    return tuple(ids)


def _work(record: Any, where: str) -> Work | None:
    work = _field(record, "work", (dict, type(None)), where, None)
    if work is None:
        return None
    where = f"{where}.work"
    return Work(
        flops=_field(work, "flops", (int, type(None)), where, None),
        bytes_moved=_field(work, "bytes_moved", int, where, 0),
        dtype=_field(work, "dtype", str, where, "float32"),
        signature=_field(work, "signature", str, where, ""),
        published_flops=_field(work, "published_flops", (int, type(None)), where, None),
        is_free=_field(work, "is_free", bool, where, False),
    )


def _implementations(record: Any, where: str) -> tuple[Implementation, ...]:
    rows = _field(record, "implementations", list, where, [])
    return tuple(
        Implementation(
            name=_field(row, "name", str, at),
            inputs=_ids(row, "inputs", at),
            outputs=_ids(row, "outputs", at),
            cost=_field(row, "cost", int, at),
            workspace_bytes=_field(row, "workspace_bytes", int, at, 0),
            overwrites=_field(row, "overwrites", (int, type(None)), at, None),
            is_lossy=_field(row, "is_lossy", bool, at, False),
            work=_work(row, at),
        )
        for row, at in ((row, f"{where}, implementation {i}") for i, row in enumerate(rows))
    )


def _from_values(document: dict[str, Any]) -> Graph:
    rows = _field(document, "operations", list, "the graph")
    values = _field(document, "values", list, "the graph")
    if not rows:
        raise InvalidGraph("the graph has no operations")
    if len(rows) > MAX_OPERATIONS:
        raise InvalidGraph(f"more than {MAX_OPERATIONS} operations")
    operations = tuple(
        Operation(
            name=_field(row, "name", str, where),
            kind=_field(row, "op", str, where, ""),
            inputs=_ids(row, "inputs", where),
            outputs=_ids(row, "outputs", where),
            cost=_field(row, "cost", int, where),
            workspace_bytes=_field(row, "workspace_bytes", int, where, 0),
            is_backward=_field(row, "backward", bool, where, False),
            run_once=_field(row, "run_once", bool, where, False),
            work=_work(row, where),
            implementations=_implementations(row, where),
        )
        for row, where in ((row, f"operation {i}") for i, row in enumerate(rows))
    )
    made = tuple(
        Value(_field(v, "name", str, w), _field(v, "bytes", int, w), _field(v, "keep", bool, w, False))
        for v, w in ((v, f"value {i}") for i, v in enumerate(values))
    )
    return Graph(operations=operations, values=made, **_head(document))
