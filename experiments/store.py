"""The result store: rows, plans, graphs and families as files, each written in one atomic step.

Layout, under ``runs/store``: ``rows/<key>.parquet`` (one row), ``plans/<key>-<plan's hash>.json`` (remat-plan/1),
``bounds/<key>.json.gz`` (remat-bound), ``graphs/<graph_sha256>.json``, ``families/<key>.parquet`` (a row for each
member). A row is written last, so that a reader of the row also finds its plan, certificate and graph. A plan never
replaces another one, so that two runs of the same solve write rows with their own plans.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import pyarrow as pa

from experiments.arguments import stop_if_interrupted
from remat import execution, solvers
from remat.errors import InvalidInput, InvalidPlan
from remat.files import read_json, read_table, sealed, unsealed, write_table, write_text
from remat.frontends.json import load_graph, save_graph
from remat.graph import Graph
from remat.plan import Plan
from remat.registry import get_strategy
from remat.simulator import load_and_simulate
from remat.solution import Family, Member, Status


@dataclass(frozen=True, slots=True)
class Row:
    """One (graph, strategy, budget, seed); every field is a column of ``store/rows/<key>.parquet``.

    Attributes:
        key: hash of what determines the row.
        experiment: the run that solved it first.
        dtype: the graph's floating-point types, e.g. ``bfloat16+float32``; None without any.
        cost_source: ``modelled``, ``measured`` or ``file``.
        parameters, options, stats, versions: JSON objects; `stats` holds numbers for people, which decide nothing.
        options: given to the strategy; in `parameters` they are mixed with the plan's own.
        ended: what ended the solve, see `remat.solution.Ending`; '' if it returned by itself.
        cut_by_clock, contradicted, peak_bound_bytes: see `remat.Solution`.
        proof_from: the strategy whose proof ended the solve; None otherwise.
        proven_by: what proves `bound`, see `remat.Solution`; None if nothing had to be proven, or in older rows.
        certified_bound: of the solve's certificate; None without one, and in older rows.
        cost_cap: of the problem; None without one.
        gpu_memory_bytes: of the GPU of the costs.
        plan_file: relative to the store; None without a plan.
        plan_from: budget in bytes for which the plan was found, if it is reused here; None otherwise.
        store_all_peak_bytes: checkpoint-all's peak under the same accounting.
        finished_at: ISO 8601, UTC.
    """

    key: str
    experiment: str
    model: str | None
    framework: str | None
    granularity: str | None
    batch_size: int | None
    dtype: str | None
    graph_name: str
    graph_sha256: str
    gpu: str
    gpu_memory_bytes: int
    cost_model: str
    cost_source: str
    cost_unit: str
    strategy: str
    parameters: str
    options: str
    budget_bytes: int
    status: str
    cost: int | None
    bound: int | None
    gap: float | None
    overhead: float | None
    peak_bytes: int | None
    plan_file: str | None
    plan_from: int | None
    message: str
    ended: str
    cut_by_clock: bool | None
    contradicted: bool
    proof_from: str | None
    proven_by: str | None
    certified_bound: int | None
    peak_bound_bytes: int | None
    wall_s: float
    time_limit_s: float
    seed: int
    threads: int
    scope: str
    accounting: str
    cost_cap: int | None
    stats: str
    total_cost: int
    store_all_peak_bytes: int
    fixed_bytes: int
    n_operations: int
    n_edges: int
    git_commit: str | None
    git_dirty: bool | None
    versions: str
    cpu: str
    solver_build: str
    finished_at: str


_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
# The type of `int | None` is the first of its arguments.
ROW_SCHEMA = pa.schema(
    {name: _ARROW[(typing.get_args(hint) or (hint,))[0]] for name, hint in typing.get_type_hints(Row).items()}
)
FAMILY_SCHEMA = pa.schema(
    {
        "strategy": pa.string(),
        "graph_sha256": pa.string(),
        "parameters": pa.string(),
        "cost": pa.int64(),
        "overhead": pa.float64(),
        "peak_bytes": pa.int64(),
        "accounting": pa.string(),
        "plan": pa.string(),
    }
)


class Store:
    """Files under one folder; several processes may write to it at once.

    Attributes:
        used: paths, relative to the folder, that were read or written. Plans are not listed, because they belong to
            their rows, nor are graphs.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.used: set[str] = set()

    def read_row(self, key: str, graph: Graph | None = None) -> Row | None:
        """The row of that key; None without one, or with a warning if it or its plan is damaged.

        Args:
            graph: of the row; with it the plan is simulated again, without it only its file is looked up.
        """
        table = _read_table(self._use("rows", f"{key}.parquet"), ROW_SCHEMA)
        if table is None:
            return None
        row = Row(**table.to_pylist()[0])
        if row.key != key:
            warn_damaged(f"{self.folder / 'rows' / key}.parquet: holds the row {row.key}")
            return None
        if row.plan_file is None:
            return row
        try:
            if graph is not None:
                self.read_plan(row, graph)
            elif not (self.folder / row.plan_file).is_file():
                raise InvalidPlan(f"{self.folder / row.plan_file}: no such file")
        except InvalidPlan as error:
            warn_damaged(error)
            return None
        return row

    def write_row(self, row: Row) -> None:
        """Write `row`; raises `DiskFull`."""
        path = self._use("rows", f"{row.key}.parquet")
        write_table(path, pa.Table.from_pylist([asdict(row)], schema=ROW_SCHEMA))

    def write_plan(self, key: str, plan: Plan) -> str:
        """Write `plan`; returns its path relative to the store."""
        digest = hashlib.sha256(plan.kinds.tobytes() + plan.ids.tobytes())
        if plan.implementations:
            digest.update(json.dumps(plan.implementations).encode())
        name = f"plans/{key}-{digest.hexdigest()[:12]}.json"
        plan.save(self.folder / name)
        return name

    def certificate_file(self, key: str) -> Path:
        """Where the certificate of a row is, if it has a `certified_bound`."""
        return self.folder / "bounds" / f"{key}.json.gz"

    def read_plan(self, row: Row, graph: Graph) -> Plan:
        """The plan of a row that has one.

        Raises:
            InvalidPlan: the file cannot be read or executed, or its cost or peak is not the row's.
        """
        assert row.plan_file is not None
        path = self.folder / row.plan_file
        plan, trace = load_and_simulate(path, graph)
        if (trace.cost, trace.peak_bytes) != (row.cost, row.peak_bytes):
            raise InvalidPlan(f"{path}: costs {trace.cost} and peaks at {trace.peak_bytes}, its row says "
                              f"{row.cost} and {row.peak_bytes}")  # fmt: skip
        return plan

    def write_graph(self, graph: Graph) -> None:
        """Write `graph` unless an undamaged copy exists."""
        path = self._graph_path(graph.sha256())
        if path.exists():
            try:
                self.read_graph(graph.sha256())
                return
            except InvalidInput as error:
                warn_damaged(error)
        save_graph(graph, path)

    def read_graph(self, sha256: str) -> Graph:
        """The graph of that hash.

        Raises:
            InvalidInput: the file does not exist, cannot be read, or was altered.
        """
        path = self._graph_path(sha256)
        graph = load_graph(path)
        if graph.sha256() != sha256:
            raise InvalidInput(f"{path}: was altered after it was written")
        return graph

    def used_rows(self) -> set[str]:
        """Keys of the rows in `used`."""
        return {PurePath(name).stem for name in self.used if name.startswith("rows/")}

    def _use(self, kind: str, name: str) -> Path:
        self.used.add(f"{kind}/{name}")
        return self.folder / kind / name

    def _graph_path(self, sha256: str) -> Path:
        return self.folder / "graphs" / f"{sha256}.json"

    def remember(self, kind: str, determines: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """The result of `compute` (JSON-ready), from the store if it was computed before; None is not stored."""
        key = row_key(determines)
        path = self._use(kind, f"{key}.json")
        if path.exists():
            try:
                content = unsealed(read_json(path), path)
                if "found" in content and content.get("key", key) == key:  # earlier versions wrote no key
                    return content["found"]
                warn_damaged(f"{path}: holds another result")
            except InvalidInput as error:
                warn_damaged(error)
        found = compute()
        if found is not None:
            write_json(path, sealed({"key": key, "found": found}))
        return found

    def write_family(self, key: str, family: Family, graph: Graph, accounting: str) -> None:
        """Write every member of a family, and its status and messages."""
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
                        **({"implementations": member.plan.implementations} if member.plan.implementations else {}),
                    }
                ),
            }
            for member in family.members
        ]
        table = pa.Table.from_pylist(rows, schema=FAMILY_SCHEMA)
        metadata = {"status": family.status or "", "message": family.message, "rejected": family.rejected}
        table = table.replace_schema_metadata(metadata | {"wall_s": repr(family.wall_s), "key": key})
        write_table(self._use("families", f"{key}.parquet"), table)

    def read_family(self, key: str, strategy: str, graph: Graph) -> Family | None:
        """The family of that key, or None; its costs and peaks are those simulated when it was written."""
        path = self._use("families", f"{key}.parquet")
        table = _read_table(path, FAMILY_SCHEMA, empty=True)
        if table is None:
            return None
        metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        members = []
        try:
            if metadata.get("key", key) != key:  # earlier versions wrote no key
                raise InvalidInput(f"holds the family {metadata['key']}")
            for row in table.to_pylist():
                steps = json.loads(row["plan"])
                # "ways" is the former name of the implementations
                chosen = steps.get("implementations") or steps.get("ways") or [""] * len(steps["ids"])
                plan = Plan.from_steps(graph, zip(steps["kinds"], steps["ids"], chosen, strict=True))
                members.append(Member(plan, row["cost"], row["peak_bytes"], json.loads(row["parameters"])))
        except (ValueError, KeyError, TypeError) as error:
            warn_damaged(f"{path}: {error}")
            return None
        return Family(
            strategy, tuple(members), metadata.get("rejected", ""),
            Status(metadata["status"]) if metadata.get("status") else None, metadata.get("message", ""),
            float(metadata.get("wall_s", "0")),
        )  # fmt: skip


def row_key(determines: Mapping[str, Any]) -> str:
    """Hash of everything that determines a row; the values must be JSON-ready."""
    text = json.dumps(determines, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def code_version(*, whole: bool = False) -> str:
    """The version of the strategies' results; with `whole` also that of measured steps.

    `remat.solvers.VERSION` and `remat.execution.VERSION` are raised by hand. Changes of frontends and cost models
    change the hash of the graph.
    """
    return f"{solvers.VERSION}.{execution.VERSION}" if whole else str(solvers.VERSION)


def code_of(*names: str, whole: bool = False) -> list[str]:
    """`code_version`, then the version of each of these strategies."""
    return [code_version(whole=whole), *map(_version_of, names)]


@cache  # so that editing the file does not change the keys of a running run
def _version_of(strategy: str) -> str:
    """The version of a strategy of this project ('' for 0); the hash of the file of one from another package."""
    chosen = get_strategy(strategy)
    if chosen.run.__module__.partition(".")[0] in ("remat", "baselines"):
        return str(chosen.version or "")
    source = inspect.getsourcefile(chosen.run)
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16] if source and Path(source).is_file() else ""


def write_json(path: Path, document: Any) -> None:
    """Write indented JSON in one atomic step; raises `DiskFull`, and KeyboardInterrupt as `stop_if_interrupted`."""
    stop_if_interrupted()
    write_text(path, json.dumps(document, indent=1) + "\n")


def _read_table(path: Path, schema: pa.Schema, *, empty: bool = False) -> pa.Table | None:
    if not path.exists():
        return None
    try:
        table = read_table(path)
    except InvalidInput as error:
        warn_damaged(error)
        return None
    if not table.schema.equals(schema) or (table.num_rows != 1 and not empty):
        warn_damaged(f"{path}: has other columns than this version writes")
        return None
    return table


def warn_damaged(what: object) -> None:
    warnings.warn(f"{what}; computing it again", stacklevel=3)
