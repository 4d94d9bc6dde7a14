"""The result store: rows, plans, graphs and families as files, each written in one atomic step.

Layout, under ``runs/store``: ``rows/<key>.parquet`` (one row), ``plans/<key>-<plan's hash>.json`` (remat-plan/1),
``graphs/<graph_sha256>.json``, ``families/<key>.parquet`` (a row per member). A row is written last,
so that whoever finds it finds its plan and graph too; a plan is never replaced by another one, so that of two runs
that solve the same, each writes rows with its own plans.
"""

from __future__ import annotations

import errno
import hashlib
import json
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from experiments.row import Row
from remat.errors import InvalidPlan, RematError
from remat.files import replacing
from remat.frontends.json import save_graph
from remat.graph import Graph
from remat.plan import Plan
from remat.solve import Family, Member, Status

_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreFull(RematError):
    """The disk has no room for a result; what was written before is kept."""


def _schema() -> pa.Schema:
    hints = typing.get_type_hints(Row)
    columns = []
    for field in fields(Row):
        kinds = [k for k in (typing.get_args(hints[field.name]) or (hints[field.name],)) if k is not type(None)]
        columns.append(pa.field(field.name, _ARROW[kinds[0]]))
    return pa.schema(columns)


ROW_SCHEMA = _schema()
FAMILY_SCHEMA = pa.schema(
    [
        ("strategy", pa.string()),
        ("graph_sha256", pa.string()),
        ("parameters", pa.string()),
        ("cost", pa.int64()),
        ("overhead", pa.float64()),
        ("peak_bytes", pa.int64()),
        ("accounting", pa.string()),
        ("plan", pa.string()),
    ]
)


class Store:
    """Files under one folder; several processes may write to it at once."""

    def __init__(self, folder: Path):
        self.folder = folder

    def read_row(self, key: str) -> Row | None:
        """The row of that key; None if there is none, or none that can be read (with a warning)."""
        path = self.folder / "rows" / f"{key}.parquet"
        table = _read_table(path, ROW_SCHEMA)
        if table is None:
            return None
        row = Row(**table.to_pylist()[0])
        if row.plan_file is not None and not (self.folder / row.plan_file).is_file():
            warnings.warn(f"{path}: its plan {row.plan_file} is gone; solving it again", stacklevel=2)
            return None
        return row

    def write_row(self, row: Row) -> None:
        """Write `row`; raises `StoreFull`."""
        table = pa.Table.from_pylist([asdict(row)], schema=ROW_SCHEMA)
        _write(self.folder / "rows" / f"{row.key}.parquet", lambda path: pq.write_table(table, path))

    def write_plan(self, key: str, plan: Plan) -> str:
        """Write `plan`; its path relative to the store."""
        digest = hashlib.sha256(plan.kinds.tobytes() + plan.ids.tobytes()).hexdigest()[:12]
        name = f"plans/{key}-{digest}.json"
        _write(self.folder / name, plan.save)
        return name

    def read_plan(self, row: Row, graph: Graph) -> Plan:
        """The plan of a row that has one."""
        assert row.plan_file is not None
        return Plan.load(self.folder / row.plan_file, graph)

    def write_graph(self, graph: Graph) -> None:
        """Write `graph` unless it is there."""
        path = self.folder / "graphs" / f"{graph.sha256()}.json"
        if not path.is_file():
            _write(path, lambda scratch: save_graph(graph, scratch))

    def write_family(self, key: str, family: Family, graph: Graph, accounting: str) -> None:
        """Write every member of a family; one without members keeps its status and reason."""
        total = graph.total_cost
        rows = [
            {
                "strategy": family.strategy,
                "graph_sha256": graph.sha256(),
                "parameters": json.dumps(dict(member.parameters), sort_keys=True),
                "cost": member.cost,
                "overhead": member.cost / total - 1 if total else 0.0,
                "peak_bytes": member.peak_bytes,
                "accounting": accounting,
                "plan": json.dumps(
                    {
                        "kinds": member.plan.kinds.tolist(),
                        "ids": member.plan.ids.tolist(),
                        **({"ways": member.plan.ways} if member.plan.ways else {}),
                    }
                ),
            }
            for member in family.members
        ]
        table = pa.Table.from_pylist(rows, schema=FAMILY_SCHEMA)
        said = {"status": family.status or "", "message": family.message, "rejected": family.rejected}
        table = table.replace_schema_metadata(said | {"wall_s": repr(family.wall_s)})
        _write(self.folder / "families" / f"{key}.parquet", lambda path: pq.write_table(table, path))

    def read_family(self, key: str, strategy: str, graph: Graph) -> Family | None:
        """The family of that key, or None; costs and peaks as judged when it was written."""
        path = self.folder / "families" / f"{key}.parquet"
        table = _read_table(path, FAMILY_SCHEMA, empty=True)
        if table is None:
            return None
        members = []
        try:
            for row in table.to_pylist():
                steps = json.loads(row["plan"])
                ways = steps.get("ways") or [""] * len(steps["ids"])
                plan = Plan.from_steps(graph, zip(steps["kinds"], steps["ids"], ways, strict=True))
                members.append(Member(plan, row["cost"], row["peak_bytes"], json.loads(row["parameters"])))
        except (InvalidPlan, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{path}: cannot be read ({error}); computing it again", stacklevel=2)
            return None
        said = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        return Family(
            strategy, tuple(members), said.get("rejected", ""),
            Status(said["status"]) if said.get("status") else None, said.get("message", ""),
            float(said.get("wall_s", "0")),
        )  # fmt: skip


def row_key(determines: Mapping[str, Any]) -> str:
    """Hash of everything that determines a row; the values must be JSON-ready."""
    text = json.dumps(determines, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def code_version(*, whole: bool = False) -> str:
    """Hash of the source that turns a graph into rows.

    Frontends, cost models and execution are left out, unless `whole`: what they do is in the hash of the graph.
    The whole includes what measures executed plans.
    """
    import baselines
    import remat

    digest = hashlib.sha256()
    for package in (remat, baselines):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if whole or name.parts[0] not in ("frontends", "networks", "cost", "torch", "tf"):
                digest.update(f"{root.name}/{name.as_posix()}\0".encode() + path.read_bytes())
    for path in sorted(Path(__file__).parent.glob("execution*.py")) if whole else ():
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def rows_of_other_models(path: Path | None, models: Sequence[str]) -> list[dict[str, Any]]:
    """Rows that are not of `models` in a table's JSON file, so that a run of some models keeps the others'."""
    rows = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    return [row for row in rows if row["model"] not in models]


def write_json(path: Path, document: Any) -> None:
    """Write JSON atomically; raises `StoreFull`."""
    _write(path, lambda scratch: scratch.write_text(json.dumps(document, indent=1)))


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    try:
        with replacing(path) as scratch:
            write(scratch)
    except OSError as error:
        if error.errno in _FULL or "No space left" in str(error):
            raise StoreFull(
                f"no space left on the disk to write {path}; what was finished before is kept: "
                "make room and give the same command again"
            ) from None
        raise


def _read_table(path: Path, schema: pa.Schema, *, empty: bool = False) -> pa.Table | None:
    if not path.is_file():
        return None
    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        warnings.warn(f"{path}: cannot be read ({str(error).splitlines()[0]}); computing it again", stacklevel=3)
        return None
    if not table.schema.equals(schema) or (table.num_rows != 1 and not empty):
        warnings.warn(f"{path}: has other columns than this version writes; computing it again", stacklevel=3)
        return None
    return table
