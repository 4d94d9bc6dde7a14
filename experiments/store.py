"""The store: rows as parquet tables that are found by their keys; each table is written in one atomic step.

`Table` has the rows of an experiment: ``runs/NAME/rows.parquet``, and ``results/NAME/rows.parquet``, which is kept.
`Store` has those of solves, of which several processes finish hundreds, under ``runs/store``: ``rows/<key>.parquet``
(one row), ``plans/<key>-<plan's hash>.json`` (remat-plan/1), ``bounds/<key>.json.gz`` (remat-bound),
``graphs/<graph_sha256>.json``, ``families/<key>.parquet`` (a row for each member), and other results by their kind. A
row is written last, so that a reader of the row also finds its plan, certificate and graph. A plan never replaces
another one, so that two runs of the same solve write rows with their own plans.
"""

import datetime
import fcntl
import hashlib
import inspect
import json
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from experiments.arguments import stop_if_interrupted
from experiments.provenance import provenance
from experiments.registry import Case
from experiments.settings import RUNS_FOLDER
from remat import execution, solvers
from remat.errors import InvalidInput, InvalidPlan
from remat.files import digest_of, read_json, read_table, write_table, write_text
from remat.frontends.json import load_graph, save_graph
from remat.graph import Graph
from remat.plan import Plan
from remat.registry import get_strategy
from remat.simulator import load_and_simulate
from remat.solution import Family, Member, Status

KEPT_FOLDER = Path(__file__).resolve().parents[1] / "results"
JSON_COLUMNS = "json_columns"  # names the columns whose values are no plain numbers, texts or truth values


@dataclass(frozen=True, slots=True)
class Row:
    """The solve of one (graph, strategy, budget, seed); docs/reference/rows.md describes every column."""

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
_OF_MEMBERS = ("strategy", "graph_sha256", "parameters", "cost", "overhead", "peak_bytes", "accounting")
FAMILY_SCHEMA = pa.schema([*map(ROW_SCHEMA.field, _OF_MEMBERS), pa.field("plan", pa.string())])


class Store:
    """Files under one folder; several processes may write to it at once.

    Attributes:
        used: keys of the rows that were read or written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.used: set[str] = set()

    def read_row(self, key: str, graph: Graph | None = None) -> Row | None:
        """The row of that key; None without one, or with a warning if it or its plan is damaged.

        Args:
            graph: of the row; with it the plan is simulated again, without it only its file is looked up.
        """
        found = _read(self._row_path(key), key, ROW_SCHEMA)
        if found is None:
            return None
        row = Row(**found[0][0])
        try:
            if row.plan_file is not None and graph is not None:
                self.read_plan(row, graph)
            elif row.plan_file is not None and not (self.folder / row.plan_file).is_file():
                raise InvalidPlan(f"{self.folder / row.plan_file}: no such file")
        except InvalidPlan as error:
            warn_damaged(error)
            return None
        return row

    def write_row(self, row: Row) -> None:
        """Write `row`; raises `DiskFull`."""
        _write(self._row_path(row.key), [asdict(row)], ROW_SCHEMA)

    def _row_path(self, key: str) -> Path:
        self.used.add(key)
        return self.folder / "rows" / f"{key}.parquet"

    def write_plan(self, key: str, plan: Plan) -> str:
        """Write `plan`; returns its path relative to the store."""
        digest = digest_of([plan.kinds.tolist(), plan.ids.tolist(), plan.implementations])
        name = f"plans/{key}-{digest[:12]}.json"
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

    def _graph_path(self, sha256: str) -> Path:
        return self.folder / "graphs" / f"{sha256}.json"

    def remember(self, kind: str, determines: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """The result of `compute` (JSON-ready), from the store if it was computed before; None is not stored."""
        key = row_key(determines)
        path = self.folder / kind / f"{key}.parquet"
        known = _read(path, key)
        if known is not None:
            return known[0][0]["found"]
        found = compute()
        if found is not None:
            _write(path, [{"key": key, "found": found}])
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
                "plan": json.dumps({"kinds": member.plan.kinds.tolist(), "ids": member.plan.ids.tolist(),
                                    "implementations": member.plan.implementations}),
            }
            for member in family.members
        ]  # fmt: skip
        beside = {"status": family.status or "", "message": family.message, "rejected": family.rejected,
                  "wall_s": repr(family.wall_s), "key": key}  # fmt: skip
        _write(self.folder / "families" / f"{key}.parquet", rows, FAMILY_SCHEMA, beside)

    def read_family(self, key: str, strategy: str, graph: Graph) -> Family | None:
        """The family of that key, or None; its costs and peaks are those simulated when it was written."""
        found = _read(path := self.folder / "families" / f"{key}.parquet", key, FAMILY_SCHEMA)
        if found is None:
            return None
        rows, beside = found
        members = []
        try:
            for row in rows:
                steps = json.loads(row["plan"])
                chosen = steps.get("implementations") or [""] * len(steps["ids"])
                plan = Plan.from_steps(graph, zip(steps["kinds"], steps["ids"], chosen, strict=True))
                members.append(Member(plan, row["cost"], row["peak_bytes"], json.loads(row["parameters"])))
        except (ValueError, KeyError, TypeError) as error:
            warn_damaged(f"{path}: {error}")
            return None
        return Family(
            strategy, tuple(members), beside.get("rejected", ""),
            Status(beside["status"]) if beside.get("status") else None, beside.get("message", ""),
            float(beside.get("wall_s", "0")),
        )  # fmt: skip


class Table:
    """Rows of an experiment, as finished cases wrote them.

    A row has the arguments of its case, what was measured, and facts: ``case_key``, ``measure``, ``date``, ``case_s``
    (of the whole case), ``load`` (of the machine when it began) and the columns of `Provenance`. ``unfinished`` is true
    in rows of a case that failed after them: it is measured again.

    Args:
        name: of the experiment.
        keep: write to ``results/`` instead of ``runs/``.
        again: measure finished cases, too; each once, also if that is interrupted.
    """

    def __init__(self, name: str, *, keep: bool = False, again: bool = False):
        self.kept, self.run = KEPT_FOLDER / name / "rows.parquet", RUNS_FOLDER / name / "rows.parquet"
        self.path = self.kept if keep else self.run
        self.again = self.run.with_name("again.json") if again else None  # keys of cases that were measured again

    def rows(self, *, kept_only: bool = False) -> list[dict[str, Any]]:
        """All rows, with the same columns; those of a run replace kept rows of the same case."""
        kept, ran = _rows(self.kept), [] if kept_only else _rows(self.run)
        keys = {row["case_key"] for row in ran}
        rows = [*(row for row in kept if row["case_key"] not in keys), *ran]
        columns = dict.fromkeys(name for row in rows for name in row)
        return [{**columns, **row} for row in rows]

    def missing(self, cases: Sequence[Case]) -> list[Case]:
        """The cases that are not finished."""
        finished = _whole(self.rows()) if self.again is None else self._measured_again()
        return [case for case in cases if key_of(case) not in finished]

    def finish(self) -> None:
        """Note that no case is missing, so that ``again=true`` measures all of them next time."""
        if self.again is not None:
            self.again.unlink(missing_ok=True)

    def _measured_again(self) -> set[str]:
        return set(read_json(self.again)) if self.again is not None and self.again.exists() else set()

    def put(
        self, case: Case, rows: Iterable[Mapping[str, Any]], wall_s: float, load: float | None = None, *,
        is_whole: bool = True,
    ) -> None:  # fmt: skip
        """Add the rows of a case in place of earlier ones; also of those with the same arguments and older code.

        Rows of a case that failed after them do not replace those of a whole one.
        """
        key = key_of(case)
        facts = {"case_key": key, "measure": case.function, "date": datetime.date.today().isoformat()}
        facts |= {"case_s": round(wall_s, 3), "load": load, **asdict(provenance())}
        facts |= {} if is_whole else {"unfinished": True}

        with self._alone():
            if not is_whole and _whole(row for row in self.rows() if _is_of({key: case}, row)):
                return
            self._replace({key: case}, [{**case.what, **facts, **row} for row in rows])
            if is_whole and self.again is not None:
                write_text(self.again, json.dumps(sorted({*self._measured_again(), key})))

    def keep(self, cases: Sequence[Case]) -> None:
        """Move what runs without ``keep`` have measured of these cases to the kept rows, if this table has those."""
        if self.path == self.run:
            return
        with self._alone():
            ran = _rows(self.run)
            whole = _whole(ran)
            moved = {key: case for case in cases if (key := key_of(case)) in whole}
            if moved:
                self._replace(moved, [row for row in ran if row["case_key"] in moved])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Several runs may change the table."""
        self.run.parent.mkdir(parents=True, exist_ok=True)
        with (self.run.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _replace(self, cases: Mapping[str, Case], rows: Sequence[Mapping[str, Any]]) -> None:
        """Let these be the rows of the cases, which are given by their keys."""

        def others(of: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
            return [row for row in of if not _is_of(cases, row)]

        _write(self.path, [*others(_rows(self.path)), *rows])
        if self.path == self.kept and len(left := others(ran := _rows(self.run))) < len(ran):
            _write(self.run, left)  # or they would stand for the kept ones


def key_of(case: Case) -> str:
    """Hash of everything that determines a case's rows."""
    determines: dict[str, Any] = {"measure": case.function, "what": dict(case.what), "code": list(case.code)}
    if case.on_this_machine:
        versions = json.loads(provenance().versions)
        determines |= {"cpu": provenance().cpu, "torch": versions.get("torch")}
    return row_key(determines)


def _is_of(cases: Mapping[str, Case], row: Mapping[str, Any]) -> bool:
    """Whether a row is of one of these cases, which are given by their keys, perhaps of older code."""
    return row["case_key"] in cases or any(
        row["measure"] == case.function and all(row.get(name) == value for name, value in case.what.items())
        for case in cases.values()
    )


def _whole(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Keys of the cases that are finished."""
    return {row["case_key"] for row in rows if not row.get("unfinished")}


def row_key(determines: Mapping[str, Any]) -> str:
    """Hash of everything that determines a row; the values must be JSON-ready."""
    return digest_of(dict(determines))[:32]


def code_version(*, whole: bool = False) -> str:
    """The version of the strategies' results; with `whole` also that of measured steps.

    `remat.solvers.VERSION` and `remat.execution.VERSION` are raised by hand. Changes of frontends and cost models
    change the hash of the graph.
    """
    return f"{solvers.VERSION}.{execution.VERSION}" if whole else str(solvers.VERSION)


def code_of(*names: str, whole: bool = False, has_link: bool = False) -> list[str]:
    """`code_version`, then the version of each of these strategies; with a link that of the search for copies, too."""
    copies = has_link and any(get_strategy(name).copies == "annealed" for name in names)
    return [code_version(whole=whole), *map(_version_of, names), *([f"copies {solvers.COPIES_VERSION}"] * copies)]


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


def _rows(path: Path) -> list[dict[str, Any]]:
    return (_read(path) or ([], {}))[0]


def _read(
    path: Path, key: str = "", schema: pa.Schema | None = None
) -> tuple[list[dict[str, Any]], dict[str, str]] | None:
    """(the rows of a table, the texts beside them); None if there is none, or, with a warning, if it is damaged.

    Args:
        key: of the table, which is beside its rows or in the first; earlier versions wrote none for families.
        schema: of the table; by default any.
    """
    if not path.exists():
        return None
    try:
        table = read_table(path)
        if schema is not None and not table.schema.equals(schema):
            raise InvalidInput(f"{path}: has other columns than this version writes")
        beside = {name.decode(): text.decode() for name, text in (table.schema.metadata or {}).items()}
        rows, as_json = table.to_pylist(), json.loads(beside.get(JSON_COLUMNS, "[]"))
        for row in rows:
            row |= {name: json.loads(row[name]) for name in as_json if row[name] is not None}
        held = beside.get("key") or (rows[0].get("key") if rows else None) or key
        if key and held != key:
            raise InvalidInput(f"{path}: holds what belongs to {held}")
    except (InvalidInput, KeyError, TypeError, ValueError) as error:
        warn_damaged(error if isinstance(error, InvalidInput) else f"{path}: {error}")
        return None
    return rows, beside


def _write(
    path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None = None, beside: Mapping[str, str] = {}
) -> None:
    """Write a table. Without a schema, columns with lists, objects or several types hold JSON; raises `DiskFull`."""
    if schema is not None:
        table = pa.Table.from_pylist(rows, schema=schema)
    else:
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        kinds = {name: {type(value) for value in values} - {type(None)} for name, values in columns.items()}
        plain = [{int, float}, {int}, {float}, {str}, {bool}, set()]
        as_json = [name for name, of in kinds.items() if of not in plain]
        for name in as_json:
            columns[name] = [None if value is None else json.dumps(value) for value in columns[name]]
        table, beside = pa.table(columns), {JSON_COLUMNS: json.dumps(as_json)}
    write_table(path, table.replace_schema_metadata(beside))


def warn_damaged(what: object) -> None:
    warnings.warn(f"{what}; computing it again", stacklevel=3)
